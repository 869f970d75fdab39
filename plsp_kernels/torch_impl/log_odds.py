"""Semantic log-odds, the quantity behind all three terms of the loss.

Proposition 1 bounds -log p_j by -log of an adjusted softmax. Leaving the own term out of its denominator,

    o_j = z_j - logsumexp_{k≠j}( z_k + (λ/2) Q[k, j] ),      p_j = sigmoid(o_j),

so that log p_j = logsigmoid(o_j) and log(1 - p_j) = logsigmoid(-o_j): both are exact in either tail, neither needs a
clamp, and for finite logits neither is ever infinite. For d = ∂L/∂o and P[k|j] = softmax of that exponent over k ≠ j

    ∂L/∂z_k = d_k - Σ_{j≠k} d_j P[k|j],      ∂L/∂Q[k, j] = -(λ/2) d_j P[k|j]   (summed over the samples of a class).

With g = diag(G) the exponent separates into z_k + (λ/2) g_k, (λ/2) g_j and -λ G[j, k]: the direct form below never
forms Q, and the separable form turns the sums over pairs into matrix products with exp(-λ G).
"""

import functools
import math

import torch
from torch import Tensor

from plsp_kernels.torch_impl.chunks import chunk_slices
from plsp_kernels.torch_impl.class_gram import gram_gradient
from plsp_kernels.torch_impl.groups import Groups, group_by_slot


def log_odds(logits: Tensor, gram: Tensor, slots: Tensor, strength: float) -> Tensor:
    """o_ij for the samples of logits (N, l), sample i having the Gram matrix gram[slots[i]]: (N, l)."""
    return LogOdds(logits, gram, slots, strength).odds


def log_odds_backward(
    grad_odds: Tensor,
    logits: Tensor,
    odds: Tensor,
    gram: Tensor,
    slots: Tensor,
    strength: float,
    need_logits: bool,
    need_gram: bool,
) -> tuple[Tensor, Tensor]:
    """Gradients of log_odds: with respect to the logits (N, l) and, symmetric, to gram (U, l, l); empty if unneeded."""
    return LogOdds(logits, gram, slots, strength, odds).backward(grad_odds, need_logits, need_gram)


class LogOdds:
    """The odds of a batch, and of their computation what the gradients need; known odds are not computed again."""

    def __init__(
        self, logits: Tensor, gram: Tensor, slots: Tensor, strength: float, odds: Tensor | None = None
    ) -> None:
        self.gram, self.slots, self.strength = gram, slots, strength
        diagonal, self.shifted = _shifted_logits(logits, gram, slots, strength)
        # logsumexp_{k≠j} of the exponents, less (λ/2) g_j
        log_sum = None if odds is None else (logits - odds).sub_(diagonal)
        self.separable = _Separable.of(self.shifted, gram, slots, strength, log_sum)
        if log_sum is None:
            log_sum = self._log_sum() if self.separable is None else self.separable.log_sum()
        self.log_sum = log_sum
        self.odds = (logits - log_sum).sub_(diagonal) if odds is None else odds

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

    def backward(self, grad_odds: Tensor, need_logits: bool, need_gram: bool) -> tuple[Tensor, Tensor]:
        """As log_odds_backward."""
        if self.separable is not None:
            pulled, pair_grad = self.separable.backward(grad_odds, self.gram, need_gram)
        else:
            pulled = torch.zeros_like(self.shifted)
            pair_grad = torch.zeros_like(self.gram) if need_gram else self.gram.new_empty(0)
            for part, columns in _pair_chunks(self.shifted):
                pairs = self._exponents(part, columns).sub_(self.log_sum[part, columns, None]).exp_()
                pairs.mul_(grad_odds[part, columns, None])
                pulled[part] += pairs.sum(1)
                if need_gram:
                    pair_grad[:, columns].index_add_(0, self.slots[part], pairs)
        grad_logits = grad_odds - pulled if need_logits else grad_odds.new_empty(0)
        return grad_logits, gram_gradient(pair_grad.mul_(-self.strength / 2)) if need_gram else pair_grad


def target_log_odds(logits: Tensor, gram: Tensor, slots: Tensor, targets: Tensor, strength: float) -> Tensor:
    """o_ij for the one column j = targets[i] of each sample: (N,)."""
    target_logits = logits.gather(1, targets[:, None])[:, 0]
    return target_logits - _target_exponents(logits, gram, slots, targets, strength).logsumexp(-1)


def target_log_odds_backward(
    grad_odds: Tensor,
    logits: Tensor,
    odds: Tensor,
    gram: Tensor,
    slots: Tensor,
    targets: Tensor,
    strength: float,
    need_logits: bool,
    need_gram: bool,
) -> tuple[Tensor, Tensor]:
    """Gradients of target_log_odds, as log_odds_backward gives them."""
    num_classes = logits.shape[1]
    log_sum = logits.gather(1, targets[:, None]).sub_(odds[:, None])
    pulled = _target_exponents(logits, gram, slots, targets, strength).sub_(log_sum).exp_().mul_(grad_odds[:, None])
    pair_grad = torch.zeros_like(gram) if need_gram else gram.new_empty(0)
    if need_gram:
        pair_grad.view(-1, num_classes).index_add_(0, slots * num_classes + targets, pulled, alpha=-strength / 2)
        pair_grad = gram_gradient(pair_grad)
    if not need_logits:
        return logits.new_empty(0), pair_grad
    return pulled.neg_().scatter_add_(1, targets[:, None], grad_odds[:, None]), pair_grad


def _shifted_logits(logits: Tensor, gram: Tensor, slots: Tensor, strength: float) -> tuple[Tensor, Tensor]:
    """(λ/2) g_j and z_k + (λ/2) g_k per sample, each (N, l)."""
    diagonal = (gram.diagonal(dim1=1, dim2=2) * (strength / 2)).index_select(0, slots)
    return diagonal, logits + diagonal


def _pair_chunks(logits: Tensor) -> list[tuple[slice, slice]]:
    """Chunks of samples, and of columns j where the pairs of a single sample exceed the budget."""
    (count, num_classes), dtype = logits.shape, logits.dtype
    return [
        (part, columns)
        for part in chunk_slices(count, num_classes**2, dtype)
        for columns in chunk_slices(num_classes, num_classes * (part.stop - part.start), dtype)
    ]


def _target_exponents(logits: Tensor, gram: Tensor, slots: Tensor, targets: Tensor, strength: float) -> Tensor:
    """z_k + (λ/2) Q[k, targets[i]] with -inf at k = targets[i]: (N, l)."""
    diagonal, shifted = _shifted_logits(logits, gram, slots, strength)
    exponents = gram[slots, targets].mul_(-strength).add_(shifted).add_(diagonal.gather(1, targets[:, None]))
    return exponents.scatter_(1, targets[:, None], -math.inf)


class _Separable:
    """The separable form: exp(-λ G[j, k]) once per class, the sums over k as matrix products.

    Asking whether its numbers stay inside the exponent range costs nothing on a CPU; on other devices it would wait
    for the device, so there the direct form serves.
    """

    def __init__(self, shifted: Tensor, gram: Tensor, groups: Groups, strength: float, log_sum: Tensor | None) -> None:
        self.groups = groups
        self.largest = shifted.amax(1, keepdim=True)  # (N, 1)
        self.scale = groups.spread((shifted - self.largest).exp_())
        self.kernel = (gram[: groups.num_slots] * -strength).exp_()  # (U, l, l), zero at k = j
        self.kernel.diagonal(dim1=1, dim2=2).zero_()
        if log_sum is None:
            self.sums = groups.multiply(self.scale, self.kernel)  # (N, l)
        else:
            self.sums = (log_sum - self.largest).exp_()

    @staticmethod
    def of(
        shifted: Tensor, gram: Tensor, slots: Tensor, strength: float, log_sum: Tensor | None
    ) -> "_Separable | None":
        """The form for these samples, or None where only the direct form serves."""
        if shifted.device.type != "cpu" or shifted.shape[0] == 0:
            return None
        # By Cauchy-Schwarz no entry of a Gram matrix exceeds its largest diagonal entry.
        reach = strength * float(gram.diagonal(dim1=1, dim2=2).max())
        exponent_range = _exponent_range(gram.dtype)
        if not reach <= exponent_range:
            return None
        groups = group_by_slot(slots, gram)
        if groups is None:
            return None
        separable = _Separable(shifted, gram, groups, strength, log_sum)
        # Every sum must be far above the terms that underflowed to zero, which exp(reach) may have multiplied.
        return separable if float(separable.sums.min()) >= math.exp(reach - exponent_range) else None

    def log_sum(self) -> Tensor:
        return self.sums.log().add_(self.largest)

    def backward(self, grad_odds: Tensor, gram: Tensor, need_gram: bool) -> tuple[Tensor, Tensor]:
        """Σ_j d_j P[k|j] (N, l) and Σ_i d_j P[k|j] (U, l, l)."""
        share = self.groups.spread(grad_odds / self.sums)
        pulled = self.groups.multiply(share, self.kernel).mul_(self.scale.rows)
        if not need_gram:
            return pulled, gram.new_empty(0)
        pair_grad = self.groups.outer(self.scale, share).mul_(self.kernel)
        if self.groups.num_slots < gram.shape[0]:
            unused = gram.new_zeros(gram.shape[0] - self.groups.num_slots, *gram.shape[1:])
            pair_grad = torch.cat([pair_grad, unused])
        return pulled, pair_grad


@functools.cache
def _exponent_range(dtype: torch.dtype) -> float:
    """Exponents below zero that the dtype resolves to full precision: its range, less its digits."""
    info = torch.finfo(dtype)
    return math.log(info.eps / info.tiny)
