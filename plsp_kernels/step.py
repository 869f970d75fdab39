"""Inputs and outputs of one step of the loss, the same for every implementation.

A `Step` is built once per call, checked once (`checks.step`) and passed on unchanged. Its fields, in this order, are
the leading arguments of the operator `plsp::upper_bound`.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor


class Step(NamedTuple):
    """A labelled batch of size Bl and an unlabelled batch of size Bu, with l classes and d features.

    Logits, weight and covariance have the floating-point dtypes of the caller; implementations compute in
    `compute_dtype(step)`. Implementations read 0-d tensors on the CPU for free, and those on another device only there.
    """

    labeled_logits: Tensor  # (Bl, l)
    weak_logits: Tensor  # (Bu, l)
    strong_logits: Tensor  # (Bu, l)
    weight: Tensor  # (l, d): W
    covariance: Tensor  # (l, d, d), or (l, d) for diagonals: Σ
    labels: Tensor  # (Bl,) int64
    candidates: Tensor  # (Bu, l) bool
    pseudo_labels: Tensor | None  # (Bu,) int64; None: the candidates with the highest class activation value
    labeled_candidates: Tensor | None  # (Bl, l) bool; None: the labelled batch has no complementary term
    thresholds: Tensor  # (l,), or 0-d for all classes, which may be on the CPU: τ
    strength: Tensor  # 0-d, which may be on the CPU: λ
    ss_weight: Tensor  # 0-d, which may be on the CPU: γ
    beta: float
    argmax_in_candidates: bool


# Functions: torch.compile of the oldest supported version traces neither _replace nor properties of a NamedTuple.


def replace(step: Step, **changes: Any) -> Step:
    """The step with other values of some fields."""
    return Step(*[changes.get(name, getattr(step, name)) for name in Step._fields])


def num_samples(step: Step) -> int:
    """Bl + Bu."""
    return step.labels.shape[0] + step.candidates.shape[0]


def compute_dtype(step: Step) -> torch.dtype:
    """float64 if the weight or any logits are float64, float32 otherwise."""
    given = step.labeled_logits, step.weak_logits, step.strong_logits, step.weight
    return torch.float64 if any(tensor.dtype == torch.float64 for tensor in given) else torch.float32


class StepResult(NamedTuple):
    """Outputs of `plsp::upper_bound`, floating-point ones in the compute dtype; those not requested are empty.

    Gradients are rounded to half precision only after the multiplication by the upstream gradient: unscaled, they would
    underflow in float16.
    """

    total: Tensor  # ()
    terms: Tensor  # (3,): supervised, consistency, complementary
    grad_logits: Tensor  # (Bl + 2 Bu, l) or (0,): labelled, strong and weak logits
    grad_weight: Tensor  # (l, d) or (0,)
    pseudo_labels: Tensor  # (Bu,) int64, or (0,) if they were given
    confidence: Tensor  # (Bu,)
    prediction: Tensor  # (Bu,) int64
    mask: Tensor  # (Bu,) bool
