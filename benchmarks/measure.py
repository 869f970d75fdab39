"""Measures one case at one shape: agreement, error, time and memory of every subject."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from benchmarks.footprint import expected_elements
from benchmarks.memory import available_bytes, peak_extra_bytes
from benchmarks.problem import Problem
from benchmarks.shapes import Shape
from benchmarks.subjects import (
    CASES,
    CLOSED_FORM,
    COMPILED,
    COMPILED_GRAM_FORM,
    CONTEXT,
    FLOOR,
    GEMMS,
    GRAM_FORM,
    ISDA_FORM,
    OURS,
    REFERENCE,
    STATE,
)
from benchmarks.timing import Clock, Timing, interleaved

AGREEMENT = 1e-3
"""Largest relative difference from the reference, or from float64 if that was not run, at which ratios are reported."""

RIVALS = {"reference": (REFERENCE,), "gram_form": (GRAM_FORM, COMPILED_GRAM_FORM), "isda": (ISDA_FORM,)}
"""Subjects to compare with, by the name of the ratio, which is that to the fastest of them."""

Row = dict[str, Any]


class Disagreement(Exception):
    """The result of an implementation differs from the reference."""


def largest_error(found: list[Tensor], wanted: list[Tensor]) -> float:
    """Largest difference of any result, relative to the largest element of its tensor."""
    return max(
        ((a.double() - b.double()).abs().max() / b.double().abs().max().clamp(min=1e-30)).item()
        for a, b in zip(found, wanted, strict=True)
    )


def count_aten_calls(call: Callable[[], object]) -> int:
    """Count top-level ATen calls, excluding calls made by ATen itself. They dominate the cost of small shapes."""
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        call()
    return sum(
        event.name.startswith("aten::")
        and not (event.cpu_parent is not None and event.cpu_parent.name.startswith("aten::"))
        for event in profiler.events() or []
    )


def measure(
    case: str, shape: Shape, device: torch.device, *, seconds: float, eager: bool = True, compiled: bool = True
) -> list[Row]:
    """Return a row for every subject; the row of a skipped subject has a note with the reason."""
    if compiled:
        torch.compiler.reset()  # after an earlier shape, the compiler would generate code for dynamic shapes
    problem = Problem(shape, device)
    found = CASES[case](problem)
    skipped = [] if eager else [REFERENCE]
    skipped += [] if compiled else [COMPILED, COMPILED_GRAM_FORM]
    notes = {name: "skipped by --quick" for name in skipped if name in found}
    for name, elements in expected_elements(case, shape).items():
        if name in found and 4 * elements > 0.8 * available_bytes(device):
            notes[name] = f"does not fit: needs about {4 * elements / 2**30:,.0f} GiB"
    running = {name: subject for name, subject in found.items() if name not in notes}

    results = {name: subject.whole() for name, subject in running.items()}  # also warms up every subject
    truth = _truth(case, shape, device)
    errors = {name: largest_error(result, truth) for name, result in results.items() if name not in CONTEXT}
    other, expected = ("the reference", results[REFERENCE]) if REFERENCE in results else ("float64", truth)
    for name in errors:
        difference = largest_error(results[name], expected)
        if not difference <= AGREEMENT:
            raise Disagreement(
                f"{name} differs from {other} by {difference:.1e} in {case} at {shape.name}; no speed-up"
            )
    results.clear()

    # Ratios compare whole calls, which are timed interleaved.
    clock = Clock(device)
    whole = interleaved({name: subject.whole for name, subject in running.items()}, clock, seconds)
    differentiable = {name: subject for name, subject in running.items() if subject.step is not None}
    forward = interleaved({name: subject.forward for name, subject in differentiable.items()}, clock, seconds)
    step = {name: whole[name] for name in differentiable}
    forward |= {name: timing for name, timing in whole.items() if name not in differentiable}
    return [
        {
            "case": case,
            **shape._asdict(),
            "dtype": "float32",
            "subject": name,
            **_columns("forward", forward.get(name)),
            **_columns("step", step.get(name)),
            "memory_mib": _rounded(peak_extra_bytes(running[name].whole, device) / 2**20) if name in running else "",
            "aten_calls": count_aten_calls(running[name].whole) if name in (*OURS, STATE) else "",
            "error": f"{errors[name]:.1e}" if name in errors else "",
            **{
                f"times_faster_than_{short}": "" if name in CONTEXT else _ratio(whole, _fastest(whole, rivals), name)
                for short, rivals in RIVALS.items()
            },
            "times_bare_bmm": _ratio(whole, name, FLOOR),
            "times_gemms": _ratio(whole, name, GEMMS),
            "note": notes.get(name, ""),
        }
        for name in found
    ]


def _truth(case: str, shape: Shape, device: torch.device) -> list[Tensor]:
    """Results in float64 from an implementation that always fits; tests compare it with the float64 reference."""
    found = CASES[case](Problem(shape, device, torch.float64))
    return found[STATE if STATE in found else CLOSED_FORM].whole()


def _columns(name: str, timing: Timing | None) -> Row:
    if timing is None:
        return {f"{name}_ms": "", f"{name}_low_ms": "", f"{name}_high_ms": "", f"{name}_calls": ""}
    milliseconds = [_rounded(1e3 * value) for value in (timing.median, timing.low, timing.high)]
    return {
        f"{name}_ms": milliseconds[0],
        f"{name}_low_ms": milliseconds[1],
        f"{name}_high_ms": milliseconds[2],
        f"{name}_calls": timing.calls,
    }


def _fastest(times: dict[str, Timing], names: tuple[str, ...]) -> str | None:
    return min((name for name in names if name in times), key=lambda name: times[name].median, default=None)


def _ratio(times: dict[str, Timing], numerator: str | None, denominator: str) -> float | str:
    if numerator not in times or denominator not in times:
        return ""
    return _rounded(times[numerator].median / times[denominator].median)


def _rounded(value: float) -> float:
    """Round to four significant digits; the rest is noise."""
    return float(f"{value:.4g}")
