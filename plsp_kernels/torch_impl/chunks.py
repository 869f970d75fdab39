"""Memory budget for temporaries over class pairs, independent of batch size and number of classes."""

from collections.abc import Iterator

import torch
from torch import Tensor

PAIR_BYTES = 64 * 2**20
"""Upper bound on the temporaries of one chunk, in total."""

_CACHE_BYTES = 4 * 2**20  # chunks of this size stay in cache between operations
_LIVE_TENSORS = 4  # pair tensors that the elementwise operations of a chunk keep alive at once


def chunk_slices(count: int, elements_each: int, dtype: torch.dtype) -> Iterator[slice]:
    """Split range(count) into slices of ≥ 1 item whose temporaries, `elements_each` per item, fit the budget."""
    bytes_each = _LIVE_TENSORS * max(1, elements_each) * dtype.itemsize
    return _slices(count, min(PAIR_BYTES, _CACHE_BYTES) // bytes_each)


def class_slices(count: int, weight: Tensor) -> Iterator[slice]:
    """Split `count` classes into slices of ≥ 1 class whose matrices fit the budget: four (l, l) and one (l, d) each."""
    num_classes, num_features = weight.shape
    bytes_each = num_classes * (_LIVE_TENSORS * num_classes + num_features) * weight.dtype.itemsize
    return _slices(count, PAIR_BYTES // bytes_each)


def product_slices(count: int, weight: Tensor) -> Iterator[slice]:
    """Split `count` classes into slices of ≥ 1 class whose (l, d) matrices, one each, stay in cache."""
    return _slices(count, _CACHE_BYTES // max(1, weight.numel() * weight.dtype.itemsize))


def feature_slices(weight: Tensor) -> Iterator[slice]:
    """Split the features into slices of ≥ 1 feature whose (l, n) matrices, one each, stay in cache."""
    return _slices(weight.shape[1], min(PAIR_BYTES, _CACHE_BYTES) // max(1, weight.shape[0] * weight.dtype.itemsize))


def _slices(count: int, size: int) -> Iterator[slice]:
    size = max(1, size)
    for start in range(0, count, size):
        yield slice(start, min(start + size, count))
