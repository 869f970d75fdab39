"""Argument checks. Each error names the argument, what it got and what it expects.

Shapes, dtypes and devices are always checked. Checking values on a GPU forces a host sync, so values are checked on CPU
tensors only, or on all devices with PLSP_CHECK_VALUES=1 in the environment, and never inside a compiled graph. With
PLSP_CHECK_VALUES=1, covariances are also checked to be symmetric and not negative, which costs more than the loss.

Numbers may be NumPy's, integers of any width, thresholds a list: what has one meaning is converted.
"""

import os
from collections.abc import Sequence
from numbers import Integral, Real
from typing import Any

import torch
from torch import Tensor

from plsp_kernels.batch import REDUCTIONS, LabeledBatch
from plsp_kernels.batch import replace as batch_replace
from plsp_kernels.step import Step, replace

_ROUNDING = 1e-5  # relative, of statistics in float32
_CHECK_VALUES = os.environ.get("PLSP_CHECK_VALUES", "") not in ("", "0")


def tensor(name: str, value: object) -> Tensor:
    if not isinstance(value, Tensor):
        raise TypeError(f"{name} must be a tensor, got {type(value).__name__}")
    return value


def floating(name: str, value: object, shape: Sequence[int | str], like: Tensor) -> None:
    """Require a floating-point tensor of this shape (a str matches any size) on the device of `like`."""
    found = _shaped(name, value, shape, like)
    if not found.is_floating_point():
        raise TypeError(f"{name} must have a floating-point dtype, got {found.dtype}")


def boolean(name: str, value: object, shape: Sequence[int | str], like: Tensor) -> None:
    found = _shaped(name, value, shape, like)
    if found.dtype != torch.bool:
        raise TypeError(f"{name} must be a bool tensor, got {found.dtype}; call .bool() on a 0/1 mask")


def class_numbers(name: str, value: object, shape: Sequence[int | str], num_classes: int, like: Tensor) -> Tensor:
    """Require class numbers in [0, l) and return them as int64."""
    return _numbers(name, value, shape, num_classes, "classes", like)


def instance_numbers(name: str, value: object, shape: Sequence[int | str], num_instances: int, like: Tensor) -> Tensor:
    """Require instance numbers in [0, n) and return them as int64."""
    return _numbers(name, value, shape, num_instances, "instances", like)


def _numbers(name: str, value: object, shape: Sequence[int | str], limit: int, kind: str, like: Tensor) -> Tensor:
    found = _integers(name, value, shape, like)
    _in_range(name, found, limit, kind)
    return found


def _integers(name: str, value: object, shape: Sequence[int | str], like: Tensor) -> Tensor:
    found = _shaped(name, value, shape, like)
    if found.dtype == torch.bool or found.is_floating_point() or found.is_complex():
        raise TypeError(f"{name} must be a tensor of integers, got {found.dtype}; call .long()")
    return found.long()


def _in_range(name: str, found: Tensor, limit: int, kind: str) -> None:
    if looks_at_values(found) and found.numel():
        low, high = (int(value) for value in found.aminmax())
        if low < 0 or high >= limit:
            raise ValueError(f"{name} must lie in [0, {limit}) for {limit} {kind}, got values from {low} to {high}")


def candidate_sets(name: str, value: Tensor, shape: Sequence[int | str], like: Tensor) -> None:
    boolean(name, value, shape, like)
    if looks_at_values(value) and not value.any(1).all():
        row = int((~value.any(1)).nonzero()[0, 0])
        raise ValueError(f"{name} must have at least one candidate in every row, but row {row} has none")


def covariances(name: str, value: object, num_classes: int, num_features: int, like: Tensor) -> None:
    """Require shape (l, d, d), or (l, d) for diagonals."""
    found = tensor(name, value)
    full, diagonal = (num_classes, num_features, num_features), (num_classes, num_features)
    if found.shape != full and found.shape != diagonal:
        raise ValueError(
            f"{name} must have shape {full} (full) or {diagonal} (diagonal) to match weight of shape {diagonal}, "
            f"got {tuple(found.shape)}"
        )
    floating(name, found, found.shape, like)
    if _CHECK_VALUES and not torch.compiler.is_compiling():
        _symmetric_and_not_negative(name, found)


def _symmetric_and_not_negative(name: str, value: Tensor) -> None:
    value = value.detach().double()
    scale = value.abs().flatten(1).amax(1)
    if not scale.isfinite().all():
        raise ValueError(f"{name} must be finite, but that of class {int((~scale.isfinite()).nonzero()[0, 0])} is not")
    least = value.amin(1)
    if value.dim() == 3:
        asymmetry = (value - value.mT).abs().flatten(1).amax(1)
        if (asymmetry > _ROUNDING * scale).any():
            y = int((asymmetry - _ROUNDING * scale).argmax())
            message = f"{name} must be symmetric, but class {y} differs from its transpose by {asymmetry[y]:.3g}"
            raise ValueError(message)
        least = torch.linalg.eigvalsh(value).amin(1)
    if (least < -_ROUNDING * scale).any():
        y, kind = int((least + _ROUNDING * scale).argmin()), "an eigenvalue" if value.dim() == 3 else "a variance"
        raise ValueError(f"{name} must not be negative, but class {y} has {kind} of {least[y]:.3g}")


def size(name: str, value: object, least: int) -> int:
    """Require an integer of at least this and return it as Python's."""
    if not isinstance(value, Integral) or value < least:
        raise ValueError(f"{name} must be an integer of at least {least}, got {value!r}")
    return int(value)


def number(name: str, value: Any, low: float = -torch.inf, high: float = torch.inf) -> None:
    """Require a finite number in [low, high]."""
    if not _is_number(value):
        raise TypeError(f"{name} must be a number, got {type(value).__name__}")
    if not (low <= value <= high and -torch.inf < value < torch.inf):
        limits = f"in [{low:g}, {high:g}]" if high < torch.inf else "finite" if low < 0 else "finite and at least 0"
        raise ValueError(f"{name} must be {limits}, got {value}")


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) or isinstance(value, Real)  # noqa: SIM101 - Python's own are tested faster


def positive(name: str, value: Any) -> float:
    """Require a positive finite number and return it as Python's."""
    number(name, value)
    if not value > 0:
        raise ValueError(f"{name} must be positive, got {value}")
    return _plain(value)


def scalar(name: str, value: object, like: object, low: float = -torch.inf, high: float = torch.inf) -> Tensor:
    """Return a finite number in [low, high] as the operators take it, a 0-d tensor.

    Python numbers become CPU tensors. `torch.compile` would specialise the graph on the value of a Python number; a
    product is traced symbolically. A tensor may also be on the device of `like`, where only kernels read it.
    """
    if not isinstance(value, Tensor):
        number(name, value, low, high)
        return torch.ones((), dtype=torch.float64, device="cpu") * _plain(value)
    floating(name, value, (), value if value.device.type == "cpu" else tensor("weight", like))
    if looks_at_values(value):
        number(name, value.item(), low, high)
    return value.detach()


def thresholds(name: str, value: object, like: object) -> Tensor:
    """Return one threshold for all classes as `scalar` does. `step` checks thresholds given per class."""
    if isinstance(value, Tensor) and value.dim() != 0:
        return value.detach()
    if isinstance(value, (Tensor, Real)):  # PyTorch 2.6 compiles no union
        return scalar(name, value, like, 0, 1)
    try:
        given = torch.as_tensor(value, dtype=torch.float64)
    except (TypeError, ValueError, RuntimeError):
        raise TypeError(f"{name} must be a number or one per class, got {type(value).__name__}") from None
    return scalar(name, given, like, 0, 1) if given.dim() == 0 else given.to(tensor("weight", like).device)


def _plain(value: Any) -> float:
    """A number of NumPy's as Python's; Python's own stay, because `torch.compile` may have made symbols of them."""
    return value if isinstance(value, (int, float)) else float(value)


def classifier(weight: Tensor, covariance: Tensor, num_classes: int) -> None:
    """Check the weight (l, d) and its class covariances."""
    floating("weight", weight, (num_classes, "d"), weight)
    if num_classes < 2:
        raise ValueError(f"weight must have at least 2 rows, one per class, got {num_classes}")
    covariances("covariance", covariance, num_classes, weight.shape[1], weight)


def step(given: Step) -> Step:
    """Check the tensors and β of a step, and return it with int64 labels; `scalar` and `thresholds` check the rest."""
    weight = tensor("weight", given.weight)
    floating("labeled_logits", given.labeled_logits, ("Bl", "l"), weight)
    num_labeled, num_classes = given.labeled_logits.shape
    classifier(weight, given.covariance, num_classes)
    floating("weak_logits", given.weak_logits, ("Bu", num_classes), weight)
    num_unlabeled = given.weak_logits.shape[0]
    floating("strong_logits", given.strong_logits, (num_unlabeled, num_classes), weight)
    labels = class_numbers("labels", given.labels, (num_labeled,), num_classes, weight)
    changes: dict[str, Any] = {"labels": labels}
    candidate_sets("candidates", given.candidates, (num_unlabeled, num_classes), weight)
    if given.thresholds.dim() != 0:
        _class_thresholds("thresholds", given.thresholds, num_classes, weight)
    changes["beta"] = positive("beta", given.beta)
    if given.pseudo_labels is not None:
        shape = (num_unlabeled,)
        changes["pseudo_labels"] = class_numbers("pseudo_labels", given.pseudo_labels, shape, num_classes, weight)
    if given.labeled_candidates is not None:
        candidate_sets("labeled_candidates", given.labeled_candidates, (num_labeled, num_classes), weight)
    return replace(given, **changes)


def labeled_batch(given: LabeledBatch) -> LabeledBatch:
    """Check a labelled batch and return it with int64 labels and Python's numbers; `scalar` has checked λ."""
    weight = tensor("weight", given.weight)
    floating("logits", given.logits, ("N", "l"), weight)
    num_samples, num_classes = given.logits.shape
    classifier(weight, given.covariance, num_classes)
    if not isinstance(given.ignore_index, Integral):
        raise TypeError(f"ignore_index must be an integer, got {type(given.ignore_index).__name__}")
    labels = _integers("labels", given.labels, (num_samples,), weight)
    if looks_at_values(labels):
        _in_range("labels", labels[labels != given.ignore_index], num_classes, "classes")
    if given.class_weight is not None:
        floating("class_weight", given.class_weight, (num_classes,), weight)
    number("label_smoothing", given.label_smoothing, 0, 1)
    if given.reduction not in REDUCTIONS:
        raise ValueError(f"reduction must be one of {', '.join(map(repr, REDUCTIONS))}, got {given.reduction!r}")
    smoothing, ignore_index = _plain(given.label_smoothing), int(given.ignore_index)
    return batch_replace(given, labels=labels, label_smoothing=smoothing, ignore_index=ignore_index)


def _class_thresholds(name: str, value: Tensor, num_classes: int, like: Tensor) -> None:
    floating(name, value, (num_classes,), like)
    if looks_at_values(value):
        low, high = (float(value) for value in value.aminmax())
        if not (low >= 0 and high <= 1):
            raise ValueError(f"{name} must lie in [0, 1], got values from {low} to {high}")


def looks_at_values(value: Tensor) -> bool:
    return (value.device.type == "cpu" or _CHECK_VALUES) and not torch.compiler.is_compiling()


def _shaped(name: str, value: object, shape: Sequence[int | str], like: Tensor) -> Tensor:
    found = tensor(name, value)
    fits = found.dim() == len(shape) and all(
        isinstance(want, str) or size == want for size, want in zip(found.shape, shape, strict=True)
    )
    if not fits:
        wanted = "(" + ", ".join(map(str, shape)) + ("," if len(shape) == 1 else "") + ")"
        raise ValueError(f"{name} must have shape {wanted}, got {tuple(found.shape)}")
    if found.device != like.device:
        raise ValueError(f"{name} must be on {like.device} like the other tensors, got {found.device}")
    return found
