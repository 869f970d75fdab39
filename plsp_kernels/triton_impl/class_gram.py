"""Class Gram matrices G_y = W Σ_y Wᵀ of the classes of U slots, and T_y = W Σ_y for the gradient of the weight.

Σ (l, d, d), or (l, d) for diagonals, is indexed by class and never gathered. A slot whose class is outside 0 … l - 1
reads no Σ; its T is zero and its G is NaN, which no row with a class reads. The slot is the slowest axis of every grid:
programs that share Σ_y or T_y run one after the other. Σ_y is symmetric and read by rows, as matrix units want both
operands; G_y is symmetric too, and beyond FUSED_GRAM_CLASSES classes tiles below its diagonal are mirrored.
"""

import triton
import triton.language as tl
from torch import Tensor

from plsp_kernels.triton_impl import tiles, tuning


@triton.jit
def _class_gram_kernel(
    weight_ptr,  # (l, d)
    covariance_ptr,  # (l, d, d)
    classes_ptr,  # (U,)
    gram_ptr,  # (U, l, l)
    product_ptr,  # (U, l, d), written only if SAVE_PRODUCT
    num_classes,
    num_features,
    stride_weight,
    stride_covariance,
    stride_covariance_row,
    SAVE_PRODUCT: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_L: tl.constexpr,  # ≥ l
    BLOCK_D: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    DTYPE: tl.constexpr = gram_ptr.dtype.element_ty
    slot = tl.program_id(1).to(tl.int64)
    rows = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    columns = tl.arange(0, BLOCK_L)
    y = tl.load(classes_ptr + slot).to(tl.int64)
    known = (y >= 0) & (y < num_classes)
    depth = tl.where(known, num_features, 0)
    covariance_ptr += tl.where(known, y, 0) * stride_covariance
    row_mask = rows[:, None] < num_classes
    gram = tl.zeros((BLOCK_M, BLOCK_L), DTYPE)
    for start in range(0, num_features, BLOCK_D):
        d = start + tl.arange(0, BLOCK_D)
        product = tl.zeros((BLOCK_M, BLOCK_D), DTYPE)
        for inner in range(0, depth, BLOCK_K):
            k = inner + tl.arange(0, BLOCK_K)
            left = tl.load(
                weight_ptr + rows[:, None] * stride_weight + k[None, :],
                mask=row_mask & (k[None, :] < num_features),
                other=0.0,
            )
            right = tl.load(
                covariance_ptr + k[:, None] + d[None, :] * stride_covariance_row,
                mask=(k[:, None] < num_features) & (d[None, :] < num_features),
                other=0.0,
            )
            product = tl.dot(left.to(DTYPE), right.to(DTYPE), product, input_precision=PRECISION, out_dtype=DTYPE)
        if SAVE_PRODUCT:
            tl.store(
                product_ptr + (slot * num_classes + rows[:, None]) * num_features + d[None, :],
                product,
                mask=row_mask & (d[None, :] < num_features),
            )
        transposed = tl.load(
            weight_ptr + columns[None, :] * stride_weight + d[:, None],
            mask=(columns[None, :] < num_classes) & (d[:, None] < num_features),
            other=0.0,
        )
        gram = tl.dot(product, transposed.to(DTYPE), gram, input_precision=PRECISION, out_dtype=DTYPE)
    tl.store(
        gram_ptr + (slot * num_classes + rows[:, None]) * num_classes + columns[None, :],
        tl.where(known, gram, float("nan")),
        mask=row_mask & (columns[None, :] < num_classes),
    )


@triton.jit
def _product_kernel(
    weight_ptr,  # (l, d)
    covariance_ptr,  # (l, d, d)
    classes_ptr,  # (U,)
    product_ptr,  # (U, l, d)
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
    DTYPE: tl.constexpr = product_ptr.dtype.element_ty
    slot = tl.program_id(2).to(tl.int64)
    rows = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    d = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    y = tl.load(classes_ptr + slot).to(tl.int64)
    known = (y >= 0) & (y < num_classes)
    depth = tl.where(known, num_features, 0)
    covariance_ptr += tl.where(known, y, 0) * stride_covariance
    product = tl.zeros((BLOCK_M, BLOCK_N), DTYPE)
    for inner in range(0, depth, BLOCK_K):
        k = inner + tl.arange(0, BLOCK_K)
        left = tl.load(
            weight_ptr + rows[:, None] * stride_weight + k[None, :],
            mask=(rows[:, None] < num_classes) & (k[None, :] < num_features),
            other=0.0,
        )
        right = tl.load(
            covariance_ptr + k[:, None] + d[None, :] * stride_covariance_row,
            mask=(k[:, None] < num_features) & (d[None, :] < num_features),
            other=0.0,
        )
        product = tl.dot(left.to(DTYPE), right.to(DTYPE), product, input_precision=PRECISION, out_dtype=DTYPE)
    tl.store(
        product_ptr + (slot * num_classes + rows[:, None]) * num_features + d[None, :],
        product,
        mask=(rows[:, None] < num_classes) & (d[None, :] < num_features),
    )


@triton.jit
def _product_gram_kernel(
    product_ptr,  # (U, l, d); the weight (l, d) if DIAGONAL
    weight_ptr,  # (l, d)
    variance_ptr,  # (l, d), read only if DIAGONAL
    classes_ptr,  # (U,)
    gram_ptr,  # (U, l, l)
    num_classes,
    num_features,
    stride_product_slot,  # 0 if DIAGONAL
    stride_product,
    stride_weight,
    stride_variance,
    DIAGONAL: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,  # = BLOCK_M
    BLOCK_K: tl.constexpr,
):
    DTYPE: tl.constexpr = gram_ptr.dtype.element_ty
    tile_m = tl.program_id(1)
    tile_n = tl.program_id(0)
    if tile_m > tile_n:  # symmetric: only tiles on and above the diagonal
        return
    slot = tl.program_id(2).to(tl.int64)
    rows = tile_m * BLOCK_M + tl.arange(0, BLOCK_M)
    columns = tile_n * BLOCK_N + tl.arange(0, BLOCK_N)
    y = tl.load(classes_ptr + slot).to(tl.int64)
    known = (y >= 0) & (y < num_classes)
    depth = tl.where(known, num_features, 0)
    product_ptr += slot * stride_product_slot
    variance_ptr += tl.where(known, y, 0) * stride_variance
    gram = tl.zeros((BLOCK_M, BLOCK_N), DTYPE)
    for inner in range(0, depth, BLOCK_K):
        k = inner + tl.arange(0, BLOCK_K)
        left = tl.load(
            product_ptr + rows[:, None] * stride_product + k[None, :],
            mask=(rows[:, None] < num_classes) & (k[None, :] < num_features),
            other=0.0,
        ).to(DTYPE)
        if DIAGONAL:
            variance = tl.load(variance_ptr + k, mask=k < num_features, other=0.0)
            left *= variance.to(DTYPE)[None, :]
        right = tl.load(
            weight_ptr + columns[None, :] * stride_weight + k[:, None],
            mask=(columns[None, :] < num_classes) & (k[:, None] < num_features),
            other=0.0,
        )
        gram = tl.dot(left, right.to(DTYPE), gram, input_precision=PRECISION, out_dtype=DTYPE)
    gram = tl.where(known, gram, float("nan"))
    gram_ptr += slot * num_classes * num_classes
    inside = (rows[:, None] < num_classes) & (columns[None, :] < num_classes)
    tl.store(gram_ptr + rows[:, None] * num_classes + columns[None, :], gram, mask=inside)
    if tile_m < tile_n:  # mirror the tile below the diagonal; every element has one writer
        tl.store(gram_ptr + columns[None, :] * num_classes + rows[:, None], gram, mask=inside)


def class_gram(weight: Tensor, covariance: Tensor, classes: Tensor, save_product: bool) -> tuple[Tensor, Tensor]:
    """G_y (U, l, l) for each slot of `classes`, and T_y = W Σ_y (U, l, d), empty unless save_product and Σ is full.

    Beyond FUSED_GRAM_CLASSES classes T_y is always materialised.
    """
    (num_classes, num_features), num_slots = weight.shape, classes.shape[0]
    dtype = tiles.compute_dtype(weight)
    covariance = tiles.dot_operand(tiles.dense_rows(covariance), dtype)
    weight, classes = tiles.dense_rows(weight), classes.contiguous()
    gram = weight.new_empty(num_slots, num_classes, num_classes, dtype=dtype)
    no_product = weight.new_empty(0, num_classes, num_features, dtype=dtype)
    if covariance.dim() == 2:
        _gram_of_product(weight, weight, covariance, classes, gram)
        return gram, no_product
    if num_classes <= tiles.FUSED_GRAM_CLASSES:
        product = weight.new_empty(num_slots, num_classes, num_features, dtype=dtype) if save_product else no_product
        tuning.launch(
            _class_gram_kernel,
            tiles.gram_tilings(num_classes, gram),
            lambda blocks: (triton.cdiv(num_classes, blocks["BLOCK_M"]), num_slots),
            weight,
            covariance,
            classes,
            gram,
            product if save_product else gram,  # unused, but must not be a null pointer
            num_classes,
            num_features,
            weight.stride(0),
            covariance.stride(0),
            covariance.stride(1),
            SAVE_PRODUCT=save_product,
            PRECISION=tiles.dot_precision(weight),
        )
        return gram, product
    product = weight.new_empty(num_slots, num_classes, num_features, dtype=dtype)
    tuning.launch(
        _product_kernel,
        tiles.matrix_tilings(num_classes, num_features, product),
        lambda blocks: (
            triton.cdiv(num_features, blocks["BLOCK_N"]),
            triton.cdiv(num_classes, blocks["BLOCK_M"]),
            num_slots,
        ),
        weight,
        covariance,
        classes,
        product,
        num_classes,
        num_features,
        weight.stride(0),
        covariance.stride(0),
        covariance.stride(1),
        PRECISION=tiles.dot_precision(weight),
    )
    _gram_of_product(product, weight, None, classes, gram)
    return gram, product if save_product else no_product


def _gram_of_product(product: Tensor, weight: Tensor, variances: Tensor | None, classes: Tensor, gram: Tensor) -> None:
    """G_y = T_y Wᵀ with T_y = product[slot], or W ∘ s_y if variances are given."""
    num_slots, num_classes, _ = gram.shape
    diagonal = variances is not None

    def grid(blocks: tiles.Blocks) -> tuple[int, int, int]:
        num_tiles = triton.cdiv(num_classes, blocks["BLOCK_M"])
        return num_tiles, num_tiles, num_slots

    tuning.launch(
        _product_gram_kernel,
        tiles.matrix_tilings(num_classes, num_classes, gram, square=True),
        grid,
        product,
        weight,
        variances if diagonal else weight,
        classes,
        gram,
        num_classes,
        weight.shape[1],
        0 if diagonal else product.stride(0),
        product.stride(-2),
        weight.stride(0),
        variances.stride(0) if variances is not None else 0,
        DIAGONAL=diagonal,
        PRECISION=tiles.dot_precision(weight),
    )
