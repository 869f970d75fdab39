"""Bytes and floating-point operations of a call, per kernel.

Bytes assume a perfect cache: every kernel reads each input once and writes each output once. An operation is one
arithmetic result; a matrix product counts two per multiply-add, as usual.
"""

from typing import Any, NamedTuple

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from benchmarks.gpu_static import ahead_of_time
from benchmarks.gpu_static.calls import call
from benchmarks.gpu_static.operations import launch_operations
from benchmarks.shapes import Shape

FREE = {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "_unsafe_view"}
"""ATen functions that launch no kernel, besides views."""
FILLS = {"arange", "eye", "full", "full_like", "new_full", "new_zeros", "ones", "ones_like", "zeros", "zeros_like"}
"""ATen functions that read nothing."""
GATHERS = {"gather", "index", "index_select"}
"""ATen functions that read as many elements as they write, not their whole first argument."""
MOVES = FILLS | GATHERS | {"cat", "clone", "copy_", "masked_fill", "scatter", "scatter_", "sort", "_to_copy", "where"}
"""ATen functions that compute nothing."""


class Work(NamedTuple):
    """One kernel launch."""

    kernel: str
    matrix_operations: int
    """Operations in matrix products."""
    operations: int
    """All other operations."""
    bytes: int
    largest_bytes: int
    """Size of the largest tensor."""


def count(function: str, shape: Shape, dtype: str, impl: str) -> list[Work]:
    """Work of every kernel that one call launches, forward and backward."""
    with AtenCounter() as counter, ahead_of_time.recording() as launches:
        call(function, shape, dtype, impl)
    return [launch_work(launch) for launch in launches] + counter.work


def launch_work(launch: ahead_of_time.Launch) -> Work:
    """Work of one Triton launch, assuming that every row has a gradient and every slot a distinct class."""
    arguments = launch.arguments
    state = _state_bytes(launch)
    sizes: dict[Any, int] = {}
    for name, tensor in arguments.items():
        if isinstance(tensor, Tensor):
            size = state.get(name, tensor_bytes(tensor))
            if name in ("covariance_ptr", "variance_ptr") and "classes_ptr" in arguments:
                # only the classes of the step are read
                size = size * min(arguments["classes_ptr"].shape[0], len(tensor)) // len(tensor)
            # Launchers pass another tensor in place of an unused argument.
            sizes.setdefault((tensor.untyped_storage()._cdata, tensor.storage_offset(), tensor.shape), size)
    largest = max(tensor_bytes(tensor) for tensor in arguments.values() if isinstance(tensor, Tensor))
    return Work(launch.name, *launch_operations(launch), sum(sizes.values()), largest)


def _state_bytes(launch: ahead_of_time.Launch) -> dict[str, int]:
    """Bytes of the tensors that a kernel updates in place, or of which it touches only the rows of the batch."""
    a, name = launch.arguments, launch.kernel.__name__
    if name == "_curriculum_update_kernel":
        entries = a["instances_ptr"].shape[0]
        return {"assigned_ptr": 2 * 8 * entries, "counts_ptr": 2 * 2 * 8 * entries, "candidates_ptr": entries}
    if name not in ("_covariance_update_kernel", "_mean_update_kernel"):
        return {}
    slots, d, itemsize = launch.grid[0], a["num_features"], a["shift_ptr"].element_size()
    row = slots * d * itemsize
    if name == "_covariance_update_kernel":  # half of a symmetric Σ is read, all of it written
        return {"covariance_ptr": row * (d + 1) // 2 + row * d, "count_ptr": 8 * slots}
    counts = {"count_ptr": 2 * 8 * slots, "skipped_ptr": 2 * 8 * slots}
    return {"variance_ptr": 2 * row if a["DIAGONAL"] else 0, "mean_ptr": 2 * row, **counts}


class AtenCounter(TorchDispatchMode):
    """Records every ATen kernel on meta tensors; one call counts as one kernel."""

    def __init__(self) -> None:
        super().__init__()
        self.work: list[Work] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        inputs = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        outputs = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
        if func.is_view or name in FREE or not any(tensor.is_meta for tensor in inputs + outputs):
            return result
        written = sum(map(tensor_bytes, outputs))
        read = 0 if name in FILLS else sum(map(tensor_bytes, inputs))
        if name in GATHERS:
            read += written - tensor_bytes(inputs[0])
        elif name == "copy_":
            read -= tensor_bytes(inputs[0])
        matrix_operations = operations = 0
        if func.overloadpacket in flop_registry:
            matrix_operations = flop_registry[func.overloadpacket](*args, **(kwargs or {}), out_val=result)
        elif name not in MOVES and any(tensor.is_floating_point() for tensor in outputs):
            operations = max(tensor.numel() for tensor in inputs + outputs)
        largest = max(map(tensor_bytes, inputs + outputs))
        self.work.append(Work(f"aten::{name}", matrix_operations, operations, read + written, largest))
        return result


def tensor_bytes(tensor: Tensor) -> int:
    """Bytes in storage; an expanded dimension is stored once."""
    elements = 1
    for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
        elements *= size if stride or size == 0 else 1
    return elements * tensor.element_size()
