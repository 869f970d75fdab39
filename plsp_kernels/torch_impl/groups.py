"""Products of each sample's row with the matrix of its class, as a few large GEMMs without gathering the matrices."""

from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from plsp_kernels.torch_impl.chunks import PAIR_BYTES

_WIDE_COLUMNS = 512  # up to this many columns U·l, multiplying by every matrix is cheaper than sorting


class Spread(NamedTuple):
    """One row per sample (N, l), and the same rows arranged by slot."""

    rows: Tensor
    by_slot: Tensor


class Groups(Protocol):
    num_slots: int

    def spread(self, rows: Tensor) -> Spread:
        """Arrange the rows for the products below."""

    def multiply(self, rows: Spread, matrices: Tensor) -> Tensor:
        """rows[i] @ matrices[slots[i]]: (N, l) and (U, l, l) to (N, l)."""

    def symmetric_outer(self, left: Spread, right: Spread, out: Tensor | None) -> Tensor:
        """Σ_{i in slot} (left[i] right[i]ᵀ + right[i] left[i]ᵀ): twice (N, l) to (U, l, l)."""


def group_by_slot(slots: Tensor, matrices: Tensor) -> Groups | None:
    """Return the cheaper grouping for these samples, or None if it would exceed the memory budget."""
    num_slots, num_classes, _ = matrices.shape
    if num_slots * num_classes <= _WIDE_COLUMNS:
        too_large = slots.shape[0] * num_slots * num_classes * matrices.dtype.itemsize > PAIR_BYTES // 4
        return None if too_large else _WideGroups(slots, matrices)
    groups = _PaddedGroups(slots)
    padded_bytes = groups.num_slots * groups.depth * num_classes * matrices.dtype.itemsize
    return groups if padded_bytes <= PAIR_BYTES // 4 else None


class _WideGroups:
    """Each row sits in the block of its slot in a wide row of zeros (N, U·l): one GEMM with the stacked matrices."""

    def __init__(self, slots: Tensor, matrices: Tensor) -> None:
        self.num_slots = matrices.shape[0]
        self.place = torch.arange(0, slots.shape[0] * self.num_slots, self.num_slots).add_(slots)

    def spread(self, rows: Tensor) -> Spread:
        count, width = rows.shape
        wide = rows.new_zeros(count * self.num_slots, width).index_copy_(0, self.place, rows)
        return Spread(rows, wide.view(count, -1))

    def multiply(self, rows: Spread, matrices: Tensor) -> Tensor:
        return torch.mm(rows.by_slot, matrices.view(-1, matrices.shape[2]))

    def symmetric_outer(self, left: Spread, right: Spread, out: Tensor | None) -> Tensor:
        stacked, rows = torch.cat([left.by_slot, right.by_slot]), torch.cat([right.rows, left.rows])
        width = rows.shape[1]
        product = torch.mm(stacked.t(), rows, out=None if out is None else out.view(-1, width))
        return product.view(self.num_slots, width, width)


class _PaddedGroups:
    """Samples are sorted by slot into (U, R, l), where R is the size of the largest group: one batched GEMM."""

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

    def symmetric_outer(self, left: Spread, right: Spread, out: Tensor | None) -> Tensor:
        first, second = torch.cat([left.by_slot, right.by_slot], 1), torch.cat([right.by_slot, left.by_slot], 1)
        return torch.bmm(first.mT, second, out=out)
