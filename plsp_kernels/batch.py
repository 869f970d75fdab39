"""Inputs and outputs of the semantic cross-entropy, the same for every implementation.

A `LabeledBatch` is built and checked once per call. Its fields, in this order, are the leading arguments of the
operator `plsp::cross_entropy`.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

REDUCTIONS = ("mean", "sum", "none")


class LabeledBatch(NamedTuple):
    """N rows of logits with their labels, l classes and d features.

    Logits, weight, covariance and class weights have the floating-point dtypes of the caller; implementations compute
    in `compute_dtype(batch)`.
    """

    logits: Tensor  # (N, l)
    weight: Tensor  # (l, d): W
    covariance: Tensor  # (l, d, d), or (l, d) for diagonals: Σ
    labels: Tensor  # (N,) int64
    class_weight: Tensor | None  # (l,); None: all one
    strength: Tensor  # 0-d, which may be on the CPU: λ
    label_smoothing: float
    ignore_index: int  # rows with this label have no loss
    reduction: str  # one of REDUCTIONS


# Functions: torch.compile of the oldest supported version traces neither _replace nor properties of a NamedTuple.


def replace(batch: LabeledBatch, **changes: Any) -> LabeledBatch:
    """The batch with other values of some fields."""
    return LabeledBatch(*[changes.get(name, getattr(batch, name)) for name in LabeledBatch._fields])


def compute_dtype(batch: LabeledBatch) -> torch.dtype:
    """float64 if the logits or the weight are float64, float32 otherwise."""
    double = batch.logits.dtype == torch.float64 or batch.weight.dtype == torch.float64
    return torch.float64 if double else torch.float32


class CrossEntropyResult(NamedTuple):
    """Outputs of `plsp::cross_entropy` in the compute dtype; gradients not requested are empty.

    Gradients are rounded to half precision only after the multiplication by the upstream gradient: unscaled, they would
    underflow in float16.
    """

    loss: Tensor  # (), or (N,) without reduction
    grad_logits: Tensor  # (N, l) or (0,)
    grad_weight: Tensor  # (l, d) or (0,)
