"""Forward and backward calls of the public functions and of a whole training step, on meta tensors."""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

import plsp_kernels
from benchmarks.shapes import Shape
from benchmarks.subjects import NUM_INSTANCES
from plsp_kernels import ops, reference
from plsp_kernels.functional import PAPER_BETA
from plsp_kernels.step import Step

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16, "float64": torch.float64}
LOSS = "semantic_upper_bound_loss"
ROW_FUNCTIONS = ("semantic_log_softmax", "semantic_cross_entropy", "probit_probabilities")
STATE_UPDATES = ("covariance_update", "curriculum_update")
FUNCTIONS = (LOSS, *ROW_FUNCTIONS, *STATE_UPDATES)


class Batch(NamedTuple):
    """Leading arguments of the loss, without the covariance."""

    labeled: Tensor
    weak: Tensor
    strong: Tensor
    weight: Tensor
    labels: Tensor
    candidates: Tensor


def _floats(dtype: torch.dtype, *size: int) -> Tensor:
    return torch.empty(size, dtype=dtype, device="meta")


def _numbers(count: int) -> Tensor:
    return torch.empty(count, dtype=torch.int64, device="meta")


def _batch(shape: Shape, dtype: torch.dtype) -> Batch:
    num_classes = shape.num_classes
    labeled, weak, strong = (
        _floats(dtype, count, num_classes).requires_grad_()
        for count in (shape.num_labeled, shape.num_unlabeled, shape.num_unlabeled)
    )
    weight = _floats(dtype, num_classes, shape.num_features).requires_grad_()
    candidates = torch.empty(shape.num_unlabeled, num_classes, dtype=torch.bool, device="meta")
    return Batch(labeled, weak, strong, weight, _numbers(shape.num_labeled), candidates)


def call(function: str, shape: Shape, dtype: str, impl: str) -> None:
    """Make one call at the shape of a training step; row-wise functions receive the unlabelled batch."""
    if function in STATE_UPDATES:
        (_update_covariance if function == "covariance_update" else _update_curriculum)(shape, DTYPES[dtype], impl)
        return
    # The reference computes half precision in float32, as every implementation does: its casts do not count.
    given = torch.promote_types(DTYPES[dtype], torch.float32) if impl == "reference" else DTYPES[dtype]
    batch = _batch(shape, given)
    width = [] if shape.covariance == "diagonal" else [shape.num_features]
    covariance = _floats(given, *batch.weight.shape, *width)
    thresholds = _floats(given, shape.num_classes)
    arguments = *batch[:4], covariance, *batch[4:]
    if function != LOSS:
        run = (
            getattr(reference, function) if impl == "reference" else partial(getattr(plsp_kernels, function), impl=impl)
        )
        result = run(batch.weak, batch.weight, covariance, _numbers(shape.num_unlabeled), strength=0.01)
        if result.requires_grad:
            result.backward(torch.empty_like(result))
    elif impl == "reference":
        numbers = torch.tensor(0.01), torch.tensor(1.0), PAPER_BETA
        reference.semantic_upper_bound_loss(Step(*arguments, None, None, thresholds, *numbers, True)).total.backward()
    else:
        loss = plsp_kernels.semantic_upper_bound_loss(*arguments, strength=0.01, thresholds=thresholds, impl=impl)
        loss.total.backward()


def _update_covariance(shape: Shape, dtype: torch.dtype, impl: str) -> None:
    """Update float32 statistics with features of this dtype, as `SemanticCovariance` does."""
    num_classes, num_features = shape.num_classes, shape.num_features
    width = [] if shape.covariance == "diagonal" else [num_features]
    means = _floats(torch.float32, num_classes, num_features)
    state = _floats(torch.float32, num_classes, num_features, *width), means, _numbers(num_classes)
    labels = _numbers(shape.num_labeled)
    if impl == "reference":
        reference.update_covariance(*state, _floats(torch.float32, shape.num_labeled, num_features), labels)
    else:
        skipped = _numbers(num_classes)
        ops.covariance_update(*state, skipped, _floats(dtype, shape.num_labeled, num_features), labels, impl)


def _update_curriculum(shape: Shape, dtype: torch.dtype, impl: str) -> None:
    """Compute the thresholds and record one unlabelled batch; the reference has no such state."""
    if impl == "reference":
        return
    num_classes, count = shape.num_classes, shape.num_unlabeled
    counts = _numbers(num_classes + 1)
    ops.curriculum_thresholds(counts, 0.75, False, impl)
    confidence = _floats(torch.promote_types(dtype, torch.float32), count)
    candidates = torch.empty(count, num_classes, dtype=torch.bool, device="meta")
    entries = _numbers(count), _numbers(count), confidence, candidates, 0.75
    ops.curriculum_update(_numbers(NUM_INSTANCES), counts, *entries, impl)


def training_step(shape: Shape, dtype: str) -> Callable[[], None]:
    """Prepare a step with all its state: the loss, its backward, covariance update and curriculum update."""
    with torch.device("meta"):
        criterion = plsp_kernels.SemanticUpperBoundLoss(
            NUM_INSTANCES, shape.num_classes, shape.num_features, covariance=shape.covariance, impl="triton"
        )
    batch, features = _batch(shape, DTYPES[dtype]), _floats(DTYPES[dtype], shape.num_labeled, shape.num_features)
    index = _numbers(shape.num_unlabeled)

    def step() -> None:
        criterion(*batch, labeled_features=features, index=index, strength=0.01).total.backward()

    return step
