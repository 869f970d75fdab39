"""plsp::probit_probabilities: pseudo-targets carry no gradient, so there is no autograd function."""

import torch
from torch import Tensor

from plsp_kernels.ops.registration import define_operator


def _fake_probit_probabilities(
    logits: Tensor, gram: Tensor, slots: Tensor, strength: Tensor, beta: float, impl: str
) -> Tensor:
    return torch.empty_like(logits, memory_format=torch.contiguous_format)


probit_probabilities = define_operator(
    "probit_probabilities(Tensor logits, Tensor gram, Tensor slots, Tensor strength, float beta, str impl) -> Tensor",
    _fake_probit_probabilities,
)
