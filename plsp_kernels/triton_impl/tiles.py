"""How kernels are launched and how large their tiles are: the one place for both.

Block sizes follow from the shape by fixed rules, so a shape always compiles to the same kernels. `aot.py` replaces
`launch` to record what the launchers would run; therefore launchers call it as `tiles.launch`.
"""

from collections.abc import Sequence
from typing import Any

import torch
import triton
from torch import Tensor

Blocks = dict[str, int]
"""BLOCK_* constants, num_warps and num_stages of one launch."""


def launch(kernel: Any, grid: Sequence[int], *args: Any, **options: Any) -> None:
    """Run a kernel on the device of its first argument; an empty grid launches nothing."""
    if 0 in grid:
        return
    with torch.cuda.device_of(args[0]):  # no effect for tensors that live elsewhere
        kernel[tuple(grid)](*args, **options)


def compute_dtype(tensor: Tensor) -> torch.dtype:
    """What a kernel computes in and returns: float64 for float64, float32 for everything else."""
    return torch.float64 if tensor.dtype == torch.float64 else torch.float32


def dense_rows(tensor: Tensor) -> Tensor:
    """The tensor itself if its last axis is dense (leading axes keep their strides), otherwise a copy."""
    return tensor if tensor.stride(-1) == 1 or tensor.shape[-1] <= 1 else tensor.contiguous()


def dot_precision(backend: str | None = None) -> str:
    """How tl.dot multiplies float32: three TF32 products, which keep float32's accuracy, unless TF32 is allowed."""
    if backend is None:
        backend = "cuda" if torch.version.hip is None else "hip"
    if backend == "hip":
        return "ieee"
    matmul = torch.backends.cuda.matmul
    # Newer versions of torch refuse to answer by the older name once the newer one was used.
    allowed = matmul.fp32_precision == "tf32" if hasattr(matmul, "fp32_precision") else matmul.allow_tf32
    return "tf32" if allowed else "tf32x3"


def class_block(num_classes: int, largest: int) -> int:
    """A power of two that covers the classes, at least the 16 that tl.dot wants and at most `largest`."""
    return min(largest, max(16, triton.next_power_of_2(num_classes)))


# Matrix products take BLOCK_K = 16: with 32, the three TF32 products per float32 product spilled on some targets, as
# did float64 with the rows and warps of float32.

FUSED_GRAM_CLASSES = 128
"""Up to here one tile spans all columns of G_y and the product never leaves the registers."""


def gram_blocks(num_classes: int, dtype: torch.dtype) -> Blocks:
    """T_y and G_y in one kernel: tiles of BLOCK_M rows, BLOCK_L ≥ l columns of G."""
    block_l = class_block(num_classes, FUSED_GRAM_CLASSES)
    return {
        "BLOCK_M": min(block_l, 64 if dtype == torch.float32 else 32),
        "BLOCK_L": block_l,
        "BLOCK_D": 32 if dtype == torch.float32 else 16,
        "BLOCK_K": 16,
        "num_warps": 4 if block_l <= 32 else 8,
        "num_stages": 2,
    }


def matrix_blocks(num_rows: int, num_columns: int, dtype: torch.dtype) -> Blocks:
    """A plain matrix product."""
    block_m = class_block(num_rows, 64 if dtype == torch.float32 else 32)
    block_n = class_block(num_columns, max(block_m, 32))
    return {
        "BLOCK_M": block_m,
        "BLOCK_N": block_n,
        "BLOCK_K": 16,
        "num_warps": 8 if block_m * block_n >= (4096 if dtype == torch.float32 else 1024) else 4,
        "num_stages": 3,
    }


def num_splits(steps: int, num_tiles: int) -> int:
    """Into how many partial sums a matrix product is split, so that a small result still occupies a GPU."""
    return max(1, min(steps // 4, 256 // max(num_tiles, 1)))


def pair_blocks(num_classes: int, dtype: torch.dtype) -> Blocks:
    """Pairs (j, k) of one sample: a tile of j, streaming over tiles of k."""
    block_k = class_block(num_classes, 64)
    warps = 1 if block_k <= 32 else 4
    return {
        "BLOCK_J": 16,
        "BLOCK_K": block_k,
        "num_warps": warps if dtype == torch.float32 else 2 * warps,
        "num_stages": 2,
    }


def pulled_blocks(num_classes: int) -> Blocks:
    """The same pairs the other way round: a tile of k, streaming over tiles of j."""
    block = class_block(num_classes, 64)
    return {"BLOCK_J": block, "BLOCK_K": min(block, 32), "num_warps": 1 if block <= 16 else 4, "num_stages": 2}


def gram_gradient_blocks(num_classes: int) -> Blocks:
    """Square tiles of class pairs, streaming over BLOCK_N samples of a class at a time."""
    block = class_block(num_classes, 32)
    return {
        "BLOCK_N": 8 if block == 16 else 2,
        "BLOCK_L": block,
        "num_warps": 4 if block == 16 else 8,
        "num_stages": 2,
    }


def row_blocks(num_classes: int) -> Blocks:
    """One row of classes, streaming over tiles of it."""
    block = class_block(num_classes, 1024)
    return {"BLOCK_L": block, "num_warps": 1 if block <= 256 else 4, "num_stages": 2}


def sum_blocks() -> Blocks:
    """The losses of a batch."""
    return {"BLOCK_N": 256, "num_warps": 4, "num_stages": 2}
