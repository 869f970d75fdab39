"""The loss of one step and its gradients, equations (11), (12), (14), (15) and (16).

The kernels of a step, in order: class_activation, preparation, then for each chunk of slots class_gram (product and
product_gram for many classes), pair, row_loss, logits_gradient, gram_gradient and class_gram_backward, finally totals.
G_y, its gradient and T_y exist for one chunk at a time, within a fixed budget of memory.
"""

from typing import NamedTuple

from torch import Tensor

from plsp_kernels.step import Step, StepResult, compute_dtype, replace
from plsp_kernels.triton_impl import tiles
from plsp_kernels.triton_impl.class_activation import class_activation_labels
from plsp_kernels.triton_impl.class_gram import class_gram
from plsp_kernels.triton_impl.class_gram_backward import Products, num_splits, weight_gradient
from plsp_kernels.triton_impl.gram_gradient import gram_gradient
from plsp_kernels.triton_impl.logits_gradient import RowGradients, logits_gradient
from plsp_kernels.triton_impl.pair import Chunk, PairResults, pairs
from plsp_kernels.triton_impl.preparation import Prepared, prepare
from plsp_kernels.triton_impl.row_loss import RowLosses, new_row_losses, row_losses
from plsp_kernels.triton_impl.totals import totals


class _Buffers(NamedTuple):
    """Results of a step that every chunk of slots writes a part of."""

    pairs: PairResults
    losses: RowLosses
    gradients: RowGradients
    partial: Tensor  # (splits · chunks, l, d): partial gradients of the weight, none if not needed


def upper_bound(step: Step, upstream: Tensor | None, need_logits: bool, need_weight: bool) -> StepResult:
    """Compute the terms, and the gradients of their sum weighted by upstream (3,), by default those of the total."""
    step = replace(step, covariance=tiles.dot_operand(step.covariance, compute_dtype(step)))
    pseudo_labels, new_labels = step.pseudo_labels, step.labels.new_empty(0)
    if pseudo_labels is None:
        pseudo_labels = new_labels = class_activation_labels(step.weak_logits, step.candidates)
    prepared = prepare(step, pseudo_labels)
    num_slots = prepared.classes.shape[0]
    chunk_slots = tiles.slots_per_chunk(prepared.centred, num_slots, step.covariance.dim() == 3)
    firsts = range(0, max(num_slots, 1), chunk_slots)
    splits = num_splits(prepared.centred, chunk_slots)
    buffers = _new_buffers(step, prepared.centred, splits * len(firsts) if need_weight else 0)
    for index, first in enumerate(firsts):
        slots, partial = slice(first, first + chunk_slots), buffers.partial[index * splits : (index + 1) * splits]
        _compute_chunk(step, upstream, prepared, slots, buffers._replace(partial=partial), need_logits)
    total, terms, grad_weight = totals(step, buffers.losses.losses, buffers.partial)
    grad_logits = buffers.gradients.grad_logits if need_logits else total.new_empty(0)
    return StepResult(total, terms, grad_logits, grad_weight, new_labels, *buffers.losses[1:])


def _new_buffers(step: Step, like: Tensor, num_partials: int) -> _Buffers:
    num_labeled, (num_unlabeled, num_classes) = step.labels.shape[0], step.candidates.shape
    num_rows = num_labeled + 2 * num_unlabeled
    shifted, log_sum, log_odds, grad_logits = (like.new_empty(num_rows, num_classes) for _ in range(4))
    return _Buffers(
        pairs=PairResults(shifted, log_sum, log_odds, like.new_empty(num_unlabeled, num_classes)),
        losses=new_row_losses(step, like),
        # The losses replace the log-odds by their gradient.
        gradients=RowGradients(log_odds, shifted, log_sum, grad_logits, step.strength, num_labeled),
        partial=like.new_empty(num_partials, *like.shape),
    )


def _compute_chunk(
    step: Step, upstream: Tensor | None, prepared: Prepared, slots: slice, buffers: _Buffers, need_logits: bool
) -> None:
    """Compute the rows of these slots and, if there are partial gradients of the weight, their part of those."""
    groups, classes, used, centred = prepared
    classes, need_weight = classes[slots], buffers.partial.shape[0] > 0
    gram, product = class_gram(centred, step.covariance, classes, need_weight)
    chunk = Chunk(slots.start, gram)
    pairs(step, groups, chunk, buffers.pairs)
    row_losses(step, upstream, groups, chunk, buffers.pairs, buffers.losses)
    if need_logits or need_weight:
        logits_gradient(buffers.gradients, groups, chunk)
    if need_weight:
        grad_gram = gram_gradient(buffers.gradients, groups, chunk)
        products = Products(centred, step.covariance, classes, product)
        weight_gradient(grad_gram, products, buffers.partial, slots.start, used)
