"""The convolution stages of LeNet-5 in C, several times as fast on a CPU core as PyTorch's operators.

PyTorch's convolutions fill vectors with channels, of which LeNet-5 has few; C fills them with images. The extension is
optional. C works on raw addresses: every tensor is validated before its address is taken.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

try:
    from plsp_train.models.native import _stages
except ImportError:
    _stages = None  # type: ignore[assignment]

VERSIONS: tuple[str, ...] = () if _stages is None else _stages.VERSIONS
"""Compiled versions that this processor can run, fastest last; empty if the extension is not built. The last one is
used; tests shorten the tuple to select another."""

MOST_THREADS = {"baseline": 1, "avx2": 2, "avx512": 2}
"""C uses one thread. More threads than these were not compared; PyTorch's convolutions serve them."""

NUM_FEATURES = 400


def serves(images: Tensor, weight: Tensor) -> bool:
    """Return whether C computes the stages of this call; PyTorch's operators serve all others."""
    return (
        bool(VERSIONS)
        and not torch.compiler.is_compiling()
        and not torch.jit.is_tracing()
        and images.is_cpu
        and images.dtype == weight.dtype == torch.float32
        and not images.requires_grad
        and images.shape[1] <= 3
        and torch.get_num_threads() <= MOST_THREADS[VERSIONS[-1]]
        and not torch.is_autocast_enabled("cpu")
    )


def stages(images: Tensor, conv1: nn.Conv2d, conv2: nn.Conv2d) -> Tensor:
    """Return the features (N, 400) of images (N, C, S, S), which are padded to 32×32. Images get no gradient."""
    inputs: tuple[Any, ...] = images, conv1.weight, conv1.bias, conv2.weight, conv2.bias
    _check(*inputs)
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in inputs):
        features: Tensor = _Stages.apply(*inputs)
        return features
    return _forward([tensor.contiguous() for tensor in inputs], num_groups=1)[0]


class _Stages(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *inputs: Tensor) -> Tensor:
        dense = [tensor.contiguous() for tensor in inputs]
        features, *buffers = _forward(dense, num_groups=-(-len(inputs[0]) // _num_lanes()))
        ctx.save_for_backward(*dense, *buffers)
        ctx.version = len(VERSIONS) - 1
        return features

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_features: Tensor) -> tuple[Tensor | None, ...]:
        saved, grad_features = ctx.saved_tensors, grad_features.contiguous()
        images, middle, gradients = saved[0], saved[5], [torch.empty_like(parameter) for parameter in saved[1:5]]
        arrays = (*_addresses(*saved), 0, *_addresses(grad_features, *gradients))
        _stages.stages_backward(ctx.version, (*images.shape[:3], len(middle)), arrays)
        return None, *gradients


def _forward(inputs: Sequence[Tensor], num_groups: int) -> tuple[Tensor, ...]:
    """Features, and what the backward pass needs besides dense inputs: if there will be none, one group is enough."""
    images, num_lanes = inputs[0], _num_lanes()
    features = torch.empty(len(images), NUM_FEATURES)
    middle = torch.empty(num_groups, 6, 14, 14, num_lanes)
    origins1 = torch.empty(middle.shape, dtype=torch.int32)
    origins2 = torch.empty(num_groups, 16, 5, 5, num_lanes, dtype=torch.int32)
    arrays = _addresses(*inputs, middle, origins1, origins2, features) + (0,) * 5
    _stages.stages_forward(len(VERSIONS) - 1, (*images.shape[:3], num_groups), arrays)
    return features, middle, origins1, origins2


def _num_lanes() -> int:
    return {"baseline": 4, "avx2": 8, "avx512": 16}[VERSIONS[-1]]


def _check(images: Tensor, *parameters: Tensor | None) -> None:
    """C does not look at what it is given."""
    num_channels = images.shape[1]
    if images.shape[1:] not in ((num_channels, 28, 28), (num_channels, 32, 32)) or not 1 <= num_channels <= 3:
        raise ValueError(f"images must have 1 to 3 channels of 28×28 or 32×32 pixels, got shape {tuple(images.shape)}")
    shapes = (6, num_channels, 5, 5), (6,), (16, 6, 5, 5), (16,)
    for tensor, shape in zip((images, *parameters), (images.shape, *shapes), strict=True):
        if tensor is None or tensor.shape != shape or tensor.dtype != torch.float32 or not tensor.is_cpu:
            seen = None if tensor is None else f"{tensor.dtype}, {tuple(tensor.shape)}"
            raise ValueError(f"expected float32 of shape {tuple(shape)} on the CPU, got {seen}")


def _addresses(*tensors: Tensor) -> tuple[int, ...]:
    return tuple(tensor.data_ptr() for tensor in tensors)
