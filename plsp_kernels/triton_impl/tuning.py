"""Tiles chosen by timing, if the environment variable PLSP_AUTOTUNE is 1 at import; otherwise the first tiling serves.

The first launch at a shape times a short list of tilings on the GPU, which synchronises, and the fastest serves that
shape until the process ends. While a CUDA graph is captured nothing can be timed, so warm up before. A tiling changes
the order of sums and with it their rounding; two processes may choose differently.
"""

import os
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import torch
import triton.testing
from torch import Tensor
from triton.runtime.errors import OutOfResources

from plsp_kernels.triton_impl import tiles
from plsp_kernels.triton_impl.tiles import Blocks

AUTOTUNE = os.environ.get("PLSP_AUTOTUNE") == "1"
_chosen: dict[Hashable, Blocks] = {}


def launch(
    kernel: Any, tilings: Sequence[Blocks], grid: Callable[[Blocks], Sequence[int]], *args: Any, **options: Any
) -> None:
    """Launch with one of the tilings. The kernel must overwrite its outputs: timing repeats it."""

    def run(blocks: Blocks) -> None:
        tiles.launch(kernel, grid(blocks), *args, **options, **blocks)

    blocks = tilings[0]
    if AUTOTUNE and len(tilings) > 1 and 0 not in grid(blocks) and _can_time(args[0]):
        blocks = fastest((kernel.__name__, *map(_described, args)), tilings, run)
    run(blocks)


def fastest(key: Hashable, tilings: Sequence[Blocks], run: Callable[[Blocks], None]) -> Blocks:
    """The tiling with the least time of `run`; timed once per key."""
    if key not in _chosen:
        _chosen[key] = min(tilings, key=lambda blocks: milliseconds(run, blocks))
    return _chosen[key]


def milliseconds(run: Callable[[Blocks], None], blocks: Blocks) -> float:
    """Median time on the GPU, infinite if the tiling needs more than the GPU has."""
    try:
        return float(triton.testing.do_bench(lambda: run(blocks), warmup=5, rep=20, return_mode="median"))
    except OutOfResources:
        return float("inf")


def _can_time(tensor: Tensor) -> bool:
    return tensor.is_cuda and not torch.cuda.is_current_stream_capturing()


def _described(argument: Any) -> Hashable:
    """What the time of a kernel depends on; numbers follow from the shapes."""
    if isinstance(argument, Tensor):
        return argument.device, argument.dtype, argument.shape, argument.stride()
    return None
