"""The semantic cross-entropy, equation (14), and its gradients.

A row of class y needs one column q of Q_y (`label_columns.py`). Its augmented exponents are e_k = z_k + (λ/2) q_k with
q_y = 0. As in `log_odds.py` the label is left out of the sum, which keeps small losses exact:

    o = z_y - logsumexp_{k≠y} e_k,      -log p_y = -logsigmoid(o).

With class weights v and label smoothing ε, let t_k = (1 - ε) v_y [k = y] + ε v_k / l and t = Σ_k t_k. Then

    loss = -t logsigmoid(o) + Σ_k t_k (z_y - z_k),      ∂loss/∂z_k = t P_k - t_k,      ∂loss/∂q_k = (λ/2) t P_k (k ≠ y),

where P is the softmax of the exponents. Samples of different classes have only the weight in common, so full
covariances are streamed over classes: (w_k - w_y)ᵀ Σ_y serves the loss and the gradient while it is in memory.
"""

import math
from collections.abc import Iterator
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from plsp_kernels.batch import CrossEntropyResult, LabeledBatch, compute_dtype
from plsp_kernels.rows import class_slots, host_number
from plsp_kernels.torch_impl.chunks import chunk_slices, product_slices
from plsp_kernels.torch_impl.label_columns import DiagonalColumns, FullColumns, LabelColumns, StreamedColumns


class _Targets(NamedTuple):
    """Targets t_k = own [k = y] + others_k of each row, and the weight of its loss in the scalar to differentiate."""

    own: Tensor  # (N,)
    others: Tensor | None  # (l,); None: zero
    factor: Tensor  # (N,)


class _Part(NamedTuple):
    """Rows whose classes share a set of columns."""

    columns: LabelColumns
    rows: Tensor | None  # (n,): indices of the rows; None: all of them
    slots: Tensor  # (n,): slot of each row's column


class _Gradients(NamedTuple):
    """Sums over the parts; empty if not needed."""

    logits: Tensor  # (N, l)
    weight: Tensor  # (l, d)


def cross_entropy(
    batch: LabeledBatch, upstream: Tensor | None, need_logits: bool, need_weight: bool
) -> CrossEntropyResult:
    """Compute the loss and its gradients; those of Σ upstream · losses if upstream (N,) is given."""
    dtype = compute_dtype(batch)
    ignored = batch.labels == batch.ignore_index
    if batch.labels.device.type == "cpu":
        _check_labels(batch, ignored)
    else:
        batch = _with_valid_labels(batch, ignored)
    batch = batch._replace(weight=batch.weight.to(dtype).contiguous())
    targets = _targets(batch, ignored, upstream)
    losses = batch.weight.new_zeros(batch.labels.shape[0])
    gradients = _Gradients(
        losses.new_zeros(batch.logits.shape if need_logits else 0),
        losses.new_zeros(batch.weight.shape if need_weight else 0),
    )
    for part in _parts(batch, ignored):
        _add_part(batch, targets, part, losses, gradients)
    losses.masked_fill_(ignored, 0)
    return CrossEntropyResult(losses if batch.reduction == "none" else losses.dot(targets.factor), *gradients)


def _targets(batch: LabeledBatch, ignored: Tensor, upstream: Tensor | None) -> _Targets:
    """The targets of all rows; ignored ones have factor 0."""
    labels, dtype, smoothing = batch.labels.masked_fill(ignored, 0), batch.weight.dtype, batch.label_smoothing
    counted = (~ignored).to(dtype)
    num_classes = batch.weight.shape[0]
    class_weight = None if batch.class_weight is None else batch.class_weight.to(dtype)
    weights = counted if class_weight is None else class_weight.index_select(0, labels) * counted
    others = None
    if smoothing > 0:
        others = batch.weight.new_ones(num_classes) if class_weight is None else class_weight
        others = others * (smoothing / num_classes)
    if upstream is not None:
        factor = upstream.to(dtype) * counted
    elif batch.reduction == "mean":
        total = weights.sum()
        factor = counted * torch.where(total > 0, 1 / total, 0)
    else:
        factor = counted
    return _Targets(weights * (1 - smoothing), others, factor)


def _parts(batch: LabeledBatch, ignored: Tensor) -> Iterator[_Part]:
    """Split the rows so that the matrices of a part fit the budget."""
    weight, covariance, num_classes = batch.weight, batch.covariance, batch.weight.shape[0]
    full, on_cpu = covariance.dim() == 3, batch.labels.device.type == "cpu"
    rows = None
    if on_cpu:
        if ignored.any():
            rows = (~ignored).nonzero()[:, 0]
        classes, slots = (batch.labels if rows is None else batch.labels[rows]).unique(return_inverse=True)
    else:
        # Finding the rows that are not ignored, or those of a part, would need a host sync.
        classes, slots = class_slots(batch.labels, num_classes)
        classes = classes.clamp(min=0)
    if not full:
        variances = covariance[classes].to(weight.dtype)
        yield _Part(DiagonalColumns(weight, variances, classes, host_number(batch.strength)), rows, slots)
    elif not on_cpu:
        yield _Part(StreamedColumns(weight, covariance, classes), rows, slots)
    else:
        yield from _streamed(weight, covariance, classes, rows, slots)


def _streamed(
    weight: Tensor, covariance: Tensor, classes: Tensor, rows: Tensor | None, slots: Tensor
) -> Iterator[_Part]:
    """The parts of full covariances. They share their memory: mapping fresh pages for every part would take longer."""
    slots, order = slots.sort()
    ends = [0, *slots.bincount(minlength=classes.shape[0]).cumsum(0).tolist()]
    rows = order if rows is None else rows[order]
    parts = list(product_slices(classes.shape[0], weight))
    memory = weight.new_empty(max((part.stop - part.start for part in parts), default=0), *weight.shape)
    for part in parts:
        members = slice(ends[part.start], ends[part.stop])
        yield _Part(FullColumns(weight, covariance, classes[part], memory), rows[members], slots[members] - part.start)


def _add_part(batch: LabeledBatch, targets: _Targets, part: _Part, losses: Tensor, gradients: _Gradients) -> None:
    """Write the losses and gradients of the part's rows, and add its gradient of the weight."""
    half_strength, quadratic = host_number(batch.strength) / 2, part.columns.quadratic
    need_logits, need_weight = gradients.logits.numel() > 0, gradients.weight.numel() > 0
    grad_quadratic = torch.zeros_like(quadratic) if need_weight else quadratic.new_empty(0)
    for chunk in chunk_slices(part.slots.shape[0], quadratic.shape[1], quadratic.dtype):
        rows, slots = chunk if part.rows is None else part.rows[chunk], part.slots[chunk]
        logits, labels = batch.logits[rows].to(quadratic.dtype), batch.labels[rows, None]
        own_logit = logits.gather(1, labels)  # (n, 1)
        exponents = quadratic.index_select(0, slots).mul_(half_strength).add_(logits).scatter_(1, labels, -math.inf)
        log_sum = exponents.logsumexp(1, keepdim=True)
        log_odds = own_logit - log_sum
        total, factor = targets.own[rows, None], targets.factor[rows, None]
        if targets.others is not None:
            total = total + targets.others.sum()
        loss = F.logsigmoid(log_odds).mul_(-total)
        if targets.others is not None:
            loss += own_logit * targets.others.sum() - torch.mv(logits, targets.others)[:, None]
        losses[rows] = loss[:, 0]
        if not (need_logits or need_weight):
            continue
        pulled = exponents.sub_(torch.logaddexp(log_sum, own_logit)).exp_().mul_(factor * total)  # factor t P
        if need_weight:
            grad_quadratic.index_add_(0, slots, pulled)
        if need_logits:
            own_gradient = torch.sigmoid(-log_odds).mul_(-total)
            if targets.others is not None:
                pulled.addcmul_(factor, targets.others, value=-1)
                own_gradient += targets.others.sum()
            gradients.logits[rows] = pulled.scatter_add_(1, labels, own_gradient.mul_(factor))
    if need_weight:
        part.columns.add_weight_gradient(grad_quadratic.mul_(half_strength), gradients.weight)


def _check_labels(batch: LabeledBatch, ignored: Tensor) -> None:
    """Raise if a label is out of range: compiled graphs do not check values."""
    num_classes = batch.weight.shape[0]
    if not ((batch.labels >= 0) & (batch.labels < num_classes) | ignored).all():
        raise IndexError(f"labels must lie in [0, {num_classes}) or be {batch.ignore_index}, the ignored label")


def _with_valid_labels(batch: LabeledBatch, ignored: Tensor) -> LabeledBatch:
    """Replace labels out of range, which would be read outside a tensor, by class 0 and their logits by NaN."""
    invalid = (batch.labels < 0) | (batch.labels >= batch.weight.shape[0])
    labels, logits = batch.labels.masked_fill(invalid | ignored, 0), batch.logits
    logits = logits.masked_fill((invalid & ~ignored)[:, None], math.nan).masked_fill(ignored[:, None], 0)
    return batch._replace(labels=labels, logits=logits)
