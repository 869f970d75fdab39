"""The gradient of the weight, 2 Σ_y H_y T_y with H_y = ∂L/∂G_y symmetric and T_y = W Σ_y.

With H (U·l, l) and T (U·l, d) stacked this is one product over the pairs q = (slot, k). It is split into partial sums
over ranges of pairs, so that a small result still fills a GPU, and `totals.py` adds them in a fixed order.
"""

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from plsp_kernels.triton_impl import tiles, tuning


class Products(NamedTuple):
    """T_y of consecutive slots: stored if Σ is full, W ∘ s_y if it is diagonal."""

    weight: Tensor  # (l, d)
    covariance: Tensor  # (l, d, d) or (l, d)
    classes: Tensor  # (U,)
    product: Tensor  # (U, l, d), or empty if Σ is diagonal


@triton.jit(do_not_specialize=["first_slot", "num_slots"])
def _class_gram_backward_kernel(
    grad_gram_ptr,  # (U, l, l), symmetric
    product_ptr,  # (U, l, d); the weight (l, d) if DIAGONAL
    variance_ptr,  # (l, d), read only if DIAGONAL
    classes_ptr,  # (U,), read only if DIAGONAL
    used_ptr,  # (1,): number of slots in use, counted from slot 0; None: all
    partial_ptr,  # (splits, l, d)
    first_slot,
    num_slots,
    num_classes,
    num_features,
    stride_product,
    stride_variance,
    DIAGONAL: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    DTYPE: tl.constexpr = partial_ptr.dtype.element_ty
    split = tl.program_id(2).to(tl.int64)
    rows = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    d = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    if used_ptr is not None:
        num_slots = tl.minimum(num_slots, tl.maximum(tl.load(used_ptr) - first_slot, 0))
    num_pairs = num_slots.to(tl.int64) * num_classes
    pairs_per_split = tl.cdiv(tl.cdiv(num_pairs, BLOCK_K), tl.num_programs(2)) * BLOCK_K
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
            pair = q.to(tl.int32)  # U is an axis of grids, hence small, and 64-bit division costs registers
            y = tl.load(classes_ptr + pair // num_classes, mask=q < num_pairs, other=-1).to(tl.int64)[:, None]
            known = inside & (y >= 0) & (y < num_classes)
            weight = tl.load(
                product_ptr + (pair % num_classes)[:, None] * stride_product + d[None, :], mask=inside, other=0.0
            )
            variance = tl.load(variance_ptr + y * stride_variance + d[None, :], mask=known, other=0.0)
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


def num_splits(weight: Tensor, num_slots: int) -> int:
    """Number of partial sums for this many slots."""
    num_classes, num_features = weight.shape
    blocks = tiles.matrix_tilings(num_classes, num_features, weight)[0]
    num_tiles = triton.cdiv(num_classes, blocks["BLOCK_M"]) * triton.cdiv(num_features, blocks["BLOCK_N"])
    return tiles.num_splits(triton.cdiv(num_slots * num_classes, blocks["BLOCK_K"]), num_tiles)


def weight_gradient(
    grad_gram: Tensor, products: Products, partial: Tensor, first_slot: int, used: Tensor | None
) -> None:
    """Write the partial gradients of the weight (splits, l, d) of the slots from first_slot."""
    weight, covariance, classes, product = products
    (num_classes, num_features), num_slots = weight.shape, classes.shape[0]
    diagonal = covariance.dim() == 2
    source = tiles.dense_rows(weight) if diagonal else product.contiguous()
    variances = tiles.dot_operand(tiles.dense_rows(covariance), partial.dtype) if diagonal else source
    tuning.launch(
        _class_gram_backward_kernel,
        tiles.matrix_tilings(num_classes, num_features, partial),
        lambda blocks: (
            triton.cdiv(num_features, blocks["BLOCK_N"]),
            triton.cdiv(num_classes, blocks["BLOCK_M"]),
            partial.shape[0],
        ),
        grad_gram.contiguous(),
        source,
        variances,
        classes.contiguous(),
        used,
        partial,
        first_slot,
        num_slots,
        num_classes,
        num_features,
        source.stride(-2),
        variances.stride(0) if diagonal else 0,
        DIAGONAL=diagonal,
        PRECISION=tiles.dot_precision(partial),
    )


def class_gram_backward(
    grad_gram: Tensor, weight: Tensor, covariance: Tensor, classes: Tensor, product: Tensor
) -> Tensor:
    """Gradient with respect to the weight (l, d), for symmetric grad_gram (U, l, l)."""
    if covariance.dim() == 3 and product.shape[0] != classes.shape[0]:
        raise ValueError(f"product must have {classes.shape[0]} slots, got {product.shape[0]}: save it in the forward")
    splits = num_splits(weight, classes.shape[0])
    partial = weight.new_empty(splits, *weight.shape, dtype=tiles.compute_dtype(weight))
    weight_gradient(grad_gram, Products(weight, covariance, classes, product), partial, 0, None)
    return partial[0] if splits == 1 else partial.sum(0)
