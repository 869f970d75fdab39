"""Rows of logits and their classes. Rows of one class share its Gram matrix."""

from typing import NamedTuple

import torch
from torch import Tensor


class Rows(NamedTuple):
    """Rows of logits, each with the covariance of one class.

    The Gram matrices G_y of the distinct classes are stored in U *slots*.
    """

    logits: Tensor  # (N, l)
    gram: Tensor  # (U, l, l)
    slots: Tensor  # (N,) int64: slot of the Gram matrix of each row
    strength: Tensor  # 0-d, which may be on the CPU: λ


def host_number(scalar: Tensor) -> float | Tensor:
    """The value of a 0-d tensor on the CPU, or the tensor itself on another device, where reading it is a host sync."""
    return float(scalar) if scalar.device.type == "cpu" else scalar


def class_slots(classes: Tensor, num_classes: int) -> tuple[Tensor, Tensor]:
    """Return the distinct classes of the samples (U,) and the slot of each sample (N,).

    U depends on shapes only, which avoids a host sync: all l classes if there are at least l samples, otherwise one
    slot per sample, the distinct classes first and -1 in unused slots.
    """
    if classes.shape[0] >= num_classes:
        # A view: torch.compile rejects an autograd.Function that receives the same tensor twice (slots and targets).
        return torch.arange(num_classes, device=classes.device), classes.view_as(classes)
    ordered, order = classes.sort()
    rank = torch.cat([torch.zeros_like(ordered[:1]), (ordered[1:] != ordered[:-1]).long()]).cumsum(0)
    slots = torch.empty_like(rank).scatter_(0, order, rank)
    distinct = torch.full_like(classes, -1).scatter_(0, rank, ordered)
    return distinct, slots
