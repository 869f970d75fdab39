"""Held-out instances choose the epoch by their candidate sets, and are not trained on."""

import json
import math
from dataclasses import replace

import pytest
import torch

from plsp_train.cli import main
from plsp_train.data import TrainTestData
from plsp_train.methods import plsp
from plsp_train.validation import criteria, hold_out, selected_epochs
from small_runs import digits, metrics, run, run_interrupted

CHOSEN = ["--validation-fraction", "0.2"]


def test_criteria_match_their_definition() -> None:
    logits = torch.tensor([[1.0, 2.0, 0.5], [3.0, 0.0, 1.0], [0.0, 0.0, 4.0]])
    candidates = torch.tensor([[True, True, False], [False, True, True], [False, False, True]])
    first = math.exp(2) / (math.exp(1) + math.exp(2))  # the second is predicted outside its set, the third is sure
    measured = criteria(logits, candidates)
    assert measured["covering_rate"] == pytest.approx(2 / 3, rel=1e-15)
    assert measured["approximated_accuracy"] == pytest.approx((first + 0 + 1) / 3, rel=1e-14)


@pytest.mark.parametrize("size", [1e4, 1e30])
def test_criteria_of_extreme_logits(size: float) -> None:
    logits = torch.tensor([[size, 0.0, -size], [size, -size, -size], [-size, -size, -size]])
    candidates = torch.tensor([[True, True, False], [False, True, True], [True, True, False]])
    assert criteria(logits, candidates) == {"covering_rate": 2 / 3, "approximated_accuracy": pytest.approx(0.5)}


def test_the_later_of_two_equal_epochs_is_selected() -> None:
    history = [
        {"epoch": 1, "covering_rate": 0.9, "approximated_accuracy": 0.8, "micro_f1": 0.3, "macro_f1": 0.2},
        {"epoch": 2, "covering_rate": 0.9, "approximated_accuracy": 0.7, "micro_f1": 0.5, "macro_f1": 0.4},
        {"epoch": 3, "covering_rate": 0.1, "approximated_accuracy": 0.1, "micro_f1": 0.9, "macro_f1": 0.9},
    ]
    assert selected_epochs(history) == {
        "selected_by_covering_rate": {"epoch": 2, "value": 0.9, "micro_f1": 0.5, "macro_f1": 0.4},
        "selected_by_approximated_accuracy": {"epoch": 1, "value": 0.8, "micro_f1": 0.3, "macro_f1": 0.2},
    }


def _numbered(count: int) -> tuple[TrainTestData, torch.Tensor]:
    """Vectors that hold their own number, so that an instance is known wherever it turns up."""
    number, labels = torch.arange(count), torch.arange(count) % 3
    vectors = number[:, None].float()
    candidates = torch.ones(count, 3, dtype=torch.bool)
    candidates[number, (labels + number // 3 % 2 + 1) % 3] = False
    test = {"test_inputs": vectors, "test_labels": labels}
    return TrainTestData("numbered", ("a", "b", "c"), vectors, (0.0,), (1.0,), labels, **test), candidates


def test_split_is_disjoint_complete_and_determined_by_the_seed() -> None:
    data, candidates = _numbered(50)
    rest, kept, held_out = hold_out(data, candidates, 0.3, seed=4)
    assert held_out is not None
    assert (len(held_out.inputs), len(rest.train_inputs)) == (15, 35)
    numbers = [part[:, 0].long() for part in (held_out.inputs, rest.train_inputs)]
    assert sorted(torch.cat(numbers).tolist()) == list(range(50))
    assert torch.equal(held_out.candidates, candidates[numbers[0]])
    assert torch.equal(kept, candidates[numbers[1]])
    assert torch.equal(rest.train_labels, data.train_labels[numbers[1]])
    assert torch.equal(rest.test_inputs, data.test_inputs)

    def drawn(seed: int) -> set[int]:
        _, _, part = hold_out(data, candidates, 0.3, seed)
        assert part is not None
        return set(part.inputs[:, 0].long().tolist())

    assert drawn(4) == set(numbers[0].tolist())
    assert drawn(5) != drawn(4)


def test_split_does_not_depend_on_true_labels() -> None:
    data, candidates = _numbered(50)
    relabelled = replace(data, train_labels=torch.zeros_like(data.train_labels))
    (_, _, one), (_, _, two) = (hold_out(variant, candidates, 0.3, seed=0) for variant in (data, relabelled))
    assert one is not None
    assert two is not None
    assert torch.equal(one.inputs, two.inputs)


def test_zero_fraction_changes_nothing() -> None:
    data, candidates = _numbered(5)
    rest, kept, held_out = hold_out(data, candidates, 0.0, seed=0)
    assert rest is data
    assert kept is candidates
    assert held_out is None


@pytest.mark.parametrize(
    ("fraction", "message"),
    [
        ("1.0", "validation_fraction must lie in [0, 1), got 1.0"),
        ("-0.1", "validation_fraction must be at least 0, got -0.1"),
        ("1e-9", "leaves none for validation"),
        ("0.99999", "leaves none for training"),
    ],
)
def test_an_impossible_fraction_is_a_one_line_error(tmp_path, capsys, fraction: str, message: str) -> None:
    assert main(["--out", str(tmp_path / "run"), "--validation-fraction", fraction]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1


def test_a_run_reports_the_criteria_and_what_they_select(tmp_path, capsys) -> None:
    out = tmp_path / "run"
    assert run(out, *CHOSEN) == 0
    lines = metrics(out)
    summary = json.loads((out / "summary.json").read_text())
    for name in ("covering_rate", "approximated_accuracy"):
        values = [line[name] for line in lines]
        assert all(0 <= value <= 1 for value in values)
        assert len(set(values)) > 1
        selected = summary[f"selected_by_{name}"]
        assert selected["value"] == max(values)
        chosen = lines[selected["epoch"] - 1]
        assert (selected["micro_f1"], selected["macro_f1"]) == (chosen["micro_f1"], chosen["macro_f1"])
    shown = capsys.readouterr().out
    assert "287 of the training instances are held out" in shown
    assert "approximated accuracy" in shown


def test_without_validation_there_are_no_criteria(tmp_path) -> None:
    out = tmp_path / "run"
    assert run(out) == 0
    assert not any("covering_rate" in line for line in metrics(out))
    assert not any(name.startswith("selected_by") for name in json.loads((out / "summary.json").read_text()))


def test_held_out_instances_are_not_trained_on(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    tasks = []
    build = plsp.PLSP.__init__
    monkeypatch.setattr(plsp.PLSP, "__init__", lambda self, task: (tasks.append(task), build(self, task))[1])
    assert run(tmp_path / "run", *CHOSEN) == 0
    data = digits()
    _, _, held_out = hold_out(data, torch.ones(len(data.train_labels), 10, dtype=torch.bool), 0.2, seed=0)
    assert held_out is not None
    (task,) = tasks
    seen, unseen = ({tuple(row) for row in inputs.flatten(1).tolist()} for inputs in (task.inputs, held_out.inputs))
    assert len(task.inputs) == len(task.candidates) == len(task.true_labels) == 1437 - 287
    assert not seen & unseen


def test_a_run_with_validation_resumes_bit_for_bit(tmp_path) -> None:
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    assert run(whole, *CHOSEN) == 0
    run_interrupted(broken, *CHOSEN)
    assert run(broken, "--resume") == 0
    assert metrics(broken) == metrics(whole)
    chosen = [json.loads((out / "summary.json").read_text())["selected_by_covering_rate"] for out in (whole, broken)]
    assert chosen[0] == chosen[1]
