"""plsp::class_gram and its autograd function."""

from typing import Any

import torch
from torch import Tensor

from plsp_kernels.ops.registration import define_operator, first_order_only
from plsp_kernels.quadratic import centred_rows, gram_gradient, quadratic_form


def fake_class_gram(weight: Tensor, covariance: Tensor, classes: Tensor, save_product: bool) -> tuple[Tensor, Tensor]:
    (num_classes, num_features), num_slots = weight.shape, classes.shape[0]
    saved = num_slots if save_product and covariance.dim() == 3 else 0
    return (
        weight.new_empty(num_slots, num_classes, num_classes),
        weight.new_empty(saved, num_classes, num_features),
    )


def _fake_class_gram_backward(
    grad_gram: Tensor, weight: Tensor, covariance: Tensor, classes: Tensor, product: Tensor
) -> Tensor:
    return torch.empty_like(weight, memory_format=torch.contiguous_format)


class_gram = define_operator(
    "class_gram(Tensor weight, Tensor covariance, Tensor classes, bool save_product, str impl) -> (Tensor, Tensor)",
    fake_class_gram,
    {"weight": "float l d", "covariance": "float l d d | l d", "classes": "int64 U"},
)
class_gram_backward = define_operator(
    "class_gram_backward(Tensor grad_gram, Tensor weight, Tensor covariance, Tensor classes, Tensor product, str impl)"
    " -> Tensor",
    _fake_class_gram_backward,
    {
        "weight": "float l d",
        "grad_gram": "float U l l",
        "covariance": "float * d d | l d",  # a full one is not read
        "classes": "int64 U",
        "product": "float * l d",
    },
)


def covariance_for_backward(covariance: Tensor) -> Tensor:
    """Return what the backward needs of Σ, which may be updated before it runs: nothing if full, a copy if diagonal."""
    return covariance.new_empty(0, *covariance.shape[1:]) if covariance.dim() == 3 else covariance.clone()


class ClassGram(torch.autograd.Function):
    """Gram matrices of the centred weight. The upstream gradient must be symmetric with rows that sum to zero."""

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
    """Quadratic forms from Gram matrices. The gradient has the properties that ClassGram requires."""

    @staticmethod
    def forward(ctx: Any, gram: Tensor) -> Tensor:
        return quadratic_form(gram)

    @staticmethod
    @first_order_only
    def backward(ctx: Any, grad_quadratic: Tensor) -> Tensor:
        return gram_gradient(grad_quadratic)
