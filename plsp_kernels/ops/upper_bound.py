"""plsp::upper_bound, the loss of one step, and its autograd function."""

from typing import Any

import torch
from torch import Tensor

from plsp_kernels.ops.log_odds import log_odds_backward
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
    beta: float,
    argmax_in_candidates: bool,
    impl: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    num_unlabeled = candidates.shape[0]
    return (
        rows.new_empty(3),
        torch.empty_like(rows, memory_format=torch.contiguous_format),
        torch.empty_like(rows, memory_format=torch.contiguous_format),
        rows.new_empty(num_unlabeled),
        labels.new_empty(num_unlabeled),
        candidates.new_empty(num_unlabeled),
    )


upper_bound = define_operator(
    "upper_bound(Tensor rows, Tensor gram, Tensor slots, Tensor labels, Tensor candidates, Tensor? labeled_candidates,"
    " Tensor thresholds, Tensor strength, float beta, bool argmax_in_candidates, str impl)"
    " -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
    _fake_upper_bound,
)


class UpperBound(torch.autograd.Function):
    """The three terms of the loss, and confidence, prediction and mask of the unlabelled batch.

    Every row of logits feeds one term only, so the forward already knows the derivative of each term with respect to
    the odds; the backward weighs it with the upstream gradient and pulls it through the log-odds.
    """

    @staticmethod
    def forward(
        ctx: Any,
        rows: Tensor,
        gram: Tensor,
        slots: Tensor,
        labels: Tensor,
        candidates: Tensor,
        labeled_candidates: Tensor | None,
        thresholds: Tensor,
        strength: Tensor,
        beta: float,
        argmax_in_candidates: bool,
        impl: str,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        terms, odds, grad_odds, confidence, prediction, mask = upper_bound(
            rows,
            gram,
            slots,
            labels,
            candidates,
            labeled_candidates,
            thresholds,
            strength,
            beta,
            argmax_in_candidates,
            impl,
        )
        ctx.save_for_backward(rows, odds, grad_odds, gram, slots, strength)
        ctx.impl = impl
        num_labeled, num_unlabeled = labels.shape[0], candidates.shape[0]
        ctx.rows_per_term = (num_labeled, num_unlabeled, rows.shape[0] - num_labeled - num_unlabeled)
        ctx.mark_non_differentiable(confidence, prediction, mask)
        return terms, confidence, prediction, mask

    @staticmethod
    @first_order_only
    def backward(ctx: Any, grad_terms: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
        rows, odds, grad_odds, gram, slots, strength = ctx.saved_tensors
        upstream = [grad.expand(count) for grad, count in zip(grad_terms.unbind(), ctx.rows_per_term, strict=True)]
        weighted = grad_odds * torch.cat(upstream)[:, None]
        need_rows, need_gram = ctx.needs_input_grad[:2]
        grad_rows, grad_gram = log_odds_backward(
            weighted, rows, odds, gram, slots, strength, need_rows, need_gram, ctx.impl
        )
        return (grad_rows if need_rows else None, grad_gram if need_gram else None, *[None] * 9)
