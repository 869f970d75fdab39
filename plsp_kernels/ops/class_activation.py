"""plsp::class_activation_labels: labels carry no gradient, so there is no autograd function."""

import torch
from torch import Tensor

from plsp_kernels.ops.registration import define_operator


def _fake(logits: Tensor, candidates: Tensor) -> Tensor:
    return candidates.new_empty(logits.shape[0], dtype=torch.int64)


class_activation_labels = define_operator(
    "class_activation_labels(Tensor logits, Tensor candidates, str impl) -> Tensor",
    _fake,
    {"logits": "float N l", "candidates": "bool N l"},
)
