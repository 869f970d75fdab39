"""Products of each sample's row with the matrix of its class, as few large GEMMs instead of a gathered copy."""

from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from plsp_kernels.torch_impl.chunks import PAIR_BYTES

_WIDE_COLUMNS = 512  # up to this many columns U·l, multiplying with every matrix is cheaper than sorting


class Spread(NamedTuple):
    """One row per sample (N, l), and the rows laid out by slot."""

    rows: Tensor
    by_slot: Tensor


class Groups(Protocol):
    num_slots: int

    def spread(self, rows: Tensor) -> Spread:
        """Lay the rows out for the products below."""

    def multiply(self, rows: Spread, matrices: Tensor) -> Tensor:
        """rows[i] @ matrices[slots[i]]: (N, l) and (U, l, l) to (N, l)."""

    def outer(self, left: Spread, right: Spread) -> Tensor:
        """Σ_{i in slot} left[i] right[i]ᵀ: twice (N, l) to (U, l, l)."""


def group_by_slot(slots: Tensor, matrices: Tensor) -> Groups | None:
    """The cheaper grouping for these samples, or None if it would exceed the memory budget of pair work."""
    num_slots, num_classes, _ = matrices.shape
    if num_slots * num_classes <= _WIDE_COLUMNS:
        too_large = slots.shape[0] * num_slots * num_classes * matrices.dtype.itemsize > PAIR_BYTES // 4
        return None if too_large else _WideGroups(slots, matrices)
    groups = _PaddedGroups(slots)
    padded_bytes = groups.num_slots * groups.depth * num_classes * matrices.dtype.itemsize
    return groups if padded_bytes <= PAIR_BYTES // 4 else None


class _WideGroups:
    """Every row in its slot's block of a wide row of zeros (N, U·l): one product with all matrices stacked."""

    def __init__(self, slots: Tensor, matrices: Tensor) -> None:
        self.num_slots = matrices.shape[0]
        self.place = torch.arange(0, slots.shape[0] * self.num_slots, self.num_slots).add_(slots)

    def spread(self, rows: Tensor) -> Spread:
        count, width = rows.shape
        wide = rows.new_zeros(count * self.num_slots, width).index_copy_(0, self.place, rows)
        return Spread(rows, wide.view(count, -1))

    def multiply(self, rows: Spread, matrices: Tensor) -> Tensor:
        return torch.mm(rows.by_slot, matrices.view(-1, matrices.shape[2]))

    def outer(self, left: Spread, right: Spread) -> Tensor:
        return torch.mm(left.by_slot.t(), right.rows).view(self.num_slots, -1, right.rows.shape[1])


class _PaddedGroups:
    """Samples sorted by slot into a block (U, R, l), R being the size of the largest group: one batched product."""

    def __init__(self, slots: Tensor) -> None:
        counts = slots.bincount()
        self.num_slots = counts.shape[0]
        self.depth = int(counts.max())
        order = slots.argsort()
        within = torch.arange(slots.shape[0]) - (counts.cumsum(0) - counts)[slots[order]]
        self.place = torch.empty_like(slots).index_copy_(0, order, slots[order] * self.depth + within)

    def spread(self, rows: Tensor) -> Spread:
        padded = rows.new_zeros(self.num_slots * self.depth, rows.shape[1]).index_copy_(0, self.place, rows)
        return Spread(rows, padded.view(self.num_slots, self.depth, -1))

    def multiply(self, rows: Spread, matrices: Tensor) -> Tensor:
        return torch.bmm(rows.by_slot, matrices).flatten(0, 1).index_select(0, self.place)

    def outer(self, left: Spread, right: Spread) -> Tensor:
        return torch.bmm(left.by_slot.mT, right.by_slot)
