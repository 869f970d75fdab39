"""Pairs of classes: the semantic log-odds of every row of logits, and the probit probabilities of the weak views.

    o_j = z_j - (λ/2) g_j - log_sum_j,     log_sum_j = logsumexp_{k≠j}( shifted_k - λ G[j, k] ),
    shifted_k = z_k + (λ/2) g_k,           g = diag(G)

The N = Bl + 2 Bu rows are the labelled batch, the strong view and the weak view. Both views of an instance share G_y,
so one program computes both from one read of it. `shifted` and `log_sum` are kept for the gradients, because
P[k|j] = exp(shifted_k - λ G[j, k] - log_sum_j).
"""

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from plsp_kernels.step import Step
from plsp_kernels.triton_impl import tiles
from plsp_kernels.triton_impl.exponents import add_to_log_sum, gram_tile, log_sum_tile, pair_exponents, store_row
from plsp_kernels.triton_impl.preparation import Groups
from plsp_kernels.triton_impl.probit import probit_constants, probit_ratios
from plsp_kernels.triton_impl.scalars import scalar, scalar_arguments


class Chunk(NamedTuple):
    """Gram matrices of consecutive slots."""

    first_slot: int
    gram: Tensor  # (C, l, l)


class PairResults(NamedTuple):
    """Results per row of logits."""

    shifted: Tensor  # (N, l)
    log_sum: Tensor  # (N, l)
    log_odds: Tensor  # (N, l)
    probabilities: Tensor  # (Bu, l)


@triton.jit(do_not_specialize=["first_slot", "num_slots", "num_labeled", "num_unlabeled"])
def _pair_kernel(
    labeled_ptr,  # (Bl, l)
    strong_ptr,  # (Bu, l)
    weak_ptr,  # (Bu, l)
    gram_ptr,  # (C, l, l), of the slots from first_slot
    slots_ptr,  # (S,)
    order_ptr,  # (S,)
    shifted_ptr,  # (N, l)
    log_sum_ptr,  # (N, l)
    log_odds_ptr,  # (N, l)
    probabilities_ptr,  # (Bu, l)
    first_slot,
    num_slots,  # C
    num_labeled,
    num_unlabeled,
    num_classes,
    stride_labeled,
    stride_strong,
    stride_weak,
    strength: tl.float64,
    strength_ptr,  # (), or None
    beta: tl.float64,
    BLOCK_J: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    DTYPE: tl.constexpr = log_odds_ptr.dtype.element_ty
    # Samples in sorted order: those of one class read G_y one after the other.
    sample = tl.load(order_ptr + tl.program_id(0)).to(tl.int64)
    position = tl.load(slots_ptr + sample).to(tl.int64) - first_slot
    if (position < 0) | (position >= num_slots):
        return
    exact_strength = scalar(strength, strength_ptr)
    strength = exact_strength.to(DTYPE)
    half_strength = 0.5 * strength
    j = tl.program_id(1) * BLOCK_J + tl.arange(0, BLOCK_J)
    gram_ptr += position * num_classes * num_classes
    diagonal_j = tl.load(gram_ptr + j * (num_classes + 1), mask=j < num_classes, other=0.0)
    if sample < num_labeled:
        labeled_ptr += sample * stride_labeled
        z = tl.load(labeled_ptr + j, mask=j < num_classes, other=0.0).to(DTYPE)
        log_sum = log_sum_tile(labeled_ptr, gram_ptr, j, num_classes, strength, DTYPE, BLOCK_J, BLOCK_K)
        store_row(
            sample, j, z, half_strength * diagonal_j, log_sum, shifted_ptr, log_sum_ptr, log_odds_ptr, num_classes
        )
    else:
        instance = sample - num_labeled
        strong_ptr += instance * stride_strong
        weak_ptr += instance * stride_weak
        spread, scale = probit_constants(exact_strength, beta, DTYPE)
        strong_j = tl.load(strong_ptr + j, mask=j < num_classes, other=0.0).to(DTYPE)
        weak_j = tl.load(weak_ptr + j, mask=j < num_classes, other=0.0).to(DTYPE)
        strong_largest = tl.full((BLOCK_J,), float("-inf"), DTYPE)
        weak_largest = tl.full((BLOCK_J,), float("-inf"), DTYPE)
        strong_total = tl.zeros((BLOCK_J,), DTYPE)
        weak_total = tl.zeros((BLOCK_J,), DTYPE)
        ratio_total = tl.full((BLOCK_J,), 1.0, DTYPE)
        for start in range(0, num_classes, BLOCK_K):
            k = start + tl.arange(0, BLOCK_K)
            inside = k < num_classes
            strong_k = tl.load(strong_ptr + k, mask=inside, other=float("-inf")).to(DTYPE)
            weak_k = tl.load(weak_ptr + k, mask=inside, other=float("-inf")).to(DTYPE)
            diagonal_k = tl.load(gram_ptr + k * (num_classes + 1), mask=inside, other=0.0)
            gram = gram_tile(gram_ptr, j, k, num_classes, DTYPE)
            exponents = pair_exponents(strong_k + half_strength * diagonal_k, gram, j, k, strength)
            strong_largest, strong_total = add_to_log_sum(strong_largest, strong_total, exponents)
            exponents = pair_exponents(weak_k + half_strength * diagonal_k, gram, j, k, strength)
            weak_largest, weak_total = add_to_log_sum(weak_largest, weak_total, exponents)
            ratios = probit_ratios(weak_j, weak_k, gram, diagonal_j, diagonal_k, j, k, num_classes, spread, scale)
            ratio_total += tl.sum(ratios, 1)
        diagonal_j *= half_strength
        log_sum = strong_largest + tl.log(strong_total)
        store_row(sample, j, strong_j, diagonal_j, log_sum, shifted_ptr, log_sum_ptr, log_odds_ptr, num_classes)
        weak = sample + num_unlabeled
        log_sum = weak_largest + tl.log(weak_total)
        store_row(weak, j, weak_j, diagonal_j, log_sum, shifted_ptr, log_sum_ptr, log_odds_ptr, num_classes)
        tl.store(probabilities_ptr + instance * num_classes + j, 1.0 / ratio_total, mask=j < num_classes)


def pairs(step: Step, groups: Groups, chunk: Chunk, results: PairResults) -> None:
    """Write the results of the samples whose slot is in the chunk."""
    logits = tuple(map(tiles.dense_rows, (step.labeled_logits, step.strong_logits, step.weak_logits)))
    num_slots, num_classes, _ = chunk.gram.shape
    blocks = tiles.pair_blocks(num_classes, results.log_odds.dtype)
    tiles.launch(
        _pair_kernel,
        (groups.order.shape[0], triton.cdiv(num_classes, blocks["BLOCK_J"])),
        *logits,
        chunk.gram,
        groups.slots,
        groups.order,
        *results,
        chunk.first_slot,
        num_slots,
        step.labels.shape[0],
        step.candidates.shape[0],
        num_classes,
        *(tensor.stride(0) for tensor in logits),
        *scalar_arguments(step.strength),
        step.beta,
        **blocks,
    )
