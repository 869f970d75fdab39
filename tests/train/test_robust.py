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
from plsp_train.methods.selection import alignment, soft_sizes
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


def test_the_recipe_leaves_the_augmentation_of_weak_views_to_the_data() -> None:
    for dataset, augments in (("fmnist", False), ("digits", True), ("cifar10", True)):
        assert build_config({"dataset": dataset, "recipe": "robust"}).augment_weak == augments
        assert build_config({"dataset": dataset}).augment_weak


def test_the_recipe_is_refused_for_other_methods() -> None:
    with pytest.raises(ValueError, match="method cc has no recipe 'robust': choose paper or released"):
        build_config({"method": "cc", "recipe": "robust"})


def test_pretraining_blends_into_the_likelihood_of_the_candidate_sets() -> None:
    task = digits_task(blend_likelihood=True, pretrain_epochs=5, pretrain_batch=1437)  # all instances
    task.model.eval()  # batch norms do not depend on the order of the batch
    method = PLSP(task)
    method.start_epoch("pretrain", 1)
    candidates = task.candidates[torch.arange(1437)]
    probabilities = task.model(task.augmentation.plain(task.inputs)).softmax(1)
    mean = (-(probabilities.log() * candidates).sum(1) / candidates.sum(1)).mean()
    likelihood = -(probabilities * candidates).sum(1).log().mean()
    for epoch, share in enumerate((0, 0.25, 0.5, 0.75, 1), start=1):
        expected = (1 - share) * mean + share * likelihood
        torch.testing.assert_close(method.step("pretrain", epoch).loss, expected)


def test_cosine_decays_to_zero_over_the_semi_supervised_epochs() -> None:
    method = _method(schedule="cosine", epochs=100, lr=0.2)
    assert method.learning_rate("pretrain", 70) == method.learning_rate("train", 1) == 0.2
    assert method.learning_rate("train", 51) == pytest.approx(0.1)
    assert 0 < method.learning_rate("train", 100) < 1e-3 * 0.2


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


def test_alignment_brings_classes_closer_to_their_expected_sizes() -> None:
    generator = torch.Generator().manual_seed(0)
    candidates = torch.rand(4000, 5, generator=generator) < 0.6
    candidates[~candidates.any(1)] = True
    logits = torch.randn(4000, 5, generator=generator) + torch.tensor([0.0, 0.0, 0.0, 1.0, -3.0])  # of classes 3 and 4
    expected = CandidateSets.pack(candidates).sizes_by_chance()
    assert expected.sum() == pytest.approx(4000)
    sizes = soft_sizes(logits, candidates)
    assert sizes[4] < 0.2 * expected[4]
    aligned = soft_sizes(logits + alignment(sizes, expected), candidates)
    before, after = (sizes - expected).abs(), (aligned - expected).abs()
    assert (after[3:] < 2 / 3 * before[3:]).all()
    assert (after[:3] < 0.1 * expected[:3]).all()


def test_alignment_is_finite_for_classes_that_are_never_predicted_or_never_candidates() -> None:
    shift = alignment(torch.tensor([0.0, 5.0, 0.0]), torch.tensor([5.0, 0.0, 0.0]))
    assert shift.isfinite().all()
    assert shift[0] > 0 > shift[1]
    assert shift[2] == 0


def test_a_class_that_the_network_never_prefers_is_selected_with_aligned_sizes() -> None:
    for align_sizes in (False, True):
        method = _method(align_sizes=align_sizes)
        with torch.no_grad():
            method.task.model.classifier.bias[3] -= 20
        metrics = method.start_epoch("train", 1)
        assert (metrics["labeled_per_class"][3] > 0) == align_sizes
    resumed = _method(align_sizes=True)
    resumed.load_state_dict(method.state_dict())
    assert torch.equal(resumed.sizes, method.sizes)


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
