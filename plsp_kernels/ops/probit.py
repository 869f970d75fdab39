"""plsp::probit_probabilities: pseudo-targets carry no gradient, so there is no autograd function."""

import torch
from torch import Tensor

from plsp_kernels.ops.log_odds import ROW_TENSORS
from plsp_kernels.ops.registration import define_operator
from plsp_kernels.rows import Rows


def _fake(rows: Rows, beta: float) -> Tensor:
    return torch.empty_like(rows.logits, memory_format=torch.contiguous_format)


probit_probabilities = define_operator(
    "probit_probabilities(Tensor logits, Tensor gram, Tensor slots, Tensor strength, float beta, str impl) -> Tensor",
    _fake,
    ROW_TENSORS,
    Rows,
)
