"""Sums of partial results in a fixed order: the losses of the rows, and the partial gradients of the weight.

supervised = Σ_{i<Bl} losses_i, consistency and complementary likewise over the strong and the remaining rows,
total = γ (supervised + consistency) + complementary, and ∂/∂W = Σ_p partial_p.
"""

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from plsp_kernels.step import Step
from plsp_kernels.triton_impl import tiles
from plsp_kernels.triton_impl.scalars import scalar, scalar_arguments


class Totals(NamedTuple):
    total: Tensor  # ()
    terms: Tensor  # (3,)
    grad_weight: Tensor  # (l, d) or (0,)


@triton.jit
def sum_of_rows(losses_ptr, first, last, BLOCK_N: tl.constexpr):
    """Σ losses_n over first ≤ n < last."""
    total = tl.zeros((BLOCK_N,), losses_ptr.dtype.element_ty)
    for start in range(first, last, BLOCK_N):
        n = start + tl.arange(0, BLOCK_N)
        total += tl.load(losses_ptr + n, mask=n < last, other=0.0)
    return tl.sum(total, 0)


@triton.jit(do_not_specialize=["num_losses", "num_labeled", "num_unlabeled", "num_partials"])
def _totals_kernel(
    losses_ptr,  # (L,): labelled, strong, weak rows, labelled rows again if they have candidates
    partial_ptr,  # (P, l, d)
    total_ptr,  # ()
    terms_ptr,  # (3,): supervised, consistency, complementary
    grad_weight_ptr,  # (l, d)
    num_losses,
    num_labeled,
    num_unlabeled,
    num_partials,
    num_weights,  # l·d
    ss_weight: tl.float64,
    ss_weight_ptr,  # (), or None
    BLOCK_N: tl.constexpr,
):
    # The first program adds the losses; every other one a block of the weight's gradient.
    if tl.program_id(0) == 0:
        weak = num_labeled + num_unlabeled
        supervised = sum_of_rows(losses_ptr, 0, num_labeled, BLOCK_N)
        consistency = sum_of_rows(losses_ptr, num_labeled, weak, BLOCK_N)
        complementary = sum_of_rows(losses_ptr, weak, num_losses, BLOCK_N)
        weight = scalar(ss_weight, ss_weight_ptr).to(terms_ptr.dtype.element_ty)
        tl.store(total_ptr, weight * (supervised + consistency) + complementary)
        tl.store(terms_ptr, supervised)
        tl.store(terms_ptr + 1, consistency)
        tl.store(terms_ptr + 2, complementary)
    else:
        w = (tl.program_id(0) - 1).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
        total = tl.zeros((BLOCK_N,), partial_ptr.dtype.element_ty)
        for _ in range(0, num_partials):
            total += tl.load(partial_ptr + w, mask=w < num_weights, other=0.0)
            partial_ptr += num_weights
        tl.store(grad_weight_ptr + w, total, mask=w < num_weights)


def totals(step: Step, losses: Tensor, partial: Tensor) -> Totals:
    """Add the losses, and the partial gradients of the weight (P, l, d) if there are any."""
    grad_weight = partial.new_empty(partial.shape[1:] if partial.shape[0] else 0)
    results = Totals(losses.new_empty(()), losses.new_empty(3), grad_weight)
    blocks = tiles.sum_blocks()
    tiles.launch(
        _totals_kernel,
        (1 + triton.cdiv(grad_weight.numel(), blocks["BLOCK_N"]),),
        losses,
        partial,
        *results,
        losses.shape[0],
        step.labels.shape[0],
        step.candidates.shape[0],
        partial.shape[0],
        grad_weight.numel(),
        *scalar_arguments(step.ss_weight),
        **blocks,
    )
    return results
