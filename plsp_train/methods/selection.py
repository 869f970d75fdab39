"""Selection of reliable instances, which are treated as labelled."""

import torch
from torch import Tensor

from plsp_kernels import class_activation_labels


def select_reliable(
    logits: Tensor, candidates: Tensor, k: int, *, agree_with_best: bool = False
) -> tuple[Tensor, Tensor]:
    """Ω_l, equations (3) and (4): the k instances of highest class activation value of every class.

    Returns their indices, and the label of every instance: its candidate of highest class activation value. With
    agree_with_best, only instances whose label has the highest value of all classes can be selected.
    """
    labels = class_activation_labels(logits, candidates)
    own = logits.gather(1, labels[:, None])[:, 0]
    activation = own * (own - 1).abs()
    eligible = torch.arange(len(logits), device=logits.device)
    if agree_with_best:
        best = class_activation_labels(logits, torch.ones_like(candidates))
        eligible = (best == labels).nonzero()[:, 0]
    # By descending value, then stably by class: the instances of a class are contiguous, best first.
    by_value = eligible[activation[eligible].argsort(descending=True, stable=True)]
    by_class = by_value[labels[by_value].argsort(stable=True)]
    members = labels[by_class].bincount(minlength=logits.shape[1])
    rank = torch.arange(len(by_class), device=logits.device) - (members.cumsum(0) - members)[labels[by_class]]
    return by_class[rank < k], labels
