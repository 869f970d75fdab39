"""The semantic cross-entropy of a labelled batch and its gradients, equation (14).

The kernels, in order: label_groups, label_columns, label_rows and, for gradients of the weight, label_column_gradient
and label_weight_gradient, finally cross_entropy_totals. With reduction that is six launches, and two more to multiply
the gradients by the upstream gradient.
"""

from torch import Tensor

from plsp_kernels.batch import CrossEntropyResult, LabeledBatch, compute_dtype
from plsp_kernels.triton_impl import tiles
from plsp_kernels.triton_impl.cross_entropy_totals import cross_entropy_totals
from plsp_kernels.triton_impl.label_column_gradient import label_column_gradient
from plsp_kernels.triton_impl.label_columns import label_columns
from plsp_kernels.triton_impl.label_groups import label_groups
from plsp_kernels.triton_impl.label_rows import label_rows
from plsp_kernels.triton_impl.label_weight_gradient import label_weight_gradient


def cross_entropy(
    batch: LabeledBatch, upstream: Tensor | None, need_logits: bool, need_weight: bool
) -> CrossEntropyResult:
    """Compute the loss and its gradients; those of Σ upstream · losses if upstream (N,) is given."""
    dtype = compute_dtype(batch)
    groups = label_groups(batch)
    weight = tiles.dot_operand(tiles.dense_rows(batch.weight), dtype)
    covariance = tiles.dot_operand(tiles.dense_rows(batch.covariance), dtype)
    columns = label_columns(weight, covariance, groups.classes, dtype, need_weight)
    rows = label_rows(batch, groups, columns, upstream, need_logits)
    gradients = None
    if need_weight:
        gradients = label_weight_gradient(columns, label_column_gradient(batch, groups, columns, rows))
    loss, grad_weight = rows.losses, rows.losses.new_empty(0)
    if batch.reduction != "none" or need_weight:
        total, grad_weight = cross_entropy_totals(rows.losses, gradients, groups.classes, weight)
        loss = rows.losses if batch.reduction == "none" else total
    grad_logits = rows.losses.new_empty(0) if rows.grad_logits is None else rows.grad_logits
    return CrossEntropyResult(loss, grad_logits, grad_weight)
