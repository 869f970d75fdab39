"""Floating-point instructions against exact arithmetic with fractions and against IEEE 754's special cases."""

import math
from fractions import Fraction

import numpy as np
import pytest

from emulator.machine import Mode
from snippets import apply, assert_same_bits, pairs

TYPES = {"f32": np.float32, "f64": np.float64}
SPECIAL = [0.0, -0.0, 1.0, -1.5, math.inf, -math.inf, math.nan, 1e-40, -1e-40, 3e38, 1 / 3]
PESSIMISTIC = Mode(pessimistic=True)


def random(dtype: type[np.generic], count: int, seed: int) -> np.ndarray:
    """Numbers of many magnitudes."""
    generator = np.random.default_rng(seed)
    return (generator.standard_normal(count) * 2.0 ** generator.integers(-20, 20, count)).astype(dtype)


def nearest(value: Fraction, dtype: type[np.generic]) -> np.generic:
    """The number of the type that is nearest, ties to even; Python rounds fractions so, but only to float64."""
    if dtype is np.float64 or value == 0:
        return dtype(float(value))
    close = np.float32(float(value))
    around = [np.nextafter(close, np.float32(-np.inf)), close, np.nextafter(close, np.float32(np.inf))]
    return min(around, key=lambda x: (abs(Fraction(float(x)) - value), int(x.view(np.uint32)) & 1))


@pytest.mark.parametrize("type_", ["f32", "f64"])
def test_arithmetic_rounds_to_nearest(type_: str) -> None:
    a, b = random(TYPES[type_], 64, 0), random(TYPES[type_], 64, 1)
    exact = [(Fraction(float(x)), Fraction(float(y))) for x, y in zip(a, b, strict=True)]
    for opcode, results in {
        "add": [x + y for x, y in exact],
        "sub.rn": [x - y for x, y in exact],
        "mul": [x * y for x, y in exact],
        "div.rn": [x / y for x, y in exact],
    }.items():
        expected = np.array([nearest(value, TYPES[type_]) for value in results])
        assert_same_bits(apply(f"{opcode}.{type_}", [a, b], TYPES[type_]), expected)


@pytest.mark.parametrize("type_", ["f32", "f64"])
def test_fused_multiply_add_rounds_once(type_: str) -> None:
    dtype = TYPES[type_]
    a, b = random(dtype, 64, 0), random(dtype, 64, 1)
    c = (-a * b).astype(dtype)  # what remains is the rounding error of the product
    exact = [Fraction(float(x)) * Fraction(float(y)) + Fraction(float(z)) for x, y, z in zip(a, b, c, strict=True)]
    actual = apply(f"fma.rn.{type_}", [a, b, c], dtype)
    assert_same_bits(actual, np.array([nearest(value, dtype) for value in exact]))
    assert (actual != 0).any()


def test_fused_multiply_add_is_not_rounded_to_float64_on_its_way() -> None:
    """The exact result lies so near to the middle of two float32 numbers that float64 cannot tell the side."""
    a = np.array([1 + 2.0**-12], np.float32)
    c = np.array([2.0**-60], np.float32)
    assert apply("fma.rn.f32", [a, a, c], np.float32)[0] == np.float32(1 + 2.0**-11 + 2.0**-23)
    assert apply("fma.rn.f32", [a, a, -c], np.float32)[0] == np.float32(1 + 2.0**-11)


def test_subnormals_are_flushed_with_ftz_only() -> None:
    tiny, one = np.array([1e-40, -1e-40], np.float32), np.array([1.0, 1.0], np.float32)
    zeros = np.array([0.0, -0.0], np.float32)
    assert_same_bits(apply("mul.f32", [tiny, one], np.float32), tiny)
    assert_same_bits(apply("mul.ftz.f32", [tiny, one], np.float32), zeros)
    assert_same_bits(apply("fma.rn.ftz.f32", [tiny, one, zeros], np.float32), zeros)
    assert_same_bits(apply("abs.ftz.f32", [tiny], np.float32), np.zeros(2, np.float32))
    small = np.array([1e-30, -1e-30], np.float32)
    factor = np.array([1e-10, 1e-10], np.float32)
    assert_same_bits(apply("mul.ftz.f32", [small, factor], np.float32), zeros)  # the result is subnormal
    assert apply("setp.eq.ftz.f32", [tiny, zeros], np.bool_).all()
    assert not apply("setp.eq.f32", [tiny, zeros], np.bool_).any()


@pytest.mark.parametrize("type_", ["f32", "f64"])
def test_minimum_and_maximum_ignore_nan_by_default(type_: str) -> None:
    a, b = pairs(SPECIAL, TYPES[type_])

    def least(x: float, y: float) -> float:
        if math.isnan(x) or math.isnan(y):
            return y if math.isnan(x) else x
        return min(x, y, key=lambda z: (z, math.copysign(1.0, z)))

    each = [(float(x), float(y)) for x, y in zip(a, b, strict=True)]
    smallest = np.array([least(x, y) for x, y in each], TYPES[type_])
    largest = np.array([-least(-x, -y) for x, y in each], TYPES[type_])
    assert_same_bits(apply(f"min.{type_}", [a, b], TYPES[type_]), smallest)
    assert_same_bits(apply(f"max.{type_}", [a, b], TYPES[type_]), largest)
    nan = np.isnan(a) | np.isnan(b)
    propagated = apply("max.NaN.f32", [a.astype(np.float32), b.astype(np.float32)], np.float32)
    assert np.isnan(propagated).tolist() == nan.tolist()


def test_signs() -> None:
    values = np.array(SPECIAL, np.float32)
    bits = values.view(np.uint32)
    assert_same_bits(apply("neg.f32", [values], np.float32), (bits ^ np.uint32(1 << 31)).view(np.float32))
    assert_same_bits(
        apply("abs.f32", [values], np.float32), (bits & np.uint32(~(1 << 31) & 0xFFFFFFFF)).view(np.float32)
    )
    signs = values[::-1].copy()
    assert_same_bits(apply("copysign.f32", [signs, values], np.float32), np.copysign(values, signs))


@pytest.mark.parametrize("type_", ["f32", "f64"])
def test_comparisons_with_nan_are_false_unless_unordered(type_: str) -> None:
    a, b = pairs(SPECIAL, TYPES[type_])
    nan = np.isnan(a) | np.isnan(b)
    relations = {"eq": a == b, "ne": (a != b) & ~nan, "lt": a < b, "le": a <= b, "gt": a > b, "ge": a >= b}
    for relation, expected in relations.items():
        ordered = apply(f"setp.{relation}.{type_}", [a, b], np.bool_)
        unordered = apply(f"setp.{relation}u.{type_}", [a, b], np.bool_)
        assert ordered.tolist() == expected.tolist()
        assert unordered.tolist() == (expected | nan).tolist()
    assert apply(f"setp.nan.{type_}", [a, b], np.bool_).tolist() == nan.tolist()
    assert apply(f"setp.num.{type_}", [a, b], np.bool_).tolist() == (~nan).tolist()


def test_halves_are_compared_as_numbers() -> None:
    a, b = pairs([0.0, -0.0, 1.0, -1.5, math.inf, math.nan], np.float16)
    assert apply("setp.lt.f16", [a, b], np.bool_).tolist() == (a < b).tolist()
    wide = [a.astype(np.float32), b.astype(np.float32)]
    upper_halves = [(x.view(np.uint32) >> np.uint32(16)).astype(np.uint16) for x in wide]
    assert apply("setp.eq.bf16", upper_halves, np.bool_).tolist() == (a == b).tolist()


APPROXIMATIONS = {
    "ex2.approx.f32": (np.exp2, 2.0**-22, np.linspace(-30, 30, 64)),
    "lg2.approx.f32": (np.log2, 2.0**-22, np.geomspace(1e-3, 1e3, 64)),
    "rsqrt.approx.ftz.f32": (lambda a: 1 / np.sqrt(a), 2.0**-22.9, np.geomspace(1e-3, 1e3, 64)),
    "rcp.approx.f32": (np.reciprocal, 2.0**-23, np.geomspace(1e-3, 1e3, 64)),
    "sqrt.approx.f32": (np.sqrt, 2.0**-23, np.geomspace(1e-3, 1e3, 64)),
}


@pytest.mark.parametrize("opcode", APPROXIMATIONS)
def test_approximations_stay_within_their_documented_error(opcode: str) -> None:
    function, error, points = APPROXIMATIONS[opcode]
    points = points.astype(np.float32)
    truth = function(points.astype(np.float64))
    assert_same_bits(apply(opcode, [points], np.float32), truth.astype(np.float32))
    wrong = apply(opcode, [points], np.float32, PESSIMISTIC)
    allowed = error * np.maximum(np.abs(truth), 1.0 if opcode.startswith("lg2") else 0.0)
    off = (wrong - truth) / allowed
    half_ulp = np.spacing(np.abs(truth).astype(np.float32)) / 2 / allowed
    assert (np.abs(off) <= 1 + 2 * half_ulp).all()
    assert (np.abs(off) >= 1 - 2 * half_ulp).all()
    assert (off > 0).any()
    assert (off < 0).any()


def test_pessimistic_division_errs_by_two_units() -> None:
    a, b = random(np.float32, 64, 2), random(np.float32, 64, 3)
    truth = a.astype(np.float64) / b.astype(np.float64)
    wrong = apply("div.full.f32", [a, b], np.float32, PESSIMISTIC)
    units = np.abs(wrong - truth) / np.spacing(np.abs(truth).astype(np.float32))
    assert units.max() <= 4.5  # 2^-22 is between two and four units
    assert units.min() >= 1.5


def test_pessimistic_results_are_the_same_every_time() -> None:
    points = np.linspace(-3, 3, 64).astype(np.float32)
    first, second = (apply("ex2.approx.f32", [points], np.float32, PESSIMISTIC) for _ in range(2))
    assert_same_bits(first, second)


def test_coarse_reciprocal_has_twenty_bits() -> None:
    points = np.geomspace(1e-3, 1e3, 64)
    for mode, bound in ((Mode(), 2.0**-19), (PESSIMISTIC, 2.0**-18)):
        coarse = apply("rcp.approx.ftz.f64", [points], np.float64, mode)
        assert (np.abs(coarse * points - 1) < bound).all()
    assert not (apply("rcp.approx.ftz.f64", [points], np.float64).view(np.uint64) & np.uint64(0xFFFFFFFF)).any()


def test_special_values_of_approximations() -> None:
    values = np.array([-math.inf, math.inf, math.nan, 200.0, -200.0], np.float32)
    expected = np.array([0.0, math.inf, math.nan, math.inf, 0.0], np.float32)
    for mode in (Mode(), PESSIMISTIC):
        assert_same_bits(apply("ex2.approx.ftz.f32", [values], np.float32, mode), expected)
    zero_and_infinity = np.array([0.0, math.inf, -1.0], np.float32)
    roots = np.array([math.inf, 0.0, math.nan], np.float32)
    assert_same_bits(apply("rsqrt.approx.f32", [zero_and_infinity], np.float32), roots)
