"""The gradient of the columns: a_k = ∂L/∂q_k = (λ/2) Σ_i scale_i P_ik over the rows i of a slot, zero at its label.

`label_rows.py` defines scale and P. One program adds the rows of a slot, a few at a time, in sorted order.
"""

import triton
import triton.language as tl
from torch import Tensor

from plsp_kernels.batch import LabeledBatch
from plsp_kernels.triton_impl import tiles
from plsp_kernels.triton_impl.label_columns import LabelColumns
from plsp_kernels.triton_impl.label_groups import LabelGroups
from plsp_kernels.triton_impl.label_rows import LabelRows
from plsp_kernels.triton_impl.scalars import scalar, scalar_arguments


@triton.jit
def _label_column_gradient_kernel(
    logits_ptr,  # (N, l)
    quadratic_ptr,  # (U, l)
    classes_ptr,  # (U,)
    order_ptr,  # (N,)
    bounds_ptr,  # (U + 1,)
    log_sum_ptr,  # (N,)
    scale_ptr,  # (N,)
    grad_quadratic_ptr,  # (U, l)
    num_classes,
    stride_logits,
    strength: tl.float64,
    strength_ptr,  # (), or None
    BLOCK_N: tl.constexpr,
    BLOCK_L: tl.constexpr,
):
    DTYPE: tl.constexpr = grad_quadratic_ptr.dtype.element_ty
    half_strength = (0.5 * scalar(strength, strength_ptr)).to(DTYPE)
    slot = tl.program_id(1).to(tl.int64)
    k = tl.program_id(0) * BLOCK_L + tl.arange(0, BLOCK_L)
    label = tl.load(classes_ptr + slot)
    quadratic = tl.load(quadratic_ptr + slot * num_classes + k, mask=k < num_classes, other=0.0)
    other = (k != label) & (k < num_classes)
    first = tl.load(bounds_ptr + slot)
    last = tl.load(bounds_ptr + slot + 1)
    total = tl.zeros((BLOCK_L,), DTYPE)
    for start in range(first, last, BLOCK_N):
        n = start + tl.arange(0, BLOCK_N)
        row = tl.load(order_ptr + n, mask=n < last, other=0).to(tl.int64)
        scale = tl.load(scale_ptr + row, mask=n < last, other=0.0)
        log_sum = tl.load(log_sum_ptr + row, mask=n < last, other=0.0)
        counted = (scale[:, None] != 0) & other[None, :]  # the logits of an ignored row may be NaN
        z = tl.load(logits_ptr + row[:, None] * stride_logits + k[None, :], mask=counted, other=0.0).to(DTYPE)
        share = tl.exp(z + (half_strength * quadratic)[None, :] - log_sum[:, None])
        total += tl.sum(tl.where(counted, scale[:, None] * share, 0.0), 0)
    tl.store(grad_quadratic_ptr + slot * num_classes + k, half_strength * total, mask=k < num_classes)


def label_column_gradient(batch: LabeledBatch, groups: LabelGroups, columns: LabelColumns, rows: LabelRows) -> Tensor:
    """Gradient of the columns (U, l); zero for unused slots."""
    num_slots, num_classes = columns.quadratic.shape
    logits = tiles.dense_rows(batch.logits)
    grad_quadratic = columns.quadratic.new_empty(num_slots, num_classes)
    blocks = tiles.column_gradient_blocks(num_classes)
    tiles.launch(
        _label_column_gradient_kernel,
        (triton.cdiv(num_classes, blocks["BLOCK_L"]), num_slots),
        logits,
        columns.quadratic,
        columns.classes,
        groups.groups.order,
        groups.groups.bounds,
        rows.log_sum,
        rows.scale,
        grad_quadratic,
        num_classes,
        logits.stride(0),
        *scalar_arguments(batch.strength),
        **blocks,
    )
    return grad_quadratic
