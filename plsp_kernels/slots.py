"""Which classes a step needs: their Gram matrices are computed once, in slots, however many samples share them."""

import torch
from torch import Tensor


def class_slots(classes: Tensor, num_classes: int) -> tuple[Tensor, Tensor]:
    """Distinct classes of the samples (U,) and the slot of each sample (N,).

    U is known from the shapes alone, so nothing waits for the device: all l classes when there are at least as many
    samples, otherwise as many slots as samples, the distinct classes in front and -1 behind.
    """
    if classes.shape[0] >= num_classes:
        # A view, as torch.compile refuses an autograd.Function that is given one tensor as slots and as targets.
        return torch.arange(num_classes, device=classes.device), classes.view_as(classes)
    ordered, order = classes.sort()
    rank = torch.cat([torch.zeros_like(ordered[:1]), (ordered[1:] != ordered[:-1]).long()]).cumsum(0)
    slots = torch.empty_like(rank).scatter_(0, order, rank)
    distinct = torch.full_like(classes, -1).scatter_(0, rank, ordered)
    return distinct, slots
