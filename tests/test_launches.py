"""Launches of a training step: their number, and that no step waits for the device."""

import json
from functools import partial

import pytest
import torch

pytest.importorskip("triton", minversion="3.5")

from benchmarks import launches
from benchmarks.gpu_static.calls import DTYPES, call, training_step
from benchmarks.launches import Launches, launches_of, record
from benchmarks.shapes import SHAPES
from plsp_kernels import CurriculumThreshold

PRESETS = ("fmnist", "cifar10", "cifar100")
MOST_OF_LOSS, MOST_OF_STEP, MOST_OF_CROSS_ENTROPY = 12, 16, 8


@pytest.mark.parametrize("covariance", ["full", "diagonal"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", PRESETS)
def test_launches_stay_within_the_budget(shape: str, dtype: str, covariance: str) -> None:
    found = launches_of(SHAPES[shape]._replace(covariance=covariance), dtype)
    assert found["loss"].counts()["total"] <= MOST_OF_LOSS, launches.table(found)
    assert found["step"].counts()["total"] <= MOST_OF_STEP, launches.table(found)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("shape", SHAPES)
def test_launches_of_the_cross_entropy_stay_within_the_budget(shape: str, dtype: str) -> None:
    found = record(partial(call, "semantic_cross_entropy", SHAPES[shape], dtype, "triton"))
    assert found.counts()["total"] <= MOST_OF_CROSS_ENTROPY, found


@pytest.mark.parametrize("shape", SHAPES)
def test_state_adds_at_most_four_launches_and_no_operator_call(shape: str) -> None:
    found = launches_of(SHAPES[shape], "bfloat16")
    assert found["step"].aten == found["loss"].aten
    added = len(found["step"].triton) - len(found["loss"].triton)
    assert 0 < added <= 4, launches.table(found)


@pytest.mark.parametrize("shape", SHAPES)
def test_no_step_waits_for_the_device(shape: str) -> None:
    """The step runs on tensors without memory, where every read of a value raises."""
    record(training_step(SHAPES[shape], "float32"))


def test_a_step_that_reads_a_value_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    def waiting(self: CurriculumThreshold, impl: str = "auto") -> torch.Tensor:
        return torch.full((10,), float(self.count.max()), device="meta")

    monkeypatch.setattr(CurriculumThreshold, "_thresholds", waiting)
    with pytest.raises((RuntimeError, NotImplementedError), match="meta"):
        record(training_step(SHAPES["fmnist"], "float32"))


def test_views_and_allocations_do_not_count_as_launches() -> None:
    def run() -> None:
        x = torch.empty(6, 5, device="meta")
        y = x.t()[:2].expand(3, 2, 6)
        torch.empty_like(x)
        (y + 1).sum()

    assert record(run) == Launches([], ["aten::add", "aten::sum"])


def test_command_prints_counts_as_json_and_names_in_a_table(capsys: pytest.CaptureFixture[str]) -> None:
    assert launches.main(["--shape", "fmnist", "--dtype", "float16", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert set(found) == {"loss", "step"}
    for counts in found.values():
        assert counts["triton"] + counts["aten"] == counts["total"] > 0
    assert launches.main(["--shape", "fmnist", "--dtype", "float16"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[-1].split() == ["total", *(str(counts["total"]) for counts in found.values())]
    assert any(line.split() == ["covariance_update", "0", "1"] for line in lines)
