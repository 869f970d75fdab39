"""Semantic log-odds o_j = z_j - logsumexp_{k≠j}( z_k + (λ/2) Q[k, j] ), streamed over tiles of class pairs.

With g = diag(G) the exponent is (z_k + (λ/2) g_k) - λ G[j, k] + (λ/2) g_j: Q is never formed, and the last summand
does not depend on k. `plsp_kernels.torch_impl.log_odds` states the gradients.

λ is declared float64 in every kernel, as Triton would pass a Python float in single precision, and is brought to the
precision of the computation at once.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from plsp_kernels.triton_impl import tiles


@triton.jit
def diagonal_term(gram_ptr, k, num_classes, strength, DTYPE: tl.constexpr):
    """(λ/2) g_k of the Gram matrix at gram_ptr, zero beyond the classes."""
    diagonal = tl.load(gram_ptr + k * (num_classes + 1), mask=k < num_classes, other=0.0)
    return diagonal.to(DTYPE) * (0.5 * strength)


@triton.jit
def gram_tile(gram_ptr, j, k, num_classes, DTYPE: tl.constexpr):
    """G[j, k], zero beyond the classes: (J, K)."""
    inside = (j[:, None] < num_classes) & (k[None, :] < num_classes)
    return tl.load(gram_ptr + j[:, None] * num_classes + k[None, :], mask=inside, other=0.0).to(DTYPE)


@triton.jit
def add_to_log_sum(largest, total, exponents):
    """One step of the running logsumexp over the columns of exponents (J, K): the new maximum and scaled sum."""
    larger = tl.maximum(largest, tl.max(exponents, 1))
    shift = tl.where(larger == float("-inf"), 0.0, larger)  # excluded classes, z = -inf, may fill a tile
    total = total * tl.exp(largest - shift) + tl.sum(tl.exp(exponents - shift[:, None]), 1)
    return larger, total


@triton.jit
def pair_exponents(shifted, gram, j, k, strength):
    """z_k + (λ/2) g_k - λ G[j, k] with -inf for the own term: (J, K)."""
    return tl.where(j[:, None] == k[None, :], float("-inf"), shifted[None, :] - strength * gram)


@triton.jit
def log_odds_tile(
    logits_ptr,  # (l,)
    gram_ptr,  # (l, l)
    j,
    num_classes,
    strength,
    DTYPE: tl.constexpr,
    BLOCK_J: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """o_j of one sample for a tile of j: (J,)."""
    largest = tl.full((BLOCK_J,), float("-inf"), DTYPE)
    total = tl.zeros((BLOCK_J,), DTYPE)
    for start in range(0, num_classes, BLOCK_K):
        k = start + tl.arange(0, BLOCK_K)
        z_k = tl.load(logits_ptr + k, mask=k < num_classes, other=float("-inf")).to(DTYPE)
        shifted = z_k + diagonal_term(gram_ptr, k, num_classes, strength, DTYPE)
        gram = gram_tile(gram_ptr, j, k, num_classes, DTYPE)
        largest, total = add_to_log_sum(largest, total, pair_exponents(shifted, gram, j, k, strength))
    z_j = tl.load(logits_ptr + j, mask=j < num_classes, other=0.0).to(DTYPE)
    return z_j - (largest + tl.log(total) + diagonal_term(gram_ptr, j, num_classes, strength, DTYPE))


@triton.jit
def _log_odds_kernel(
    logits_ptr,  # (N, l)
    gram_ptr,  # (U, l, l)
    slots_ptr,  # (N,)
    odds_ptr,  # (N, l)
    num_classes,
    stride_logits,
    strength: tl.float64,
    BLOCK_J: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    DTYPE: tl.constexpr = odds_ptr.dtype.element_ty
    strength = tl.full((), strength, DTYPE)
    row = tl.program_id(0).to(tl.int64)
    j = tl.program_id(1) * BLOCK_J + tl.arange(0, BLOCK_J)
    gram_ptr += tl.load(slots_ptr + row).to(tl.int64) * num_classes * num_classes
    odds = log_odds_tile(logits_ptr + row * stride_logits, gram_ptr, j, num_classes, strength, DTYPE, BLOCK_J, BLOCK_K)
    tl.store(odds_ptr + row * num_classes + j, odds, mask=j < num_classes)


@triton.jit
def _logits_gradient_kernel(
    grad_odds_ptr,  # (N, l)
    logits_ptr,  # (N, l)
    odds_ptr,  # (N, l)
    gram_ptr,  # (U, l, l)
    slots_ptr,  # (N,)
    grad_logits_ptr,  # (N, l)
    num_classes,
    stride_grad,
    stride_logits,
    stride_odds,
    strength: tl.float64,
    BLOCK_J: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    DTYPE: tl.constexpr = grad_logits_ptr.dtype.element_ty
    strength = tl.full((), strength, DTYPE)
    row = tl.program_id(0).to(tl.int64)
    k = tl.program_id(1) * BLOCK_K + tl.arange(0, BLOCK_K)
    gram_ptr += tl.load(slots_ptr + row).to(tl.int64) * num_classes * num_classes
    grad_odds_ptr += row * stride_grad
    logits_ptr += row * stride_logits
    odds_ptr += row * stride_odds
    z_k = tl.load(logits_ptr + k, mask=k < num_classes, other=float("-inf")).to(DTYPE)
    shifted = z_k + diagonal_term(gram_ptr, k, num_classes, strength, DTYPE)
    pulled = tl.zeros((BLOCK_K,), DTYPE)  # Σ_j d_j P[k|j]
    for start in range(0, num_classes, BLOCK_J):
        j = start + tl.arange(0, BLOCK_J)
        grad = tl.load(grad_odds_ptr + j, mask=j < num_classes, other=0.0).to(DTYPE)
        if tl.max((grad != 0).to(tl.int32), 0) > 0:  # rows that no loss looks at, and labelled rows but for their label
            z_j = tl.load(logits_ptr + j, mask=j < num_classes, other=0.0).to(DTYPE)
            odds = tl.load(odds_ptr + j, mask=j < num_classes, other=0.0).to(DTYPE)
            log_sum = z_j - odds - diagonal_term(gram_ptr, j, num_classes, strength, DTYPE)
            gram = gram_tile(gram_ptr, j, k, num_classes, DTYPE)
            pairs = tl.exp(pair_exponents(shifted, gram, j, k, strength) - log_sum[:, None])
            pulled += tl.sum(tl.where(grad[:, None] != 0, pairs * grad[:, None], 0.0), 0)
    own = tl.load(grad_odds_ptr + k, mask=k < num_classes, other=0.0).to(DTYPE)
    tl.store(grad_logits_ptr + row * num_classes + k, own - pulled, mask=k < num_classes)


@triton.jit
def _gram_gradient_kernel(
    grad_odds_ptr,  # (N, l)
    logits_ptr,  # (N, l)
    odds_ptr,  # (N, l)
    gram_ptr,  # (U, l, l)
    order_ptr,  # (N,), the samples sorted by slot
    bounds_ptr,  # (U + 1,), where each slot's samples begin in this order
    grad_gram_ptr,  # (U, l, l)
    num_classes,
    stride_grad,
    stride_logits,
    stride_odds,
    strength: tl.float64,
    BLOCK_N: tl.constexpr,
    BLOCK_L: tl.constexpr,
):
    DTYPE: tl.constexpr = grad_gram_ptr.dtype.element_ty
    strength = tl.full((), strength, DTYPE)
    # S[a, b] = D[a, b] + D[b, a] is symmetric: only tiles on and above the diagonal are computed.
    if tl.program_id(1) <= tl.program_id(2):
        slot = tl.program_id(0).to(tl.int64)
        a = tl.program_id(1) * BLOCK_L + tl.arange(0, BLOCK_L)
        b = tl.program_id(2) * BLOCK_L + tl.arange(0, BLOCK_L)
        gram_ptr += slot * num_classes * num_classes
        grad_gram_ptr += slot * num_classes * num_classes
        diagonal_a = diagonal_term(gram_ptr, a, num_classes, strength, DTYPE)
        diagonal_b = diagonal_term(gram_ptr, b, num_classes, strength, DTYPE)
        # λ G in both directions: rounding leaves G only nearly symmetric, and P must be the forward's to sum to one.
        from_a = (strength * gram_tile(gram_ptr, a, b, num_classes, DTYPE))[None, :, :]
        from_b = (strength * tl.trans(gram_tile(gram_ptr, b, a, num_classes, DTYPE)))[None, :, :]
        other_pair = (a[:, None] != b[None, :]) & (a[:, None] < num_classes) & (b[None, :] < num_classes)
        total = tl.zeros((BLOCK_L, BLOCK_L), DTYPE)
        last = tl.load(bounds_ptr + slot + 1)
        for start in range(tl.load(bounds_ptr + slot), last, BLOCK_N):
            n = start + tl.arange(0, BLOCK_N)
            i = tl.load(order_ptr + n, mask=n < last, other=0).to(tl.int64)[:, None]
            in_a = (n[:, None] < last) & (a[None, :] < num_classes)
            in_b = (n[:, None] < last) & (b[None, :] < num_classes)
            grad_a = tl.load(grad_odds_ptr + i * stride_grad + a[None, :], mask=in_a, other=0.0).to(DTYPE)
            grad_b = tl.load(grad_odds_ptr + i * stride_grad + b[None, :], mask=in_b, other=0.0).to(DTYPE)
            used = tl.max(tl.max((grad_a != 0).to(tl.int32), 1), 0) + tl.max(tl.max((grad_b != 0).to(tl.int32), 1), 0)
            if used > 0:
                z_a = tl.load(logits_ptr + i * stride_logits + a[None, :], mask=in_a, other=0.0).to(DTYPE)
                z_b = tl.load(logits_ptr + i * stride_logits + b[None, :], mask=in_b, other=0.0).to(DTYPE)
                odds_a = tl.load(odds_ptr + i * stride_odds + a[None, :], mask=in_a, other=0.0).to(DTYPE)
                odds_b = tl.load(odds_ptr + i * stride_odds + b[None, :], mask=in_b, other=0.0).to(DTYPE)
                shifted_a, shifted_b = z_a + diagonal_a[None, :], z_b + diagonal_b[None, :]
                log_sum_a, log_sum_b = z_a - odds_a - diagonal_a[None, :], z_b - odds_b - diagonal_b[None, :]
                # d_a P[b|a] + d_b P[a|b]: (n, a, b)
                valid = other_pair[None, :, :] & (n < last)[:, None, None]
                given_a = tl.where(valid, shifted_b[:, None, :] - from_a - log_sum_a[:, :, None], float("-inf"))
                given_b = tl.where(valid, shifted_a[:, :, None] - from_b - log_sum_b[:, None, :], float("-inf"))
                total += tl.sum(grad_a[:, :, None] * tl.exp(given_a) + grad_b[:, None, :] * tl.exp(given_b), 0)
        # -S above the diagonal and its mirror image below, each element by one thread; the row sums follow outside.
        total *= 0.5 * strength
        above = (a[:, None] <= b[None, :]) & (b[None, :] < num_classes)
        tl.store(grad_gram_ptr + a[:, None] * num_classes + b[None, :], total, mask=above)
        tl.store(grad_gram_ptr + b[None, :] * num_classes + a[:, None], total, mask=above & (a[:, None] != b[None, :]))


@triton.jit
def _target_log_odds_kernel(
    logits_ptr,  # (N, l)
    gram_ptr,  # (U, l, l)
    slots_ptr,  # (N,)
    targets_ptr,  # (N,)
    odds_ptr,  # (N,)
    num_classes,
    stride_logits,
    strength: tl.float64,
    BLOCK_L: tl.constexpr,
):
    DTYPE: tl.constexpr = odds_ptr.dtype.element_ty
    strength = tl.full((), strength, DTYPE)
    row = tl.program_id(0).to(tl.int64)
    target = tl.load(targets_ptr + row)
    gram_ptr += tl.load(slots_ptr + row).to(tl.int64) * num_classes * num_classes
    logits_ptr += row * stride_logits
    largest = tl.full((1,), float("-inf"), DTYPE)
    total = tl.zeros((1,), DTYPE)
    for start in range(0, num_classes, BLOCK_L):
        k = start + tl.arange(0, BLOCK_L)
        exponents = _target_exponents(logits_ptr, gram_ptr, k, target, num_classes, strength, DTYPE)
        largest, total = add_to_log_sum(largest, total, exponents[None, :])
    z = tl.load(logits_ptr + target).to(DTYPE)
    tl.store(odds_ptr + row + tl.arange(0, 1), z - (largest + tl.log(total)))


@triton.jit
def _target_exponents(logits_ptr, gram_ptr, k, target, num_classes, strength, DTYPE: tl.constexpr):
    """z_k + (λ/2) Q[k, target] with -inf for the own term and beyond the classes: (K,)."""
    z_k = tl.load(logits_ptr + k, mask=k < num_classes, other=float("-inf")).to(DTYPE)
    gram = tl.load(gram_ptr + target * num_classes + k, mask=k < num_classes, other=0.0).to(DTYPE)
    diagonal = diagonal_term(gram_ptr, k, num_classes, strength, DTYPE)
    own_diagonal = tl.load(gram_ptr + target * (num_classes + 1)).to(DTYPE) * (0.5 * strength)
    return tl.where(k == target, float("-inf"), z_k + diagonal - strength * gram + own_diagonal)


@triton.jit
def _target_logits_gradient_kernel(
    grad_odds_ptr,  # (N,)
    logits_ptr,  # (N, l)
    odds_ptr,  # (N,)
    gram_ptr,  # (U, l, l)
    slots_ptr,  # (N,)
    targets_ptr,  # (N,)
    grad_logits_ptr,  # (N, l)
    num_classes,
    stride_logits,
    strength: tl.float64,
    BLOCK_L: tl.constexpr,
):
    DTYPE: tl.constexpr = grad_logits_ptr.dtype.element_ty
    strength = tl.full((), strength, DTYPE)
    row = tl.program_id(0).to(tl.int64)
    k = tl.program_id(1) * BLOCK_L + tl.arange(0, BLOCK_L)
    target = tl.load(targets_ptr + row)
    gram_ptr += tl.load(slots_ptr + row).to(tl.int64) * num_classes * num_classes
    logits_ptr += row * stride_logits
    grad = tl.load(grad_odds_ptr + row).to(DTYPE)
    log_sum = tl.load(logits_ptr + target).to(DTYPE) - tl.load(odds_ptr + row).to(DTYPE)
    exponents = _target_exponents(logits_ptr, gram_ptr, k, target, num_classes, strength, DTYPE)
    pulled = grad * tl.exp(exponents - log_sum)
    tl.store(grad_logits_ptr + row * num_classes + k, tl.where(k == target, grad, -pulled), mask=k < num_classes)


@triton.jit
def _target_pair_gradient_kernel(
    grad_logits_ptr,  # (N, l)
    order_ptr,  # (N,), the samples sorted by slot and target
    bounds_ptr,  # (U·l + 1,), where the samples of each (slot, target) begin in this order
    pair_grad_ptr,  # (U, l, l)
    num_classes,
    strength: tl.float64,
    BLOCK_L: tl.constexpr,
):
    DTYPE: tl.constexpr = pair_grad_ptr.dtype.element_ty
    strength = tl.full((), strength, DTYPE)
    key = tl.program_id(0).to(tl.int64)
    k = tl.program_id(1) * BLOCK_L + tl.arange(0, BLOCK_L)
    total = tl.zeros((BLOCK_L,), DTYPE)
    for n in range(tl.load(bounds_ptr + key), tl.load(bounds_ptr + key + 1)):
        i = tl.load(order_ptr + n).to(tl.int64)
        total += tl.load(grad_logits_ptr + i * num_classes + k, mask=k < num_classes, other=0.0)
    # Q[k, j] stands beside z_k in the exponent: but for the factor λ/2, and for k = j, they share their gradient.
    total = tl.where(k == key % num_classes, 0.0, 0.5 * strength * total)
    tl.store(pair_grad_ptr + key * num_classes + k, total, mask=k < num_classes)


def log_odds(logits: Tensor, gram: Tensor, slots: Tensor, strength: float) -> Tensor:
    """o_ij for the samples of logits (N, l), sample i having the Gram matrix gram[slots[i]]: (N, l)."""
    count, num_classes = logits.shape
    logits = tiles.dense_rows(logits)
    odds = logits.new_empty(count, num_classes, dtype=tiles.compute_dtype(logits))
    blocks = tiles.pair_blocks(num_classes, odds.dtype)
    tiles.launch(
        _log_odds_kernel,
        (count, triton.cdiv(num_classes, blocks["BLOCK_J"])),
        logits,
        gram.contiguous(),
        slots.contiguous(),
        odds,
        num_classes,
        logits.stride(0),
        strength,
        **blocks,
    )
    return odds


def log_odds_backward(
    grad_odds: Tensor,
    logits: Tensor,
    odds: Tensor,
    gram: Tensor,
    slots: Tensor,
    strength: float,
    need_logits: bool,
    need_gram: bool,
) -> tuple[Tensor, Tensor]:
    """Gradients of log_odds: with respect to the logits (N, l) and, symmetric, to gram (U, l, l); empty if unneeded."""
    count, num_classes = logits.shape
    grad_odds, logits, odds = tiles.dense_rows(grad_odds), tiles.dense_rows(logits), tiles.dense_rows(odds)
    gram, slots = gram.contiguous(), slots.contiguous()
    dtype = tiles.compute_dtype(logits)
    grad_logits = logits.new_empty((count, num_classes) if need_logits else 0, dtype=dtype)
    grad_gram = torch.empty_like(gram) if need_gram else gram.new_empty(0)
    strides = grad_odds.stride(0), logits.stride(0), odds.stride(0)
    if need_logits:
        blocks = tiles.pulled_blocks(num_classes)
        tiles.launch(
            _logits_gradient_kernel,
            (count, triton.cdiv(num_classes, blocks["BLOCK_K"])),
            grad_odds,
            logits,
            odds,
            gram,
            slots,
            grad_logits,
            num_classes,
            *strides,
            strength,
            **blocks,
        )
    if need_gram:
        order, bounds = _sorted_by(slots, gram.shape[0])
        blocks = tiles.gram_gradient_blocks(num_classes)
        num_tiles = triton.cdiv(num_classes, blocks["BLOCK_L"])
        tiles.launch(
            _gram_gradient_kernel,
            (gram.shape[0], num_tiles, num_tiles),
            grad_odds,
            logits,
            odds,
            gram,
            order,
            bounds,
            grad_gram,
            num_classes,
            *strides,
            strength,
            **blocks,
        )
        # The kernel wrote -S with an empty diagonal; ∂L/∂G = diag(S 1) - S needs whole rows, so they are summed here.
        grad_gram.diagonal(dim1=1, dim2=2).copy_(grad_gram.sum(-1).neg_())
    return grad_logits, grad_gram


def target_log_odds(logits: Tensor, gram: Tensor, slots: Tensor, targets: Tensor, strength: float) -> Tensor:
    """o_ij for the one column j = targets[i] of each sample: (N,)."""
    count, num_classes = logits.shape
    logits = tiles.dense_rows(logits)
    odds = logits.new_empty(count, dtype=tiles.compute_dtype(logits))
    tiles.launch(
        _target_log_odds_kernel,
        (count,),
        logits,
        gram.contiguous(),
        slots.contiguous(),
        targets.contiguous(),
        odds,
        num_classes,
        logits.stride(0),
        strength,
        **tiles.row_blocks(num_classes),
    )
    return odds


def target_log_odds_backward(
    grad_odds: Tensor,
    logits: Tensor,
    odds: Tensor,
    gram: Tensor,
    slots: Tensor,
    targets: Tensor,
    strength: float,
    need_logits: bool,
    need_gram: bool,
) -> tuple[Tensor, Tensor]:
    """Gradients of target_log_odds, as log_odds_backward gives them."""
    count, num_classes = logits.shape
    logits, gram = tiles.dense_rows(logits), gram.contiguous()
    grad_logits = logits.new_empty(count, num_classes, dtype=tiles.compute_dtype(logits))
    blocks = tiles.row_blocks(num_classes)
    num_tiles = triton.cdiv(num_classes, blocks["BLOCK_L"])
    tiles.launch(
        _target_logits_gradient_kernel,
        (count, num_tiles),
        grad_odds.contiguous(),
        logits,
        odds.contiguous(),
        gram,
        slots.contiguous(),
        targets.contiguous(),
        grad_logits,
        num_classes,
        logits.stride(0),
        strength,
        **blocks,
    )
    grad_gram = gram.new_empty(0)
    if need_gram:
        num_keys = gram.shape[0] * num_classes
        order, bounds = _sorted_by(slots * num_classes + targets, num_keys)
        pair_grad = torch.empty_like(gram)
        tiles.launch(
            _target_pair_gradient_kernel,
            (num_keys, num_tiles),
            grad_logits,
            order,
            bounds,
            pair_grad,
            num_classes,
            strength,
            **blocks,
        )
        # S = D + Dᵀ from D, then diag(S 1) - S
        grad_gram = (pair_grad + pair_grad.mT).neg_()
        grad_gram.diagonal(dim1=1, dim2=2).copy_(grad_gram.sum(-1).neg_())
    return grad_logits if need_logits else logits.new_empty(0, dtype=grad_logits.dtype), grad_gram


def _sorted_by(keys: Tensor, num_keys: int) -> tuple[Tensor, Tensor]:
    """The samples in order of their key (equal keys stay in order), and where each key's samples begin and end."""
    ordered, order = keys.sort(stable=True)
    return order, torch.searchsorted(ordered, torch.arange(num_keys + 1, device=keys.device, dtype=keys.dtype))
