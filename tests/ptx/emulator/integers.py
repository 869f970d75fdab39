"""Integer and logic instructions. Arithmetic wraps, as numpy's does."""

from collections.abc import Callable

import numpy as np

from emulator.forms import Execute, form, lanewise
from emulator.operands import DTYPES
from emulator.program import Instruction

Function = Callable[..., np.ndarray]


@form(r"(?P<name>add|sub|min|max)\.(?P<type>[su](16|32|64))")
def arithmetic(instruction: Instruction, name: str, type: str) -> Execute:
    functions = {"add": np.add, "sub": np.subtract, "min": np.minimum, "max": np.maximum}
    return lanewise(instruction, functions[name], [type, type])


@form(r"(?P<name>neg|abs)\.(?P<type>s(16|32|64))")
def sign(instruction: Instruction, name: str, type: str) -> Execute:
    return lanewise(instruction, np.negative if name == "neg" else np.abs, [type])


@form(r"mul\.lo\.(?P<type>[su](16|32|64))")
def multiply(instruction: Instruction, type: str) -> Execute:
    return lanewise(instruction, np.multiply, [type, type])


@form(r"mad\.lo\.(?P<type>[su](16|32|64))")
def multiply_add(instruction: Instruction, type: str) -> Execute:
    return lanewise(instruction, lambda a, b, c: a * b + c, [type] * 3)


def _widened(type_: str) -> str:
    return f"{type_[0]}{2 * int(type_[1:])}"


def _product(type_: str) -> Function:
    """The full product, twice as wide as its factors."""
    wide = DTYPES[_widened(type_)]
    return lambda a, b: a.astype(wide) * b.astype(wide)


@form(r"mul\.wide\.(?P<type>[su](16|32))")
def multiply_wide(instruction: Instruction, type: str) -> Execute:
    return lanewise(instruction, _product(type), [type, type], _widened(type))


@form(r"mad\.wide\.(?P<type>[su](16|32))")
def multiply_add_wide(instruction: Instruction, type: str) -> Execute:
    product = _product(type)
    return lanewise(instruction, lambda a, b, c: product(a, b) + c, [type, type, _widened(type)], _widened(type))


@form(r"mul\.hi\.(?P<type>[su](16|32))")
def multiply_high(instruction: Instruction, type: str) -> Execute:
    product, dtype, bits = _product(type), DTYPES[type], int(type[1:])
    return lanewise(instruction, lambda a, b: (product(a, b) >> bits).astype(dtype), [type, type])


@form(r"(?P<name>div|rem)\.(?P<type>[su](16|32|64))")
def divide(instruction: Instruction, name: str, type: str) -> Execute:
    """Rounds towards zero; PTX leaves division by zero open, here it gives all ones."""
    ones = np.array(-1).astype(DTYPES[type])

    def remainder(a: np.ndarray, b: np.ndarray) -> np.ndarray:
        return np.fmod(a, np.where(b == 0, np.ones_like(b), b))

    def quotient(a: np.ndarray, b: np.ndarray) -> np.ndarray:
        return (a - remainder(a, b)) // np.where(b == 0, np.ones_like(b), b)

    function = quotient if name == "div" else remainder
    return lanewise(instruction, lambda a, b: np.where(b == 0, ones, function(a, b)), [type, type])


@form(r"(?P<name>and|or|xor)\.(?P<type>pred|b16|b32|b64)")
def logic(instruction: Instruction, name: str, type: str) -> Execute:
    functions = {"and": np.bitwise_and, "or": np.bitwise_or, "xor": np.bitwise_xor}
    return lanewise(instruction, functions[name], [type, type])


@form(r"not\.(?P<type>pred|b16|b32|b64)")
def complement(instruction: Instruction, type: str) -> Execute:
    return lanewise(instruction, np.invert, [type])


@form(r"(?P<name>shl|shr)\.(?P<type>[bsu](16|32|64))")
def shift(instruction: Instruction, name: str, type: str) -> Execute:
    """Shifts by more than the width give zero, or the sign for signed right shifts."""
    dtype, bits = DTYPES[type], int(type[1:])

    def shifted(a: np.ndarray, amount: np.ndarray) -> np.ndarray:
        within = np.minimum(amount, bits - 1).astype(dtype)
        if name == "shl":
            return np.where(amount < bits, a << within, dtype(0))
        return a >> within if type[0] == "s" else np.where(amount < bits, a >> within, dtype(0))

    return lanewise(instruction, shifted, [type, "u32"])


@form(r"bfe\.(?P<type>[su]32)")
def extract_bits(instruction: Instruction, type: str) -> Execute:
    """`length` bits from `start` on, extended by zeros or by the sign: the highest extracted bit inside the operand."""

    def extract(a: np.ndarray, start: np.ndarray, length: np.ndarray) -> np.ndarray:
        wide = a.astype(np.int64)
        start, length = (np.minimum(x & np.uint32(255), 32).astype(np.int64) for x in (start, length))
        field = (wide >> start) & ((np.int64(1) << length) - 1)
        if type == "u32":
            return field.astype(np.uint32)
        negative = (wide >> np.minimum(start + length - 1, 31)) & 1
        extended = np.where(negative, field | -(np.int64(1) << length), field & ((np.int64(1) << length) - 1))
        return np.where(length == 0, 0, extended).astype(np.int32)

    return lanewise(instruction, extract, [type, "u32", "u32"])


@form(r"prmt\.b32")
def permute_bytes(instruction: Instruction) -> Execute:
    """Four of the eight bytes of two registers; bit 3 of a selector replicates the sign of its byte."""

    def permute(a: np.ndarray, b: np.ndarray, selectors: np.ndarray) -> np.ndarray:
        source = a.astype(np.uint64) | b.astype(np.uint64) << np.uint64(32)
        result = np.zeros_like(source)
        for position in range(4):
            selector = selectors.astype(np.uint64) >> np.uint64(4 * position)
            byte = source >> (selector & np.uint64(7)) * np.uint64(8) & np.uint64(255)
            signs = (byte >> np.uint64(7)) * np.uint64(255)
            result |= np.where(selector & np.uint64(8), signs, byte) << np.uint64(8 * position)
        return result.astype(np.uint32)

    return lanewise(instruction, permute, ["b32"] * 3)


@form(r"popc\.(?P<type>b32|b64)")
def count_bits(instruction: Instruction, type: str) -> Execute:
    def count(a: np.ndarray) -> np.ndarray:
        return np.unpackbits(a.copy().view(np.uint8).reshape(len(a), -1), axis=1).sum(1, dtype=np.uint32)

    return lanewise(instruction, count, [type], "u32")


_COMPARISONS = {
    **{"eq": np.equal, "ne": np.not_equal, "lt": np.less, "le": np.less_equal, "gt": np.greater},
    **{"ge": np.greater_equal, "lo": np.less, "ls": np.less_equal, "hi": np.greater, "hs": np.greater_equal},
}


@form(r"setp\.(?P<relation>eq|ne|lt|le|gt|ge|lo|ls|hi|hs)\.(?P<type>[bsu](16|32|64))")
def compare(instruction: Instruction, relation: str, type: str) -> Execute:
    return lanewise(instruction, _COMPARISONS[relation], [type, type], "pred")
