"""cvt: between integers, between floating-point types, and from one to the other."""

import numpy as np

from emulator.floats import flush
from emulator.forms import Execute, form, lanewise
from emulator.operands import DTYPES
from emulator.program import Instruction

_ROUND = {"rni": np.rint, "rzi": np.trunc, "rmi": np.floor, "rpi": np.ceil}


@form(r"cvt\.(?P<to>[su](8|16|32|64))\.(?P<source>[su](8|16|32|64))")
def integer_to_integer(instruction: Instruction, to: str, source: str) -> Execute:
    return lanewise(instruction, lambda a: a.astype(DTYPES[to]), [source], to)


@form(r"cvt\.rn\.(?P<to>f16|f32|f64)\.(?P<source>[su](8|16|32|64))")
def integer_to_float(instruction: Instruction, to: str, source: str) -> Execute:
    return lanewise(instruction, lambda a: a.astype(DTYPES[to]), [source], to)


@form(r"cvt\.(?P<rounding>rni|rzi|rmi|rpi)(?P<ftz>\.ftz)?\.(?P<to>[su](8|16|32|64))\.(?P<source>f16|f32|f64)")
def float_to_integer(instruction: Instruction, rounding: str, ftz: str | None, to: str, source: str) -> Execute:
    """Values beyond the integers are clamped, NaN becomes zero."""
    limits = np.iinfo(np.dtype(DTYPES[to]))

    def convert(a: np.ndarray) -> np.ndarray:
        whole = _ROUND[rounding]((flush(a) if ftz else a).astype(np.float64))
        # The largest 64-bit integers round up in float64, so the comparison decides and the cast is never out of range.
        above, below = whole >= float(limits.max), whole <= float(limits.min)
        inside = np.where(above | below | np.isnan(whole), 0.0, whole).astype(DTYPES[to])
        return np.where(above, limits.max, np.where(below, limits.min, inside)).astype(DTYPES[to])

    return lanewise(instruction, convert, [source], to)


@form(r"cvt\.(?P<rounding>rni|rzi|rmi|rpi)(?P<ftz>\.ftz)?\.(?P<type>f16|f32|f64)\.(?P=type)")
def round_to_integer(instruction: Instruction, rounding: str, ftz: str | None, type: str) -> Execute:
    function = _ROUND[rounding]
    return lanewise(instruction, (lambda a: function(flush(a))) if ftz else function, [type])


@form(r"cvt\.(?P<to>f32|f64)\.(?P<source>f16|bf16|f32)")
def widen(instruction: Instruction, to: str, source: str) -> Execute:
    return lanewise(instruction, lambda a: a.astype(DTYPES[to]), [source], to)


@form(r"cvt\.rn\.(?P<to>f16|f32)\.(?P<source>f32|f64)")
def narrow(instruction: Instruction, to: str, source: str) -> Execute:
    return lanewise(instruction, lambda a: a.astype(DTYPES[to]), [source], to)


def bfloat16_bits(values: np.ndarray) -> np.ndarray:
    """float32 rounded to nearest even, as the upper half of its bits."""
    bits = values.view(np.uint32).astype(np.uint64)
    rounded = (bits + np.uint64(0x7FFF) + (bits >> np.uint64(16) & np.uint64(1))) >> np.uint64(16)
    return np.where(np.isnan(values), 0x7FFF, rounded).astype(np.uint16)


def float16_bits(values: np.ndarray) -> np.ndarray:
    return values.astype(np.float16).view(np.uint16)


@form(r"cvt\.rn\.bf16\.f32")
def narrow_to_bfloat16(instruction: Instruction) -> Execute:
    return lanewise(instruction, bfloat16_bits, ["f32"], "b16")


@form(r"cvt\.rn\.(?P<half>bf16|f16)x2\.f32")
def narrow_pair(instruction: Instruction, half: str) -> Execute:
    """The first operand becomes the upper half."""
    narrow = bfloat16_bits if half == "bf16" else float16_bits

    def pack(upper: np.ndarray, lower: np.ndarray) -> np.ndarray:
        return narrow(upper).astype(np.uint32) << np.uint32(16) | narrow(lower)

    return lanewise(instruction, pack, ["f32", "f32"], "b32")


@form(r"cvt\.rna\.tf32\.f32")
def round_to_tf32(instruction: Instruction) -> Execute:
    """Ten bits of fraction, ties away from zero."""

    def convert(a: np.ndarray) -> np.ndarray:
        bits = a.view(np.uint32)
        rounded = (bits + np.uint32(0x1000)) & np.uint32(0xFFFFE000)
        return np.where(np.isfinite(a), rounded, bits)

    return lanewise(instruction, convert, ["f32"], "b32")
