"""Quadratic forms between every class and the class y of a slot, one column of Q_y:

    q_k = (w_k - w_y)ᵀ Σ_y (w_k - w_y),        ∂L/∂w_k = 2 a_k Σ_y (w_k - w_y) for k ≠ y,
    a_k = ∂L/∂q_k,                             ∂L/∂w_y = -2 Σ_k a_k Σ_y (w_k - w_y).

A full Σ_y multiplies the differences, which leaves nothing to cancel. For diagonal ones q is expanded into two GEMMs
over all slots; where the expansion cancels, it is computed from the differences.
"""

from collections.abc import Iterator
from typing import Protocol

import torch
from torch import Tensor

from plsp_kernels.quadratic import centred_rows
from plsp_kernels.torch_impl.chunks import chunk_slices, feature_slices, product_slices

_GATHERED_FEATURES = 128  # up to this many, copying Σ_y is cheaper than operator calls for each class
_CANCELLED = 1 / 16  # share of its terms below which an expanded quadratic form is computed from the differences
_HARMLESS = 8  # λ times the terms up to which their rounding changes an exponent no more than that of the logits does


class LabelColumns(Protocol):
    quadratic: Tensor
    """q of each slot: (U, l)."""

    def add_weight_gradient(self, grad_quadratic: Tensor, out: Tensor) -> None:
        """Add the gradient with respect to the weight to out (l, d), given that of the columns (U, l)."""


class FullColumns:
    """Columns of full covariances. Keeps (w_k - w_y)ᵀ Σ_y of every slot for the gradient, in memory (≥ U, l, d)."""

    def __init__(self, weight: Tensor, covariance: Tensor, classes: Tensor, memory: Tensor) -> None:
        self.classes, self.product = classes, memory[: classes.shape[0]]
        if weight.device.type != "cpu" or weight.shape[1] <= _GATHERED_FEATURES:
            # On other devices, reading the class numbers would need a host sync.
            difference = weight - weight[classes][:, None, :]
            torch.bmm(difference, covariance[classes].to(weight.dtype), out=self.product)
            self.quadratic = difference.mul_(self.product).sum(-1)
            return
        self.quadratic = weight.new_empty(classes.shape[0], weight.shape[0])
        difference = torch.empty_like(weight)
        # One GEMM per class reads Σ_y in place; gathering the matrices first would cost as much as multiplying them.
        for y, product, quadratic in zip(classes.tolist(), self.product, self.quadratic, strict=True):
            torch.sub(weight, weight[y], out=difference)
            torch.mm(difference, covariance[y].to(weight.dtype), out=product)
            torch.sum(difference.mul_(product), 1, out=quadratic)

    def add_weight_gradient(self, grad_quadratic: Tensor, out: Tensor) -> None:
        own = torch.bmm(grad_quadratic[:, None, :], self.product)[:, 0]  # (U, d)
        for grad, product in zip(grad_quadratic, self.product, strict=True):
            out.addcmul_(grad[:, None], product, value=2)
        out.index_add_(0, self.classes, own, alpha=-2)


class StreamedColumns:
    """Columns of full covariances of any number of classes, computed again for the gradient."""

    def __init__(self, weight: Tensor, covariance: Tensor, classes: Tensor) -> None:
        self.given = weight, covariance, classes
        parts = [columns.quadratic for _, columns in self._parts()]
        self.quadratic = torch.cat(parts) if parts else weight.new_empty(0, weight.shape[0])

    def _parts(self) -> Iterator[tuple[slice, FullColumns]]:
        weight, covariance, classes = self.given
        for part in product_slices(classes.shape[0], weight):
            memory = weight.new_empty(part.stop - part.start, *weight.shape)
            yield part, FullColumns(weight, covariance, classes[part], memory)

    def add_weight_gradient(self, grad_quadratic: Tensor, out: Tensor) -> None:
        for part, columns in self._parts():
            columns.add_weight_gradient(grad_quadratic[part], out)


class DiagonalColumns:
    """Columns of diagonal covariances s_y: q_k = Σ w_k² s_y - 2 Σ w_k s_y w_y + Σ w_y² s_y.

    Centring the weight makes the terms small. Entries that still cancel are computed from the differences.
    """

    def __init__(self, weight: Tensor, variances: Tensor, classes: Tensor, strength: float | Tensor) -> None:
        """variances (U, d) of the classes (U,)."""
        self.weight, self.variances, self.classes = weight, variances, classes
        self.centred = centred_rows(weight)
        self.own = self.centred[classes]
        self.scaled = self.own * variances
        terms = (self.scaled * self.own).sum(1, keepdim=True).expand(-1, weight.shape[0]).contiguous()
        for part in feature_slices(weight):  # a part of the squares stays in cache
            terms.addmm_(variances[:, part], self.centred[:, part].square().t())
        quadratic = torch.addmm(terms, self.scaled, self.centred.t(), alpha=-2)
        self.quadratic = quadratic.clamp_(min=0).scatter_(1, classes[:, None], 0)
        self.cancelled: tuple[Tensor, Tensor] | None = None  # slots and classes k of the entries
        if weight.device.type == "cpu":  # on other devices, finding the entries would need a host sync
            # They are small against their terms, unless λ makes the rounding of these harmless.
            cancelled = (quadratic < terms * _CANCELLED) & (terms * float(strength) > _HARMLESS)
            slots, k = cancelled.scatter_(1, classes[:, None], False).nonzero(as_tuple=True)
            if slots.shape[0]:
                self.cancelled = slots, k
                for part, products, difference in self._cancelled_products():
                    self.quadratic[slots[part], k[part]] = products.mul_(difference).sum(1)

    def _cancelled_products(self) -> Iterator[tuple[slice, Tensor, Tensor]]:
        """s_y (w_k - w_y) and w_k - w_y of chunks of the entries that cancel, (n, d) each."""
        assert self.cancelled is not None
        slots, k = self.cancelled
        for part in chunk_slices(slots.shape[0], self.weight.shape[1], self.weight.dtype):
            difference = self.weight[k[part]] - self.weight[self.classes[slots[part]]]
            yield part, difference * self.variances[slots[part]], difference

    def add_weight_gradient(self, grad_quadratic: Tensor, out: Tensor) -> None:
        """As in the protocol, but out must be zero: all classes form one part, and products in place save an (l, d)."""
        whole = grad_quadratic
        if self.cancelled is not None:
            whole = grad_quadratic.index_put(self.cancelled, grad_quadratic.new_zeros(()))
        whole = 2 * whole
        out.addmm_(whole.t(), self.variances).mul_(self.centred).addmm_(whole.t(), self.scaled, alpha=-1)
        own = torch.mm(whole, self.centred)
        own.addcmul_(whole.sum(1, keepdim=True), self.own, value=-1).mul_(self.variances)
        out.index_add_(0, self.classes, own, alpha=-1)
        if self.cancelled is not None:
            slots, k = self.cancelled
            for part, products, _ in self._cancelled_products():
                products *= grad_quadratic[slots[part], k[part], None]
                out.index_add_(0, k[part], products, alpha=2)
                out.index_add_(0, self.classes[slots[part]], products, alpha=-2)
