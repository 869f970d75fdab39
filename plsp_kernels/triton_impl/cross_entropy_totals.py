"""Sums of partial results in a fixed order: the losses of the rows, and the gradient of the weight.

loss = Σ_i losses_i,      ∂L/∂w_j = Σ_p partial_p,j - Σ_t own_t,u  with the slot u of class j, if there is one
"""

import triton
import triton.language as tl
from torch import Tensor

from plsp_kernels.triton_impl import tiles
from plsp_kernels.triton_impl.label_weight_gradient import PartialGradients
from plsp_kernels.triton_impl.totals import sum_of_rows


@triton.jit(do_not_specialize=["num_losses", "num_slots", "num_partials"])
def _cross_entropy_totals_kernel(
    losses_ptr,  # (N,)
    loss_ptr,  # ()
    partial_ptr,  # (P, l, d), or None
    own_ptr,  # (T, U, d)
    classes_ptr,  # (U,)
    grad_weight_ptr,  # (l, d)
    num_losses,
    num_partials,
    num_tiles,
    num_slots,
    num_classes,
    num_features,
    BLOCK_N: tl.constexpr,
):
    # The first row of programs adds the losses; every other one a row of the weight's gradient.
    row = tl.program_id(1).to(tl.int64) - 1
    if row < 0:
        if tl.program_id(0) == 0:
            tl.store(loss_ptr, sum_of_rows(losses_ptr, 0, num_losses, BLOCK_N))
    elif partial_ptr is not None:
        d = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
        inside = d < num_features
        total = tl.zeros((BLOCK_N,), grad_weight_ptr.dtype.element_ty)
        for split in range(0, num_partials):
            total += tl.load(partial_ptr + (split * num_classes + row) * num_features + d, mask=inside, other=0.0)
        slot = tl.full((), -1, tl.int32)
        for start in range(0, num_slots, BLOCK_N):
            u = start + tl.arange(0, BLOCK_N)
            y = tl.load(classes_ptr + u, mask=u < num_slots, other=-1)
            slot = tl.maximum(slot, tl.max(tl.where(y == row, u, -1), 0))
        if slot >= 0:
            own_ptr += slot.to(tl.int64) * num_features
            for _ in range(0, num_tiles):
                total -= tl.load(own_ptr + d, mask=inside, other=0.0)
                own_ptr += num_slots.to(tl.int64) * num_features
        tl.store(grad_weight_ptr + row * num_features + d, total, mask=inside)


def cross_entropy_totals(
    losses: Tensor, gradients: PartialGradients | None, classes: Tensor, weight: Tensor
) -> tuple[Tensor, Tensor]:
    """The loss () and, if there are partial gradients, the gradient of the weight (l, d), otherwise empty."""
    (num_classes, num_features), loss = weight.shape, losses.new_empty(())
    grad_weight = losses.new_empty(0) if gradients is None else losses.new_empty(num_classes, num_features)
    blocks = tiles.sum_blocks()
    grid = (1, 1) if gradients is None else (triton.cdiv(num_features, blocks["BLOCK_N"]), 1 + num_classes)
    partial, own = (None, None) if gradients is None else gradients
    tiles.launch(
        _cross_entropy_totals_kernel,
        grid,
        losses,
        loss,
        partial,
        own,
        classes,
        grad_weight,
        losses.shape[0],
        0 if partial is None else partial.shape[0],
        0 if own is None else own.shape[0],
        classes.shape[0],
        num_classes,
        num_features,
        **blocks,
    )
    return loss, grad_weight
