"""The recipe "robust" of PLSP, ingredient by ingredient."""

import json
import math

import pytest
import torch

from plsp_train.cli import main
from plsp_train.config import build_config
from plsp_train.data.candidate_sets import CandidateSets
from plsp_train.methods import PLSP
from plsp_train.methods.plsp import largest_ss_weight
from plsp_train.methods.selection import Scores, remember, select_reliable
from plsp_train.model_file import read_model_file
from small_runs import digits_task, metrics, run, run_interrupted

ROBUST = ["--recipe", "robust"]


def _method(**given: object) -> PLSP:
    return PLSP(digits_task(**given))


def test_the_recipe_is_a_set_of_defaults() -> None:
    robust = build_config({"recipe": "robust"})
    assert {name: getattr(robust, name) for name in PLSP.recipes["robust"]} == PLSP.recipes["robust"]
    assert build_config({"recipe": "robust", "schedule": "step"}).schedule == "step"
    paper = build_config({}).to_json()
    changed = {name for name, value in robust.to_json().items() if paper[name] != value}
    assert changed == {"recipe", *PLSP.recipes["robust"]}


def test_the_recipe_is_refused_for_other_methods() -> None:
    with pytest.raises(ValueError, match="method cc has no recipe 'robust': choose paper or released"):
        build_config({"method": "cc", "recipe": "robust"})


def test_cosine_decays_to_zero_over_the_semi_supervised_epochs() -> None:
    method = _method(schedule="cosine", epochs=100, lr=0.2)
    assert method.learning_rate("pretrain", 70) == method.learning_rate("train", 1) == 0.2
    assert method.learning_rate("train", 51) == pytest.approx(0.1)
    assert 0 < method.learning_rate("train", 100) < 1e-3 * 0.2


def test_ramp_takes_its_share_of_the_epochs() -> None:
    method = _method(ss_ramp=0.25, ss_weight=2.0, epochs=40)
    assert [method.ss_weight(epoch) for epoch in (1, 5, 10, 11, 40)] == pytest.approx([0.2, 1, 2, 2, 2])
    assert _method(ss_ramp=0.0, ss_weight=2.0, epochs=40).ss_weight(1) == 2


def test_bound_is_the_weight_at_which_wrong_labels_sustain_themselves() -> None:
    generator = torch.Generator().manual_seed(0)
    truth = torch.randint(8, (200_000,), generator=generator)
    sets = torch.rand(200_000, 8, generator=generator) < 0.7
    bound = largest_ss_weight(CandidateSets.pack(sets.scatter(1, truth[:, None], True)))
    assert bound == pytest.approx(0.3 / 0.7, rel=0.01)
    assert largest_ss_weight(CandidateSets.pack(torch.eye(4, dtype=torch.bool))) == math.inf
    assert largest_ss_weight(CandidateSets.pack(torch.ones(5, 3, dtype=torch.bool))) == 0


def test_bound_limits_the_weight_but_does_not_raise_it() -> None:
    bounded = _method(bound_ss_weight=True, flip_probability=0.7, epochs=40)
    assert bounded.ss_weight(40) == pytest.approx(largest_ss_weight(bounded.task.candidates))
    assert bounded.ss_weight(40) < 0.5
    assert _method(bound_ss_weight=True, flip_probability=0.2, epochs=40).ss_weight(40) == 1


def _scores(labels: list[int], activation: list[float]) -> Scores:
    return Scores(torch.tensor(labels), torch.tensor(activation), torch.ones(len(labels), dtype=torch.bool))


def test_memory_averages_values_while_the_label_stays() -> None:
    before = torch.tensor([4.0, 4.0, -2.0, -2.0])
    scores = remember(_scores([0, 1, 0, 1], [8.0, 8.0, -6.0, -6.0]), torch.tensor([0, 0, 0, 0]), before, 0.75)
    assert scores.activation.tolist() == [5.0, 2.0, -3.0, -6.0]


def test_memory_passes_over_instances_whose_label_keeps_changing() -> None:
    # Of six instances labelled 0 in the last epoch, the last two alternate between two labels with the highest values.
    labels, values = torch.tensor([0, 0, 0, 0, 1, 1]), torch.tensor([3.0, 2.9, 2.8, 2.7, 9.0, 9.0])
    for epoch in range(6):
        scores = _scores([0, 0, 0, 0, epoch % 2, epoch % 2], [3.0, 2.9, 2.8, 2.7, 5.0, 5.0])
        scores = remember(scores, labels, values, 0.5)
        labels, values = scores.labels, scores.activation
        if epoch % 2 == 0:
            assert select_reliable(scores, 2, 2).tolist() == [0, 1]


def test_memory_spans_epochs_of_a_run() -> None:
    method = _method(selection_memory=0.5)
    method.start_epoch("train", 1)
    first = method.remembered.clone()
    with torch.no_grad():
        method.task.model.classifier.weight.mul_(2)
    scores, labels = method._scores(), method.labels
    method.start_epoch("train", 2)
    expected = torch.where(scores.labels == labels, (first + scores.activation) / 2, scores.activation.clamp_max(0))
    kept = scores.labels == labels
    torch.testing.assert_close(method.remembered[kept], expected[kept])
    assert kept.float().mean() > 0.5


def test_average_follows_the_weights_and_the_statistics_of_batch_norms() -> None:
    method = _method(average_epochs=2.0, iterations=5)
    trained = dict(method.task.model.named_parameters()) | dict(method.task.model.named_buffers())
    expected = {}
    for step in range(4):
        with torch.no_grad():
            for tensor in trained.values():
                tensor.add_(step + 1)
        method.after_step("train")
        for name, tensor in trained.items():
            expected[name] = tensor.clone() if step == 0 else torch.lerp(expected[name].double(), tensor.double(), 0.1)
    averaged = dict(method.network.named_parameters()) | dict(method.network.named_buffers())
    for name, tensor in expected.items():
        if tensor.is_floating_point() and "num_batches" not in name:
            torch.testing.assert_close(averaged[name].double(), tensor.double())


def test_average_scores_is_evaluated_and_is_saved(tmp_path) -> None:
    for name, settings in {"average": ["--average-epochs", "3"], "last": []}.items():
        assert run(tmp_path / name, *settings) == 0
    average, last = metrics(tmp_path / "average"), metrics(tmp_path / "last")
    assert average[0]["loss"] == last[0]["loss"]
    assert average[0]["micro_f1"] != last[0]["micro_f1"]
    saved = read_model_file(tmp_path / "average" / "model.pt").state_dict
    state = torch.load(tmp_path / "average" / "checkpoint.pt", weights_only=True)
    averaged = {name.removeprefix("module."): tensor for name, tensor in state["method"]["average"].items()}
    assert all(torch.equal(saved[name], averaged[name]) for name in saved)
    assert not all(torch.equal(saved[name], state["model"][name]) for name in saved)


@pytest.mark.parametrize("steps", [1, 5])
def test_a_robust_run_resumes_bit_for_bit(tmp_path, steps: int) -> None:
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    assert run(whole, *ROBUST) == 0
    run_interrupted(broken, *ROBUST, steps=steps)
    assert run(broken, *ROBUST, "--resume") == 0
    assert metrics(broken) == metrics(whole)
    weights = [read_model_file(out / "model.pt").state_dict for out in (whole, broken)]
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])


def test_the_robust_recipe_trains_without_alarms(tmp_path) -> None:
    out = tmp_path / "run"
    assert main(["--out", str(out), *ROBUST, "--epochs", "25", "--iterations", "30"]) == 0
    assert metrics(out)[-1]["micro_f1"] >= 0.95
    assert json.loads((out / "summary.json").read_text())["warnings"] == []
