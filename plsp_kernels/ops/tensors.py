"""Dtypes and shapes of an operator's tensors, for implementations that take their addresses.

A tensor is described by its dtype and its sizes, such as "int64 Bl" or, with an alternative, "float l d d | l d". A
name stands for the same size in all tensors of a call; `l+1` is one more than `l`, `*` any dtype or size, `()` a 0-d
tensor.
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

_DTYPES: dict[str, Callable[[torch.dtype], bool]] = {
    "float": lambda dtype: dtype.is_floating_point,
    "int64": lambda dtype: dtype == torch.int64,
    "bool": lambda dtype: dtype == torch.bool,
    "*": lambda dtype: True,
}


def tensor_check(arguments: Sequence[str], tensors: Mapping[str, str]) -> Callable[[Sequence[Any]], None]:
    """Return a function of an operator's arguments that raises unless its tensors are as described."""
    described = [(arguments.index(name), name, *_parsed(text)) for name, text in tensors.items()]
    positions = [position for position, *_ in described]

    @functools.lru_cache(maxsize=1024)  # a training step repeats its shapes, and looking them up costs less
    def check(*found: tuple[torch.dtype, torch.Size] | None) -> None:
        sizes = {"3": 3}
        for (_, name, kind, shapes), given in zip(described, found, strict=True):
            if given is None:
                continue
            dtype, shape = given
            if not _DTYPES[kind](dtype):
                raise TypeError(f"{name} must be a tensor of {kind}, got {dtype}")
            wanted = shapes.get(len(shape))
            if wanted is None or any(
                letter != "*" and sizes.setdefault(letter, size - more) != size - more
                for (letter, more), size in zip(wanted, shape, strict=True)
            ):
                expected = tensors[name].partition(" ")[2]
                known = ", ".join(f"{letter} = {size}" for letter, size in sizes.items() if letter.isalpha())
                raise ValueError(f"{name} must have shape {expected} with {known}, got {tuple(shape)}")

    def check_arguments(args: Sequence[Any]) -> None:
        given = [args[position] for position in positions]
        check(*[None if tensor is None else (tensor.dtype, tensor.shape) for tensor in given])

    return check_arguments


def _parsed(text: str) -> tuple[str, dict[int, list[tuple[str, int]]]]:
    """The dtype and, by number of dimensions, the name of each size and what is added to it."""
    dtype, _, alternatives = text.partition(" ")
    shapes = [[] if shape.strip() == "()" else shape.split() for shape in alternatives.split("|")]
    return dtype, {
        len(shape): [(size.removesuffix("+1"), int(size.endswith("+1"))) for size in shape] for shape in shapes
    }
