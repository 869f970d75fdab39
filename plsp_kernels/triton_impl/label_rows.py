"""The cross-entropy of every row and its gradient with respect to the logits.

    e_k = z_k + (λ/2) q_k,      o = z_y - logsumexp_{k≠y} e_k,      P = softmax(e)
    loss = -t logsigmoid(o) + Σ_k t_k (z_y - z_k),                  ∂loss/∂z_k = t P_k - t_k

with the column q of the row's slot and the targets t_k = (1 - ε) v_y [k = y] + ε v_k / l, t = Σ_k t_k, of class weights
v and label smoothing ε. An ignored row has loss and gradient zero, a row without a class NaN.
"""

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from plsp_kernels.batch import LabeledBatch
from plsp_kernels.triton_impl import tiles
from plsp_kernels.triton_impl.exponents import add_to_log_sum
from plsp_kernels.triton_impl.label_columns import LabelColumns
from plsp_kernels.triton_impl.label_groups import LabelGroups
from plsp_kernels.triton_impl.row_loss import weighted_loss
from plsp_kernels.triton_impl.scalars import scalar, scalar_arguments


class LabelRows(NamedTuple):
    """Results per row. The factor of a row is the weight of its loss in the scalar that is differentiated."""

    losses: Tensor  # (N,), times the factor if they are reduced
    log_sum: Tensor  # (N,): logsumexp of all exponents
    scale: Tensor  # (N,): the factor times t
    grad_logits: Tensor | None  # (N, l), times the factor


@triton.jit
def column_exponents(logits_ptr, quadratic_ptr, k, label, num_classes, strength, DTYPE: tl.constexpr):
    """z_k and z_k + (λ/2) q_k, the latter with -inf at the label and beyond the classes: (K,) each."""
    z = tl.load(logits_ptr + k, mask=k < num_classes, other=float("-inf")).to(DTYPE)
    quadratic = tl.load(quadratic_ptr + k, mask=k < num_classes, other=0.0)
    return z, tl.where(k == label, float("-inf"), z + 0.5 * strength * quadratic)


@triton.jit
def _class_weights(class_weight_ptr, k, num_classes, DTYPE: tl.constexpr):
    """v_k, one if there are no class weights, and zero beyond the classes."""
    if class_weight_ptr is None:
        return tl.where(k < num_classes, 1.0, 0.0).to(DTYPE)
    else:
        return tl.load(class_weight_ptr + k, mask=k < num_classes, other=0.0).to(DTYPE)


@triton.jit(do_not_specialize=["ignore_index"])
def _label_rows_kernel(
    logits_ptr,  # (N, l)
    quadratic_ptr,  # (U, l)
    slots_ptr,  # (N,)
    labels_ptr,  # (N,)
    class_weight_ptr,  # (l,), or None
    upstream_ptr,  # (N,), or None
    divisor_ptr,  # (1,), or None if the loss is no mean
    losses_ptr,  # (N,)
    log_sum_ptr,  # (N,)
    scale_ptr,  # (N,)
    grad_logits_ptr,  # (N, l), or None
    num_classes,
    stride_logits,
    ignore_index,
    strength: tl.float64,
    strength_ptr,  # (), or None
    smoothing: tl.float64,
    SMOOTHED: tl.constexpr,
    BLOCK_L: tl.constexpr,
):
    DTYPE: tl.constexpr = losses_ptr.dtype.element_ty
    strength = scalar(strength, strength_ptr).to(DTYPE)
    smoothing = scalar(smoothing, None).to(DTYPE)
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots_ptr + row).to(tl.int64)
    label = tl.load(labels_ptr + row)
    one = tl.arange(0, 1)
    if (slot >= 0) & (label != ignore_index):
        factor = tl.full((1,), 1.0, DTYPE)
        if upstream_ptr is not None:
            factor = tl.load(upstream_ptr + row + one).to(DTYPE)
        if divisor_ptr is not None:
            divisor = tl.load(divisor_ptr + one)
            factor = tl.where(divisor > 0, factor / divisor, 0.0)
        logits_ptr += row * stride_logits
        quadratic_ptr += slot * num_classes
        largest = tl.full((1,), float("-inf"), DTYPE)
        total = tl.zeros((1,), DTYPE)
        weights = tl.zeros((BLOCK_L,), DTYPE)
        weighted = tl.zeros((BLOCK_L,), DTYPE)
        for start in range(0, num_classes, BLOCK_L):
            k = start + tl.arange(0, BLOCK_L)
            z, exponents = column_exponents(logits_ptr, quadratic_ptr, k, label, num_classes, strength, DTYPE)
            largest, total = add_to_log_sum(largest, total, exponents[None, :])
            if SMOOTHED:
                weight = _class_weights(class_weight_ptr, k, num_classes, DTYPE)
                weights += weight
                weighted += tl.where(weight != 0, weight * z, 0.0)
        log_rest = largest + tl.log(total)
        own_logit = tl.load(logits_ptr + label + one).to(DTYPE)
        own_weight = _class_weights(class_weight_ptr, label + one, num_classes, DTYPE)
        scale = own_weight
        if SMOOTHED:
            share = smoothing / num_classes
            spread = share * tl.sum(weights, 0)
            scale = (1.0 - smoothing) * own_weight + spread
        loss, slope = weighted_loss(own_logit - log_rest, scale)
        if SMOOTHED:
            loss += spread * own_logit - share * tl.sum(weighted, 0)
        if divisor_ptr is not None:
            loss *= factor
        tl.store(losses_ptr + row + one, loss)
        # One of the two may be -inf: an excluded label, or all other classes excluded.
        larger = tl.maximum(log_rest, own_logit)
        log_sum = larger + tl.log(1.0 + tl.exp(-tl.abs(log_rest - own_logit)))
        tl.store(log_sum_ptr + row + one, log_sum)
        tl.store(scale_ptr + row + one, factor * scale)
        if grad_logits_ptr is not None:
            for start in range(0, num_classes, BLOCK_L):
                k = start + tl.arange(0, BLOCK_L)
                z, exponents = column_exponents(logits_ptr, quadratic_ptr, k, label, num_classes, strength, DTYPE)
                gradient = scale * tl.exp(exponents - log_sum)
                own_gradient = -slope
                if SMOOTHED:
                    gradient -= share * _class_weights(class_weight_ptr, k, num_classes, DTYPE)
                    own_gradient += spread - share * own_weight
                gradient = factor * tl.where(k == label, own_gradient, gradient)
                tl.store(grad_logits_ptr + row * num_classes + k, gradient, mask=k < num_classes)
    else:
        missing = tl.where(label == ignore_index, 0.0, float("nan"))
        tl.store(losses_ptr + row, missing)
        tl.store(log_sum_ptr + row, 0.0)
        tl.store(scale_ptr + row, 0.0)
        if grad_logits_ptr is not None:
            for start in range(0, num_classes, BLOCK_L):
                k = start + tl.arange(0, BLOCK_L)
                tl.store(grad_logits_ptr + row * num_classes + k, missing, mask=k < num_classes)


def label_rows(
    batch: LabeledBatch, groups: LabelGroups, columns: LabelColumns, upstream: Tensor | None, need_logits: bool
) -> LabelRows:
    """Compute the losses of the rows, and their gradients if upstream (N,) or a reduction determines the factors."""
    (num_rows, num_classes), logits = batch.logits.shape, tiles.dense_rows(batch.logits)
    losses, log_sum, scale = (columns.quadratic.new_empty(num_rows) for _ in range(3))
    grad_logits = columns.quadratic.new_empty(num_rows, num_classes) if need_logits else None
    results = LabelRows(losses, log_sum, scale, grad_logits)
    tiles.launch(
        _label_rows_kernel,
        (num_rows,),
        logits,
        columns.quadratic,
        groups.groups.slots,
        batch.labels.contiguous(),
        None if batch.class_weight is None else batch.class_weight.contiguous(),
        None if upstream is None else upstream.contiguous(),
        groups.divisor if batch.reduction == "mean" else None,
        *results,
        num_classes,
        logits.stride(0),
        batch.ignore_index,
        *scalar_arguments(batch.strength),
        batch.label_smoothing,
        SMOOTHED=batch.label_smoothing > 0,
        **tiles.row_blocks(num_classes),
    )
    return results
