"""The candidate with the highest class activation value."""

import math

import torch
from torch import Tensor


def class_activation_labels(logits: Tensor, candidates: Tensor) -> Tensor:
    """argmax_{j∈C_i} z_ij |z_ij - 1|: (N,)."""
    activation = (logits * (logits - 1).abs()).clamp(min=torch.finfo(logits.dtype).min)  # above a non-candidate's -inf
    return torch.where(candidates, activation, -math.inf).argmax(dim=1)
