"""Selection of reliable instances, which are treated as labelled."""

from typing import NamedTuple

import torch
from torch import Tensor

from plsp_kernels import class_activation_labels


class Scores(NamedTuple):
    """What the selection needs to know of every instance."""

    labels: Tensor
    """(n,): the candidate of highest class activation value."""
    activation: Tensor
    """(n,): that value."""
    agrees: Tensor
    """(n,) bool: no class outside the candidate set has a higher one."""


def score_instances(logits: Tensor, candidates: Tensor) -> Scores:
    """Equation (3) for a batch of instances."""
    labels = class_activation_labels(logits, candidates)
    own = logits.gather(1, labels[:, None])[:, 0]
    best = class_activation_labels(logits, torch.ones_like(candidates))
    return Scores(labels, own * (own - 1).abs(), best == labels)


def soft_sizes(logits: Tensor, candidates: Tensor) -> Tensor:
    """(l,): the sum over a batch of the probabilities of each class among the candidates."""
    return logits.masked_fill(~candidates, -torch.inf).softmax(1).sum(0)


def alignment(sizes: Tensor, expected: Tensor) -> Tensor:
    """(l,): what to add to logits to bring classes of these sizes closer to the expected ones."""
    least = torch.finfo(sizes.dtype).tiny  # finite logarithms for classes that are never predicted or never candidates
    return expected.clamp_min(least).log() - sizes.clamp_min(least).log()


def select_reliable(scores: Scores, num_classes: int, k: int, *, agree_with_best: bool = False) -> Tensor:
    """Ω_l, equation (4): indices of the k instances of highest class activation value of every class.

    With agree_with_best, only instances whose label has the highest value of all classes can be selected.
    """
    labels, activation, agrees = scores
    eligible = agrees.nonzero()[:, 0] if agree_with_best else torch.arange(len(labels), device=labels.device)
    # By descending value, then stably by class: the instances of a class are contiguous, best first.
    by_value = eligible[activation[eligible].argsort(descending=True, stable=True)]
    by_class = by_value[labels[by_value].argsort(stable=True)]
    members = labels[by_class].bincount(minlength=num_classes)
    rank = torch.arange(len(by_class), device=labels.device) - (members.cumsum(0) - members)[labels[by_class]]
    return by_class[rank < k]
