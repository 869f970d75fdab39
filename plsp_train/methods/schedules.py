"""Learning rates over the epochs of a stage, scaled to any number of them."""


def divided_by_ten(lr: float, epoch: int, epochs: int, shares: tuple[float, ...]) -> float:
    """The rate of an epoch (from 1): a tenth of the previous one after each of the shares of all epochs."""
    return lr * 0.1 ** sum(epoch - 1 >= share * epochs for share in shares)
