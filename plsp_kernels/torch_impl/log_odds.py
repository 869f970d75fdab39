"""Semantic log-odds, from which all three terms of the loss are computed.

Proposition 1 bounds -log p_j by -log of an adjusted softmax. Excluding the term k = j from the denominator,

    o_j = z_j - logsumexp_{k≠j}( z_k + (λ/2) Q[k, j] ),      p_j = sigmoid(o_j),

so log p_j = logsigmoid(o_j) and log(1 - p_j) = logsigmoid(-o_j). Both are exact in either tail, need no clamp, and are
finite for finite logits. With d = ∂L/∂o and P[k|j] the softmax of the exponent over k ≠ j,

    ∂L/∂z_k = d_k - Σ_{j≠k} d_j P[k|j],      ∂L/∂Q[k, j] = -(λ/2) d_j P[k|j]   (summed over the samples of a class).

With g = diag(G) the exponent separates into z_k + (λ/2) g_k, (λ/2) g_j and -λ G[j, k]. The direct form never
materialises Q. The separable form computes the sums over pairs as matrix products with exp(-λ G).
"""

import functools
import math
from typing import NamedTuple

import torch
from torch import Tensor

from plsp_kernels.quadratic import gram_gradient
from plsp_kernels.rows import Rows, host_number
from plsp_kernels.torch_impl.chunks import chunk_slices
from plsp_kernels.torch_impl.groups import Groups, group_by_slot


def log_odds(rows: Rows) -> Tensor:
    """o_ij of each row: (N, l)."""
    return RowLogOdds(rows).values


def log_odds_backward(
    rows: Rows, log_odds: Tensor, grad_log_odds: Tensor, need_logits: bool, need_gram: bool
) -> tuple[Tensor, Tensor]:
    """Gradients with respect to the logits (N, l) and gram (U, l, l), the latter symmetric; empty if not needed."""
    return RowLogOdds(rows, log_odds).backward(grad_log_odds, need_logits, need_gram)


class PairMatrices(NamedTuple):
    """Memory for two matrices per slot, each (U, l, l)."""

    kernel: Tensor  # exp(-λ G)
    grad_gram: Tensor  # ∂L/∂G


class RowLogOdds:
    """Log-odds of rows of logits and the intermediate results of their backward.

    Values passed in are not recomputed. Memory passed in may be used for the matrices, including the result ∂L/∂G.
    """

    def __init__(self, rows: Rows, values: Tensor | None = None, memory: PairMatrices | None = None) -> None:
        self.gram, self.slots, self.strength = rows.gram, rows.slots, host_number(rows.strength)
        diagonal, self.shifted = _shifted_logits(rows)
        # logsumexp_{k≠j} of the exponents, minus (λ/2) g_j
        log_sum = None if values is None else (rows.logits - values).sub_(diagonal)
        self.separable = _Separable.of(rows, self.shifted, log_sum, memory)
        if log_sum is None:
            log_sum = self._log_sum() if self.separable is None else self.separable.log_sum()
        self.log_sum = log_sum
        self.values = (rows.logits - log_sum).sub_(diagonal) if values is None else values

    def _log_sum(self) -> Tensor:
        log_sum = torch.empty_like(self.shifted)
        for part, columns in _pair_chunks(self.shifted):
            log_sum[part, columns] = self._exponents(part, columns).logsumexp(-1)
        return log_sum

    def _exponents(self, part: slice, columns: slice) -> Tensor:
        """z_k + (λ/2) g_k - λ G[j, k] with -inf at k = j, indexed [i, j, k]: (chunk, columns, l)."""
        exponents = self.gram[:, columns][self.slots[part]].mul_(-self.strength).add_(self.shifted[part, None, :])
        exponents.diagonal(offset=columns.start, dim1=1, dim2=2).fill_(-math.inf)
        return exponents

    def backward(self, grad_log_odds: Tensor, need_logits: bool, need_gram: bool) -> tuple[Tensor, Tensor]:
        """Same as log_odds_backward."""
        backward = self._backward if self.separable is None else self.separable.backward
        pulled, grad_gram = backward(grad_log_odds, need_gram)
        return grad_log_odds - pulled if need_logits else pulled.new_empty(0), grad_gram

    def _backward(self, grad_log_odds: Tensor, need_gram: bool) -> tuple[Tensor, Tensor]:
        """Σ_j d_j P[k|j] (N, l) and ∂L/∂G in the direct form."""
        pulled = torch.zeros_like(self.shifted)
        pair_grad = torch.zeros_like(self.gram) if need_gram else self.gram.new_empty(0)
        log_sum = self.log_sum.clamp(min=torch.finfo(pulled.dtype).min)  # -inf if every other class is excluded
        for part, columns in _pair_chunks(self.shifted):
            pairs = self._exponents(part, columns).sub_(log_sum[part, columns, None]).exp_()
            pairs.mul_(grad_log_odds[part, columns, None])
            pulled[part] += pairs.sum(1)
            if need_gram:
                pair_grad[:, columns].index_add_(0, self.slots[part], pairs)
        return pulled, gram_gradient(pair_grad.mul_(-self.strength / 2)) if need_gram else pair_grad


def _shifted_logits(rows: Rows) -> tuple[Tensor, Tensor]:
    """(λ/2) g_j and z_k + (λ/2) g_k per row, each (N, l)."""
    halved = rows.gram.diagonal(dim1=1, dim2=2) * (host_number(rows.strength) / 2)
    diagonal = halved.index_select(0, rows.slots)
    return diagonal, rows.logits + diagonal


def _pair_chunks(logits: Tensor) -> list[tuple[slice, slice]]:
    """Chunks of samples, and of columns j if the pairs of a single sample exceed the budget."""
    (count, num_classes), dtype = logits.shape, logits.dtype
    return [
        (part, columns)
        for part in chunk_slices(count, num_classes**2, dtype)
        for columns in chunk_slices(num_classes, num_classes * (part.stop - part.start), dtype)
    ]


class _Separable:
    """The separable form: exp(-λ G[j, k]) once per class, and sums over k as matrix products.

    It is valid only if its values stay inside the exponent range. Checking this is free on a CPU but needs a host sync
    elsewhere, so other devices use the direct form.
    """

    def __init__(
        self, rows: Rows, shifted: Tensor, groups: Groups, log_sum: Tensor | None, memory: PairMatrices | None
    ) -> None:
        self.groups, self.num_slots, self.strength = groups, rows.gram.shape[0], float(rows.strength)
        kernel = None if memory is None else memory.kernel
        self.grad_gram = None if memory is None else memory.grad_gram
        self.largest = shifted.amax(1, keepdim=True)  # (N, 1)
        self.scale = groups.spread((shifted - self.largest).exp_())
        self.kernel = torch.mul(rows.gram[: groups.num_slots], -self.strength, out=kernel).exp_()  # (U, l, l)
        self.kernel.diagonal(dim1=1, dim2=2).zero_()  # leaves out k = j
        if log_sum is None:
            self.sums = groups.multiply(self.scale, self.kernel)  # (N, l)
        else:
            self.sums = (log_sum - self.largest).exp_()

    @staticmethod
    def of(rows: Rows, shifted: Tensor, log_sum: Tensor | None, memory: PairMatrices | None) -> "_Separable | None":
        """Return the separable form of the rows, or None if the direct form must be used."""
        if shifted.device.type != "cpu" or shifted.shape[0] == 0:
            return None
        # By Cauchy-Schwarz, no entry of a Gram matrix exceeds its largest diagonal entry.
        reach = float(rows.strength) * float(rows.gram.diagonal(dim1=1, dim2=2).max())
        exponent_range = _exponent_range(shifted.dtype)
        if not reach <= exponent_range:
            return None
        groups = group_by_slot(rows.slots, rows.gram)
        if groups is None:
            return None
        separable = _Separable(rows, shifted, groups, log_sum, memory)
        # Every sum must be far above the terms that underflowed to zero and may have been scaled by up to exp(reach).
        return separable if float(separable.sums.min()) >= math.exp(reach - exponent_range) else None

    def log_sum(self) -> Tensor:
        return self.sums.log().add_(self.largest)

    def backward(self, grad_log_odds: Tensor, need_gram: bool) -> tuple[Tensor, Tensor]:
        """Σ_j d_j P[k|j] (N, l) and ∂L/∂G."""
        share = self.groups.spread(grad_log_odds / self.sums)
        pulled = self.groups.multiply(share, self.kernel).mul_(self.scale.rows)
        if not need_gram:
            return pulled, pulled.new_empty(0)
        # D = ∂L/∂Q is -(λ/2) exp(-λG) ∘ Σ_i s_i u_iᵀ, so D + Dᵀ needs no transposing copy of an (l, l) matrix.
        halved = self.groups.spread(share.rows * (self.strength / 2))
        grad_gram = self.groups.symmetric_outer(self.scale, halved, self.grad_gram).mul_(self.kernel)
        grad_gram.diagonal(dim1=1, dim2=2).copy_(grad_gram.sum(-1).neg_())
        if grad_gram.shape[0] < self.num_slots:
            unused = grad_gram.new_zeros(self.num_slots - grad_gram.shape[0], *grad_gram.shape[1:])
            grad_gram = torch.cat([grad_gram, unused])
        return pulled, grad_gram


@functools.cache
def _exponent_range(dtype: torch.dtype) -> float:
    """Range of negative exponents that the dtype represents with full precision."""
    info = torch.finfo(dtype)
    return math.log(info.eps / info.tiny)
