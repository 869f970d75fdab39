"""plsp::upper_bound, the loss of one step, and its autograd functions."""

from typing import Any

import torch
from torch import Tensor

from plsp_kernels import native
from plsp_kernels.ops.class_gram import centred_rows, class_gram_backward, covariance_for_backward, fake_class_gram
from plsp_kernels.ops.log_odds import fake_gradients, log_odds_backward
from plsp_kernels.ops.registration import define_operator, first_order_only, implementation
from plsp_kernels.slots import class_slots


def _rows_of_logits(labeled: Tensor, strong: Tensor, weak: Tensor, again: bool) -> Tensor:
    """One row for each logsumexp of the loss (N, l): labelled rows serve twice if they have candidates too."""
    return torch.cat([labeled, strong, weak, labeled] if again else [labeled, strong, weak])


def _slots_of_rows(labels: Tensor, pseudo_labels: Tensor, num_classes: int, again: bool) -> tuple[Tensor, Tensor]:
    """The distinct classes (U,), and the slot of each row (N,)."""
    classes, slots = class_slots(torch.cat([labels, pseudo_labels]), num_classes)
    labeled, unlabeled = slots.split([labels.shape[0], pseudo_labels.shape[0]])
    return classes, torch.cat([slots, unlabeled, labeled] if again else [slots, unlabeled])


def _compute_upper_bound(
    impl: str,
    labeled: Tensor,
    strong: Tensor,
    weak: Tensor,
    weight: Tensor,
    covariance: Tensor,
    labels: Tensor,
    pseudo_labels: Tensor,
    candidates: Tensor,
    labeled_candidates: Tensor | None,
    thresholds: Tensor,
    strength: float,
    ss_weight: float,
    beta: float,
    argmax_in_candidates: bool,
    need_logits: bool,
    need_weight: bool,
) -> tuple[Tensor, ...]:
    numbers = strength, ss_weight, beta
    flags = argmax_in_candidates, need_logits, need_weight
    if impl == "torch" and native.serves(labels.shape[0] + candidates.shape[0], weight, covariance):
        sets = labels, pseudo_labels, candidates, labeled_candidates
        return native.upper_bound(labeled, strong, weak, weight, covariance, *sets, thresholds, *numbers, *flags)
    functions, again = implementation(impl), labeled_candidates is not None
    rows = _rows_of_logits(labeled, strong, weak, again)
    classes, slots = _slots_of_rows(labels, pseudo_labels, weight.shape[0], again)
    centred = centred_rows(weight).contiguous()
    gram, product = functions.class_gram(centred, covariance, classes, need_weight)
    values, odds, grad_odds, grad_rows, grad_gram, *chosen = functions.upper_bound(
        rows, gram, slots, labels, candidates, labeled_candidates, thresholds, *numbers, *flags
    )
    grad_weight = weight.new_empty(0)
    if need_weight:
        grad_weight = functions.class_gram_backward(grad_gram, centred, covariance, classes, product)
    return values, grad_rows, grad_weight, odds, grad_odds, centred, gram, product, *chosen


def _fake_upper_bound(
    labeled: Tensor,
    strong: Tensor,
    weak: Tensor,
    weight: Tensor,
    covariance: Tensor,
    labels: Tensor,
    pseudo_labels: Tensor,
    candidates: Tensor,
    labeled_candidates: Tensor | None,
    thresholds: Tensor,
    strength: Tensor,
    ss_weight: Tensor,
    beta: float,
    argmax_in_candidates: bool,
    need_logits: bool,
    need_weight: bool,
    impl: str,
) -> tuple[Tensor, ...]:
    again = labeled_candidates is not None
    rows = _rows_of_logits(labeled, strong, weak, again)
    classes, _ = _slots_of_rows(labels, pseudo_labels, weight.shape[0], again)
    num_unlabeled = candidates.shape[0]
    return (
        rows.new_empty(4),
        *fake_gradients(rows, weight, need_logits, need_weight),
        torch.empty_like(rows),
        torch.empty_like(rows),
        weight.new_empty(weight.shape),
        *fake_class_gram(weight, covariance, classes, need_weight, impl),
        rows.new_empty(num_unlabeled),
        labels.new_empty(num_unlabeled),
        candidates.new_empty(num_unlabeled),
    )


_upper_bound = define_operator(
    "upper_bound(Tensor labeled, Tensor strong, Tensor weak, Tensor weight, Tensor covariance, Tensor labels,"
    " Tensor pseudo_labels, Tensor candidates, Tensor? labeled_candidates, Tensor thresholds, Tensor strength,"
    " Tensor ss_weight, float beta, bool argmax_in_candidates, bool need_logits, bool need_weight, str impl)"
    " -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
    _fake_upper_bound,
    _compute_upper_bound,
)


def upper_bound(
    labeled: Tensor,
    strong: Tensor,
    weak: Tensor,
    weight: Tensor,
    covariance: Tensor,
    labels: Tensor,
    pseudo_labels: Tensor,
    candidates: Tensor,
    labeled_candidates: Tensor | None,
    thresholds: Tensor,
    strength: Tensor,
    ss_weight: Tensor,
    beta: float,
    argmax_in_candidates: bool,
    impl: str,
) -> tuple[Tensor, ...]:
    """Total, supervised, consistency and complementary (0-d), and confidence, prediction and mask of the unlabelled
    batch. Logits (Bl, l), (Bu, l), (Bu, l) and weight are of one dtype.

    The total is what is trained with, so its gradients are computed along with it, from the same intermediate results.
    The terms have a backward of their own, which costs nothing unless one of them is differentiated by itself.
    """
    differentiable = labeled, strong, weak, weight
    needs = [torch.is_grad_enabled() and tensor.requires_grad for tensor in differentiable]
    with torch.no_grad():
        values, *computed, confidence, prediction, mask = _upper_bound(
            *differentiable,
            covariance,
            labels,
            pseudo_labels,
            candidates,
            labeled_candidates,
            thresholds,
            strength,
            ss_weight,
            beta,
            argmax_in_candidates,
            any(needs[:3]),
            needs[3],
            impl,
        )
        kept = covariance_for_backward(covariance)
    grad_rows, grad_weight, *for_terms = computed
    again = labeled_candidates is not None
    total = _Total.apply(*differentiable, values, grad_rows, grad_weight, again)
    terms = _Terms.apply(*differentiable, values, *for_terms, kept, labels, pseudo_labels, strength, again, impl)
    return total, *terms.unbind(), confidence, prediction, mask


def _gradients_of_logits(grad_rows: Tensor, num_labeled: int, num_unlabeled: int, again: bool) -> tuple[Tensor, ...]:
    """Of the labelled, the strong and the weak logits, from those of the rows they serve in."""
    sizes = [num_labeled, num_unlabeled, num_unlabeled]
    grad_labeled, *grad_views = grad_rows.split([*sizes, num_labeled] if again else sizes)
    if again:
        grad_labeled = grad_labeled + grad_views.pop()
    return grad_labeled, *grad_views


class _Total(torch.autograd.Function):
    """The first of the values, whose gradients are known."""

    @staticmethod
    def forward(
        ctx: Any,
        labeled: Tensor,
        strong: Tensor,
        weak: Tensor,
        weight: Tensor,
        values: Tensor,
        grad_rows: Tensor,
        grad_weight: Tensor,
        again: bool,
    ) -> Tensor:
        ctx.save_for_backward(grad_rows, grad_weight)
        ctx.layout = labeled.shape[0], strong.shape[0], again
        return values[0].clone()

    @staticmethod
    @first_order_only
    def backward(ctx: Any, grad_total: Tensor) -> tuple[Tensor | None, ...]:
        grad_rows, grad_weight = ctx.saved_tensors
        grad_logits: tuple[Tensor | None, ...] = (None, None, None)
        if any(ctx.needs_input_grad[:3]):
            grad_logits = _gradients_of_logits(grad_rows * grad_total, *ctx.layout)
        return (*grad_logits, grad_weight * grad_total if ctx.needs_input_grad[3] else None, *[None] * 4)


class _Terms(torch.autograd.Function):
    """The three other values. Every row of logits feeds one of them only, so the forward already knows the derivative
    of each with respect to the odds; the backward weighs it with the upstream gradient and pulls it through the odds.
    """

    @staticmethod
    def forward(
        ctx: Any,
        labeled: Tensor,
        strong: Tensor,
        weak: Tensor,
        weight: Tensor,
        values: Tensor,
        odds: Tensor,
        grad_odds: Tensor,
        centred: Tensor,
        gram: Tensor,
        product: Tensor,
        covariance: Tensor,
        labels: Tensor,
        pseudo_labels: Tensor,
        strength: Tensor,
        again: bool,
        impl: str,
    ) -> Tensor:
        logits, classifier = (labeled, strong, weak), (centred, covariance, product)
        ctx.save_for_backward(*logits, *classifier, odds, grad_odds, gram, labels, pseudo_labels, strength)
        ctx.again, ctx.impl = again, impl
        return values[1:].clone()

    @staticmethod
    @first_order_only
    def backward(ctx: Any, grad_terms: Tensor) -> tuple[Tensor | None, ...]:
        labeled, strong, weak, centred, covariance, product, *computed = ctx.saved_tensors
        odds, grad_odds, gram, labels, pseudo_labels, strength = computed
        need_logits, need_weight = any(ctx.needs_input_grad[:3]), ctx.needs_input_grad[3]
        rows = _rows_of_logits(labeled, strong, weak, ctx.again)
        classes, slots = _slots_of_rows(labels, pseudo_labels, centred.shape[0], ctx.again)
        layout = labeled.shape[0], strong.shape[0]
        rows_per_term = *layout, rows.shape[0] - sum(layout)
        upstream = [grad.expand(count) for grad, count in zip(grad_terms.unbind(), rows_per_term, strict=True)]
        weighted = grad_odds * torch.cat(upstream)[:, None]
        grad_rows, grad_gram = log_odds_backward(
            weighted, rows, odds, gram, slots, strength, need_logits, need_weight, ctx.impl
        )
        grad_logits: tuple[Tensor | None, ...] = (None, None, None)
        if need_logits:
            grad_logits = _gradients_of_logits(grad_rows, *layout, ctx.again)
        grad_weight = None
        if need_weight:
            grad_weight = class_gram_backward(grad_gram, centred, covariance, classes, product, ctx.impl)
        return (*grad_logits, grad_weight, *[None] * 12)
