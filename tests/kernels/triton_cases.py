"""What the tests of the Triton kernels share: poisoned memory and the rules for comparing results."""

import contextlib
import math
import os
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
LOW_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
MARGIN = 64
"""Elements of poison before and after every allocation; keeps the alignment of the allocator."""
SMALLEST_TILING = {"BLOCK_M": 16, "BLOCK_N": 16, "BLOCK_K": 16, "num_warps": 1, "num_stages": 1}
"""Of a matrix product."""

MARKS = [
    pytest.mark.skipif(
        DEVICE == "cpu" and os.environ.get("TRITON_INTERPRET") != "1", reason="needs a GPU, or TRITON_INTERPRET=1"
    ),
    # the interpreter runs on numpy, which warns about intended infinities
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),
]
POISONED = [*MARKS, pytest.mark.usefixtures("poisoned_allocations")]


def poison(tensor: Tensor) -> Tensor:
    if tensor.dtype == torch.bool:
        return tensor.fill_(True)
    return tensor.fill_(math.nan if tensor.is_floating_point() else torch.iinfo(tensor.dtype).max)


def is_poison(tensor: Tensor) -> bool:
    return torch.equal(tensor.nan_to_num(7.0), poison(torch.full_like(tensor, 0)).nan_to_num(7.0))


@contextlib.contextmanager
def poisoned() -> Iterator[None]:
    """Poison every allocation and the margins around it.

    An element that a kernel does not write is NaN, or an absurd integer. The margins must stay as they are.
    """
    buffers: list[tuple[Tensor, int]] = []
    allocate = torch.empty

    def with_margins(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def wrapper(*args: Any, **kwargs: Any) -> Tensor:
            like = function(*args, **kwargs)
            buffer = poison(allocate(like.numel() + 2 * MARGIN, dtype=like.dtype, device=like.device))
            buffers.append((buffer, like.numel()))
            return buffer.as_strided(like.shape, like.stride(), MARGIN)

        return wrapper

    with (
        mock.patch.object(torch, "empty", with_margins(torch.empty)),
        mock.patch.object(torch, "empty_like", with_margins(torch.empty_like)),
        mock.patch.object(torch.Tensor, "new_empty", with_margins(torch.Tensor.new_empty)),
    ):
        yield
    for buffer, size in buffers:
        assert is_poison(buffer[:MARGIN]), "a kernel wrote before its buffer"
        assert is_poison(buffer[MARGIN + size :]), "a kernel wrote beyond its buffer"


def guarded(tensor: Tensor) -> Tensor:
    """The same values, contiguous, with poison on either side."""
    return torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device).copy_(tensor)


def fenced(tensor: Tensor) -> Tensor:
    """The same values as a view into a larger poisoned buffer: poison follows every row."""
    buffer = poison(torch.empty([size + 6 for size in tensor.shape], dtype=tensor.dtype, device=tensor.device))
    return buffer[tuple(slice(3, 3 + size) for size in tensor.shape)].copy_(tensor)


def scattered(tensor: Tensor) -> Tensor:
    """The same values with a strided last axis."""
    return tensor.mT.contiguous().mT if tensor.dim() > 1 else tensor.repeat_interleave(2)[::2]


def as_tuple(results: Any) -> tuple[Tensor, ...]:
    return results if isinstance(results, tuple) else (results,)


def assert_same(actual: Any, expected: Any, tolerance: float = 1e-12) -> None:
    """Compare shapes, dtypes, and values relative to the largest element."""
    for ours, theirs in zip(as_tuple(actual), as_tuple(expected), strict=True):
        scale = float(theirs.abs().max()) if theirs.is_floating_point() and theirs.numel() else 0.0
        torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=tolerance * scale)


def assert_as_accurate(actual: Any, plain: Any, truth: Any) -> None:
    """float32 results are as close to float64 truth as plain PyTorch, up to a few roundings."""
    for ours, theirs, exact in zip(as_tuple(actual), as_tuple(plain), as_tuple(truth), strict=True):
        assert ours.dtype == theirs.dtype
        assert ours.shape == theirs.shape
        if not ours.is_floating_point() or not ours.numel():
            assert torch.equal(ours, theirs)
            continue
        slack = 8 * torch.finfo(torch.float32).eps * float(exact.abs().max())
        assert float((ours - exact).abs().max()) <= float((theirs - exact).abs().max()) + slack


def assert_same_bits(actual: Any, expected: Any) -> None:
    """Equal shapes, dtypes and values, NaN included."""
    for ours, theirs in zip(as_tuple(actual), as_tuple(expected), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=0, equal_nan=True)
