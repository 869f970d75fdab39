"""Inputs of a curriculum update, the same for every implementation."""

from typing import NamedTuple

from torch import Tensor


class CurriculumBatch(NamedTuple):
    """Predictions for N instances out of n, with the state that they update.

    An instance is assigned its prediction if the confidence reaches the threshold and the prediction is a candidate. If
    it occurs repeatedly, its last assignment counts. The fields are the leading arguments of `plsp::curriculum_update`.
    """

    assigned: Tensor  # (n,) int64: class of each instance, l if it has none; updated in place
    counts: Tensor  # (l + 1,) int64: number of instances of each class; updated in place
    instances: Tensor  # (N,) int64: their indices
    prediction: Tensor  # (N,) int64
    confidence: Tensor  # (N,) floating-point, or bool, which counts as 0 and 1
    candidates: Tensor | None  # (N, l) bool; None: every class is a candidate
    threshold: float
