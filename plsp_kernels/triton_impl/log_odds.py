"""Semantic log-odds o_j = z_j - logsumexp_{k≠j}( z_k + (λ/2) Q[k, j] ) of rows of logits, streamed over class pairs.

`exponents.py` states the exponents in terms of G, `logits_gradient.py` and `gram_gradient.py` the gradients. A row
whose slot is outside 0 … U - 1 has log-odds and gradients NaN.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from plsp_kernels.rows import Rows
from plsp_kernels.triton_impl import tiles
from plsp_kernels.triton_impl.exponents import diagonal_term, log_sum_tile, store_row
from plsp_kernels.triton_impl.gram_gradient import gram_gradient
from plsp_kernels.triton_impl.logits_gradient import RowGradients, logits_gradient
from plsp_kernels.triton_impl.pair import Chunk
from plsp_kernels.triton_impl.preparation import Groups
from plsp_kernels.triton_impl.scalars import scalar, scalar_arguments


@triton.jit(do_not_specialize=["num_slots"])
def _log_odds_kernel(
    logits_ptr,  # (N, l)
    gram_ptr,  # (U, l, l)
    slots_ptr,  # (N,)
    shifted_ptr,  # (N, l)
    log_sum_ptr,  # (N, l)
    log_odds_ptr,  # (N, l)
    num_slots,
    num_classes,
    stride_logits,
    strength: tl.float64,
    strength_ptr,  # (), or None
    BLOCK_J: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    DTYPE: tl.constexpr = log_odds_ptr.dtype.element_ty
    strength = scalar(strength, strength_ptr).to(DTYPE)
    row = tl.program_id(0).to(tl.int64)
    j = tl.program_id(1) * BLOCK_J + tl.arange(0, BLOCK_J)
    slot = tl.load(slots_ptr + row).to(tl.int64)
    if (slot >= 0) & (slot < num_slots):
        gram_ptr += slot * num_classes * num_classes
        logits_ptr += row * stride_logits
        log_sum = log_sum_tile(logits_ptr, gram_ptr, j, num_classes, strength, DTYPE, BLOCK_J, BLOCK_K)
        z = tl.load(logits_ptr + j, mask=j < num_classes, other=0.0).to(DTYPE)
        diagonal = diagonal_term(gram_ptr, j, num_classes, strength, DTYPE)
        store_row(row, j, z, diagonal, log_sum, shifted_ptr, log_sum_ptr, log_odds_ptr, num_classes)
    else:
        nan = tl.full((BLOCK_J,), float("nan"), DTYPE)
        store_row(row, j, nan, nan, nan, shifted_ptr, log_sum_ptr, log_odds_ptr, num_classes)


def log_odds(rows: Rows) -> Tensor:
    """o_ij of each row: (N, l)."""
    return _row_exponents(rows)[2]


def _row_exponents(rows: Rows) -> tuple[Tensor, Tensor, Tensor]:
    """shifted, log_sum and the log-odds of each row, (N, l) each."""
    (count, num_classes), logits = rows.logits.shape, tiles.dense_rows(rows.logits)
    dtype = tiles.compute_dtype(logits)
    shifted, log_sum, log_odds = (logits.new_empty(count, num_classes, dtype=dtype) for _ in range(3))
    blocks = tiles.pair_blocks(num_classes, dtype)
    tiles.launch(
        _log_odds_kernel,
        (count, triton.cdiv(num_classes, blocks["BLOCK_J"])),
        logits,
        rows.gram.contiguous(),
        rows.slots.contiguous(),
        shifted,
        log_sum,
        log_odds,
        rows.gram.shape[0],
        num_classes,
        logits.stride(0),
        *scalar_arguments(rows.strength),
        **blocks,
    )
    return shifted, log_sum, log_odds


def log_odds_backward(
    rows: Rows, log_odds: Tensor, grad_log_odds: Tensor, need_logits: bool, need_gram: bool
) -> tuple[Tensor, Tensor]:
    """Gradients with respect to the logits (N, l) and gram (U, l, l), the latter symmetric; empty if not needed.

    The sums of the exponents are computed again: z - o would lose those of excluded classes, z = -inf.
    """
    shifted, log_sum, _ = _row_exponents(rows)
    num_slots = rows.gram.shape[0]
    slots = torch.where((rows.slots >= 0) & (rows.slots < num_slots), rows.slots, -1)
    groups = Groups(slots, *sorted_by(slots, num_slots))
    row_gradients = RowGradients(
        grad_log_odds.contiguous(), shifted, log_sum, torch.empty_like(shifted), rows.strength, rows.logits.shape[0]
    )
    chunk = Chunk(0, rows.gram.contiguous())
    logits_gradient(row_gradients, groups, chunk)
    grad_gram = gram_gradient(row_gradients, groups, chunk) if need_gram else chunk.gram.new_empty(0)
    return row_gradients.grad_logits if need_logits else shifted.new_empty(0), grad_gram


def sorted_by(keys: Tensor, num_keys: int) -> tuple[Tensor, Tensor]:
    """Sample indices sorted by key (stable), and the offsets of each key in this order."""
    ordered, order = keys.sort(stable=True)
    return order, torch.searchsorted(ordered, torch.arange(num_keys + 1, device=keys.device, dtype=keys.dtype))
