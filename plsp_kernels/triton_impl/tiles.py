"""Kernel launches and tile sizes.

Block sizes follow from target and shape by fixed rules, so a shape always compiles to the same kernels (`tuning.py` is
the exception that one asks for). Launchers must call `tiles.launch` and `tiles.target` by these names: ahead-of-time
compilation patches them, to record launches and to stand for a GPU.
"""

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

Blocks = dict[str, int]
"""BLOCK_* constants, num_warps and num_stages of one launch."""


def launch(kernel: Any, grid: Sequence[int], *args: Any, **options: Any) -> None:
    """Run a kernel on the device of its first argument; an empty grid launches nothing."""
    if 0 in grid:
        return
    with torch.cuda.device_of(args[0]):  # no effect for tensors on other devices
        kernel[tuple(grid)](*args, **options)


def compute_dtype(tensor: Tensor) -> torch.dtype:
    """Dtype in which a kernel computes and returns: float64 for float64, float32 otherwise."""
    return torch.float64 if tensor.dtype == torch.float64 else torch.float32


def dense_rows(tensor: Tensor) -> Tensor:
    """Return the tensor if its last axis is dense (leading axes keep their strides), otherwise a copy."""
    return tensor if tensor.stride(-1) == 1 or tensor.shape[-1] <= 1 else tensor.contiguous()


class Float32Products(NamedTuple):
    """How a target multiplies float32 matrices."""

    precision: str
    """Of tl.dot: one IEEE product, or three TF32 products, which keep float32 accuracy."""
    rows: int
    """BLOCK_M of plain products, at most."""
    rows_per_warp: int
    stages: int
    """Of the pipeline of loads."""
    gram_rows: int
    """BLOCK_M of the fused Gram kernel, at most; it holds rows of G_y in registers beside those of T_y."""
    gram_warps: int


FLOAT32_PRODUCTS = {
    # Three TF32 products where the TF32 peak is over three times the float32 peak: 156 and 19.5 Tflop/s on an A100, 494
    # and 67 on an H100, over 1,000 and 75 on a B200. Triton spreads the warps of such a chain over rows only, 16 for
    # each warp: with fewer, warps repeat each other's work. 64 rows keep 20 warps resident on sm_80, 128 rows 16. The
    # tensor cores of the others outgrew the L2 cache, and 128 rows read a quarter less through it.
    "sm_80": Float32Products("tf32x3", 64, 16, 3, 64, 4),
    "sm_90": Float32Products("tf32x3", 128, 16, 3, 64, 4),
    "sm_100": Float32Products("tf32x3", 128, 16, 3, 64, 4),
    # The TF32 peak of sm_86, sm_89 and sm_120 is one to two times the float32 peak, and older GPUs have no TF32. IEEE
    # products spill with 16 rows per warp. Of the fused Gram kernel, 32 rows leave two resident blocks, 64 rows one.
    "other sm": Float32Products("ieee", 64, 8, 3, 32, 8),
    # IEEE products in matrix units. Two stages, 8 KiB, leave room for eight programs in 64 KiB of shared memory.
    "gfx": Float32Products("ieee", 64, 16, 2, 64, 8),
}


def float32_products(name: str) -> Float32Products:
    """Entry of a target such as "sm_80"."""
    return FLOAT32_PRODUCTS.get(name, FLOAT32_PRODUCTS["gfx" if name.startswith("gfx") else "other sm"])


@functools.cache
def target(device: torch.device) -> str:
    """Compilation target of a device, such as "sm_80" or "gfx942"; "sm_80" stands for the interpreter."""
    if device.type != "cuda":
        return "sm_80"
    if torch.version.hip is not None:
        return str(torch.cuda.get_device_properties(device).gcnArchName).split(":")[0]
    major, minor = torch.cuda.get_device_capability(device)
    return f"sm_{major}{minor}"


def dot_precision(tensor: Tensor) -> str:
    """Precision of tl.dot for float32 on the tensor's device: float32 accuracy, unless TF32 is allowed and exists."""
    name = target(tensor.device)
    matmul = torch.backends.cuda.matmul
    # Newer versions of torch raise on reading the old setting once the new one has been used.
    allowed = matmul.fp32_precision == "tf32" if hasattr(matmul, "fp32_precision") else matmul.allow_tf32
    if allowed and name.startswith("sm_") and int(name.removeprefix("sm_")) >= 80:
        return "tf32"
    return float32_products(name).precision


def dot_operand(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """The tensor as an operand of products in this dtype: half precision is widened to float32, exactly, for float64.

    Triton cannot feed float64 matrix instructions from loads narrower than 32 bits. float64 with a covariance in half
    precision is rare enough for a copy.
    """
    return tensor.float() if dtype == torch.float64 and tensor.element_size() < 4 else tensor


def class_block(num_classes: int, largest: int) -> int:
    """Power of two that covers the classes, at least 16 as tl.dot requires and at most `largest`."""
    return min(largest, max(16, triton.next_power_of_2(num_classes)))


# Matrix products take BLOCK_K = 16: with 32, the three TF32 products per float32 product spilled on some targets, as
# did float64 with the rows and warps of float32.

FUSED_GRAM_CLASSES = 128
"""Up to this many classes, one tile spans all columns of G_y and the product stays in registers."""


def gram_tilings(num_classes: int, like: Tensor) -> list[Blocks]:
    """Tilings of the fused kernel for T_y and G_y, BLOCK_M rows by BLOCK_L ≥ l columns: the default, then others."""
    block_l = class_block(num_classes, FUSED_GRAM_CLASSES)
    precision, _, _, _, rows, warps = float32_products(target(like.device))
    stages = 3 if precision == "tf32x3" else 2  # TF32 spills with 2 on sm_80 (no gradient), IEEE with 3 on sm_86
    choices = [(rows, stages), (rows, 5 - stages), (96 - rows, stages)]  # 2 or 3 stages, 32 or 64 rows
    if like.dtype == torch.float64:
        warps, choices = 8, [(32, 2)]
    tilings = []
    for largest, num_stages in choices:
        blocks = {
            "BLOCK_M": min(block_l, largest),
            "BLOCK_L": block_l,
            "BLOCK_D": 16,
            "BLOCK_K": 16,
            "num_warps": 4 if block_l <= 32 else warps,
            "num_stages": num_stages,
        }
        tilings += [blocks] if blocks not in tilings else []
    return tilings


def matrix_tilings(num_rows: int, num_columns: int, like: Tensor, square: bool = False) -> list[Blocks]:
    """Tilings of a plain matrix product with the dtype and device of a tensor: the default, then some to try."""
    if like.dtype == torch.float64:
        block_m, block_n = class_block(num_rows, 32), class_block(num_columns, 32)
        warps = 8 if block_m * block_n == 1024 else 4
        return [{"BLOCK_M": block_m, "BLOCK_N": block_n, "BLOCK_K": 16, "num_warps": warps, "num_stages": 3}]
    _, rows, rows_per_warp, stages, *_ = float32_products(target(like.device))
    sizes = [(64, 64), (128, 128), (32, 32)] if square else [(rows, 64), (64, 64), (128, 64), (64, 128)]
    tilings = []
    for largest_m, largest_n in sizes:
        block_m = class_block(num_rows, largest_m)
        block_n = class_block(num_columns, largest_n if block_m >= 64 else 32)
        warps = max(4, block_m // rows_per_warp)  # below 64 rows loads dominate: repeated products are free
        blocks = {"BLOCK_M": block_m, "BLOCK_N": block_n, "BLOCK_K": 16, "num_warps": warps, "num_stages": stages}
        tilings += [blocks] if blocks not in tilings else []
    return tilings


def label_product_blocks(num_classes: int, num_features: int, like: Tensor) -> Blocks:
    """Blocks of a product with differences of rows, which take registers too: half the columns of a plain product."""
    blocks = matrix_tilings(num_classes, num_features, like)[0]
    return blocks | {"BLOCK_N": min(blocks["BLOCK_N"], 32)}


def num_splits(steps: int, num_tiles: int) -> int:
    """Number of split-K partial sums of a matrix product, so that a small result still fills a GPU."""
    return max(1, min(steps // 4, 256 // max(num_tiles, 1)))


CHUNK_BYTES = 384 * 2**20
"""Memory for the Gram matrices, their gradients and the products T_y of the slots that a step computes at a time."""


def slots_per_chunk(weight: Tensor, num_slots: int, full: bool) -> int:
    """Number of slots that fit the budget: all of them, or a multiple of 4, which keeps views of them aligned."""
    num_classes, num_features = weight.shape
    slot_bytes = num_classes * (2 * num_classes + (num_features if full else 0)) * weight.element_size()
    fitting = CHUNK_BYTES // slot_bytes
    return max(1, num_slots if num_slots <= fitting else fitting // 4 * 4)


def preparation_blocks(num_classes: int) -> Blocks:
    """Blocks of the counting sort, BLOCK_N samples by BLOCK_L classes, and of the centring, BLOCK_L rows by BLOCK_D."""
    return {"BLOCK_N": 64, "BLOCK_L": class_block(num_classes, 32), "BLOCK_D": 32, "num_warps": 8, "num_stages": 2}


def group_blocks(num_classes: int) -> Blocks:
    """Blocks of the counting sort alone."""
    return {"BLOCK_N": 64, "BLOCK_L": class_block(num_classes, 32), "num_warps": 4, "num_stages": 2}


def diagonal_column_blocks(num_classes: int) -> Blocks:
    """Blocks of BLOCK_U slots by BLOCK_L classes, streaming over BLOCK_D features."""
    return {"BLOCK_U": 8, "BLOCK_L": class_block(num_classes, 32), "BLOCK_D": 16, "num_warps": 4, "num_stages": 2}


def column_gradient_blocks(num_classes: int) -> Blocks:
    """Blocks of a column of classes, streaming over BLOCK_N samples of a class at a time."""
    block = class_block(num_classes, 128)
    return {"BLOCK_N": 8, "BLOCK_L": block, "num_warps": 1 if block <= 32 else 4, "num_stages": 2}


def pair_blocks(num_classes: int, dtype: torch.dtype) -> Blocks:
    """Blocks of pairs (j, k) of one sample: a tile of j, streaming over tiles of k, 4 pairs a thread."""
    block_k = class_block(num_classes, 32)
    warps = block_k // 8
    return {
        "BLOCK_J": 16,
        "BLOCK_K": block_k,
        "num_warps": warps if dtype == torch.float32 else 2 * warps,
        "num_stages": 2,
    }


def pulled_blocks(num_classes: int) -> Blocks:
    """Blocks of the transposed pairs: a tile of k, streaming over tiles of j."""
    block = class_block(num_classes, 64)
    return {"BLOCK_J": block, "BLOCK_K": min(block, 32), "num_warps": 1 if block <= 16 else 4, "num_stages": 2}


def gram_gradient_blocks(num_classes: int) -> Blocks:
    """Blocks of square tiles of class pairs, streaming over BLOCK_N samples of a class at a time."""
    block = class_block(num_classes, 32)
    return {
        "BLOCK_N": 8 if block == 16 else 2,
        "BLOCK_L": block,
        "num_warps": 4 if block == 16 else 8,
        "num_stages": 2,
    }


def row_blocks(num_classes: int) -> Blocks:
    """Blocks of one row of classes, streamed in tiles."""
    block = class_block(num_classes, 1024)
    return {"BLOCK_L": block, "num_warps": 1 if block <= 256 else 8, "num_stages": 2}


def sum_blocks() -> Blocks:
    """Blocks of the sum over a batch."""
    return {"BLOCK_N": 256, "num_warps": 4, "num_stages": 2}


def covariance_blocks(num_features: int, dtype: torch.dtype) -> Blocks:
    """Blocks of square tiles of a covariance, streaming over BLOCK_N samples."""
    block = 64 if num_features >= 256 and dtype == torch.float32 else 32
    return {"BLOCK_N": 16, "BLOCK_D": block, "num_warps": 4, "num_stages": 2}


def assignment_blocks() -> Blocks:
    """Blocks of a batch that is compared with itself, pair by pair."""
    return {"BLOCK_N": 64, "num_warps": 4, "num_stages": 2}


def mean_blocks(num_features: int, device: torch.device) -> Blocks:
    """Blocks of the features of a class mean, streaming over BLOCK_N samples."""
    # At 512 features, ptxas spills with 64 features and 8 warps on sm_120 (diagonal Σ), with 128 and 4 on sm_90.
    largest, warps = (128, 4) if target(device) == "sm_120" else (64, 8)
    block = class_block(num_features, largest)
    return {"BLOCK_N": 16, "BLOCK_D": block, "num_warps": 1 if block <= 32 else warps, "num_stages": 2}
