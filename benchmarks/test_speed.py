"""The cases of `python -m benchmarks` under pytest-benchmark.

pytest benchmarks --benchmark-only
pytest benchmarks --benchmark-only -k "loss and fmnist" --benchmark-autosave
pytest benchmarks --benchmark-only --benchmark-compare
"""

import pytest
import torch
from pytest_benchmark.fixture import BenchmarkFixture

from benchmarks.footprint import expected_elements
from benchmarks.problem import Problem
from benchmarks.shapes import SHAPES
from benchmarks.subjects import (
    CASES,
    COMPILED,
    COMPILED_GRAM_FORM,
    FLOOR,
    GEMMS,
    GRAM_FORM,
    OURS,
    REFERENCE,
    STATE,
)

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
EAGER_ELEMENTS = 2**28  # beyond this, an eager call takes seconds; `python -m benchmarks` times it once


@pytest.mark.parametrize("subject", [REFERENCE, COMPILED, GRAM_FORM, COMPILED_GRAM_FORM, *OURS, STATE, FLOOR, GEMMS])
@pytest.mark.parametrize("shape", [name for name in SHAPES if not name.startswith("large")])
@pytest.mark.parametrize("case", CASES)
def test_speed(benchmark: BenchmarkFixture, case: str, shape: str, subject: str) -> None:
    benchmark.group = f"{case} at {shape}"
    subjects = CASES[case](Problem(SHAPES[shape], DEVICE))
    if subject not in subjects:
        pytest.skip(f"{case} has no {subject} on {DEVICE.type}")
    if expected_elements(case, SHAPES[shape]).get(subject, 0) > EAGER_ELEMENTS:
        pytest.skip(f"{subject} takes too long here")

    def call() -> None:
        subjects[subject].whole()
        if DEVICE.type == "cuda":
            torch.cuda.synchronize()

    call()
    benchmark(call)
