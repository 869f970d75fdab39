"""Products of each sample's row with the matrix of its class, as few large GEMMs instead of a gathered copy."""

from typing import Protocol

import torch
from torch import Tensor

from plsp_kernels.torch_impl.chunks import PAIR_BYTES

_WIDE_COLUMNS = 512  # up to this many columns U·l, multiplying with every matrix is cheaper than sorting


class Groups(Protocol):
    num_slots: int

    def multiply(self, rows: Tensor, matrices: Tensor) -> Tensor:
        """rows[i] @ matrices[slots[i]]: (N, l) and (U, l, l) to (N, l)."""

    def outer(self, left: Tensor, right: Tensor) -> Tensor:
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
    """One product with all matrices side by side; the block of the sample's own slot is what counts."""

    def __init__(self, slots: Tensor, matrices: Tensor) -> None:
        self.num_slots = matrices.shape[0]
        self.place = torch.arange(0, slots.shape[0] * self.num_slots, self.num_slots).add_(slots)

    def multiply(self, rows: Tensor, matrices: Tensor) -> Tensor:
        wide = torch.mm(rows, matrices.transpose(0, 1).reshape(rows.shape[1], -1))  # (N, U·l)
        return wide.view(-1, rows.shape[1]).index_select(0, self.place)

    def outer(self, left: Tensor, right: Tensor) -> Tensor:
        wide = left.new_zeros(left.shape[0] * self.num_slots, left.shape[1]).index_copy_(0, self.place, left)
        return torch.mm(wide.view(left.shape[0], -1).t(), right).view(self.num_slots, -1, right.shape[1])


class _PaddedGroups:
    """Samples sorted by slot into a block (U, R, l), R being the size of the largest group: one batched product."""

    def __init__(self, slots: Tensor) -> None:
        counts = slots.bincount()
        self.num_slots = counts.shape[0]
        self.depth = int(counts.max())
        order = slots.argsort()
        within = torch.arange(slots.shape[0]) - (counts.cumsum(0) - counts)[slots[order]]
        self.place = torch.empty_like(slots).index_copy_(0, order, slots[order] * self.depth + within)

    def _pad(self, rows: Tensor) -> Tensor:
        padded = rows.new_zeros(self.num_slots * self.depth, rows.shape[1])
        return padded.index_copy_(0, self.place, rows).view(self.num_slots, self.depth, -1)

    def multiply(self, rows: Tensor, matrices: Tensor) -> Tensor:
        return torch.bmm(self._pad(rows), matrices).flatten(0, 1).index_select(0, self.place)

    def outer(self, left: Tensor, right: Tensor) -> Tensor:
        return torch.bmm(self._pad(left).mT, self._pad(right))
