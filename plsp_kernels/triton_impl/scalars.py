"""Numbers that change during training, such as λ: arguments of the kernels, or tensors that the kernels read.

Triton would pass a Python float as float32, so kernels declare numbers as float64 and cast them to the compute dtype. A
tensor on the device is read there, never by the host: a captured CUDA graph replays with the value of that moment.
"""

import triton
import triton.language as tl
from torch import Tensor

from plsp_kernels.rows import host_number


@triton.jit
def scalar(number, number_ptr):
    """The number, or the one at the pointer if there is one, in float64."""
    return tl.full((), number, tl.float64) if number_ptr is None else tl.load(number_ptr).to(tl.float64)


def scalar_arguments(tensor: Tensor) -> tuple[float, Tensor | None]:
    """Arguments `number` and `number_ptr` of a kernel for a 0-d tensor."""
    number = host_number(tensor)
    return (0.0, number) if isinstance(number, Tensor) else (number, None)
