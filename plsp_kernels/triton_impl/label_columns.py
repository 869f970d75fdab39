"""Quadratic forms between every class k and the class y of a slot: q_k = (w_k - w_y)ᵀ Σ_y (w_k - w_y).

Rows are subtracted before anything is multiplied, so nothing cancels where they are nearly equal. Σ (l, d, d), or
(l, d) for diagonals, is indexed by class and never gathered. An unused slot reads no Σ, and its column is zero.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from plsp_kernels.triton_impl import tiles


class LabelColumns(NamedTuple):
    """Columns of the classes of U slots."""

    weight: Tensor  # (l, d)
    covariance: Tensor  # (l, d, d) or (l, d)
    classes: Tensor  # (U,)
    quadratic: Tensor  # (U, l)
    product: Tensor | None  # (U, l, d): (w_k - w_y)ᵀ Σ_y; None: to be computed again


@triton.jit
def differences(weight_ptr, y, rows, d, num_classes, num_features, stride_weight, DTYPE: tl.constexpr):
    """w_k - w_y for a tile of rows k and of features, zero beyond either: (K, D)."""
    inside = (rows[:, None] < num_classes) & (d[None, :] < num_features)
    weight = tl.load(weight_ptr + rows[:, None] * stride_weight + d[None, :], mask=inside, other=0.0).to(DTYPE)
    own = tl.load(weight_ptr + y * stride_weight + d, mask=d < num_features, other=0.0).to(DTYPE)
    return tl.where(inside, weight - own[None, :], 0.0)


@triton.jit
def product_tile(
    weight_ptr,  # (l, d)
    covariance_ptr,  # (d, d), of the class y
    y,
    rows,
    d,
    depth,  # d, or 0 for an unused slot
    num_classes,
    num_features,
    stride_weight,
    stride_covariance_row,
    DTYPE: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """(w_k - w_y)ᵀ Σ_y for a tile of rows k and of features d: (M, N)."""
    product = tl.zeros((BLOCK_M, BLOCK_N), DTYPE)
    for inner in range(0, depth, BLOCK_K):
        k = inner + tl.arange(0, BLOCK_K)
        left = differences(weight_ptr, y, rows, k, num_classes, num_features, stride_weight, DTYPE)
        right = tl.load(
            covariance_ptr + k[:, None] * stride_covariance_row + d[None, :],
            mask=(k[:, None] < num_features) & (d[None, :] < num_features),
            other=0.0,
        ).to(DTYPE)
        product = tl.dot(left, right, product, input_precision=PRECISION, out_dtype=DTYPE)
    return product


@triton.jit
def _full_columns_kernel(
    weight_ptr,  # (l, d)
    covariance_ptr,  # (l, d, d)
    classes_ptr,  # (U,)
    quadratic_ptr,  # (U, l)
    product_ptr,  # (U, l, d), or None
    num_classes,
    num_features,
    stride_weight,
    stride_covariance,
    stride_covariance_row,
    PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    DTYPE: tl.constexpr = quadratic_ptr.dtype.element_ty
    slot = tl.program_id(1).to(tl.int64)
    rows = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    y = tl.load(classes_ptr + slot).to(tl.int64)
    depth = tl.where(y >= 0, num_features, 0)
    y = tl.maximum(y, 0)
    quadratic = tl.zeros((BLOCK_M,), DTYPE)
    for start in range(0, depth, BLOCK_N):
        d = start + tl.arange(0, BLOCK_N)
        product = product_tile(
            weight_ptr,
            covariance_ptr + y * stride_covariance,
            y,
            rows,
            d,
            depth,
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
        if product_ptr is not None:
            tl.store(
                product_ptr + (slot * num_classes + rows[:, None]) * num_features + d[None, :],
                product,
                mask=(rows[:, None] < num_classes) & (d[None, :] < num_features),
            )
        difference = differences(weight_ptr, y, rows, d, num_classes, num_features, stride_weight, DTYPE)
        quadratic += tl.sum(product * difference, 1)
    tl.store(quadratic_ptr + slot * num_classes + rows, quadratic, mask=rows < num_classes)


@triton.jit(do_not_specialize=["num_slots"])
def _diagonal_columns_kernel(
    weight_ptr,  # (l, d)
    variance_ptr,  # (l, d)
    classes_ptr,  # (U,)
    quadratic_ptr,  # (U, l)
    num_slots,
    num_classes,
    num_features,
    stride_weight,
    stride_variance,
    BLOCK_U: tl.constexpr,
    BLOCK_L: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    DTYPE: tl.constexpr = quadratic_ptr.dtype.element_ty
    slots = tl.program_id(1) * BLOCK_U + tl.arange(0, BLOCK_U)
    rows = tl.program_id(0) * BLOCK_L + tl.arange(0, BLOCK_L)
    y = tl.load(classes_ptr + slots, mask=slots < num_slots, other=-1).to(tl.int64)
    quadratic = tl.zeros((BLOCK_U, BLOCK_L), DTYPE)
    for start in range(0, num_features, BLOCK_D):
        d = start + tl.arange(0, BLOCK_D)
        inside = (rows[:, None] < num_classes) & (d[None, :] < num_features)
        weight = tl.load(weight_ptr + rows[:, None] * stride_weight + d[None, :], mask=inside, other=0.0).to(DTYPE)
        known = (y[:, None] >= 0) & (d[None, :] < num_features)
        own = tl.load(weight_ptr + y[:, None] * stride_weight + d[None, :], mask=known, other=0.0).to(DTYPE)
        variance = tl.load(variance_ptr + y[:, None] * stride_variance + d[None, :], mask=known, other=0.0).to(DTYPE)
        difference = weight[None, :, :] - own[:, None, :]
        quadratic += tl.sum(difference * difference * variance[:, None, :], 2)
    index = slots.to(tl.int64)[:, None] * num_classes + rows[None, :]
    tl.store(quadratic_ptr + index, quadratic, mask=(slots[:, None] < num_slots) & (rows[None, :] < num_classes))


def label_columns(
    weight: Tensor, covariance: Tensor, classes: Tensor, dtype: torch.dtype, need_weight: bool
) -> LabelColumns:
    """Compute the columns and, if the gradient of the weight will need them and they fit the budget, the products."""
    (num_classes, num_features), num_slots = weight.shape, classes.shape[0]
    quadratic = weight.new_empty(num_slots, num_classes, dtype=dtype)
    if covariance.dim() == 2:
        blocks = tiles.diagonal_column_blocks(num_classes)
        tiles.launch(
            _diagonal_columns_kernel,
            (triton.cdiv(num_classes, blocks["BLOCK_L"]), triton.cdiv(num_slots, blocks["BLOCK_U"])),
            weight,
            covariance,
            classes,
            quadratic,
            num_slots,
            num_classes,
            num_features,
            weight.stride(0),
            covariance.stride(0),
            **blocks,
        )
        return LabelColumns(weight, covariance, classes, quadratic, None)
    saved = need_weight and num_slots * weight.numel() * dtype.itemsize <= tiles.CHUNK_BYTES
    product = weight.new_empty(num_slots, num_classes, num_features, dtype=dtype) if saved else None
    blocks = tiles.label_product_blocks(num_classes, num_features, quadratic)
    tiles.launch(
        _full_columns_kernel,
        (triton.cdiv(num_classes, blocks["BLOCK_M"]), num_slots),
        weight,
        covariance,
        classes,
        quadratic,
        product,
        num_classes,
        num_features,
        weight.stride(0),
        covariance.stride(0),
        covariance.stride(1),
        PRECISION=tiles.dot_precision(weight),
        **blocks,
    )
    return LabelColumns(weight, covariance, classes, quadratic, product)
