"""Registration of the operators of the namespace `plsp`.

The last argument of an operator, `str impl`, names the implementation, which has a function of the operator's name. The
leading flat arguments of the schema are packed into a structure such as `Step` here and nowhere else. Numbers that
change during training, such as λ, are 0-d tensors: `torch.compile` would specialise the graph on the value of a Python
number. On the CPU, the host reads them without a sync; on another device, only kernels do.

Autograd lives outside the operators, in `autograd.Function`s: this has the lowest overhead in eager mode, and
`torch.compile` traces through it.
"""

import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from plsp_kernels.batch import LabeledBatch
from plsp_kernels.curriculum import CurriculumBatch
from plsp_kernels.dispatch import implementation
from plsp_kernels.ops.tensors import tensor_check
from plsp_kernels.rows import Rows
from plsp_kernels.step import Step

LIBRARY = torch.library.Library("plsp", "DEF")
KERNELS: dict[str, Callable[..., Any]] = {}
"""Python function behind each operator, by name, for tools that record launches."""


def without_autocast(device_type: str, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call the function with autocast disabled."""
    if not torch.is_autocast_enabled(device_type):
        return function(*args, **kwargs)
    with torch.autocast(device_type, enabled=False):
        return function(*args, **kwargs)


def define_operator(
    schema: str,
    fake: Callable[..., Any],
    tensors: Mapping[str, str],
    structure: type[Step] | type[LabeledBatch] | type[Rows] | type[CurriculumBatch] | None = None,
) -> Callable[..., Any]:
    """Register `plsp::<schema>` with its fake implementation and return the callable operator.

    The fake function takes the operator's arguments except `impl`, the leading ones packed into the structure. The
    operator passes the same arguments to the implementation's function of its name. The tensors, described as in
    `tensors.py`, are checked for Triton kernels: C checks its own, and ATen operators read no memory beyond a tensor.
    """
    name = schema.partition("(")[0]

    def pack(args: tuple[Any, ...]) -> tuple[Any, ...]:
        if structure is None:
            return args
        width = len(structure._fields)
        return structure(*args[:width]), *args[width:]

    def kernel(*args: Any) -> Any:
        if args[-1] == "triton":
            check(args)
        *given, impl = pack(args)
        return getattr(implementation(impl), name)(*given)

    def precise_kernel(tensor: Tensor, *args: Any) -> Any:
        return without_autocast(tensor.device.type, kernel, tensor, *args)

    KERNELS[name] = kernel
    LIBRARY.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
    operator = getattr(torch.ops.plsp, name).default
    check = tensor_check([argument.name for argument in operator._schema.arguments], tensors)
    LIBRARY.impl(name, precise_kernel, "CompositeExplicitAutograd")
    torch.library.register_fake(f"plsp::{name}", lambda *args: fake(*pack(args[:-1])), lib=LIBRARY)
    return operator


def first_order_only(backward: Callable[..., Any]) -> Callable[..., Any]:
    """Raise an error on double backward.

    PyTorch's once_differentiable silently returns zero for it when the upstream gradient is a constant,
    as in `loss + gradient.square().sum()`.
    """

    @functools.wraps(backward)
    def wrapper(ctx: Any, *grads: Tensor) -> Any:
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():
            raise RuntimeError(
                "plsp_kernels cannot be differentiated twice: call backward or grad without create_graph=True, "
                "or use impl='reference', which supports second derivatives"
            )
        return backward(ctx, *grads)

    return wrapper


def as_output(ctx: Any, result: Tensor) -> Tensor:
    """Return a result of the operator from a forward: the tensor itself, or a copy where the compiler needs one."""
    if torch.compiler.is_compiling():
        return result.clone()
    ctx.mark_dirty(result)
    return result


def scaled(gradient: Tensor, factor: Tensor, dtype: torch.dtype) -> Tensor:
    """The product of a gradient and the 0-d upstream gradient, rounded once to the dtype."""
    return torch.mul(gradient, factor, out=torch.empty_like(gradient, dtype=dtype))
