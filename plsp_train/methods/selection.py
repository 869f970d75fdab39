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


def remember(scores: Scores, labels: Tensor, activation: Tensor, memory: float) -> Scores:
    """Scores whose activation values remember those of the epoch before, which had these labels and values.

    An instance whose label has changed starts anew from zero: it is selected only after it has kept its label for a
    while, or if no instance of its class has.
    """
    now = scores.activation
    moved = torch.lerp(now, activation, memory)
    fresh = torch.minimum(now, (1 - memory) * now)  # values may be negative
    return scores._replace(activation=torch.where(scores.labels == labels, moved, fresh))


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
