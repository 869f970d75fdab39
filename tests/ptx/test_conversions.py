"""cvt against PyTorch's conversions, which round to nearest even, and against the definition of TF32."""

import math
from fractions import Fraction

import numpy as np
import pytest
import torch

from snippets import apply, assert_same_bits

VALUES = [0.0, -0.0, 1.0, 1 / 3, -2.7, 65519.0, 65520.0, 1e-8, 3e38, -1e-40, math.inf, -math.inf, math.nan]
TIES = [1 + 2.0**-8, 1 + 3 * 2.0**-8, 1 + 2.0**-11, 1 + 3 * 2.0**-11, 1 + 2.0**-8 + 2.0**-20]
FLOATS = np.array(VALUES + TIES, np.float32)


def test_integers_are_truncated_and_extended_by_their_sign() -> None:
    values = np.array([-1, -(2**31), 2**31 - 1, 300, 0], np.int32)
    assert apply("cvt.s64.s32", [values], np.int64).tolist() == values.astype(np.int64).tolist()
    assert apply("cvt.u64.u32", [values.view(np.uint32)], np.uint64).tolist() == values.view(np.uint32).tolist()
    assert apply("cvt.s8.s32", [values], np.int32).tolist() == values.astype(np.int8).tolist()
    assert apply("cvt.u16.u32", [values], np.uint16).tolist() == values.astype(np.uint16).tolist()
    assert apply("cvt.u32.u16", [values.astype(np.uint16)], np.uint32).tolist() == values.astype(np.uint16).tolist()


def test_integers_round_to_the_nearest_float() -> None:
    values = np.array([2**24 + 1, 2**24 + 3, -(2**31), 7], np.int32)
    assert apply("cvt.rn.f32.s32", [values], np.float32).tolist() == [2**24, 2**24 + 4, -(2**31), 7]
    unsigned = np.array([2**32 - 1, 5], np.uint32)
    assert apply("cvt.rn.f64.u32", [unsigned], np.float64).tolist() == [2**32 - 1, 5]


@pytest.mark.parametrize(
    ("rounding", "expected"),
    [("rni", [2, 4, -2, 0]), ("rzi", [2, 3, -2, 0]), ("rmi", [2, 3, -3, -1]), ("rpi", [3, 4, -2, 0])],
)
def test_floats_round_to_integers(rounding: str, expected: list[int]) -> None:
    values = np.array([2.5, 3.5, -2.5, -0.5], np.float32)
    assert apply(f"cvt.{rounding}.s32.f32", [values], np.int32).tolist() == expected
    assert apply(f"cvt.{rounding}.f32.f32", [values], np.float32).tolist() == expected


def test_floats_beyond_the_integers_are_clamped() -> None:
    values = np.array([1e10, -1e10, math.inf, -math.inf, math.nan], np.float32)
    signed = apply("cvt.rzi.s32.f32", [values], np.int32)
    assert signed.tolist() == [2**31 - 1, -(2**31), 2**31 - 1, -(2**31), 0]
    assert apply("cvt.rzi.u32.f32", [values], np.uint32).tolist() == [2**32 - 1, 0, 2**32 - 1, 0, 0]
    assert apply("cvt.rzi.s64.f32", [values * 1e20], np.int64).tolist()[:2] == [2**63 - 1, -(2**63)]


def test_halves_round_to_nearest_even() -> None:
    tensor = torch.from_numpy(FLOATS)
    half = apply("cvt.rn.f16.f32", [FLOATS], np.float16)
    assert_same_bits(half, tensor.half().numpy())
    brain = apply("cvt.rn.bf16.f32", [FLOATS], np.uint16)
    expected = tensor.bfloat16().view(torch.int16).numpy().view(np.uint16)
    known = ~np.isnan(FLOATS)
    assert brain[known].tolist() == expected[known].tolist()
    assert brain[~known].tolist() == [0x7FFF]


def test_halves_are_widened_exactly() -> None:
    bits = np.arange(0, 2**16, 37).astype(np.uint16)
    halves = torch.from_numpy(bits.view(np.int16)).view(torch.bfloat16).float().numpy()
    for start in range(0, len(bits), 512):
        part = slice(start, start + 512)
        assert_same_bits(apply("cvt.f32.bf16", [bits[part]], np.float32), halves[part])
        assert_same_bits(
            apply("cvt.f32.f16", [bits[part].view(np.float16)], np.float32),
            bits[part].view(np.float16).astype(np.float32),
        )


def test_pairs_of_halves_hold_the_first_operand_above() -> None:
    upper, lower = np.array([1.0, -2.0], np.float32), np.array([3.0, 0.5], np.float32)
    packed = apply("cvt.rn.f16x2.f32", [upper, lower], np.uint32).view(np.float16).reshape(-1, 2)
    assert packed.tolist() == [[3.0, 1.0], [0.5, -2.0]]
    packed = apply("cvt.rn.bf16x2.f32", [upper, lower], np.uint32)
    assert packed.tolist() == [0x3F804040, 0xC0003F00]


def test_double_is_narrowed_to_nearest() -> None:
    values = np.array([1 / 3, 1 + 2.0**-24, 1 + 3 * 2.0**-24, 1e300, -1e-300], np.float64)
    assert_same_bits(
        apply("cvt.rn.f32.f64", [values], np.float32), np.array([1 / 3, 1, 1 + 2.0**-22, math.inf, -0.0], np.float32)
    )
    assert_same_bits(apply("cvt.f64.f32", [FLOATS], np.float64), FLOATS.astype(np.float64))


def test_tf32_keeps_ten_bits_with_ties_away_from_zero() -> None:
    values = np.array([1 + 2.0**-11, -(1 + 2.0**-11), 1 + 2.0**-11 - 2.0**-23, 1 / 3, math.inf], np.float32)
    actual = apply("cvt.rna.tf32.f32", [values], np.float32)
    third = Fraction(round(Fraction(float(values[3])) * 2**12), 2**12)  # 1/3 has its leading bit at 2^-2
    expected = np.array([1 + 2.0**-10, -(1 + 2.0**-10), 1.0, float(third), math.inf], np.float32)
    assert_same_bits(actual, expected)
