"""The loss of one step and its gradients, streamed over the classes of its samples.

Samples of different classes have only the weight in common: a step is the sum of smaller steps, each with the samples
of a few classes. As gradients are computed with the loss, the matrices of a class are temporary. A class that occurs
only among the labelled samples needs one column of its matrix, not all pairs (`cross_entropy.py`).
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from plsp_kernels.batch import LabeledBatch
from plsp_kernels.quadratic import centred_rows
from plsp_kernels.rows import Rows, class_slots, host_number
from plsp_kernels.step import Step, StepResult, compute_dtype, replace
from plsp_kernels.torch_impl.chunks import class_slices
from plsp_kernels.torch_impl.class_activation import class_activation_labels
from plsp_kernels.torch_impl.class_gram import class_gram, class_gram_backward, write_class_gram
from plsp_kernels.torch_impl.cross_entropy import cross_entropy
from plsp_kernels.torch_impl.log_odds import PairMatrices
from plsp_kernels.torch_impl.term_sums import TermSums, Wanted, term_sums

_COLUMN_CLASSES = 64  # with fewer classes, a second set of operator calls costs more than all pairs


class ClassMatrices(NamedTuple):
    """Matrices of the classes of one part of a step.

    The parts share their memory: mapping fresh pages for every part would take longer than the arithmetic on them.
    """

    product: Tensor  # (U, l, d): T
    gram: Tensor  # (U, l, l): G, which may be overwritten by ∂L/∂G
    kernel: Tensor  # (U, l, l): exp(-λ G)


def upper_bound(step: Step, upstream: Tensor | None, need_logits: bool, need_weight: bool) -> StepResult:
    """Compute the terms, and the gradients of their sum weighted by upstream (3,), by default those of the total."""
    num_labeled, num_unlabeled = step.labels.shape[0], step.candidates.shape[0]
    num_complementary = num_unlabeled + (0 if step.labeled_candidates is None else num_labeled)
    counts = [max(count, 1) for count in (num_labeled, num_unlabeled, num_complementary)]
    ss_weight = host_number(step.ss_weight)
    weights = (ss_weight, ss_weight, 1.0) if upstream is None else upstream.unbind()
    factors = [weight / count for weight, count in zip(weights, counts, strict=True)]
    pseudo_labels, new_labels = step.pseudo_labels, step.labels.new_empty(0)
    labeled, weak, strong, weight = (tensor.to(compute_dtype(step)) for tensor in step[:4])
    if pseudo_labels is None:
        pseudo_labels = new_labels = class_activation_labels(weak, step.candidates)
    step = replace(step, labeled_logits=labeled, weak_logits=weak, strong_logits=strong, weight=weight)
    # On other devices, finding the samples of a part would need a host sync.
    compute = _in_parts if weight.device.type == "cpu" else _at_once
    sums, grad_weight = compute(step, pseudo_labels, Wanted(factors, need_logits, need_weight))
    supervised, consistency, complementary = (
        value / count for value, count in zip(sums.terms.unbind(), counts, strict=True)
    )
    total = (supervised + consistency).mul_(ss_weight).add_(complementary)
    terms = torch.stack([supervised, consistency, complementary])
    decisions = sums.confidence, sums.prediction, sums.mask
    return StepResult(total, terms, sums.grad_logits, grad_weight, new_labels, *decisions)


def _in_parts(step: Step, pseudo_labels: Tensor, wanted: Wanted) -> tuple[TermSums, Tensor]:
    """Compute the terms and the gradient of the weight, labelled samples of classes of their own apart."""
    samples = torch.cat([step.labels, pseudo_labels])
    _check_classes(step, samples)
    alone = ~torch.isin(step.labels, pseudo_labels)
    whole = replace(step, weight=centred_rows(step.weight).contiguous())
    if step.weight.shape[0] < _COLUMN_CLASSES or step.labeled_candidates is not None or not alone.any():
        return _streamed(whole, samples, wanted)
    rest, own = (~alone).nonzero()[:, 0], alone.nonzero()[:, 0]
    sums, grad_weight = _streamed(
        _subset(whole, rest, slice(None)), torch.cat([step.labels[rest], pseudo_labels]), wanted
    )
    labeled = step.labeled_logits[own], step.weight, step.covariance, step.labels[own]
    batch = LabeledBatch(*labeled, None, step.strength, 0.0, -1, "none")  # no label is -1
    upstream = torch.ones_like(batch.logits[:, 0]) * wanted.factors[0]
    found = cross_entropy(batch, upstream, wanted.need_logits, wanted.need_weight)
    sums.terms[0] += found.loss.clamp(max=torch.finfo(found.loss.dtype).max).sum()
    if wanted.need_logits:
        grad_logits = found.grad_logits.new_empty(sums.grad_logits.shape[0] + own.shape[0], step.weight.shape[0])
        grad_logits[own], grad_logits[rest] = found.grad_logits, sums.grad_logits[: rest.shape[0]]
        grad_logits[step.labels.shape[0] :] = sums.grad_logits[rest.shape[0] :]
        sums = sums._replace(grad_logits=grad_logits)
    return sums, grad_weight + found.grad_weight if wanted.need_weight else grad_weight


def _streamed(step: Step, samples: Tensor, wanted: Wanted) -> tuple[TermSums, Tensor]:
    """Add up the terms and the gradient of the weight over parts of the classes of the samples (Bl + Bu,)."""
    weight, (classes, slots) = step.weight, samples.unique(return_inverse=True)
    grad_weight = torch.zeros_like(weight) if wanted.need_weight else weight.new_empty(0)
    parts = list(class_slices(classes.shape[0], weight))
    matrices = _class_matrices(max((part.stop - part.start for part in parts), default=0), weight)
    if len(parts) <= 1:
        return _add_part(step, classes, slots, wanted, matrices, grad_weight), grad_weight
    num_labeled, num_unlabeled = step.labels.shape[0], step.candidates.shape[0]
    num_rows = num_labeled + 2 * num_unlabeled
    sums = TermSums(
        terms=weight.new_zeros(3),
        grad_logits=weight.new_empty((num_rows, weight.shape[0]) if wanted.need_logits else 0),
        confidence=weight.new_empty(num_unlabeled),
        prediction=step.labels.new_empty(num_unlabeled),
        mask=step.candidates.new_empty(num_unlabeled),
    )
    for part in parts:
        members = ((slots >= part.start) & (slots < part.stop)).nonzero()[:, 0]
        labeled, strong = members[members < num_labeled], members[members >= num_labeled]
        unlabeled, weak = strong - num_labeled, strong + num_unlabeled
        some, own_slots = _subset(step, labeled, unlabeled), slots[members] - part.start
        found = _add_part(some, classes[part], own_slots, wanted, matrices, grad_weight)
        sums.terms.add_(found.terms)
        if wanted.need_logits:
            sums.grad_logits.index_copy_(0, torch.cat([labeled, strong, weak]), found.grad_logits)
        for whole, piece in zip(sums[2:], found[2:], strict=True):
            whole.index_copy_(0, unlabeled, piece)
    return sums, grad_weight


def _subset(step: Step, labeled: Tensor, unlabeled: Tensor | slice) -> Step:
    """The step of some of its samples."""
    changes = {name: getattr(step, name)[labeled] for name in ("labeled_logits", "labels")}
    changes |= {name: getattr(step, name)[unlabeled] for name in ("weak_logits", "strong_logits", "candidates")}
    if step.labeled_candidates is not None:
        changes["labeled_candidates"] = step.labeled_candidates[labeled]
    return replace(step, **changes)


def _class_matrices(num_slots: int, weight: Tensor) -> ClassMatrices:
    num_classes, num_features = weight.shape
    gram, kernel = (weight.new_empty(num_slots, num_classes, num_classes) for _ in range(2))
    return ClassMatrices(weight.new_empty(num_slots, num_classes, num_features), gram, kernel)


def _add_part(
    step: Step, classes: Tensor, slots: Tensor, wanted: Wanted, matrices: ClassMatrices, grad_weight: Tensor
) -> TermSums:
    """Compute the terms of a step on the CPU, from its classes (U,) and the slots of its samples (Bl + Bu,).

    Adds to the gradient of the weight: 2 Σ_y H_y T_y with H = ∂L/∂G.
    """
    product, gram, kernel = (matrix[: classes.shape[0]] for matrix in matrices)
    write_class_gram(step.weight, step.covariance, classes, gram, product)
    # ∂L/∂G may overwrite G: log-odds and probit have read it by then.
    sums, grad_gram = term_sums(step, _rows(step, gram, slots), wanted, PairMatrices(kernel, grad_gram=gram))
    if wanted.need_weight:
        # H_y is symmetric: stacking the slots gives the sum over y as one GEMM without a transposing copy.
        stacked = grad_gram.view(-1, gram.shape[1]).t(), product.view(-1, product.shape[2])
        torch.addmm(grad_weight, *stacked, alpha=2, out=grad_weight)
    return sums


def _check_classes(step: Step, samples: Tensor) -> None:
    """Raise if a class of the samples is out of range: compiled graphs do not check values."""
    num_classes = step.weight.shape[0]
    if not ((samples >= 0) & (samples < num_classes)).all():
        valid = bool(((step.labels >= 0) & (step.labels < num_classes)).all())
        raise IndexError(f"{'pseudo_labels' if valid else 'labels'} must lie in [0, {num_classes})")


def _at_once(step: Step, pseudo_labels: Tensor, wanted: Wanted) -> tuple[TermSums, Tensor]:
    """Compute the terms and the gradient of the weight without a host sync."""
    step = replace(step, weight=centred_rows(step.weight).contiguous())
    step, samples = _with_valid_classes(step, torch.cat([step.labels, pseudo_labels]))
    classes, slots = class_slots(samples, step.weight.shape[0])
    gram, product = class_gram(step.weight, step.covariance, classes, wanted.need_weight)
    sums, grad_gram = term_sums(step, _rows(step, gram, slots), wanted)
    if not wanted.need_weight:
        return sums, gram.new_empty(0)
    return sums, class_gram_backward(grad_gram, step.weight, step.covariance, classes, product)


def _with_valid_classes(step: Step, samples: Tensor) -> tuple[Step, Tensor]:
    """Replace classes out of range, which would be read outside a tensor, by class 0 and their logits by NaN."""
    invalid = (samples < 0) | (samples >= step.weight.shape[0])
    samples, num_labeled = samples.masked_fill(invalid, 0), step.labels.shape[0]
    labeled, unlabeled = invalid[:num_labeled, None], invalid[num_labeled:, None]
    step = replace(
        step,
        labels=samples[:num_labeled],
        labeled_logits=step.labeled_logits.masked_fill(labeled, math.nan),
        weak_logits=step.weak_logits.masked_fill(unlabeled, math.nan),
        strong_logits=step.strong_logits.masked_fill(unlabeled, math.nan),
    )
    return step, samples


def _rows(step: Step, gram: Tensor, slots: Tensor) -> Rows:
    """One row per logsumexp of the loss: labelled samples with candidate sets have two."""
    labeled, strong, weak = step.labeled_logits, step.strong_logits, step.weak_logits
    labeled_slots, unlabeled_slots = slots.split([labeled.shape[0], weak.shape[0]])
    again = step.labeled_candidates is not None
    logits = torch.cat([labeled, strong, weak, labeled] if again else [labeled, strong, weak])
    slots = torch.cat([slots, unlabeled_slots, labeled_slots] if again else [slots, unlabeled_slots])
    return Rows(logits, gram, slots, step.strength)
