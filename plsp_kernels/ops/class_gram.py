"""plsp::class_gram and its autograd function."""

from typing import Any

import torch
from torch import Tensor

from plsp_kernels.ops.registration import define_operator, first_order_only
from plsp_kernels.torch_impl.class_gram import gram_gradient


def fake_class_gram(
    weight: Tensor, covariance: Tensor, classes: Tensor, save_product: bool, impl: str
) -> tuple[Tensor, Tensor]:
    (num_classes, num_features), num_slots = weight.shape, classes.shape[0]
    saved = num_slots if save_product and covariance.dim() == 3 else 0
    return (
        weight.new_empty(num_slots, num_classes, num_classes),
        weight.new_empty(saved, num_classes, num_features),
    )


def _fake_class_gram_backward(
    grad_gram: Tensor, weight: Tensor, covariance: Tensor, classes: Tensor, product: Tensor, impl: str
) -> Tensor:
    return torch.empty_like(weight, memory_format=torch.contiguous_format)


class_gram = define_operator(
    "class_gram(Tensor weight, Tensor covariance, Tensor classes, bool save_product, str impl) -> (Tensor, Tensor)",
    fake_class_gram,
)
class_gram_backward = define_operator(
    "class_gram_backward(Tensor grad_gram, Tensor weight, Tensor covariance, Tensor classes, Tensor product, str impl)"
    " -> Tensor",
    _fake_class_gram_backward,
)


def centred_rows(weight: Tensor) -> Tensor:
    """The weight less its mean row, for functions of class-pair differences only.

    All differences w_j - w_j' stay as they are, and G is no larger than they need, so less cancels in
    G[j,j] + G[j',j'] - 2 G[j,j']. The gradient with respect to G has rows that sum to zero for the same reason, and so
    the gradient of the centred weight is that of the weight.
    """
    return weight - weight.mean(0)


def covariance_for_backward(covariance: Tensor) -> Tensor:
    """Σ may move on before the backward, which needs T_y alone if Σ is full, and a copy if Σ is diagonal."""
    return covariance.new_empty(0, *covariance.shape[1:]) if covariance.dim() == 3 else covariance.clone()


class ClassGram(torch.autograd.Function):
    """Gram matrices of the centred weight; the incoming gradient must be symmetric with rows that sum to zero."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, covariance: Tensor, classes: Tensor, save_product: bool, impl: str) -> Tensor:
        centred = centred_rows(weight)
        gram, product = class_gram(centred, covariance, classes, save_product, impl)
        ctx.save_for_backward(centred, covariance_for_backward(covariance), classes, product)
        ctx.impl = impl
        return gram

    @staticmethod
    @first_order_only
    def backward(ctx: Any, grad_gram: Tensor) -> tuple[Tensor | None, ...]:
        return class_gram_backward(grad_gram, *ctx.saved_tensors, ctx.impl), None, None, None, None


class PairQuadratic(torch.autograd.Function):
    """Q[j, j'] = G[j, j] + G[j', j'] - 2 G[j, j'], whose gradient is symmetric as ClassGram wants it."""

    @staticmethod
    def forward(ctx: Any, gram: Tensor) -> Tensor:
        diagonal = gram.diagonal(dim1=1, dim2=2)
        quadratic = diagonal[:, :, None] + diagonal[:, None, :] - 2 * gram
        # Zero where it is zero by definition, and not below where it cancels: two equal rows differ by nothing.
        own = torch.eye(gram.shape[1], dtype=torch.bool, device=gram.device)
        return quadratic.clamp(min=0).masked_fill(own, 0)

    @staticmethod
    @first_order_only
    def backward(ctx: Any, grad_quadratic: Tensor) -> Tensor:
        return gram_gradient(grad_quadratic)
