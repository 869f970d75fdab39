"""plsp::curriculum_update, which updates the state of the curriculum in place, and plsp::curriculum_thresholds."""

import torch
from torch import Tensor

from plsp_kernels.curriculum import CurriculumBatch
from plsp_kernels.ops.registration import define_operator


def _fake_update(batch: CurriculumBatch) -> None:
    return None


def _fake_thresholds(counts: Tensor, threshold: float, convex: bool) -> Tensor:
    return counts.new_empty(counts.shape[0] - 1, dtype=torch.float32)


curriculum_update = define_operator(
    "curriculum_update(Tensor(a!) assigned, Tensor(b!) counts, Tensor instances, Tensor prediction, Tensor confidence,"
    " Tensor? candidates, float threshold, str impl) -> ()",
    _fake_update,
    {
        "assigned": "int64 n",
        "counts": "int64 l+1",
        "instances": "int64 N",
        "prediction": "int64 N",
        "confidence": "* N",
        "candidates": "bool N l",
    },
    CurriculumBatch,
)

curriculum_thresholds = define_operator(
    "curriculum_thresholds(Tensor counts, float threshold, bool convex, str impl) -> Tensor",
    _fake_thresholds,
    {"counts": "int64 l+1"},
)
