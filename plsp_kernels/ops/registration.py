"""How every operator of the namespace is registered.

An operator's last argument, `str impl`, names the implementation ("torch" or "triton"); its Python function there has
the operator's own name, unless the operator is composed of several. The strength λ, which grows during training, is a
0-d tensor on the CPU to the operator and a number to its implementation: `torch.compile` would make a new graph for
every value of a number.

Autograd lives outside, in `autograd.Function`s: that is the cheapest call in eager mode, and `torch.compile` traces
through it.
"""

import functools
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

LIBRARY = torch.library.Library("plsp", "DEF")
KERNELS: dict[str, Callable[..., Any]] = {}
"""What runs when an operator is called, by its name: for those who look into operators from outside."""


@functools.cache
def implementation(impl: str) -> ModuleType:
    """The package that has the functions of this implementation."""
    # Imported on first use: neither of them, least of all Triton, is needed to import the package.
    if impl == "triton":
        from plsp_kernels import triton_impl

        return triton_impl
    from plsp_kernels import torch_impl

    return torch_impl


def without_autocast(function: Callable[..., Any], tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
    """Call the function in the precision of its arguments, whatever autocast region surrounds it."""
    device_type = tensor.device.type
    if not torch.is_autocast_enabled(device_type):
        return function(tensor, *args, **kwargs)
    with torch.autocast(device_type, enabled=False):
        return function(tensor, *args, **kwargs)


def define_operator(
    schema: str, fake: Callable[..., Any], compose: Callable[..., Any] | None = None
) -> Callable[..., Any]:
    """Register `plsp::<schema>` with its fake implementation; returns the callable operator.

    It calls the implementation's function of the operator's name, or compose(impl, …) with the operator's other
    arguments, which builds the operator from several functions.
    """
    name = schema.partition("(")[0]

    def kernel(*args: Any) -> Any:
        *given, impl = (arg.item() if isinstance(arg, Tensor) and arg.dim() == 0 else arg for arg in args)
        return getattr(implementation(impl), name)(*given) if compose is None else compose(impl, *given)

    KERNELS[name] = kernel
    LIBRARY.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
    LIBRARY.impl(name, functools.partial(without_autocast, kernel), "CompositeExplicitAutograd")
    torch.library.register_fake(f"plsp::{name}", fake, lib=LIBRARY)
    return getattr(torch.ops.plsp, name).default


def first_order_only(backward: Callable[..., Any]) -> Callable[..., Any]:
    """Refuse to be differentiated a second time, loudly.

    PyTorch's own once_differentiable lets a second derivative pass as zero when the upstream gradient is a constant,
    as in `loss + gradient.square().sum()`.
    """

    @functools.wraps(backward)
    def wrapper(ctx: Any, *grads: Tensor) -> Any:
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():
            raise RuntimeError(
                "plsp_kernels cannot be differentiated twice: call backward or grad without create_graph=True, "
                "or use impl='reference', which offers second derivatives"
            )
        return backward(ctx, *grads)

    return wrapper
