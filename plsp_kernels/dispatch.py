"""Resolves `impl`, once per call. No other module chooses an implementation.

| implementation | what it is | serves |
|---|---|---|
| `triton` | GPU kernels | CUDA and ROCm tensors; CPU tensors in Triton's interpreter |
| `native` | small steps in C | float32 on a CPU, few classes, if the extension was built |
| `torch` | the closed form in ATen operators | everything |
| `reference` | the paper, literally | everything that fits in memory; never chosen by `auto` |

`auto` selects Triton on a GPU, if it is installed and recent enough, C for CPU calls that are small enough to be faster
there, and ATen operators otherwise.
"""

import functools
import importlib
import importlib.metadata
import importlib.util
import os
from collections.abc import Callable
from types import ModuleType

import torch
from torch import Tensor

from plsp_kernels import native
from plsp_kernels.batch import LabeledBatch
from plsp_kernels.step import Step

IMPLEMENTATIONS = ("auto", "triton", "native", "torch", "reference")

OLDEST_TRITON = (3, 5)  # earlier ones multiply no float64 matrices
_TRITON_DISTRIBUTIONS = ("triton", "pytorch-triton", "pytorch-triton-rocm")
_PACKAGES = {"triton": "triton_impl", "native": "native", "torch": "torch_impl"}


def _find_triton() -> str | None:
    """Why the Triton kernels cannot run with the installed packages, or None. Does not import Triton."""
    if importlib.util.find_spec("triton") is None:
        return "the triton package is not installed"
    for name in _TRITON_DISTRIBUTIONS:
        try:
            version = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
        if tuple(map(int, version.split(".")[:2])) < OLDEST_TRITON:
            return f"it needs Triton {'.'.join(map(str, OLDEST_TRITON))} or newer, found {version}"
    return None


_TRITON_REFUSAL = _find_triton()


def for_step(impl: str, step: Step) -> str:
    """Resolve `impl` for a whole step of the loss."""
    return _resolve(impl, step.weight, lambda: native.step_refusal(step), lambda: native.step_pays(step))


def for_batch(impl: str, batch: LabeledBatch) -> str:
    """Resolve `impl` for the semantic cross-entropy."""
    return _resolve(impl, batch.weight, lambda: native.batch_refusal(batch), lambda: native.batch_pays(batch))


def for_rows(impl: str, weight: Tensor) -> str:
    """Resolve `impl` for a function of independent rows of logits."""
    return _resolve(impl, weight, lambda: "it implements whole steps of the loss, not this function")


def for_labels(impl: str, logits: Tensor) -> str:
    """Resolve `impl` for class activation labels."""
    return _resolve(impl, logits, lambda: native.labels_refusal(logits))


def for_update(impl: str, state: tuple[Tensor, Tensor, Tensor, Tensor], features: Tensor) -> str:
    """Resolve `impl` for a covariance update. The reference replaces the state; ATen operators update it in place."""
    impl, covariance = "torch" if impl == "reference" else impl, state[0]
    return _resolve(
        impl,
        covariance,
        lambda: native.update_refusal(*state, features),
        lambda: native.update_pays(covariance, features),
    )


def for_curriculum(impl: str, count: Tensor) -> str:
    """Resolve `impl` for the state of the curriculum, which neither C nor the reference implements."""
    return _resolve("torch" if impl in ("native", "reference") else impl, count, lambda: "it implements the loss")


def _resolve(
    impl: str, tensor: Tensor, native_refusal: Callable[[], str | None], native_pays: Callable[[], bool] = lambda: True
) -> str:
    """Resolve `impl` for tensors like this one.

    native_refusal returns why C cannot serve the call, or None; native_pays returns whether C would be faster.
    """
    if impl != "reference":
        _refuse_transforms()
    if impl == "auto":
        if tensor.is_cuda:
            return "triton" if _TRITON_REFUSAL is None else "torch"
        return "native" if native_refusal() is None and native_pays() else "torch"
    if impl == "native":
        refusal = native_refusal()
        if refusal is not None:
            raise ValueError(f"impl='native' cannot serve this call: {refusal}; use impl='auto'")
    elif impl == "triton":
        if _TRITON_REFUSAL is not None:
            raise ValueError(f"impl='triton' cannot serve this call: {_TRITON_REFUSAL}; use impl='auto'")
        if not tensor.is_cuda and os.environ.get("TRITON_INTERPRET", "0") in ("", "0"):
            raise ValueError(
                f"impl='triton' needs CUDA or ROCm tensors, got {tensor.device}; move them to the GPU, use impl='auto' "
                "or set TRITON_INTERPRET=1 before Python starts to run the kernels in Triton's interpreter"
            )
    elif impl not in IMPLEMENTATIONS:
        raise ValueError(f"impl must be one of {', '.join(map(repr, IMPLEMENTATIONS))}, got {impl!r}")
    return impl


def _refuse_transforms() -> None:
    """The operators have no rules for torch.func, and would fail deep inside it."""
    if not torch.compiler.is_compiling() and torch._C._are_functorch_transforms_active():
        raise RuntimeError(
            "plsp_kernels does not support torch.func transforms such as grad and vmap: use impl='reference'"
        )


@functools.cache
def implementation(impl: str) -> ModuleType:
    """Return the package of this implementation, imported on first use."""
    if impl not in _PACKAGES:
        raise ValueError(f"an operator's impl must be one of {', '.join(map(repr, _PACKAGES))}, got {impl!r}")
    return importlib.import_module(f"plsp_kernels.{_PACKAGES[impl]}")
