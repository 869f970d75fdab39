"""plsp::upper_bound, the loss of one step, and its autograd function."""

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
    batch. Logits (Bl, l), (Bu, l), (Bu, l), weight and thresholds are of one dtype.

    The total is what is trained with, so its gradients are computed along with it, from the same intermediate results.
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
    again = labeled_candidates is not None
    losses = _Losses.apply(
        *differentiable, values, *computed, kept, labels, pseudo_labels, strength, ss_weight, again, impl
    )
    return *losses, confidence, prediction, mask


class _Losses(torch.autograd.Function):
    """The total and the three terms.

    The gradients of the total are known. For a mix with terms, known is the derivative of each term with respect to the
    odds of the rows that feed it, and no row feeds two: the backward weighs it with the upstream gradients and pulls it
    through the odds.
    """

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
        odds: Tensor,
        grad_odds: Tensor,
        centred: Tensor,
        gram: Tensor,
        product: Tensor,
        covariance: Tensor,
        labels: Tensor,
        pseudo_labels: Tensor,
        strength: Tensor,
        ss_weight: Tensor,
        again: bool,
        impl: str,
    ) -> tuple[Tensor, ...]:
        for_terms = labeled, strong, weak, odds, grad_odds, centred, gram, product, covariance, labels, pseudo_labels
        ctx.save_for_backward(grad_rows, grad_weight, *for_terms, strength, ss_weight)
        ctx.set_materialize_grads(False)
        ctx.again, ctx.impl = again, impl
        return values.clone().unbind()

    @staticmethod
    @first_order_only
    def backward(ctx: Any, grad_total: Tensor | None, *grad_terms: Tensor | None) -> tuple[Tensor | None, ...]:
        need_logits, need_weight = any(ctx.needs_input_grad[:3]), ctx.needs_input_grad[3]
        grad_rows, grad_weight, labeled, strong, weak, *_ = ctx.saved_tensors
        if any(grad is not None for grad in grad_terms):
            grad_rows, grad_weight = _pull_terms(ctx, grad_total, grad_terms, need_logits, need_weight)
        elif grad_total is not None:
            grad_rows, grad_weight = grad_rows * grad_total, grad_weight * grad_total
        else:
            return (None,) * 19
        grad_logits: tuple[Tensor | None, ...] = (None, None, None)
        if need_logits:
            sizes = [labeled.shape[0], strong.shape[0], weak.shape[0]]
            grad_labeled, *grad_views = grad_rows.split([*sizes, sizes[0]] if ctx.again else sizes)
            if ctx.again:
                grad_labeled = grad_labeled + grad_views.pop()
            grad_logits = (grad_labeled, *grad_views)
        return (*grad_logits, grad_weight if need_weight else None, *[None] * 15)


def _pull_terms(
    ctx: Any, grad_total: Tensor | None, grad_terms: tuple[Tensor | None, ...], need_logits: bool, need_weight: bool
) -> tuple[Tensor, Tensor]:
    """Gradients with respect to the rows of logits and to the weight, from upstream gradients of total and terms."""
    _, _, labeled, strong, weak, odds, grad_odds, centred, gram, product, covariance, *others = ctx.saved_tensors
    labels, pseudo_labels, strength, ss_weight = others
    total = odds.new_zeros(()) if grad_total is None else grad_total
    semi_supervised = (total * ss_weight).to(total.dtype)
    counts = labels.shape[0], pseudo_labels.shape[0], odds.shape[0] - labels.shape[0] - pseudo_labels.shape[0]
    shares = (semi_supervised, semi_supervised, total)
    upstream = [
        (share if grad is None else share + grad).expand(count)
        for share, grad, count in zip(shares, grad_terms, counts, strict=True)
    ]
    rows = _rows_of_logits(labeled, strong, weak, ctx.again)
    classes, slots = _slots_of_rows(labels, pseudo_labels, centred.shape[0], ctx.again)
    grad_rows, grad_gram = log_odds_backward(
        grad_odds * torch.cat(upstream)[:, None], rows, odds, gram, slots, strength, need_logits, need_weight, ctx.impl
    )
    if not need_weight:
        return grad_rows, grad_gram
    return grad_rows, class_gram_backward(grad_gram, centred, covariance, classes, product, ctx.impl)
