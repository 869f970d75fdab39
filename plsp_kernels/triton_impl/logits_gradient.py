"""The gradient of the logits, from that of the log-odds d_j = ∂L/∂o_j:

    ∂L/∂z_k = d_k - Σ_j d_j P[k|j],        P[k|j] = exp(shifted_k - λ G[j, k] - log_sum_j) for k ≠ j

`pair.py` defines rows, shifted and log_sum. A program serves both views of an unlabelled instance with one read of G_y.
"""

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from plsp_kernels.triton_impl import tiles
from plsp_kernels.triton_impl.exponents import gram_tile, pair_exponents
from plsp_kernels.triton_impl.pair import Chunk
from plsp_kernels.triton_impl.preparation import Groups
from plsp_kernels.triton_impl.scalars import scalar, scalar_arguments


class RowGradients(NamedTuple):
    """Gradients of N = Bl + 2 Bu rows, and what determines them."""

    grad_log_odds: Tensor  # (N, l)
    shifted: Tensor  # (N, l)
    log_sum: Tensor  # (N, l)
    grad_logits: Tensor  # (N, l), written by `logits_gradient`
    strength: Tensor  # ()
    num_labeled: int


@triton.jit
def _pulled(gradient, shifted, log_sum, gram, j, k, strength):
    """Σ_j d_j P[k|j] over a tile of j: (K,)."""
    pairs = tl.exp(pair_exponents(shifted, gram, j, k, strength) - log_sum[:, None])
    return tl.sum(tl.where(gradient[:, None] != 0, pairs * gradient[:, None], 0.0), 0)


@triton.jit(do_not_specialize=["first_slot", "num_slots", "num_labeled", "num_unlabeled"])
def _logits_gradient_kernel(
    grad_log_odds_ptr,  # (N, l)
    shifted_ptr,  # (N, l)
    log_sum_ptr,  # (N, l)
    gram_ptr,  # (C, l, l), of the slots from first_slot
    slots_ptr,  # (S,)
    order_ptr,  # (S,)
    grad_logits_ptr,  # (N, l)
    first_slot,
    num_slots,  # C
    num_labeled,
    num_unlabeled,
    num_classes,
    strength: tl.float64,
    strength_ptr,  # (), or None
    BLOCK_J: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    DTYPE: tl.constexpr = grad_logits_ptr.dtype.element_ty
    strength = scalar(strength, strength_ptr).to(DTYPE)
    sample = tl.load(order_ptr + tl.program_id(0)).to(tl.int64)
    slot = tl.load(slots_ptr + sample).to(tl.int64)
    k = tl.program_id(1) * BLOCK_K + tl.arange(0, BLOCK_K)
    # The first row of a sample is its labelled or strong one; only an unlabelled sample has a second, weak one.
    row = sample * num_classes
    weak = (sample + num_unlabeled) * num_classes
    inside = k < num_classes
    inside_weak = inside & (sample >= num_labeled)
    if (slot >= first_slot) & (slot < first_slot + num_slots):
        gram_ptr += (slot - first_slot) * num_classes * num_classes
        shifted = tl.load(shifted_ptr + row + k, mask=inside, other=float("-inf"))
        shifted_weak = tl.load(shifted_ptr + weak + k, mask=inside_weak, other=float("-inf"))
        pulled = tl.zeros((BLOCK_K,), DTYPE)
        pulled_weak = tl.zeros((BLOCK_K,), DTYPE)
        for start in range(0, num_classes, BLOCK_J):
            j = start + tl.arange(0, BLOCK_J)
            second = (j < num_classes) & (sample >= num_labeled)
            gradient = tl.load(grad_log_odds_ptr + row + j, mask=j < num_classes, other=0.0)
            gradient_weak = tl.load(grad_log_odds_ptr + weak + j, mask=second, other=0.0)
            # Skip tiles without gradient, such as those of instances below the threshold.
            used = tl.max((gradient != 0).to(tl.int32), 0)
            used_weak = tl.max((gradient_weak != 0).to(tl.int32), 0)
            if used + used_weak > 0:
                gram = gram_tile(gram_ptr, j, k, num_classes, DTYPE)
                if used > 0:
                    log_sum = tl.load(log_sum_ptr + row + j, mask=j < num_classes, other=0.0)
                    pulled += _pulled(gradient, shifted, log_sum, gram, j, k, strength)
                if used_weak > 0:
                    log_sum = tl.load(log_sum_ptr + weak + j, mask=second, other=0.0)
                    pulled_weak += _pulled(gradient_weak, shifted_weak, log_sum, gram, j, k, strength)
        own = tl.load(grad_log_odds_ptr + row + k, mask=inside, other=0.0)
        own_weak = tl.load(grad_log_odds_ptr + weak + k, mask=inside_weak, other=0.0)
        tl.store(grad_logits_ptr + row + k, own - pulled, mask=inside)
        tl.store(grad_logits_ptr + weak + k, own_weak - pulled_weak, mask=inside_weak)
    elif (slot < 0) & (first_slot == 0):  # no class
        tl.store(grad_logits_ptr + row + k, float("nan"), mask=inside)
        tl.store(grad_logits_ptr + weak + k, float("nan"), mask=inside_weak)


def logits_gradient(rows: RowGradients, groups: Groups, chunk: Chunk) -> None:
    """Write the gradients of the rows whose slot is in the chunk; the first chunk writes NaN for rows without class."""
    num_rows, num_classes = rows.grad_logits.shape
    num_samples = groups.order.shape[0]
    blocks = tiles.pulled_blocks(num_classes)
    tiles.launch(
        _logits_gradient_kernel,
        (num_samples, triton.cdiv(num_classes, blocks["BLOCK_K"])),
        rows.grad_log_odds,
        rows.shifted,
        rows.log_sum,
        chunk.gram,
        groups.slots,
        groups.order,
        rows.grad_logits,
        chunk.first_slot,
        chunk.gram.shape[0],
        rows.num_labeled,
        num_rows - num_samples,
        num_classes,
        *scalar_arguments(rows.strength),
        **blocks,
    )
