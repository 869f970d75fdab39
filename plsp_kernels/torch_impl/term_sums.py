"""The three terms of the loss as sums over samples, computed from log-odds and probit probabilities."""

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from plsp_kernels.rows import Rows, host_number
from plsp_kernels.step import Step
from plsp_kernels.torch_impl.log_odds import PairMatrices, RowLogOdds
from plsp_kernels.torch_impl.probit import probit_probabilities


class TermSums(NamedTuple):
    """Sums of the terms over the samples of a step, and the results of its rows."""

    terms: Tensor  # (3,): supervised, consistency, complementary
    grad_logits: Tensor  # (Bl + 2 Bu, l), or (0,) if not needed
    confidence: Tensor
    prediction: Tensor
    mask: Tensor  # (Bu,) each


class Wanted(NamedTuple):
    """The gradients to compute: those of Σ factors · terms."""

    factors: Sequence[float | Tensor]  # three
    need_logits: bool
    need_weight: bool


def term_sums(step: Step, rows: Rows, wanted: Wanted, memory: PairMatrices | None = None) -> tuple[TermSums, Tensor]:
    """Equations (11), (12), (14), (15), as sums over the samples instead of means, and ∂L/∂G (U, l, l) if needed.

    The rows are the labelled, strong and weak logits and, if they have candidate sets, the labelled logits again.
    """
    candidates, num_labeled = step.candidates, step.labels.shape[0]
    weak = num_labeled + candidates.shape[0]  # first row of the weak view
    log_odds = RowLogOdds(rows, memory=memory)
    weak_view = slice(weak, weak + candidates.shape[0])
    weak_rows = rows._replace(logits=rows.logits[weak_view], slots=rows.slots[weak_view])
    probabilities = probit_probabilities(weak_rows, step.beta)
    confidence, prediction = probabilities.max(dim=1)
    mask = confidence >= _required_confidence(step.thresholds, prediction, confidence.dtype)
    if step.argmax_in_candidates:
        mask = mask & candidates.gather(1, prediction[:, None])[:, 0]

    # Each term is a weighted sum of -logsigmoid(±o): + for classes to raise, - for classes to suppress. The weights
    # carry the sign as well, so the gradient with respect to the log-odds is sigmoid(∓o) times the weight.
    weights = torch.zeros_like(rows.logits)
    labeled_weights, strong_weights, weak_weights = weights.tensor_split((num_labeled, weak))
    labeled_weights.scatter_(1, step.labels[:, None], -1)
    _write_targets(strong_weights, probabilities, mask, weak_rows.logits, candidates)
    _write_outside(weak_weights, step)

    signed = log_odds.values.clone()
    signed[weak:].neg_()
    # A logit of -inf stands for an excluded class: with weight zero, it must not make the loss NaN.
    losses = F.logsigmoid(signed).clamp_(min=torch.finfo(signed.dtype).min).mul_(weights)
    supervised, consistency, complementary = (block.sum() for block in losses.tensor_split((num_labeled, weak)))
    terms = torch.stack([supervised, consistency, -complementary])

    grad_logits, grad_gram = rows.logits.new_empty(0), rows.gram.new_empty(0)
    if wanted.need_logits or wanted.need_weight:
        grad_log_odds = signed.neg_().sigmoid_().mul_(weights)
        for block, factor in zip(grad_log_odds.tensor_split((num_labeled, weak)), wanted.factors, strict=True):
            block.mul_(factor)
        grad_logits, grad_gram = log_odds.backward(grad_log_odds, wanted.need_logits, wanted.need_weight)
    if wanted.need_logits and step.labeled_candidates is not None:
        grad_logits, again = grad_logits.split([weak_view.stop, num_labeled])
        grad_logits[:num_labeled] += again
    return TermSums(terms, grad_logits, confidence, prediction, mask), grad_gram


def _required_confidence(thresholds: Tensor, prediction: Tensor, dtype: torch.dtype) -> float | Tensor:
    """One threshold for all classes, or the thresholds of the predicted classes: (Bu,)."""
    return host_number(thresholds) if thresholds.dim() == 0 else thresholds.to(dtype).index_select(0, prediction)


def _write_outside(out: Tensor, step: Step) -> None:
    """Write 1 for classes outside the candidate sets of the unlabelled and, if given, of the labelled batch."""
    unlabeled, labeled = out.tensor_split((step.candidates.shape[0],))
    torch.logical_not(step.candidates, out=unlabeled)
    if step.labeled_candidates is not None:
        torch.logical_not(step.labeled_candidates, out=labeled)


def _write_targets(out: Tensor, probabilities: Tensor, mask: Tensor, logits: Tensor, candidates: Tensor) -> None:
    """Write the negated pseudo-targets of the instances in the mask.

    Pseudo-targets are the normalised probabilities of the candidates or, if all of these underflow, the softmax of the
    candidate logits.
    """
    inside = probabilities * candidates
    mass = inside.sum(1, keepdim=True)
    lost = mass < torch.finfo(mass.dtype).tiny
    if logits.device.type != "cpu" or lost.any():
        fallback = logits.masked_fill(~candidates, -math.inf).softmax(1)
        inside, mass = torch.where(lost, fallback, inside), torch.where(lost, 1, mass)
    torch.mul(inside, mask[:, None] / mass.neg_(), out=out)
