"""plsp::upper_bound, the loss of one step, and its autograd functions."""

from typing import Any

import torch
from torch import Tensor

from plsp_kernels.ops.registration import as_output, define_operator, first_order_only, scaled
from plsp_kernels.semantic_loss import SemanticLoss
from plsp_kernels.step import Step, StepResult, compute_dtype, replace


def _fake_upper_bound(step: Step, upstream: Tensor | None, need_logits: bool, need_weight: bool) -> StepResult:
    num_labeled, num_unlabeled = step.labels.shape[0], step.candidates.shape[0]
    num_classes, num_features = step.weight.shape
    result = step.weight.new_empty(0, dtype=compute_dtype(step))
    return StepResult(
        total=result.new_empty(()),
        terms=result.new_empty(3),
        grad_logits=result.new_empty(num_labeled + 2 * num_unlabeled, num_classes) if need_logits else result,
        grad_weight=result.new_empty(num_classes, num_features) if need_weight else result.new_empty(0),
        pseudo_labels=step.labels.new_empty(num_unlabeled if step.pseudo_labels is None else 0),
        confidence=result.new_empty(num_unlabeled),
        prediction=step.labels.new_empty(num_unlabeled),
        mask=step.candidates.new_empty(num_unlabeled),
    )


# upstream (3,): weights of the terms in the scalar that is differentiated; None for those of the total, (γ, γ, 1).
_upper_bound = define_operator(
    "upper_bound(Tensor labeled_logits, Tensor weak_logits, Tensor strong_logits, Tensor weight, Tensor covariance,"
    " Tensor labels, Tensor candidates, Tensor? pseudo_labels, Tensor? labeled_candidates, Tensor thresholds,"
    " Tensor strength, Tensor ss_weight, float beta, bool argmax_in_candidates, Tensor? upstream, bool need_logits,"
    " bool need_weight, str impl) -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
    _fake_upper_bound,
    {
        "labeled_logits": "float Bl l",
        "weak_logits": "float Bu l",
        "strong_logits": "float Bu l",
        "weight": "float l d",
        "covariance": "float l d d | l d",
        "labels": "int64 Bl",
        "candidates": "bool Bu l",
        "pseudo_labels": "int64 Bu",
        "labeled_candidates": "bool Bl l",
        "thresholds": "float l | ()",
        "strength": "float ()",
        "ss_weight": "float ()",
        "upstream": "float 3",
    },
    Step,
)


def upper_bound(step: Step, impl: str) -> SemanticLoss:
    """Compute the loss of a checked step.

    Training uses the total, so the forward pass computes its gradients from the same intermediate results. A single
    term is differentiated by computing the step again with other weights of the terms.
    """
    differentiable = step.labeled_logits, step.weak_logits, step.strong_logits, step.weight
    needs = [torch.is_grad_enabled() and tensor.requires_grad for tensor in differentiable]
    with torch.no_grad():
        result = StepResult(*_upper_bound(*step, None, any(needs[:3]), needs[3], impl))
    if step.pseudo_labels is None:
        step = replace(step, pseudo_labels=result.pseudo_labels)
    total = _Total.apply(*differentiable, result.total, result.grad_logits, result.grad_weight)
    supervised, consistency, complementary = _Terms.apply(*step, result.terms, impl).unbind()
    assert step.pseudo_labels is not None
    decisions = step.pseudo_labels, result.confidence, result.prediction, result.mask
    return SemanticLoss(total, supervised, consistency, complementary, *decisions)


class _Total(torch.autograd.Function):
    """The total. Its gradients are computed in the forward pass."""

    @staticmethod
    def forward(ctx: Any, labeled: Tensor, weak: Tensor, strong: Tensor, weight: Tensor, *known: Tensor) -> Tensor:
        total, *gradients = known
        ctx.save_for_backward(*gradients)
        ctx.num_labeled, ctx.dtypes = labeled.shape[0], (labeled.dtype, weak.dtype, strong.dtype, weight.dtype)
        return as_output(ctx, total)

    @staticmethod
    @first_order_only
    def backward(ctx: Any, grad_total: Tensor) -> tuple[Tensor | None, ...]:
        grad_logits, grad_weight = ctx.saved_tensors
        *dtypes, weight_dtype = ctx.dtypes
        # Logits of one dtype, the usual case, are scaled and rounded in one launch.
        logits_dtype = dtypes[0] if dtypes[0] == dtypes[1] == dtypes[2] else grad_logits.dtype
        gradients = scaled(grad_logits, grad_total, logits_dtype), scaled(grad_weight, grad_total, weight_dtype)
        return *_gradients_of_inputs(ctx, *gradients), None, None, None


class _Terms(torch.autograd.Function):
    """The three terms. The backward computes the step again, so they hold references to its inputs only.

    Σ is not copied: autograd raises an error if it was updated in place before a term is differentiated.
    """

    @staticmethod
    def forward(ctx: Any, *given: Any) -> Tensor:
        *tensors, ctx.beta, ctx.argmax_in_candidates, terms, ctx.impl = given
        ctx.save_for_backward(*tensors)
        ctx.num_labeled, ctx.dtypes = tensors[0].shape[0], tuple(tensor.dtype for tensor in tensors[:4])
        return as_output(ctx, terms)

    @staticmethod
    @first_order_only
    def backward(ctx: Any, grad_terms: Tensor) -> tuple[Tensor | None, ...]:
        step = *ctx.saved_tensors, ctx.beta, ctx.argmax_in_candidates
        need_logits, need_weight = any(ctx.needs_input_grad[:3]), ctx.needs_input_grad[3]
        result = StepResult(*_upper_bound(*step, grad_terms, need_logits, need_weight, ctx.impl))
        unneeded = len(Step._fields) - 4 + 2
        return *_gradients_of_inputs(ctx, result.grad_logits, result.grad_weight), *[None] * unneeded


def _gradients_of_inputs(ctx: Any, grad_logits: Tensor, grad_weight: Tensor) -> tuple[Tensor | None, ...]:
    """Return the gradients of labelled, weak and strong logits and of the weight, each in the dtype of its input."""
    gradients: list[Tensor | None] = [None] * 4
    if any(ctx.needs_input_grad[:3]):
        num_unlabeled = (grad_logits.shape[0] - ctx.num_labeled) // 2
        labeled, strong, weak = grad_logits.split([ctx.num_labeled, num_unlabeled, num_unlabeled])
        gradients[:3] = labeled, weak, strong
    if ctx.needs_input_grad[3]:
        gradients[3] = grad_weight
    return tuple(None if found is None else found.to(dtype) for found, dtype in zip(gradients, ctx.dtypes, strict=True))
