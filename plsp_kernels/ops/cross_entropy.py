"""plsp::cross_entropy, the semantic cross-entropy of a labelled batch, and its autograd functions."""

from typing import Any

import torch
from torch import Tensor

from plsp_kernels.batch import CrossEntropyResult, LabeledBatch, compute_dtype
from plsp_kernels.ops.registration import as_output, define_operator, first_order_only, scaled


def _fake(batch: LabeledBatch, upstream: Tensor | None, need_logits: bool, need_weight: bool) -> CrossEntropyResult:
    result = batch.weight.new_empty(0, dtype=compute_dtype(batch))
    return CrossEntropyResult(
        loss=result.new_empty(batch.labels.shape if batch.reduction == "none" else ()),
        grad_logits=result.new_empty(batch.logits.shape) if need_logits else result,
        grad_weight=result.new_empty(batch.weight.shape) if need_weight else result.new_empty(0),
    )


# upstream (N,): weights of the rows' losses in the scalar that is differentiated; None for those of the reduced loss.
_cross_entropy = define_operator(
    "cross_entropy(Tensor logits, Tensor weight, Tensor covariance, Tensor labels, Tensor? class_weight,"
    " Tensor strength, float label_smoothing, int ignore_index, str reduction, Tensor? upstream, bool need_logits,"
    " bool need_weight, str impl) -> (Tensor, Tensor, Tensor)",
    _fake,
    {
        "logits": "float N l",
        "weight": "float l d",
        "covariance": "float l d d | l d",
        "labels": "int64 N",
        "class_weight": "float l",
        "strength": "float ()",
        "upstream": "float N",
    },
    LabeledBatch,
)


def cross_entropy(batch: LabeledBatch, impl: str) -> Tensor:
    """Compute the loss of a checked batch.

    The forward pass computes the gradients of a reduced loss from the same intermediate results. Without reduction the
    upstream gradient of every row is needed first: the backward computes the batch again.
    """
    if batch.reduction == "none":
        return _RowLosses.apply(*batch, impl)
    needs = [torch.is_grad_enabled() and tensor.requires_grad for tensor in (batch.logits, batch.weight)]
    with torch.no_grad():
        result = CrossEntropyResult(*_cross_entropy(*batch, None, *needs, impl))
    return _ReducedLoss.apply(batch.logits, batch.weight, *result)


class _ReducedLoss(torch.autograd.Function):
    """The sum or mean. Its gradients are computed in the forward pass."""

    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, weight: Tensor, loss: Tensor, grad_logits: Tensor, grad_weight: Tensor
    ) -> Tensor:
        ctx.save_for_backward(grad_logits, grad_weight)
        ctx.dtypes = logits.dtype, weight.dtype
        return as_output(ctx, loss)

    @staticmethod
    @first_order_only
    def backward(ctx: Any, grad_loss: Tensor) -> tuple[Tensor | None, ...]:
        found = [
            scaled(gradient, grad_loss, dtype) if needed else None
            for gradient, dtype, needed in zip(ctx.saved_tensors, ctx.dtypes, ctx.needs_input_grad[:2], strict=True)
        ]
        return *found, None, None, None


class _RowLosses(torch.autograd.Function):
    """The losses of the rows (N,). Σ is not copied: autograd raises an error if it was updated before the backward."""

    @staticmethod
    def forward(ctx: Any, *given: Any) -> Tensor:
        *batch, impl = given
        ctx.save_for_backward(*batch[:6])
        ctx.options, ctx.impl = batch[6:], impl
        return _cross_entropy(*batch, None, False, False, impl)[0]

    @staticmethod
    @first_order_only
    def backward(ctx: Any, grad_losses: Tensor) -> tuple[Tensor | None, ...]:
        tensors, needs = ctx.saved_tensors, ctx.needs_input_grad[:2]
        result = CrossEntropyResult(*_cross_entropy(*tensors, *ctx.options, grad_losses, *needs, ctx.impl))
        found = [
            gradient.to(tensor.dtype) if needed else None
            for gradient, tensor, needed in zip(
                (result.grad_logits, result.grad_weight), tensors[:2], needs, strict=True
            )
        ]
        return *found, *[None] * (len(LabeledBatch._fields) - 2 + 1)
