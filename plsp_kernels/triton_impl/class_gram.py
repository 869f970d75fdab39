"""Class Gram matrices G_y = W Σ_y Wᵀ and the gradient of the weight."""

import triton
import triton.language as tl
from torch import Tensor

from plsp_kernels.triton_impl import tiles


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
    slot = tl.program_id(0).to(tl.int64)
    rows = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    columns = tl.arange(0, BLOCK_L)
    y = tl.load(classes_ptr + slot)
    depth = tl.where(y >= 0, num_features, 0)  # an empty slot reads nothing and writes zeros
    covariance_ptr += y * stride_covariance
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
                covariance_ptr + k[:, None] * stride_covariance_row + d[None, :],
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
        gram,
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
    slot = tl.program_id(0).to(tl.int64)
    rows = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    d = tl.program_id(2) * BLOCK_N + tl.arange(0, BLOCK_N)
    y = tl.load(classes_ptr + slot)
    depth = tl.where(y >= 0, num_features, 0)
    covariance_ptr += y * stride_covariance
    product = tl.zeros((BLOCK_M, BLOCK_N), DTYPE)
    for inner in range(0, depth, BLOCK_K):
        k = inner + tl.arange(0, BLOCK_K)
        left = tl.load(
            weight_ptr + rows[:, None] * stride_weight + k[None, :],
            mask=(rows[:, None] < num_classes) & (k[None, :] < num_features),
            other=0.0,
        )
        right = tl.load(
            covariance_ptr + k[:, None] * stride_covariance_row + d[None, :],
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
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    DTYPE: tl.constexpr = gram_ptr.dtype.element_ty
    slot = tl.program_id(0).to(tl.int64)
    rows = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    columns = tl.program_id(2) * BLOCK_N + tl.arange(0, BLOCK_N)
    y = tl.load(classes_ptr + slot)
    depth = tl.where(y >= 0, num_features, 0)
    product_ptr += slot * stride_product_slot
    gram = tl.zeros((BLOCK_M, BLOCK_N), DTYPE)
    for inner in range(0, depth, BLOCK_K):
        k = inner + tl.arange(0, BLOCK_K)
        left = tl.load(
            product_ptr + rows[:, None] * stride_product + k[None, :],
            mask=(rows[:, None] < num_classes) & (k[None, :] < num_features),
            other=0.0,
        ).to(DTYPE)
        if DIAGONAL:
            variance = tl.load(variance_ptr + y * stride_variance + k, mask=k < num_features, other=0.0)
            left *= variance.to(DTYPE)[None, :]
        right = tl.load(
            weight_ptr + columns[None, :] * stride_weight + k[:, None],
            mask=(columns[None, :] < num_classes) & (k[:, None] < num_features),
            other=0.0,
        )
        gram = tl.dot(left, right.to(DTYPE), gram, input_precision=PRECISION, out_dtype=DTYPE)
    tl.store(
        gram_ptr + (slot * num_classes + rows[:, None]) * num_classes + columns[None, :],
        gram,
        mask=(rows[:, None] < num_classes) & (columns[None, :] < num_classes),
    )


@triton.jit
def _class_gram_backward_kernel(
    grad_gram_ptr,  # (U, l, l), symmetric
    product_ptr,  # (U, l, d); the weight (l, d) if DIAGONAL
    variance_ptr,  # (l, d), read only if DIAGONAL
    classes_ptr,  # (U,), read only if DIAGONAL
    partial_ptr,  # (splits, l, d)
    num_pairs,  # U·l
    num_classes,
    num_features,
    pairs_per_split,  # a multiple of BLOCK_K
    stride_product,
    stride_variance,
    DIAGONAL: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    # H_y is symmetric: stacked as (U·l, l) and (U·l, d), Σ_y H_y T_y is one product over the pairs q = (y, k).
    DTYPE: tl.constexpr = partial_ptr.dtype.element_ty
    split = tl.program_id(0).to(tl.int64)
    rows = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    d = tl.program_id(2) * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    first = split * pairs_per_split
    grad_gram_ptr += first * num_classes
    if not DIAGONAL:
        product_ptr += first * stride_product
    total = tl.zeros((BLOCK_M, BLOCK_N), DTYPE)
    for start in range(first, tl.minimum(first + pairs_per_split, num_pairs), BLOCK_K):
        q = start + k
        left = tl.load(
            grad_gram_ptr + k[None, :] * num_classes + rows[:, None],
            mask=(rows[:, None] < num_classes) & (q[None, :] < num_pairs),
            other=0.0,
        ).to(DTYPE)
        inside = (q[:, None] < num_pairs) & (d[None, :] < num_features)
        if DIAGONAL:
            y = tl.load(classes_ptr + q // num_classes, mask=q < num_pairs, other=-1)[:, None]
            weight = tl.load(
                product_ptr + (q % num_classes)[:, None] * stride_product + d[None, :], mask=inside, other=0.0
            )
            variance = tl.load(variance_ptr + y * stride_variance + d[None, :], mask=inside & (y >= 0), other=0.0)
            right = weight.to(DTYPE) * variance.to(DTYPE)
        else:
            right = tl.load(product_ptr + k[:, None] * stride_product + d[None, :], mask=inside, other=0.0).to(DTYPE)
            product_ptr += BLOCK_K * stride_product
        total = tl.dot(left, right, total, input_precision=PRECISION, out_dtype=DTYPE)
        grad_gram_ptr += BLOCK_K * num_classes
    tl.store(
        partial_ptr + (split * num_classes + rows[:, None]) * num_features + d[None, :],
        2 * total,
        mask=(rows[:, None] < num_classes) & (d[None, :] < num_features),
    )


def class_gram(weight: Tensor, covariance: Tensor, classes: Tensor, save_product: bool) -> tuple[Tensor, Tensor]:
    """G_y (U, l, l) for each slot of `classes`, and T_y = W Σ_y (U, l, d), empty unless asked for and Σ is full.

    Σ is read where it lies, by class number; slots of class -1 get zeros. Beyond FUSED_GRAM_CLASSES classes T_y goes
    through memory, whether it is kept or not.
    """
    (num_classes, num_features), num_slots = weight.shape, classes.shape[0]
    dtype = tiles.compute_dtype(weight)
    weight, covariance, classes = tiles.dense_rows(weight), tiles.dense_rows(covariance), classes.contiguous()
    gram = weight.new_empty(num_slots, num_classes, num_classes, dtype=dtype)
    no_product = weight.new_empty(0, num_classes, num_features, dtype=dtype)
    if covariance.dim() == 2:
        _gram_of_product(weight, weight, covariance, classes, gram)
        return gram, no_product
    if num_classes <= tiles.FUSED_GRAM_CLASSES:
        product = weight.new_empty(num_slots, num_classes, num_features, dtype=dtype) if save_product else no_product
        blocks = tiles.gram_blocks(num_classes, dtype)
        tiles.launch(
            _class_gram_kernel,
            (num_slots, triton.cdiv(num_classes, blocks["BLOCK_M"])),
            weight,
            covariance,
            classes,
            gram,
            product if save_product else gram,  # never a null pointer
            num_classes,
            num_features,
            weight.stride(0),
            covariance.stride(0),
            covariance.stride(1),
            SAVE_PRODUCT=save_product,
            PRECISION=tiles.dot_precision(),
            **blocks,
        )
        return gram, product
    product = weight.new_empty(num_slots, num_classes, num_features, dtype=dtype)
    blocks = tiles.matrix_blocks(num_classes, num_features, dtype)
    tiles.launch(
        _product_kernel,
        (num_slots, triton.cdiv(num_classes, blocks["BLOCK_M"]), triton.cdiv(num_features, blocks["BLOCK_N"])),
        weight,
        covariance,
        classes,
        product,
        num_classes,
        num_features,
        weight.stride(0),
        covariance.stride(0),
        covariance.stride(1),
        PRECISION=tiles.dot_precision(),
        **blocks,
    )
    _gram_of_product(product, weight, None, classes, gram)
    return gram, product if save_product else no_product


def _gram_of_product(product: Tensor, weight: Tensor, variances: Tensor | None, classes: Tensor, gram: Tensor) -> None:
    """G_y = T_y Wᵀ, with T_y = product[slot], or W ∘ s_y where variances are given."""
    num_slots, num_classes, _ = gram.shape
    diagonal = variances is not None
    blocks = tiles.matrix_blocks(num_classes, num_classes, gram.dtype)
    tiles.launch(
        _product_gram_kernel,
        (num_slots, triton.cdiv(num_classes, blocks["BLOCK_M"]), triton.cdiv(num_classes, blocks["BLOCK_N"])),
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
        PRECISION=tiles.dot_precision(),
        **blocks,
    )


def class_gram_backward(
    grad_gram: Tensor, weight: Tensor, covariance: Tensor, classes: Tensor, product: Tensor
) -> Tensor:
    """Gradient with respect to the weight: 2 Σ_y H_y T_y, for symmetric H_y = grad_gram (U, l, l).

    Stretches of the sum go to programs of their own; adding them up is one more reduction in a fixed order.
    """
    (num_classes, num_features), num_pairs = weight.shape, classes.shape[0] * weight.shape[0]
    dtype = tiles.compute_dtype(weight)
    diagonal = covariance.dim() == 2
    source = tiles.dense_rows(weight) if diagonal else product.contiguous()
    variances = tiles.dense_rows(covariance) if diagonal else source
    blocks = tiles.matrix_blocks(num_classes, num_features, dtype)
    row_tiles, column_tiles = triton.cdiv(num_classes, blocks["BLOCK_M"]), triton.cdiv(num_features, blocks["BLOCK_N"])
    steps = max(1, triton.cdiv(num_pairs, blocks["BLOCK_K"]))
    steps_per_split = triton.cdiv(steps, tiles.num_splits(steps, row_tiles * column_tiles))
    splits = triton.cdiv(steps, steps_per_split)
    partial = weight.new_empty(splits, num_classes, num_features, dtype=dtype)
    tiles.launch(
        _class_gram_backward_kernel,
        (splits, row_tiles, column_tiles),
        grad_gram.contiguous(),
        source,
        variances,
        classes.contiguous(),
        partial,
        num_pairs,
        num_classes,
        num_features,
        steps_per_split * blocks["BLOCK_K"],
        source.stride(-2),
        variances.stride(0) if diagonal else 0,
        DIAGONAL=diagonal,
        PRECISION=tiles.dot_precision(),
        **blocks,
    )
    return partial[0] if splits == 1 else partial.sum(0)
