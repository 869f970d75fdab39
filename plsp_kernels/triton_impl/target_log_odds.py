"""Semantic log-odds of one class per row: o_i = z_it - logsumexp_{k≠t}( z_ik + (λ/2) Q[k, t] ) with t = targets[i].

    ∂o/∂z_k = [k = t] - P[k|t],    ∂o/∂Q[k, t] = -(λ/2) P[k|t],    P[k|t] the softmax of the exponents over k ≠ t

A row whose slot or target is out of range has log-odds and gradients NaN.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from plsp_kernels import quadratic
from plsp_kernels.rows import Rows
from plsp_kernels.triton_impl import tiles
from plsp_kernels.triton_impl.exponents import add_to_log_sum, diagonal_term
from plsp_kernels.triton_impl.log_odds import sorted_by
from plsp_kernels.triton_impl.scalars import scalar, scalar_arguments


@triton.jit
def _target_exponents(logits_ptr, gram_ptr, k, target, num_classes, strength, DTYPE: tl.constexpr):
    """z_k + (λ/2) Q[k, target] with -inf at k = target and beyond the classes: (K,)."""
    z_k = tl.load(logits_ptr + k, mask=k < num_classes, other=float("-inf")).to(DTYPE)
    gram = tl.load(gram_ptr + target * num_classes + k, mask=k < num_classes, other=0.0).to(DTYPE)
    diagonal = diagonal_term(gram_ptr, k, num_classes, strength, DTYPE)
    own_diagonal = tl.load(gram_ptr + target * (num_classes + 1)).to(DTYPE) * (0.5 * strength)
    return tl.where(k == target, float("-inf"), z_k + diagonal - strength * gram + own_diagonal)


@triton.jit
def _target_log_sum(logits_ptr, gram_ptr, target, num_classes, strength, DTYPE: tl.constexpr, BLOCK_L: tl.constexpr):
    """logsumexp of the exponents: (1,)."""
    largest = tl.full((1,), float("-inf"), DTYPE)
    total = tl.zeros((1,), DTYPE)
    for start in range(0, num_classes, BLOCK_L):
        k = start + tl.arange(0, BLOCK_L)
        exponents = _target_exponents(logits_ptr, gram_ptr, k, target, num_classes, strength, DTYPE)
        largest, total = add_to_log_sum(largest, total, exponents[None, :])
    return largest + tl.log(total)


@triton.jit(do_not_specialize=["num_slots"])
def _target_log_odds_kernel(
    logits_ptr,  # (N, l)
    gram_ptr,  # (U, l, l)
    slots_ptr,  # (N,)
    targets_ptr,  # (N,)
    log_odds_ptr,  # (N,)
    num_slots,
    num_classes,
    stride_logits,
    strength: tl.float64,
    strength_ptr,  # (), or None
    BLOCK_L: tl.constexpr,
):
    DTYPE: tl.constexpr = log_odds_ptr.dtype.element_ty
    strength = scalar(strength, strength_ptr).to(DTYPE)
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots_ptr + row).to(tl.int64)
    target = tl.load(targets_ptr + row)
    log_odds = tl.full((1,), float("nan"), DTYPE)
    if (slot >= 0) & (slot < num_slots) & (target >= 0) & (target < num_classes):
        gram_ptr += slot * num_classes * num_classes
        logits_ptr += row * stride_logits
        z = tl.load(logits_ptr + target).to(DTYPE)
        log_odds = z - _target_log_sum(logits_ptr, gram_ptr, target, num_classes, strength, DTYPE, BLOCK_L)
    tl.store(log_odds_ptr + row + tl.arange(0, 1), log_odds)


@triton.jit(do_not_specialize=["num_slots"])
def _target_logits_gradient_kernel(
    grad_log_odds_ptr,  # (N,)
    logits_ptr,  # (N, l)
    gram_ptr,  # (U, l, l)
    slots_ptr,  # (N,)
    targets_ptr,  # (N,)
    grad_logits_ptr,  # (N, l)
    num_slots,
    num_classes,
    stride_logits,
    strength: tl.float64,
    strength_ptr,  # (), or None
    BLOCK_L: tl.constexpr,
):
    DTYPE: tl.constexpr = grad_logits_ptr.dtype.element_ty
    strength = scalar(strength, strength_ptr).to(DTYPE)
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots_ptr + row).to(tl.int64)
    target = tl.load(targets_ptr + row)
    grad_logits_ptr += row * num_classes
    if (slot >= 0) & (slot < num_slots) & (target >= 0) & (target < num_classes):
        gram_ptr += slot * num_classes * num_classes
        logits_ptr += row * stride_logits
        grad = tl.load(grad_log_odds_ptr + row).to(DTYPE)
        # Computed again: z - o would lose the sum if the target is excluded, z = -inf.
        log_sum = _target_log_sum(logits_ptr, gram_ptr, target, num_classes, strength, DTYPE, BLOCK_L)
        log_sum = tl.where(log_sum == float("-inf"), 0.0, log_sum)
        for start in range(0, num_classes, BLOCK_L):
            k = start + tl.arange(0, BLOCK_L)
            exponents = _target_exponents(logits_ptr, gram_ptr, k, target, num_classes, strength, DTYPE)
            pulled = grad * tl.exp(exponents - log_sum)
            tl.store(grad_logits_ptr + k, tl.where(k == target, grad, -pulled), mask=k < num_classes)
    else:
        for start in range(0, num_classes, BLOCK_L):
            k = start + tl.arange(0, BLOCK_L)
            tl.store(grad_logits_ptr + k, float("nan"), mask=k < num_classes)


@triton.jit
def _target_pair_gradient_kernel(
    grad_logits_ptr,  # (N, l)
    order_ptr,  # (N,), sample indices sorted by slot and target
    bounds_ptr,  # (U·l + 1,), offset of the samples of each (slot, target) in this order
    pair_grad_ptr,  # (U, l, l)
    num_classes,
    strength: tl.float64,
    strength_ptr,  # (), or None
    BLOCK_L: tl.constexpr,
):
    DTYPE: tl.constexpr = pair_grad_ptr.dtype.element_ty
    strength = scalar(strength, strength_ptr).to(DTYPE)
    key = tl.program_id(0).to(tl.int64)
    k = tl.program_id(1) * BLOCK_L + tl.arange(0, BLOCK_L)
    total = tl.zeros((BLOCK_L,), DTYPE)
    for n in range(tl.load(bounds_ptr + key), tl.load(bounds_ptr + key + 1)):
        i = tl.load(order_ptr + n).to(tl.int64)
        total += tl.load(grad_logits_ptr + i * num_classes + k, mask=k < num_classes, other=0.0)
    # The exponent contains z_k + (λ/2) Q[k, j]: up to the factor λ/2, both have the same gradient for k ≠ j.
    total = tl.where(k == key % num_classes, 0.0, 0.5 * strength * total)
    tl.store(pair_grad_ptr + key * num_classes + k, total, mask=k < num_classes)


def target_log_odds(rows: Rows, targets: Tensor) -> Tensor:
    """o_ij for the one column j = targets[i] of each row: (N,)."""
    (count, num_classes), logits = rows.logits.shape, tiles.dense_rows(rows.logits)
    log_odds = logits.new_empty(count, dtype=tiles.compute_dtype(logits))
    tiles.launch(
        _target_log_odds_kernel,
        (count,),
        logits,
        rows.gram.contiguous(),
        rows.slots.contiguous(),
        targets.contiguous(),
        log_odds,
        rows.gram.shape[0],
        num_classes,
        logits.stride(0),
        *scalar_arguments(rows.strength),
        **tiles.row_blocks(num_classes),
    )
    return log_odds


def target_log_odds_backward(
    rows: Rows, targets: Tensor, log_odds: Tensor, grad_log_odds: Tensor, need_logits: bool, need_gram: bool
) -> tuple[Tensor, Tensor]:
    """Gradients of target_log_odds, in the form of log_odds_backward."""
    (count, num_classes), num_slots = rows.logits.shape, rows.gram.shape[0]
    logits, gram, strength = tiles.dense_rows(rows.logits), rows.gram.contiguous(), scalar_arguments(rows.strength)
    grad_logits = logits.new_empty(count, num_classes, dtype=tiles.compute_dtype(logits))
    blocks = tiles.row_blocks(num_classes)
    tiles.launch(
        _target_logits_gradient_kernel,
        (count,),
        grad_log_odds.contiguous(),
        logits,
        gram,
        rows.slots.contiguous(),
        targets.contiguous(),
        grad_logits,
        num_slots,
        num_classes,
        logits.stride(0),
        *strength,
        **blocks,
    )
    grad_gram = gram.new_empty(0)
    if need_gram:
        order, bounds = sorted_by(rows.slots * num_classes + targets, num_slots * num_classes)
        pair_grad = torch.empty_like(gram)
        tiles.launch(
            _target_pair_gradient_kernel,
            (num_slots * num_classes, triton.cdiv(num_classes, blocks["BLOCK_L"])),
            grad_logits,
            order,
            bounds,
            pair_grad,
            num_classes,
            *strength,
            **blocks,
        )
        grad_gram = quadratic.gram_gradient(pair_grad)
    return grad_logits if need_logits else grad_logits.new_empty(0), grad_gram
