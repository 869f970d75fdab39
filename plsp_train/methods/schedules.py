"""Learning rates over the epochs of a stage, scaled to any number of them. Epochs count from 1."""

import math

PLSP_DECAYS = (0.4, 0.6)  # epochs 100 and 150 of 250


def divided_by_ten(lr: float, epoch: int, epochs: int, shares: tuple[float, ...]) -> float:
    """A tenth of the previous rate after each of the shares of all epochs."""
    return lr * 0.1 ** sum(epoch - 1 >= share * epochs for share in shares)


def cosine(first: float, epoch: int, epochs: int, last: float = 0.0) -> float:
    """Half a cosine from the first rate towards the last one."""
    return last + (first - last) * (1 + math.cos(math.pi * (epoch - 1) / epochs)) / 2
