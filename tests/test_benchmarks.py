"""The benchmarks run, agree with the reference, and the speed tables show what was measured."""

import json
import math
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from benchmarks import gpu_check, results, table
from benchmarks import measure as measuring
from benchmarks.measure import Disagreement, largest_error, measure
from benchmarks.problem import Problem
from benchmarks.shapes import SHAPES, Shape
from benchmarks.subjects import (
    CASES,
    CLOSED_FORM,
    COMPILED,
    COMPILED_GRAM_FORM,
    FLOOR,
    GEMMS,
    GRAM_FORM,
    ISDA_FORM,
    REFERENCE,
    Subject,
)
from benchmarks.sweeps import exponent, points
from benchmarks.timing import SLOW_SECONDS, Clock, interleaved

ROOT = Path(__file__).parent.parent
CPU = torch.device("cpu")
SMALL = Shape("small", 6, 10, 5, 7)


@pytest.mark.parametrize("page", table.PAGES, ids=lambda page: page.name)
def test_speed_tables_show_the_measured_rows(page: Path) -> None:
    found = table.SECTION.search(page.read_text(encoding="utf-8"))
    assert found is not None, f"{page.name} has lost its speed markers"
    rows = results.read(ROOT / found["csv"])
    assert found[0] == f"{found[1]}{table.PAGES[page](rows)}{found[3]}", (
        f"run python -m benchmarks.table {found['csv']}"
    )


@pytest.mark.parametrize("covariance", ["full", "diagonal"])
@pytest.mark.parametrize("case", CASES)
def test_every_case_is_measured_and_agrees(case: str, covariance: str) -> None:
    rows = measure(case, SMALL._replace(covariance=covariance), CPU, seconds=0, compiled=False)
    by_subject = {row["subject"]: row for row in rows}
    reference = by_subject[REFERENCE]
    assert reference["forward_ms"] > 0
    assert reference["times_faster_than_reference"] == 1
    if GRAM_FORM in by_subject:
        assert by_subject[GRAM_FORM]["times_faster_than_gram_form"] == 1
        assert by_subject[CLOSED_FORM]["times_faster_than_gram_form"] > 0
    if case == "cross_entropy":
        assert by_subject[ISDA_FORM]["times_faster_than_isda"] == 1
    for name, row in by_subject.items():
        if name in (COMPILED, COMPILED_GRAM_FORM):
            assert row["note"]
            assert row["step_ms"] == row["forward_ms"] == ""
        elif row["error"]:
            assert float(row["error"]) < 1e-4


def test_wrong_result_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(problem: Problem) -> dict[str, Subject]:
        subjects = CASES["probit"](problem)
        return {
            REFERENCE: subjects[REFERENCE],
            CLOSED_FORM: Subject(lambda: [1.01 * subjects[CLOSED_FORM].forward()[0]]),
        }

    monkeypatch.setattr(measuring, "CASES", {"probit": wrong})
    with pytest.raises(Disagreement, match="closed form differs from the reference by"):
        measure("probit", SMALL, CPU, seconds=0)


def test_reference_that_does_not_fit_is_noted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measuring, "available_bytes", lambda device: 1000)
    rows = {row["subject"]: row for row in measure("loss", SMALL, CPU, seconds=0)}
    assert "does not fit" in rows[REFERENCE]["note"]
    assert "does not fit" in rows[GRAM_FORM]["note"]
    assert rows[CLOSED_FORM]["times_faster_than_reference"] == ""
    assert rows[CLOSED_FORM]["times_faster_than_gram_form"] == ""
    assert rows[CLOSED_FORM]["times_bare_bmm"] > 0
    assert rows[FLOOR]["times_bare_bmm"] == rows[GEMMS]["times_gemms"] == 1


def test_wrong_result_is_an_error_without_the_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(problem: Problem) -> dict[str, Subject]:
        subjects = CASES["probit"](problem)
        return {
            CLOSED_FORM: subjects[CLOSED_FORM],
            GRAM_FORM: Subject(lambda: [1.01 * subjects[GRAM_FORM].forward()[0]]),
        }

    monkeypatch.setattr(measuring, "CASES", {"probit": wrong})
    with pytest.raises(Disagreement, match="Gram form differs from float64 by"):
        measure("probit", SMALL, CPU, seconds=0)


def test_speed_tables_compare_with_the_faster_gram_form() -> None:
    row = dict.fromkeys(
        ("run", "hardware", "torch", "note", "forward_ms", "times_bare_bmm", "times_faster_than_isda"), ""
    )
    row |= {"covariance": "full", "num_labeled": "64", "num_classes": "10", "num_features": "84"}
    loss = row | {"case": "loss", "name": "fmnist", "num_unlabeled": "256", "times_faster_than_reference": "90"}
    batch = row | {"case": "cross_entropy", "name": "cifar10-resnet110", "num_unlabeled": "0"}
    ours = {"subject": CLOSED_FORM, "step_ms": "2", "memory_mib": "1", "times_gemms": "1.2"}
    ours |= {"times_faster_than_gram_form": "3.5"}
    rows = [
        loss | ours,
        loss | {"subject": REFERENCE, "step_ms": "180", "memory_mib": "90"},
        loss | {"subject": GRAM_FORM, "step_ms": "9", "memory_mib": "8"},
        loss | {"subject": COMPILED_GRAM_FORM, "step_ms": "7", "memory_mib": "6"},
        batch | ours | {"times_faster_than_isda": "5", "times_faster_than_gram_form": ""},
        batch | {"subject": ISDA_FORM, "step_ms": "10", "memory_mib": "4"},
        batch | {"subject": GRAM_FORM, "step_ms": "", "memory_mib": "", "note": "does not fit: needs about 99 GiB"},
    ]
    assert "| fmnist (10 classes) | 180 ms (90 ×) | 7 ms (3.5 ×) | 2 ms | 90 / 6.0 / 1.0 |" in table.summary(rows)
    page = table.render(rows)
    assert "| 9 ms | 7 ms | 2 ms | 90 × | 3.5 × |" in page
    assert "N 64, l 10, d 84 | 10 ms (5 ×) | does not fit | 2 ms | 1.2 × | 4.0 / – / 1.0 |" in page


def test_nan_does_not_count_as_agreement() -> None:
    one = [torch.ones(2)]
    assert largest_error([torch.tensor([1.0, 1.5])], one) == 0.5
    assert math.isnan(largest_error([torch.tensor([1.0, math.nan])], one))


def test_subjects_are_interleaved_and_slow_ones_timed_once() -> None:
    calls: list[str] = []

    class FakeClock(Clock):
        def __call__(self, call) -> float:  # type: ignore[no-untyped-def]
            call()
            return SLOW_SECONDS if calls[-1] == "slow" else 0.5

    subjects = {name: lambda name=name: calls.append(name) for name in ("slow", "a", "b")}  # type: ignore[misc]
    times = interleaved(subjects, FakeClock(CPU), seconds=0)
    assert times["slow"].calls == 1
    assert times["a"].calls == times["b"].calls == 6
    assert calls == ["slow", "a", "b"] + 5 * ["a", "a", "b", "b"]


def test_exponent_is_the_slope_of_the_last_points() -> None:
    assert exponent([(1, 100.0), (2, 5.0), (4, 20.0), (8, 80.0)]) == pytest.approx(2)


def test_points_of_a_sweep_are_sorted_by_size() -> None:
    row = {"name": "sweep over batch", "subject": CLOSED_FORM, "step_ms": "2"}
    rows = [row | {"num_unlabeled": "64"}, row | {"num_unlabeled": "16"}, row | {"num_unlabeled": "32", "step_ms": ""}]
    assert points(rows, "batch", CLOSED_FORM) == [(16, 2.0), (64, 2.0)]


def test_rows_are_appended_and_new_columns_stay_empty_in_old_rows(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "rows.csv"
    results.append(path, [{"a": 1}])
    results.append(path, [{"a": 2, "b": "x, y"}])
    assert results.read(path) == [{"a": "1", "b": ""}, {"a": "2", "b": "x, y"}]


@pytest.mark.parametrize("failing", ["", "tests", "benchmark", "counted_launches", "kernel_times"])
def test_gpu_check_writes_one_file_whatever_fails(
    failing: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def section(name: str) -> dict[str, int]:
        if name == failing:
            raise RuntimeError("an illegal memory access was encountered")
        return {"figure": 1}

    commands = {gpu_check.TESTS: "tests", gpu_check.BENCHMARK: "benchmark"}
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(results, "hardware", lambda device: "some GPU")
    monkeypatch.setattr(gpu_check, "run", lambda *command: {"exit_code": int(commands[command] == failing)})
    monkeypatch.setattr(gpu_check, "counted_launches", lambda: section("counted_launches"))
    monkeypatch.setattr(gpu_check, "kernel_times", lambda shape, device: section("kernel_times"))
    path = tmp_path / "deep" / "report.json"
    assert gpu_check.main(["--out", str(path)]) == int(bool(failing))
    report = json.loads(path.read_text())
    assert report["environment"]["hardware"] == "some GPU"
    assert set(report["kernels_timed"]) == set(SHAPES)
    assert report["tests"]["exit_code"] == int(failing == "tests")
    error = {"error": "RuntimeError: an illegal memory access was encountered"}
    assert (report["launches_counted"] == error) == (failing == "counted_launches")
    assert all((times == error) == (failing == "kernel_times") for times in report["kernels_timed"].values())


def test_gpu_check_keeps_the_output_of_a_command() -> None:
    found = gpu_check.run("benchmarks.table", "nowhere.csv")
    assert found["command"] == "python -m benchmarks.table nowhere.csv"
    assert found["exit_code"] == 2
    assert "holds no rows" in found["output"]


def test_quick_mode_runs() -> None:
    command = [sys.executable, "-m", "benchmarks", "--quick"]
    found = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert found.returncode == 0, found.stderr
    assert "closed form" in found.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["benchmarks", "--device", "cuda"], "torch found no GPU"),
        (["benchmarks", "--shape", "cifar10-resnet110", "--case", "loss"], "has no unlabelled batch"),
        (["benchmarks.gpu_check"], "torch found no GPU"),
        (["benchmarks.table", "nowhere.csv"], "holds no rows"),
        (["benchmarks.table", "README.md"], "holds no rows of python -m benchmarks: no 'case'"),
        (["benchmarks.training_step", "--dataset", "cifar10", "--data-root", "nowhere"], "nowhere"),
    ],
)
def test_invalid_input_is_a_one_line_error(arguments: list[str], message: str) -> None:
    if "no GPU" in message and torch.cuda.is_available():
        pytest.skip("there is a GPU")
    found = subprocess.run([sys.executable, "-m", *arguments], cwd=ROOT, capture_output=True, text=True)
    assert found.returncode == 2
    assert message in found.stderr
    assert found.stderr.count("\n") == 1
