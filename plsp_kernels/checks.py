"""Argument checks: each error names the argument, what was seen and what is wanted.

Shapes, dtypes and devices are checked always. Looking at values makes a GPU finish its queue first, so that is done on
CPU tensors only, or everywhere with PLSP_CHECK_VALUES=1 in the environment, and never inside a compiled graph.
"""

import importlib.util
import os
from collections.abc import Sequence

import torch
from torch import Tensor

IMPLEMENTATIONS = ("auto", "triton", "torch", "reference")
_CHECK_VALUES = os.environ.get("PLSP_CHECK_VALUES", "") not in ("", "0")
_HAS_TRITON = importlib.util.find_spec("triton") is not None


def resolve_impl(impl: str, tensor: Tensor) -> str:
    """The implementation that `impl` means for tensors like this one."""
    if impl not in IMPLEMENTATIONS:
        raise ValueError(f"impl must be one of {', '.join(map(repr, IMPLEMENTATIONS))}, got {impl!r}")
    if impl == "auto":
        return "triton" if tensor.is_cuda and _HAS_TRITON else "torch"
    if impl == "triton":
        if not _HAS_TRITON:
            raise ValueError("impl='triton' needs the triton package, which is not installed; use impl='auto'")
        if not tensor.is_cuda and os.environ.get("TRITON_INTERPRET", "0") in ("", "0"):
            raise ValueError(
                f"impl='triton' needs CUDA or ROCm tensors, got {tensor.device}; move them to the GPU, use impl='auto' "
                "or set TRITON_INTERPRET=1 before Python starts to run the kernels in Triton's interpreter"
            )
    return impl


def tensor(name: str, value: object) -> Tensor:
    if not isinstance(value, Tensor):
        raise TypeError(f"{name} must be a tensor, got {type(value).__name__}")
    return value


def floating(name: str, value: object, shape: Sequence[int | str], like: Tensor) -> None:
    """A floating-point tensor of this shape (a str stands for any size) on the device of `like`."""
    found = _shaped(name, value, shape, like)
    if not found.is_floating_point():
        raise TypeError(f"{name} must have a floating-point dtype, got {found.dtype}")


def boolean(name: str, value: object, shape: Sequence[int | str], like: Tensor) -> None:
    found = _shaped(name, value, shape, like)
    if found.dtype != torch.bool:
        raise TypeError(f"{name} must be a bool tensor, got {found.dtype}; call .bool() on a 0/1 mask")


def class_numbers(name: str, value: object, shape: Sequence[int | str], num_classes: int, like: Tensor) -> None:
    """int64 class numbers in [0, l)."""
    _numbers(name, value, shape, num_classes, "classes", like)


def instance_numbers(name: str, value: object, shape: Sequence[int | str], num_instances: int, like: Tensor) -> None:
    """int64 instance numbers in [0, n)."""
    _numbers(name, value, shape, num_instances, "instances", like)


def _numbers(name: str, value: object, shape: Sequence[int | str], limit: int, kind: str, like: Tensor) -> None:
    found = _shaped(name, value, shape, like)
    if found.dtype != torch.int64:
        raise TypeError(f"{name} must be an int64 tensor, got {found.dtype}; call .long()")
    if looks_at_values(found) and found.numel():
        low, high = (int(value) for value in found.aminmax())
        if low < 0 or high >= limit:
            raise ValueError(
                f"{name} must lie in [0, {limit}), there being {limit} {kind}; got values from {low} to {high}"
            )


def candidate_sets(name: str, value: Tensor, shape: Sequence[int | str], like: Tensor) -> None:
    boolean(name, value, shape, like)
    if looks_at_values(value) and not value.any(1).all():
        row = int((~value.any(1)).nonzero()[0, 0])
        raise ValueError(f"{name} must have at least one candidate in every row, but row {row} has none")


def covariance(name: str, value: object, num_classes: int, num_features: int, like: Tensor) -> None:
    """(l, d, d), or (l, d) for diagonals."""
    found = tensor(name, value)
    full, diagonal = (num_classes, num_features, num_features), (num_classes, num_features)
    if found.shape != full and found.shape != diagonal:
        raise ValueError(
            f"{name} must have shape {full} (full) or {diagonal} (diagonal) to match weight of shape {diagonal}, "
            f"got {tuple(found.shape)}"
        )
    floating(name, found, found.shape, like)


def number(name: str, value: object, low: float = -torch.inf, high: float = torch.inf) -> None:
    """A finite Python number in [low, high]."""
    if not isinstance(value, (int, float)):
        raise TypeError(f"{name} must be a number, got {type(value).__name__}")
    if not (low <= value <= high and -torch.inf < value < torch.inf):
        limits = f"in [{low:g}, {high:g}]" if high < torch.inf else "finite" if low < 0 else "finite and at least 0"
        raise ValueError(f"{name} must be {limits}, got {value}")


def positive(name: str, value: object) -> None:
    number(name, value)
    if not value > 0:  # type: ignore[operator]
        raise ValueError(f"{name} must be positive, got {value}")


def thresholds(name: str, value: object, num_classes: int, like: Tensor) -> None:
    """A number in [0, 1] or one per class."""
    if not isinstance(value, Tensor):
        number(name, value, 0, 1)
        return
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
