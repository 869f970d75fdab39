"""The public functions, forward and backward, on tensors without memory."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

import plsp_kernels
from benchmarks.shapes import Shape
from plsp_kernels import reference

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16, "float64": torch.float64}
LOSS = "semantic_upper_bound_loss"
FUNCTIONS = (LOSS, "semantic_log_softmax", "semantic_cross_entropy", "probit_probabilities")


def call(function: str, shape: Shape, dtype: str, impl: str) -> None:
    """One call at the shape of a training step; the functions of samples take the unlabelled batch."""
    num_labeled, num_unlabeled, num_classes, num_features = shape[1:5]

    def floats(*size: int) -> Tensor:
        return torch.empty(size, dtype=DTYPES[dtype], device="meta")

    def classes(count: int) -> Tensor:
        return torch.empty(count, dtype=torch.int64, device="meta")

    diagonal = shape.covariance == "diagonal"
    covariance = floats(num_classes, num_features, *([] if diagonal else [num_features]))
    weight = floats(num_classes, num_features).requires_grad_()
    labeled, weak, strong = (
        floats(count, num_classes).requires_grad_() for count in (num_labeled, num_unlabeled, num_unlabeled)
    )
    run: Callable[..., Any] = partial(getattr(plsp_kernels, function), impl=impl)
    if impl == "reference":  # computes half precision in float32, as every implementation does
        run = getattr(reference, function)
        computed = torch.promote_types(weight.dtype, torch.float32)
        labeled, weak, strong, weight, covariance = (
            tensor.to(computed) for tensor in (labeled, weak, strong, weight, covariance)
        )
    if function == LOSS:
        candidates = torch.empty(num_unlabeled, num_classes, dtype=torch.bool, device="meta")
        thresholds = floats(num_classes)
        batch = labeled, weak, strong, weight, covariance, classes(num_labeled), candidates
        run(*batch, strength=0.01, thresholds=thresholds).total.backward()
    else:
        result = run(weak, weight, covariance, classes(num_unlabeled), strength=0.01)
        if result.requires_grad:
            result.backward(torch.empty_like(result))
