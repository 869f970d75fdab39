"""The gradient of the Gram matrices, from that of the log-odds d_j = ∂L/∂o_j. With the sum over the rows i of a slot,

    S[a, b]      = -(λ/2) Σ_i ( d_a P[b|a] + d_b P[a|b] )          for a ≠ b
    ∂L/∂G[a, b]  = -S[a, b]
    ∂L/∂G[a, a]  = Σ_b S[a, b] = -(λ/2) Σ_i ( 2 d_a - ∂L/∂z_a ),

since Σ_b P[b|a] = 1 and Σ_b d_b P[a|b] = d_a - ∂L/∂z_a: whole-row sums need no second pass. The result is bitwise
symmetric and its rows sum to zero. `pair.py` defines rows and P.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from plsp_kernels.triton_impl import tiles
from plsp_kernels.triton_impl.exponents import gram_tile
from plsp_kernels.triton_impl.logits_gradient import RowGradients
from plsp_kernels.triton_impl.pair import Chunk
from plsp_kernels.triton_impl.preparation import Groups
from plsp_kernels.triton_impl.scalars import scalar, scalar_arguments


@triton.jit(do_not_specialize=["num_labeled", "num_unlabeled"])
def _gram_gradient_kernel(
    grad_log_odds_ptr,  # (N, l)
    shifted_ptr,  # (N, l)
    log_sum_ptr,  # (N, l)
    grad_logits_ptr,  # (N, l)
    gram_ptr,  # (C, l, l)
    order_ptr,  # (S,)
    bounds_ptr,  # (C + 1,), of the slots of the chunk
    grad_gram_ptr,  # (C, l, l)
    num_labeled,
    num_unlabeled,
    num_classes,
    strength: tl.float64,
    strength_ptr,  # (), or None
    BLOCK_N: tl.constexpr,
    BLOCK_L: tl.constexpr,
):
    DTYPE: tl.constexpr = grad_gram_ptr.dtype.element_ty
    tile_a = tl.program_id(1)
    tile_b = tl.program_id(0)
    if tile_a > tile_b:  # symmetric: only tiles on and above the diagonal
        return
    strength = scalar(strength, strength_ptr).to(DTYPE)
    slot = tl.program_id(2).to(tl.int64)
    a = tile_a * BLOCK_L + tl.arange(0, BLOCK_L)
    b = tile_b * BLOCK_L + tl.arange(0, BLOCK_L)
    gram_ptr += slot * num_classes * num_classes
    grad_gram_ptr += slot * num_classes * num_classes
    # λ G in both directions: G is symmetric only up to rounding, and P must match the forward to sum to one.
    from_a = (strength * gram_tile(gram_ptr, a, b, num_classes, DTYPE))[None, :, :]
    from_b = (strength * tl.trans(gram_tile(gram_ptr, b, a, num_classes, DTYPE)))[None, :, :]
    other_pair = (a[:, None] != b[None, :]) & (a[:, None] < num_classes) & (b[None, :] < num_classes)
    total = tl.zeros((BLOCK_L, BLOCK_L), DTYPE)
    diagonal = tl.zeros((BLOCK_L,), DTYPE)
    first = tl.load(bounds_ptr + slot)
    count = tl.load(bounds_ptr + slot + 1) - first
    # First the labelled and strong rows of the slot's samples, then the weak rows of the unlabelled ones.
    for start in range(0, 2 * count, BLOCK_N):
        n = start + tl.arange(0, BLOCK_N)
        weak = n >= count
        sample = tl.load(order_ptr + first + tl.where(weak, n - count, n), mask=n < 2 * count, other=0).to(tl.int64)
        valid = (n < 2 * count) & ((sample >= num_labeled) | (n < count))
        row = (tl.where(weak, sample + num_unlabeled, sample) * num_classes)[:, None]
        in_a = valid[:, None] & (a[None, :] < num_classes)
        in_b = valid[:, None] & (b[None, :] < num_classes)
        grad_a = tl.load(grad_log_odds_ptr + row + a[None, :], mask=in_a, other=0.0)
        grad_b = tl.load(grad_log_odds_ptr + row + b[None, :], mask=in_b, other=0.0)
        if tile_a == tile_b:
            grad_logits = tl.load(grad_logits_ptr + row + a[None, :], mask=in_a, other=0.0)
            diagonal += tl.sum(2.0 * grad_a - grad_logits, 0)
        used = tl.max(tl.max((grad_a != 0).to(tl.int32), 1), 0) + tl.max(tl.max((grad_b != 0).to(tl.int32), 1), 0)
        if used > 0:  # skip rows without gradient, such as those of instances below the threshold
            shifted_a = tl.load(shifted_ptr + row + a[None, :], mask=in_a, other=0.0)
            shifted_b = tl.load(shifted_ptr + row + b[None, :], mask=in_b, other=0.0)
            log_sum_a = tl.load(log_sum_ptr + row + a[None, :], mask=in_a, other=0.0)
            log_sum_b = tl.load(log_sum_ptr + row + b[None, :], mask=in_b, other=0.0)
            # d_a P[b|a] + d_b P[a|b]: (n, a, b)
            pair = other_pair[None, :, :] & valid[:, None, None]
            given_a = shifted_b[:, None, :] - from_a - log_sum_a[:, :, None]
            given_b = shifted_a[:, :, None] - from_b - log_sum_b[:, None, :]
            given_a = tl.where(pair, given_a, float("-inf"))
            given_b = tl.where(pair, given_b, float("-inf"))
            total += tl.sum(grad_a[:, :, None] * tl.exp(given_a) + grad_b[:, None, :] * tl.exp(given_b), 0)
    # Mirror the tile below the diagonal; every element has one writer.
    total = 0.5 * strength * tl.where(a[:, None] == b[None, :], -diagonal[:, None], total)
    above = (a[:, None] <= b[None, :]) & (b[None, :] < num_classes)
    tl.store(grad_gram_ptr + a[:, None] * num_classes + b[None, :], total, mask=above)
    tl.store(grad_gram_ptr + b[None, :] * num_classes + a[:, None], total, mask=above & (a[:, None] != b[None, :]))


def gram_gradient(rows: RowGradients, groups: Groups, chunk: Chunk) -> Tensor:
    """Gradients of the Gram matrices of the chunk (C, l, l); zero for slots without samples."""
    num_slots, num_classes, _ = chunk.gram.shape
    num_rows, num_samples = rows.grad_logits.shape[0], groups.order.shape[0]
    grad_gram = torch.empty_like(chunk.gram)
    blocks = tiles.gram_gradient_blocks(num_classes)
    num_tiles = triton.cdiv(num_classes, blocks["BLOCK_L"])
    tiles.launch(
        _gram_gradient_kernel,
        (num_tiles, num_tiles, num_slots),
        *rows[:4],
        chunk.gram,
        groups.order,
        groups.bounds[chunk.first_slot :],
        grad_gram,
        rows.num_labeled,
        num_rows - num_samples,
        num_classes,
        *scalar_arguments(rows.strength),
        **blocks,
    )
    return grad_gram
