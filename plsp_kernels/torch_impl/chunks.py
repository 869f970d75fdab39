"""The memory budget of pair work: no batch, however large, makes temporaries beyond it."""

from collections.abc import Iterator

import torch

PAIR_BYTES = 64 * 2**20
"""Upper limit for the temporaries of one chunk, all of them together."""

_CACHE_BYTES = 16 * 2**20  # a chunk this small stays in a processor's caches from one operation to the next
_LIVE_TENSORS = 4  # a chunk's elementwise chain keeps at most this many pair tensors alive at once


def chunk_slices(count: int, elements_each: int, dtype: torch.dtype) -> Iterator[slice]:
    """Slices of range(count) whose temporaries, `elements_each` per item, fit the budget (at least one item)."""
    size = max(1, min(PAIR_BYTES, _CACHE_BYTES) // (_LIVE_TENSORS * max(1, elements_each) * dtype.itemsize))
    for start in range(0, count, size):
        yield slice(start, min(start + size, count))
