"""Numbers that are no longer finite: how they are noticed, and the likely cause."""

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

LARGE_WEIGHT = 1e3  # trained weights are far below


class NonFiniteLoss(Exception):
    """The loss is not finite; a checkpoint, if there is one, is from before."""


def all_finite(state: Any, device: torch.device) -> bool:
    """Whether no tensor of a nested state holds a NaN or an infinity. A single host sync."""
    return bool(torch.stack([tensor.isfinite().all().to(device) for tensor in _floating_tensors(state)]).all())


def _floating_tensors(state: Any) -> Iterator[Tensor]:
    if isinstance(state, Tensor):
        if state.is_floating_point():
            yield state
    elif isinstance(state, dict | list | tuple):
        for part in state.values() if isinstance(state, dict) else state:
            yield from _floating_tensors(part)


def likely_cause(model: nn.Module, rate: float, amp: str) -> str:
    """Inputs are finite, or the data would have been refused: what remains is the precision or a setting."""
    largest = max(parameter.detach().abs().max().item() for parameter in model.parameters())
    if amp == "fp16" and largest < LARGE_WEIGHT:
        return "half precision overflowed while the weights are moderate: use --amp bf16 or --amp off"
    if largest >= LARGE_WEIGHT or not math.isfinite(largest):
        return (
            f"the weights have grown to {largest:.4g} at learning rate {rate:g}: try a smaller --lr, or smaller "
            "--weight-decay, --strength and --ss-weight if you have raised them"
        )
    return (
        f"the weights are moderate (largest {largest:.4g}, learning rate {rate:g}): look for features of very "
        "different scale (--normalise feature), or lower --strength and --lr"
    )
