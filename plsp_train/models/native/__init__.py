"""The convolution stages of LeNet-5 in C, two to three times as fast on a CPU core as PyTorch's operators.

PyTorch's convolutions fill vectors with channels, of which LeNet-5 has few; C fills them with images. The extension is
optional. C works on raw addresses: every tensor is validated before its address is taken.
"""

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
"""C uses one thread. With more threads than this, PyTorch's convolutions are as fast."""

NUM_FEATURES = 400
_NUM_LANES = {"baseline": 4, "avx2": 8, "avx512": 16}


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
    features: Tensor = _Stages.apply(images, conv1.weight, conv1.bias, conv2.weight, conv2.bias)
    return features


class _Stages(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, images: Tensor, *parameters: Tensor) -> Tensor:
        num_channels, side = _check_shapes(images, parameters)
        inputs = [tensor.contiguous() for tensor in (images, *parameters)]
        num_lanes = _NUM_LANES[VERSIONS[-1]]
        is_differentiated = any(ctx.needs_input_grad)
        num_groups = -(-len(images) // num_lanes) if is_differentiated else 1
        middle = torch.empty(num_groups, 6, 14, 14, num_lanes)
        origins1 = torch.empty(middle.shape, dtype=torch.int32)
        origins2 = torch.empty(num_groups, 16, 5, 5, num_lanes, dtype=torch.int32)
        buffers = middle, origins1, origins2
        features = torch.empty(len(images), NUM_FEATURES)
        sizes = (len(images), num_channels, side, num_groups)
        _stages.stages_forward(len(VERSIONS) - 1, sizes, _addresses(*inputs, *buffers, features) + (0,) * 5)
        if is_differentiated:
            ctx.save_for_backward(*inputs, *buffers)
            ctx.sizes, ctx.version = sizes, len(VERSIONS) - 1
        return features

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_features: Tensor) -> tuple[Tensor | None, ...]:
        saved = ctx.saved_tensors
        grad_features = grad_features.contiguous()
        gradients = [torch.empty_like(parameter) for parameter in saved[1:5]]
        arrays = (*_addresses(*saved), 0, *_addresses(grad_features, *gradients))
        _stages.stages_backward(ctx.version, ctx.sizes, arrays)
        return None, *gradients


def _check_shapes(images: Tensor, parameters: tuple[Tensor, ...]) -> tuple[int, int]:
    num_channels, side = images.shape[1], images.shape[2]
    if images.shape[1:] not in ((num_channels, 28, 28), (num_channels, 32, 32)) or not 1 <= num_channels <= 3:
        raise ValueError(f"images must have 1 to 3 channels of 28×28 or 32×32 pixels, got shape {tuple(images.shape)}")
    shapes = (6, num_channels, 5, 5), (6,), (16, 6, 5, 5), (16,)
    for tensor, shape in zip((images, *parameters), (images.shape, *shapes), strict=True):
        if tensor.shape != shape or tensor.dtype != torch.float32 or not tensor.is_cpu:
            raise ValueError(f"expected float32 of shape {shape} on the CPU, got {tensor.dtype}, {tuple(tensor.shape)}")
    return num_channels, side


def _addresses(*tensors: Tensor) -> tuple[int, ...]:
    return tuple(tensor.data_ptr() for tensor in tensors)
