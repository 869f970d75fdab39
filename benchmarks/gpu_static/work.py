"""How many bytes and floating-point operations a call is made of, kernel by kernel.

Bytes are those a perfect cache would leave: every kernel reads each of its inputs once and writes each of its outputs
once. An operation is one arithmetic result; a product of matrices counts two per multiplication, as is usual.
"""

from typing import Any, NamedTuple

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from benchmarks.gpu_static.calls import call
from benchmarks.gpu_static.operations import launch_operations
from benchmarks.shapes import Shape
from plsp_kernels.triton_impl import aot

FREE = {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "_unsafe_view"}
"""ATen functions that launch nothing, besides views."""
FILLS = {"arange", "eye", "full", "full_like", "new_full", "new_zeros", "ones", "ones_like", "zeros", "zeros_like"}
"""Those that read nothing."""
GATHERS = {"gather", "index", "index_select"}
"""Those that read as many elements as they write, not the whole of their first argument."""
MOVES = FILLS | GATHERS | {"cat", "clone", "copy_", "masked_fill", "scatter", "scatter_", "sort", "_to_copy", "where"}
"""Those that compute nothing."""


class Work(NamedTuple):
    """One kernel launch."""

    kernel: str
    matrix_operations: int
    """In products of matrices."""
    operations: int
    """All others."""
    bytes: int
    largest_bytes: int
    """Of one tensor."""


def count(function: str, shape: Shape, dtype: str, impl: str) -> list[Work]:
    """Every kernel that one call launches, forward and backward."""
    with AtenCounter() as counter, aot.recording() as launches:
        call(function, shape, dtype, impl)
    return [launch_work(launch) for launch in launches] + counter.work


def launch_work(launch: aot.Launch) -> Work:
    """The work of one Triton kernel: every row with a gradient, every slot with a class of its own."""
    arguments = launch.arguments
    sizes: dict[Any, int] = {}
    for name, tensor in arguments.items():
        if isinstance(tensor, Tensor):
            size = tensor_bytes(tensor)
            if name in ("covariance_ptr", "variance_ptr"):  # only the classes of the step are read
                size = size * min(arguments["classes_ptr"].shape[0], len(tensor)) // len(tensor)
            # A launcher passes one tensor twice where an argument is not used.
            sizes.setdefault((tensor.untyped_storage()._cdata, tensor.storage_offset(), tensor.shape), size)
    return Work(launch.name, *launch_operations(launch), sum(sizes.values()), max(sizes.values()))


class AtenCounter(TorchDispatchMode):
    """Notes every ATen kernel on tensors without memory; one call counts as one kernel."""

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
    """Of the elements that exist: an expanded dimension is stored once."""
    elements = 1
    for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
        elements *= size if stride or size == 0 else 1
    return elements * tensor.element_size()
