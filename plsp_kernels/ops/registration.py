"""How every operator of the namespace is registered.

An operator's last argument, `str impl`, names the implementation ("torch" or "triton"), and its Python function there
has the operator's own name. The strength λ, which grows during training, is a 0-d tensor on the CPU to the operator and
a number to its implementation: `torch.compile` would make a new graph for every value of a number.

Autograd lives outside, in `autograd.Function`s: that is the cheapest call in eager mode, and `torch.compile` traces
through it.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

LIBRARY = torch.library.Library("plsp", "DEF")


@functools.cache
def _implementation(impl: str, name: str) -> Callable[..., Any]:
    # Imported on first use: neither implementation, least of all Triton, is needed to import the package.
    if impl == "triton":
        from plsp_kernels import triton_impl

        return getattr(triton_impl, name)
    from plsp_kernels import torch_impl

    return getattr(torch_impl, name)


def without_autocast(function: Callable[..., Any], tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
    """Call the function in the precision of its arguments, whatever autocast region surrounds it."""
    device_type = tensor.device.type
    if not torch.is_autocast_enabled(device_type):
        return function(tensor, *args, **kwargs)
    with torch.autocast(device_type, enabled=False):
        return function(tensor, *args, **kwargs)


def define_operator(schema: str, fake: Callable[..., Any]) -> Callable[..., Any]:
    """Register `plsp::<schema>` with its fake implementation; returns the callable operator."""
    name = schema.partition("(")[0]

    def kernel(*args: Any) -> Any:
        first, *others = args[:-1]
        others = [arg.item() if isinstance(arg, Tensor) and arg.dim() == 0 else arg for arg in others]
        return without_autocast(_implementation(args[-1], name), first, *others)

    LIBRARY.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
    LIBRARY.impl(name, kernel, "CompositeExplicitAutograd")
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
