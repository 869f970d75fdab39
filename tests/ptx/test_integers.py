"""Integer instructions against Python's integers of any size."""

from collections.abc import Callable

import numpy as np
import pytest

from snippets import apply, pairs

TYPES = {"s16": np.int16, "u16": np.uint16, "s32": np.int32, "u32": np.uint32, "s64": np.int64, "u64": np.uint64}
TYPES |= {"b16": np.uint16, "b32": np.uint32, "b64": np.uint64}


def edges(type_: str) -> list[int]:
    limits = np.iinfo(TYPES[type_])
    return [limits.min, limits.min + 1, 0, 1, 2, 7, 100, limits.max // 3, limits.max - 1, limits.max]


def wrapped(value: int, type_: str) -> int:
    """The integer of the type that agrees with the value in the lowest bits."""
    bits = int(type_[1:])
    value &= (1 << bits) - 1
    return value - (1 << bits) if type_[0] == "s" and value >> (bits - 1) else value


def check(opcode: str, type_: str, function: Callable[[int, int], int], result: str | None = None) -> None:
    result = result or type_
    a, b = pairs(np.array(edges(type_), TYPES[type_]), TYPES[type_])
    expected = [wrapped(function(int(x), int(y)), result) for x, y in zip(a, b, strict=True)]
    assert apply(opcode, [a, b], TYPES[result]).tolist() == expected


@pytest.mark.parametrize("type_", ["s16", "u16", "s32", "u32", "s64", "u64"])
def test_sums_and_products_wrap(type_: str) -> None:
    check(f"add.{type_}", type_, lambda a, b: a + b)
    check(f"sub.{type_}", type_, lambda a, b: a - b)
    check(f"mul.lo.{type_}", type_, lambda a, b: a * b)
    check(f"min.{type_}", type_, min)
    check(f"max.{type_}", type_, max)


@pytest.mark.parametrize(("type_", "wide"), [("s16", "s32"), ("u16", "u32"), ("s32", "s64"), ("u32", "u64")])
def test_wide_products_are_exact(type_: str, wide: str) -> None:
    check(f"mul.wide.{type_}", type_, lambda a, b: a * b, wide)
    check(f"mul.hi.{type_}", type_, lambda a, b: a * b >> int(type_[1:]))


@pytest.mark.parametrize(("type_", "wide"), [("s32", "s64"), ("u32", "u64")])
def test_multiply_add_wraps_at_the_width_of_its_result(type_: str, wide: str) -> None:
    a, b = pairs(np.array(edges(type_), TYPES[type_]), TYPES[type_])
    for opcode, result in ((f"mad.lo.{type_}", type_), (f"mad.wide.{type_}", wide)):
        c = np.resize(np.array(edges(result), TYPES[result]), len(a))
        expected = [wrapped(int(x) * int(y) + int(z), result) for x, y, z in zip(a, b, c, strict=True)]
        assert apply(opcode, [a, b, c], TYPES[result]).tolist() == expected


@pytest.mark.parametrize("type_", ["s32", "u32", "s64", "u64"])
def test_division_rounds_towards_zero(type_: str) -> None:
    def quotient(a: int, b: int) -> int:
        return -1 if b == 0 else abs(a) // abs(b) * (-1 if (a < 0) != (b < 0) else 1)

    check(f"div.{type_}", type_, quotient)
    check(f"rem.{type_}", type_, lambda a, b: -1 if b == 0 else a - b * quotient(a, b))


@pytest.mark.parametrize("type_", ["b16", "b32", "b64"])
def test_logic_acts_on_bits(type_: str) -> None:
    check(f"and.{type_}", type_, lambda a, b: a & b)
    check(f"or.{type_}", type_, lambda a, b: a | b)
    check(f"xor.{type_}", type_, lambda a, b: a ^ b)
    values = np.array(edges(type_), TYPES[type_])
    assert apply(f"not.{type_}", [values], TYPES[type_]).tolist() == [wrapped(~int(x), type_) for x in values]


def test_logic_acts_on_predicates() -> None:
    a, b = pairs([False, True], np.bool_)
    assert apply("and.pred", [a, b], np.bool_).tolist() == (a & b).tolist()
    assert apply("or.pred", [a, b], np.bool_).tolist() == (a | b).tolist()
    assert apply("xor.pred", [a, b], np.bool_).tolist() == (a ^ b).tolist()
    assert apply("not.pred", [a], np.bool_).tolist() == (~a).tolist()


@pytest.mark.parametrize("type_", ["s32", "s64"])
def test_signs(type_: str) -> None:
    values = np.array(edges(type_), TYPES[type_])
    assert apply(f"neg.{type_}", [values], TYPES[type_]).tolist() == [wrapped(-int(x), type_) for x in values]
    assert apply(f"abs.{type_}", [values], TYPES[type_]).tolist() == [wrapped(abs(int(x)), type_) for x in values]


@pytest.mark.parametrize("type_", ["u16", "s32", "u32", "s64", "u64"])
def test_shifts_beyond_the_width_leave_nothing_but_the_sign(type_: str) -> None:
    values = np.repeat(np.array(edges(type_), TYPES[type_]), 5)
    bits = int(type_[1:])
    amounts = np.tile(np.array([0, 1, bits - 1, bits, 1000], np.uint32), len(values) // 5)
    each = [(int(x), int(y)) for x, y in zip(values, amounts, strict=True)]
    left = apply(f"shl.b{bits}", [values, amounts], TYPES[type_])
    assert left.tolist() == [wrapped(x << y, type_) for x, y in each]
    right = apply(f"shr.{type_}", [values, amounts], TYPES[type_])
    assert right.tolist() == [x >> y for x, y in each]


def test_bit_fields_are_extracted() -> None:
    a = np.array([0xDEADBEEF] * 7, np.uint32)
    start = np.array([0, 4, 28, 31, 16, 0, 28], np.uint32)
    length = np.array([8, 12, 4, 1, 16, 0, 16], np.uint32)
    unsigned = apply("bfe.u32", [a, start, length], np.uint32)
    assert unsigned.tolist() == [0xEF, 0xBEE, 0xD, 1, 0xDEAD, 0, 0xD]
    signed = apply("bfe.s32", [a.view(np.int32), start, length], np.int32)
    # A field that reaches beyond bit 31 is extended by bit 31.
    assert signed.tolist() == [0xEF - 0x100, 0xBEE - 0x1000, 0xD - 0x10, -1, 0xDEAD - 0x10000, 0, 0xD - 0x10]


def test_bytes_are_permuted() -> None:
    a, b = (np.array([value] * 4, np.uint32) for value in (0x33221100, 0x77665584))
    selectors = np.array([0x3210, 0x7654, 0x0246, 0xC890], np.uint32)
    # Selector 8 + i replicates the sign of byte i: 0x84 is negative, 0x00 and 0x11 are not.
    expected = [0x33221100, 0x77665584, 0x00228466, 0xFF000000]
    assert apply("prmt.b32", [a, b, selectors], np.uint32).tolist() == expected


def test_set_bits_are_counted() -> None:
    values = np.array([0, 1, 0xF0F0, 2**32 - 1], np.uint32)
    assert apply("popc.b32", [values], np.uint32).tolist() == [0, 1, 8, 32]


@pytest.mark.parametrize("type_", ["s16", "u16", "s32", "u32", "s64", "u64"])
def test_comparisons_respect_the_sign(type_: str) -> None:
    a, b = pairs(np.array(edges(type_), TYPES[type_]), TYPES[type_])
    relations = {"eq": a == b, "ne": a != b, "lt": a < b, "le": a <= b, "gt": a > b, "ge": a >= b}
    for relation, expected in relations.items():
        assert apply(f"setp.{relation}.{type_}", [a, b], np.bool_).tolist() == expected.tolist()
