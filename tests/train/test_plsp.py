"""The method itself: selection, losses, schedules, recipes."""

import math

import pytest
import torch
import torch.nn.functional as F

from plsp_kernels import SemanticUpperBoundLoss
from plsp_train.cli import main
from plsp_train.methods import PLSP
from plsp_train.methods.losses import candidate_cross_entropy, complementary_loss
from plsp_train.methods.plain_loss import plain_loss
from plsp_train.methods.selection import Scores, score_instances, select_reliable
from small_runs import digits_task, metrics


def _method(**given: object) -> PLSP:
    return PLSP(digits_task(**given))


def _naive_selection(logits, candidates, k, agree):  # type: ignore[no-untyped-def]
    value = logits * (logits - 1).abs()
    chosen, labels = [], []
    for row, inside in zip(value.tolist(), candidates.tolist(), strict=True):
        labels.append(max((j for j in range(len(row)) if inside[j]), key=lambda j: row[j]))
    for j in range(logits.shape[1]):
        members = [i for i in range(len(logits)) if labels[i] == j]
        if agree:
            members = [i for i in members if max(value[i].tolist()) == value[i, j].item()]
        chosen += sorted(members, key=lambda i: -value[i, j].item())[:k]
    return set(chosen), labels


@pytest.mark.parametrize("k", [0, 1, 4, 1000])
@pytest.mark.parametrize("agree", [False, True])
def test_selection_takes_the_k_highest_values_of_each_class(k: int, agree: bool) -> None:
    generator = torch.Generator().manual_seed(k)
    logits = 3 * torch.randn(90, 7, generator=generator)
    candidates = torch.rand(90, 7, generator=generator) < 0.4
    candidates[torch.arange(90), torch.randint(7, (90,), generator=generator)] = True
    parts = [score_instances(*part) for part in zip(logits.split(40), candidates.split(40), strict=True)]
    scores = Scores(*map(torch.cat, zip(*parts, strict=True)))
    index = select_reliable(scores, 7, k, agree_with_best=agree)
    chosen, expected = _naive_selection(logits, candidates, k, agree)
    assert set(index.tolist()) == chosen
    assert len(index) == len(chosen)
    assert scores.labels.tolist() == expected


def test_pretraining_loss_is_the_mean_over_candidates() -> None:
    logits = torch.randn(5, 4, dtype=torch.float64)
    candidates = torch.tensor([[1, 0, 0, 1], [1, 1, 1, 0], [0, 1, 0, 0], [1, 1, 0, 0], [0, 0, 1, 1]]).bool()
    probability = logits.softmax(1)
    expected = sum(
        sum(-math.log(probability[i, j]) for j in range(4) if candidates[i, j]) / int(candidates[i].sum())
        for i in range(5)
    )
    assert candidate_cross_entropy(logits, candidates).item() == pytest.approx(expected / 5, rel=1e-6)


def test_complementary_loss_is_minus_log_of_one_minus_p_outside_the_candidates() -> None:
    logits = torch.randn(6, 5, dtype=torch.float64)
    candidates = torch.rand(6, 5) < 0.5
    expected = -torch.log(1 - logits.softmax(1)).masked_fill(candidates, 0).sum(1).mean()
    torch.testing.assert_close(complementary_loss(logits, candidates), expected)


def test_complementary_loss_stays_finite_where_p_is_one() -> None:
    logits = torch.tensor([[200.0, 0.0, 0.0]], requires_grad=True)
    loss = complementary_loss(logits, torch.tensor([[False, True, True]]))
    loss.backward()
    assert loss.item() == pytest.approx(200 - math.log(2))
    assert torch.isfinite(logits.grad).all()


def test_plain_loss_is_the_objective_with_softmax() -> None:
    generator = torch.Generator().manual_seed(0)
    labeled, weak, strong = (2 * torch.randn(n, 6, generator=generator) for n in (4, 9, 9))
    labels = torch.randint(6, (4,), generator=generator)
    candidates = torch.rand(9, 6, generator=generator) < 0.5
    candidates[:, 0] = True
    state = SemanticUpperBoundLoss(6, 6, 2, threshold=0.4)
    state.curriculum.update(torch.arange(6), torch.arange(6), torch.ones(6, dtype=torch.bool))
    assert state.curriculum.thresholds.tolist() == pytest.approx([0.4] * 6)
    loss = plain_loss((labeled, weak, strong), labels, candidates, state, ss_weight=0.3)
    probability = weak.softmax(1)
    best = probability.argmax(1)
    mask = (probability.max(1).values >= 0.4) & candidates[torch.arange(9), best]
    target = probability * candidates
    target = target / target.sum(1, keepdim=True)
    consistency = (mask * -(target * F.log_softmax(strong, 1)).sum(1)).mean()
    assert mask.any()
    assert not mask.all()
    torch.testing.assert_close(loss.consistency, consistency)
    torch.testing.assert_close(loss.supervised, F.cross_entropy(labeled, labels))
    torch.testing.assert_close(loss.total, 0.3 * (loss.supervised + consistency) + complementary_loss(weak, candidates))


def test_schedules_of_the_paper() -> None:
    method = _method(epochs=250, strength=0.01, ss_weight=2.0, lr=0.1)
    assert method.strength(125) == pytest.approx(0.005)
    assert method.strength(250) == pytest.approx(0.01)
    assert method.ss_weight(50) == pytest.approx(0.4)
    rates = [method.learning_rate("train", epoch) for epoch in (1, 100, 101, 150, 151, 250)]
    assert rates == pytest.approx([0.1, 0.1, 0.01, 0.01, 0.001, 0.001])
    assert method.learning_rate("pretrain", 200) == 0.1
    assert method.num_iterations("pretrain") == math.ceil(len(method.task.inputs) / method.task.config.pretrain_batch)
    assert method.num_iterations("train") == method.task.config.iterations


def test_schedules_of_the_released_code() -> None:
    method = _method(recipe="released", epochs=250, strength=0.01, ss_weight=2.0)
    assert method.strength(1) == method.ss_weight(1) == 0
    assert method.strength(126) == pytest.approx(0.005)
    assert method.ss_weight(26) == pytest.approx(1.0)
    assert method.ss_weight(51) == method.ss_weight(250) == pytest.approx(2.0)
    assert method.num_iterations("pretrain") == method.num_iterations("train") == method.task.config.iterations


def test_recipes_differ_as_documented() -> None:
    paper, released = _method(), _method(recipe="released")
    assert (paper.loss.curriculum.mapping, released.loss.curriculum.mapping) == ("linear", "convex")
    for method in (paper, released):
        method.start_epoch("pretrain", 1)
    plain, extended = (method.step("pretrain", 1).loss.item() for method in (paper, released))
    assert extended != pytest.approx(plain)


def test_an_epoch_splits_the_training_set_into_labelled_and_unlabelled() -> None:
    method = _method(k=20)
    report = method.start_epoch("train", 1)
    assert report["num_labeled"] == len(method.labeled._order)
    everyone = torch.cat([method.labeled._order, method.unlabeled._order])
    assert everyone.sort().values.tolist() == list(range(len(method.task.inputs)))


@pytest.mark.parametrize("k", [0, 10**6])
def test_extreme_k_still_trains(k: int) -> None:
    method = _method(k=k)
    method.start_epoch("train", 1)
    step = method.step("train", 1)
    step.loss.backward()
    assert math.isfinite(step.loss.item())
    assert len(method.unlabeled._order) == len(method.task.inputs)


def test_a_step_updates_covariance_and_curriculum() -> None:
    method = _method(k=50)
    method.start_epoch("train", 1)
    method.step("train", 1)
    assert method.loss.covariance.count.sum() == method.task.config.labeled_batch


def test_the_default_run_on_digits_disambiguates(tmp_path) -> None:
    out = tmp_path / "run"
    assert main(["--out", str(out), "--epochs", "25", "--iterations", "30"]) == 0
    last = metrics(out)[-1]
    assert last["micro_f1"] >= 0.95
    assert last["labeled_purity"] >= 0.95


def test_the_released_recipe_trains(tmp_path) -> None:
    out = tmp_path / "run"
    assert main(["--out", str(out), "--recipe", "released", "--epochs", "25", "--iterations", "30"]) == 0
    assert metrics(out)[-1]["micro_f1"] >= 0.95
