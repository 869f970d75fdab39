"""The gradient of the weight, from that of the columns a_k = ∂L/∂q_k of every slot u with class y:

    ∂L/∂w_k += 2 a_k Σ_y (w_k - w_y),        ∂L/∂w_y -= 2 Σ_k a_k Σ_y (w_k - w_y)

Partial sums over ranges of slots, so that a small result still fills a GPU, and the sums over k of every tile of rows
are added in a fixed order by `cross_entropy_totals.py`.
"""

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from plsp_kernels.triton_impl import tiles
from plsp_kernels.triton_impl.label_columns import LabelColumns, differences, product_tile


class PartialGradients(NamedTuple):
    partial: Tensor  # (splits, l, d): Σ_u 2 a_k Σ_y (w_k - w_y) over a range of slots
    own: Tensor  # (tiles, U, d): Σ_k 2 a_k Σ_y (w_k - w_y) over a tile of rows


@triton.jit(do_not_specialize=["num_slots"])
def _label_weight_gradient_kernel(
    grad_quadratic_ptr,  # (U, l)
    weight_ptr,  # (l, d)
    covariance_ptr,  # (l, d, d); (l, d) if DIAGONAL
    classes_ptr,  # (U,)
    product_ptr,  # (U, l, d), or None
    partial_ptr,  # (splits, l, d)
    own_ptr,  # (tiles, U, d)
    num_slots,
    num_classes,
    num_features,
    stride_weight,
    stride_covariance,
    stride_covariance_row,  # unused if DIAGONAL
    DIAGONAL: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    DTYPE: tl.constexpr = partial_ptr.dtype.element_ty
    split = tl.program_id(2).to(tl.int64)
    tile = tl.program_id(1)
    rows = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    d = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    inside = (rows[:, None] < num_classes) & (d[None, :] < num_features)
    slots_per_split = tl.cdiv(num_slots, tl.num_programs(2))
    first = split * slots_per_split
    total = tl.zeros((BLOCK_M, BLOCK_N), DTYPE)
    for slot in range(first, tl.minimum(first + slots_per_split, num_slots)):
        y = tl.load(classes_ptr + slot).to(tl.int64)
        own = tl.zeros((BLOCK_N,), DTYPE)
        if y >= 0:
            grad = tl.load(grad_quadratic_ptr + slot * num_classes + rows, mask=rows < num_classes, other=0.0)
            if DIAGONAL:
                difference = differences(weight_ptr, y, rows, d, num_classes, num_features, stride_weight, DTYPE)
                variance = tl.load(covariance_ptr + y * stride_covariance + d, mask=d < num_features, other=0.0)
                product = difference * variance.to(DTYPE)[None, :]
            elif product_ptr is not None:
                product_row = (slot * num_classes + rows[:, None]) * num_features
                product = tl.load(product_ptr + product_row + d[None, :], mask=inside, other=0.0)
            else:
                product = product_tile(
                    weight_ptr,
                    covariance_ptr + y * stride_covariance,
                    y,
                    rows,
                    d,
                    num_features,
                    num_classes,
                    num_features,
                    stride_weight,
                    stride_covariance_row,
                    DTYPE,
                    PRECISION,
                    BLOCK_M,
                    BLOCK_N,
                    BLOCK_K,
                )
            product *= 2.0 * grad[:, None]
            total += product
            own = tl.sum(product, 0)
        tl.store(own_ptr + (tile * num_slots + slot).to(tl.int64) * num_features + d, own, mask=d < num_features)
    tl.store(
        partial_ptr + (split * num_classes + rows[:, None]) * num_features + d[None, :],
        total,
        mask=inside,
    )


def label_weight_gradient(columns: LabelColumns, grad_quadratic: Tensor) -> PartialGradients:
    """Partial sums of the gradient of the weight, given that of the columns (U, l)."""
    weight, covariance, classes, quadratic, product = columns
    (num_classes, num_features), num_slots = weight.shape, classes.shape[0]
    blocks = tiles.label_product_blocks(num_classes, num_features, quadratic)
    grid = triton.cdiv(num_features, blocks["BLOCK_N"]), triton.cdiv(num_classes, blocks["BLOCK_M"])
    splits = tiles.num_splits(num_slots, grid[0] * grid[1])
    result = PartialGradients(
        quadratic.new_empty(splits, num_classes, num_features), quadratic.new_empty(grid[1], num_slots, num_features)
    )
    diagonal = covariance.dim() == 2
    tiles.launch(
        _label_weight_gradient_kernel,
        (*grid, splits),
        grad_quadratic,
        weight,
        covariance,
        classes,
        product,
        *result,
        num_slots,
        num_classes,
        num_features,
        weight.stride(0),
        covariance.stride(0),
        0 if diagonal else covariance.stride(1),
        DIAGONAL=diagonal,
        PRECISION=tiles.dot_precision(weight),
        **blocks,
    )
    return result
