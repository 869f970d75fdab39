"""Floating-point instructions.

Approximate instructions are exact up to one rounding, or in pessimistic mode wrong by as much as the PTX manual allows.
The sign of the error depends on nothing but the result, so that equal inputs still give equal bits.
"""

from collections.abc import Callable

import numpy as np

from emulator.forms import Execute, form, lanewise
from emulator.fused import fma
from emulator.machine import Lanes, Machine
from emulator.operands import DTYPES, reader, writer
from emulator.program import Instruction

Function = Callable[..., np.ndarray]


def flush(values: np.ndarray) -> np.ndarray:
    """Subnormal float32 numbers become zeros of their sign."""
    bits = values.view(np.uint32)
    subnormal = (bits & np.uint32(0x7F800000)) == 0
    return np.where(subnormal, bits & np.uint32(0x80000000), bits).view(np.float32)


def flushed(function: Function) -> Function:
    """The .ftz variant of a float32 function: subnormal inputs and results are zero."""
    return lambda *values: flush(function(*map(flush, values)))


def _floating(instruction: Instruction, function: Function, ftz: str | None, type_: str, result: str = "") -> Execute:
    count = len(instruction.operands) - 1
    return lanewise(instruction, flushed(function) if ftz else function, [type_] * count, result or None)


@form(r"(?P<name>add|sub|mul)(\.rn)?(?P<ftz>\.ftz)?\.(?P<type>f32|f64)")
def arithmetic(instruction: Instruction, name: str, ftz: str | None, type: str) -> Execute:
    functions = {"add": np.add, "sub": np.subtract, "mul": np.multiply}
    return _floating(instruction, functions[name], ftz, type)


@form(r"fma\.rn(?P<ftz>\.ftz)?\.(?P<type>f32|f64)")
def fused_multiply_add(instruction: Instruction, ftz: str | None, type: str) -> Execute:
    return _floating(instruction, fma, ftz, type)


@form(r"(?P<name>div|rcp|sqrt)\.rn(?P<ftz>\.ftz)?\.(?P<type>f32|f64)")
def rounded(instruction: Instruction, name: str, ftz: str | None, type: str) -> Execute:
    functions = {"div": np.divide, "rcp": np.reciprocal, "sqrt": np.sqrt}
    return _floating(instruction, functions[name], ftz, type)


@form(r"(?P<name>neg|abs)(?P<ftz>\.ftz)?\.(?P<type>f32|f64)")
def sign(instruction: Instruction, name: str, ftz: str | None, type: str) -> Execute:
    return _floating(instruction, np.negative if name == "neg" else np.abs, ftz, type)


@form(r"copysign\.(?P<type>f32|f64)")
def copy_sign(instruction: Instruction, type: str) -> Execute:
    """The sign of the first operand, the rest of the second."""
    return _floating(instruction, lambda a, b: np.copysign(b, a), None, type)


@form(r"(?P<name>min|max)(?P<ftz>\.ftz)?(?P<nan>\.NaN)?\.(?P<type>f32|f64)")
def extremum(instruction: Instruction, name: str, ftz: str | None, nan: str | None, type: str) -> Execute:
    """The other operand if one is NaN, or NaN with .NaN; -0 is below +0."""
    if nan:
        choose: Function = np.minimum if name == "min" else np.maximum
    else:
        choose = np.fmin if name == "min" else np.fmax

    def extreme(a: np.ndarray, b: np.ndarray) -> np.ndarray:
        first, second = (a, b) if name == "min" else (b, a)
        return np.where(a == b, np.where(np.signbit(a), first, second), choose(a, b))

    return _floating(instruction, extreme, ftz, type)


_RELATIONS = {"eq": np.equal, "ne": np.not_equal, "lt": np.less, "le": np.less_equal, "gt": np.greater}
_RELATIONS["ge"] = np.greater_equal


@form(r"setp\.(?P<relation>eq|ne|lt|le|gt|ge|num|nan)(?P<unordered>u)?(?P<ftz>\.ftz)?\.(?P<type>f16|bf16|f32|f64)")
def compare(instruction: Instruction, relation: str, unordered: str | None, ftz: str | None, type: str) -> Execute:
    """Relations of NaN are false, or true with the suffix u."""

    def holds(a: np.ndarray, b: np.ndarray) -> np.ndarray:
        if ftz and type == "f32":
            a, b = flush(a), flush(b)
        nan = np.isnan(a) | np.isnan(b)
        if relation in ("num", "nan"):
            return ~nan if relation == "num" else nan
        related = _RELATIONS[relation](a, b)
        return related | nan if unordered else related & ~nan

    return _floating(instruction, holds, None, type, "pred")


# Approximations


def _perturbed(values: np.ndarray, relative: float, absolute: float = 0.0) -> np.ndarray:
    """Wrong by the given error, upwards or downwards by a hash of the value; infinities and NaN are kept."""
    bits = values.view(np.uint32 if values.itemsize == 4 else np.uint64).astype(np.uint64)
    up = (bits * np.uint64(0x9E3779B97F4A7C15)) >> np.uint64(63)
    error = np.maximum(np.abs(values.astype(np.float64)) * relative, absolute)
    moved = (values + np.where(up, error, -error)).astype(values.dtype)
    return np.where(np.isfinite(moved) & (error > 0), moved, values)


def approximate(
    instruction: Instruction, function: Function, type_: str, ftz: str | None, error: tuple[float, float]
) -> Execute:
    """A function that may be wrong by error = (relative, absolute)."""
    destination, *operands = instruction.operands
    reads, write = [reader(operand, type_) for operand in operands], writer(destination, type_)

    def execute(machine: Machine, lanes: Lanes) -> None:
        values = [read(machine, lanes) for read in reads]
        if ftz and type_ == "f32":
            values = list(map(flush, values))
        result = function(*(value.astype(np.float64) for value in values)).astype(DTYPES[type_])
        if machine.mode.pessimistic:
            result = _perturbed(result, *error)
        write(machine, lanes, flush(result) if ftz and type_ == "f32" else result)

    return execute


# Relative and absolute errors of float32 by the PTX manual: two units in the last place for ex2 and division, 2^-22
# for lg2, absolute between 1/2 and 2 and relative elsewhere, 2^-22.9 for rsqrt, 2^-23 for sqrt, one unit for rcp.
_APPROXIMATIONS: dict[str, tuple[Function, tuple[float, float]]] = {
    "ex2": (np.exp2, (2.0**-22, 0.0)),
    "lg2": (np.log2, (2.0**-22, 2.0**-22)),
    "rsqrt": (lambda a: 1 / np.sqrt(a), (2.0**-22.9, 0.0)),
    "sqrt": (np.sqrt, (2.0**-23, 0.0)),
    "rcp": (np.reciprocal, (2.0**-23, 0.0)),
    "div": (np.divide, (2.0**-22, 0.0)),
}


@form(r"(?P<name>ex2|lg2|rsqrt|sqrt|rcp|div)\.(approx|full)(?P<ftz>\.ftz)?\.f32")
def approximate_float32(instruction: Instruction, name: str, ftz: str | None) -> Execute:
    function, error = _APPROXIMATIONS[name]
    return approximate(instruction, function, "f32", ftz, error)


@form(r"rsqrt\.approx\.f64")
def reciprocal_square_root(instruction: Instruction) -> Execute:
    """Emulated by GPUs in software; CUDA documents one unit in the last place."""
    return approximate(instruction, lambda a: 1 / np.sqrt(a), "f64", None, (2.0**-52, 0.0))


@form(r"rcp\.approx\.ftz\.f64")
def coarse_reciprocal(instruction: Instruction) -> Execute:
    """The start of a Newton iteration: only the upper 32 bits count, of the operand and of the result."""

    def upper(values: np.ndarray) -> np.ndarray:
        return (values.view(np.uint64) & np.uint64(0xFFFFFFFF00000000)).view(np.float64)

    return approximate(instruction, lambda a: upper(1 / upper(a)), "f64", None, (2.0**-20, 0.0))
