"""plsp::upper_bound, the loss of one step, and its autograd functions."""

from typing import Any

import torch
from torch import Tensor

from plsp_kernels.ops.class_gram import centred_rows, class_gram, class_gram_backward, covariance_for_backward
from plsp_kernels.ops.log_odds import fake_gradients, log_odds_backward
from plsp_kernels.ops.registration import define_operator, first_order_only


def _fake_upper_bound(
    rows: Tensor,
    gram: Tensor,
    slots: Tensor,
    labels: Tensor,
    candidates: Tensor,
    labeled_candidates: Tensor | None,
    thresholds: Tensor,
    strength: Tensor,
    ss_weight: Tensor,
    beta: float,
    argmax_in_candidates: bool,
    need_rows: bool,
    need_gram: bool,
    impl: str,
) -> tuple[Tensor, ...]:
    num_unlabeled = candidates.shape[0]
    return (
        rows.new_empty(4),
        torch.empty_like(rows, memory_format=torch.contiguous_format),
        torch.empty_like(rows, memory_format=torch.contiguous_format),
        *fake_gradients(rows, gram, need_rows, need_gram),
        rows.new_empty(num_unlabeled),
        labels.new_empty(num_unlabeled),
        candidates.new_empty(num_unlabeled),
    )


_upper_bound = define_operator(
    "upper_bound(Tensor rows, Tensor gram, Tensor slots, Tensor labels, Tensor candidates, Tensor? labeled_candidates,"
    " Tensor thresholds, Tensor strength, Tensor ss_weight, float beta, bool argmax_in_candidates, bool need_rows,"
    " bool need_gram, str impl) -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
    _fake_upper_bound,
)


def upper_bound(
    rows: Tensor,
    weight: Tensor,
    covariance: Tensor,
    classes: Tensor,
    slots: Tensor,
    labels: Tensor,
    candidates: Tensor,
    labeled_candidates: Tensor | None,
    thresholds: Tensor,
    strength: Tensor,
    ss_weight: Tensor,
    beta: float,
    argmax_in_candidates: bool,
    impl: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Total (0-d), the three terms (3,), and confidence, prediction and mask of the unlabelled batch.

    The total is what is trained with, so its gradients are computed along with it, from the same intermediate results.
    The terms have a backward of their own, which costs nothing unless one of them is differentiated by itself.
    """
    need_rows, need_weight = (torch.is_grad_enabled() and tensor.requires_grad for tensor in (rows, weight))
    with torch.no_grad():
        centred = centred_rows(weight)
        gram, product = class_gram(centred, covariance, classes, need_weight, impl)
        values, odds, grad_odds, grad_rows, grad_gram, confidence, prediction, mask = _upper_bound(
            rows,
            gram,
            slots,
            labels,
            candidates,
            labeled_candidates,
            thresholds,
            strength,
            ss_weight,
            beta,
            argmax_in_candidates,
            need_rows,
            need_weight,
            impl,
        )
        classifier = (centred, covariance_for_backward(covariance), classes, product)
        grad_weight = class_gram_backward(grad_gram, *classifier, impl) if need_weight else grad_gram
    total = _Total.apply(rows, weight, values, grad_rows, grad_weight)
    terms = _Terms.apply(
        rows, weight, values, odds, grad_odds, gram, slots, labels, candidates, strength, *classifier, impl
    )
    return total, terms, confidence, prediction, mask


class _Total(torch.autograd.Function):
    """The first of the values, whose gradients are known."""

    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, weight: Tensor, values: Tensor, grad_rows: Tensor, grad_weight: Tensor
    ) -> Tensor:
        ctx.save_for_backward(grad_rows, grad_weight)
        return values[0].clone()

    @staticmethod
    @first_order_only
    def backward(ctx: Any, grad_total: Tensor) -> tuple[Tensor | None, ...]:
        gradients = zip(ctx.saved_tensors, ctx.needs_input_grad[:2], strict=True)
        return (*(gradient * grad_total if need else None for gradient, need in gradients), None, None, None)


class _Terms(torch.autograd.Function):
    """The three other values. Every row of logits feeds one of them only, so the forward already knows the derivative
    of each with respect to the odds; the backward weighs it with the upstream gradient and pulls it through the odds.
    """

    @staticmethod
    def forward(
        ctx: Any,
        rows: Tensor,
        weight: Tensor,
        values: Tensor,
        odds: Tensor,
        grad_odds: Tensor,
        gram: Tensor,
        slots: Tensor,
        labels: Tensor,
        candidates: Tensor,
        strength: Tensor,
        centred: Tensor,
        covariance: Tensor,
        classes: Tensor,
        product: Tensor,
        impl: str,
    ) -> Tensor:
        ctx.save_for_backward(rows, odds, grad_odds, gram, slots, strength, centred, covariance, classes, product)
        num_labeled, num_unlabeled = labels.shape[0], candidates.shape[0]
        ctx.rows_per_term = (num_labeled, num_unlabeled, rows.shape[0] - num_labeled - num_unlabeled)
        ctx.impl = impl
        return values[1:].clone()

    @staticmethod
    @first_order_only
    def backward(ctx: Any, grad_terms: Tensor) -> tuple[Tensor | None, ...]:
        rows, odds, grad_odds, gram, slots, strength, *classifier = ctx.saved_tensors
        upstream = [grad.expand(count) for grad, count in zip(grad_terms.unbind(), ctx.rows_per_term, strict=True)]
        weighted = grad_odds * torch.cat(upstream)[:, None]
        need_rows, need_weight = ctx.needs_input_grad[:2]
        grad_rows, grad_gram = log_odds_backward(
            weighted, rows, odds, gram, slots, strength, need_rows, need_weight, ctx.impl
        )
        grad_weight = class_gram_backward(grad_gram, *classifier, ctx.impl) if need_weight else None
        return (grad_rows if need_rows else None, grad_weight, *[None] * 13)
