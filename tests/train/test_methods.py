"""The methods that PLSP is compared with: losses, confidences, schedules, runs."""

import json
import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor

from plsp_train import console
from plsp_train.cli import main
from plsp_train.config import build_config, read_config_file
from plsp_train.methods import LWS_SURROGATES, METHODS, build_method
from plsp_train.methods.losses import (
    candidate_cross_entropy,
    candidate_likelihood_loss,
    confidence_cross_entropy,
    leveraged_weighted_loss,
    log_surrogates,
    sigmoid_surrogates,
    softmax_within,
    uniform_confidences,
)
from plsp_train.runs import read_config
from small_runs import SMALL, digits_task, metrics, run, run_interrupted

COMPARED = [name for name in METHODS if name != "plsp"]
REFINED_AFTER_STEP = ["rc", "lws", "cavl"]


@pytest.fixture(autouse=True)
def _no_curves(monkeypatch: pytest.MonkeyPatch) -> None:
    """To draw them takes longer than the runs here."""
    monkeypatch.setattr(console, "draw_curves", lambda *_: True)


def _batch(rows: int = 7, classes: int = 5) -> tuple[Tensor, Tensor, Tensor]:
    """Logits in float64, candidate sets of which one is full and one has a single label, weights of all labels."""
    generator = torch.Generator().manual_seed(0)
    logits = 3 * torch.randn(rows, classes, dtype=torch.float64, generator=generator)
    candidates = torch.rand(rows, classes, generator=generator) < 0.5
    candidates[:, 1] = True
    candidates[0] = True
    candidates[1] = torch.arange(classes) == 1
    return logits, candidates, torch.rand(rows, classes, dtype=torch.float64, generator=generator)


def _mean_of_rows(logits: Tensor, of_row: Callable[[int, list[float]], float]) -> float:
    """The mean of a function of a row's number and probabilities."""
    values = [of_row(i, row) for i, row in enumerate(logits.softmax(1).tolist())]
    return sum(values) / len(values)


def test_candidate_likelihood_is_minus_log_of_the_candidates_probability() -> None:
    logits, candidates, _ = _batch()
    expected = _mean_of_rows(
        logits, lambda i, p: -math.log(sum(p[j] for j in range(len(p)) if candidates[i, j].item()))
    )
    assert candidate_likelihood_loss(logits, candidates).item() == pytest.approx(expected, rel=1e-12)


def test_confidence_cross_entropy_is_the_weighted_log_likelihood() -> None:
    logits, _, weights = _batch()
    expected = _mean_of_rows(logits, lambda i, p: -sum(weights[i, j].item() * math.log(p[j]) for j in range(len(p))))
    assert confidence_cross_entropy(logits, weights).item() == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("surrogate", LWS_SURROGATES)
def test_leveraged_loss_weights_surrogates_inside_and_outside_the_candidates(surrogate: str) -> None:
    logits, candidates, weights = _batch()

    def of_row(i: int, probabilities: list[float]) -> float:
        total = 0.0
        for j, (z, p) in enumerate(zip(logits[i].tolist(), probabilities, strict=True)):
            inside = candidates[i, j].item()
            if surrogate == "sigmoid":
                cost = 1 / (1 + math.exp(z if inside else -z))
            else:
                cost = -math.log(p if inside else 1 - p)
            total += (1.0 if inside else 2.5) * weights[i, j].item() * cost
        return total

    loss = leveraged_weighted_loss(LWS_SURROGATES[surrogate](logits), candidates, weights, 2.5)
    assert loss.item() == pytest.approx(_mean_of_rows(logits, of_row), rel=1e-12)


def test_softmax_within_is_normalised_over_the_members() -> None:
    logits, candidates, _ = _batch()
    product = logits.softmax(1) * candidates
    torch.testing.assert_close(softmax_within(logits, candidates), product / product.sum(1, keepdim=True))
    assert (softmax_within(logits, ~candidates)[0] == 0).all(), "nothing is outside a full set"


def _uniform_on_both_sides(candidates: Tensor) -> Tensor:
    return uniform_confidences(candidates) + uniform_confidences(~candidates).nan_to_num()


@pytest.mark.parametrize(
    "loss",
    [
        candidate_cross_entropy,
        candidate_likelihood_loss,
        lambda z, s: confidence_cross_entropy(z, softmax_within(z.detach(), s)),
        lambda z, s: leveraged_weighted_loss(sigmoid_surrogates(z), s, _uniform_on_both_sides(s), 2.0),
        lambda z, s: leveraged_weighted_loss(log_surrogates(z), s, _uniform_on_both_sides(s), 2.0),
    ],
    ids=["df", "cc", "confidences", "lws", "lwc"],
)
def test_losses_stay_finite_at_extreme_logits(loss: Callable[[Tensor, Tensor], Tensor]) -> None:
    # Rows: far apart either way, and candidates that all underflow beside one that is none.
    logits = torch.tensor([[1e4, -1e4, 0.0], [-1e4, 1e4, -1e4], [-1e4, -9e3, 1e4]], requires_grad=True)
    value = loss(logits, torch.tensor([[True, True, False], [True, False, True], [True, True, False]]))
    value.backward()
    assert math.isfinite(value.item())
    assert torch.isfinite(logits.grad).all()


def _method(name: str, **given: object):  # type: ignore[no-untyped-def]
    return build_method(digits_task(method=name, **given))


def _confidences_after(method, name: str, index: Tensor, logits: Tensor) -> Tensor:  # type: ignore[no-untyped-def]
    if name == "proden":
        method.loss(logits, index)
        return method.confidences[index]
    return method.refined(logits, method.task.candidates[index])


@pytest.mark.parametrize("name", ["rc", "proden", "lws", "cavl"])
@pytest.mark.parametrize("scale", [1.0, 1e4])
def test_confidences_are_a_distribution_over_the_candidates(name: str, scale: float) -> None:
    method, index = _method(name), torch.arange(64)
    logits = scale * torch.randn(64, 10, generator=torch.Generator().manual_seed(0))
    inside = method.task.candidates[index]
    # The largest logit of all outside the set, where p of all candidates underflows.
    logits[~inside] += 2 * scale
    found = _confidences_after(method, name, index, logits)
    torch.testing.assert_close((found * inside).sum(1), torch.ones(64))
    if name == "lws":
        torch.testing.assert_close((found * ~inside).sum(1), (~inside).any(1).float())
    else:
        assert (found[~inside] == 0).all()


@pytest.mark.parametrize("name", ["rc", "proden", "lws", "cavl"])
def test_an_underflowed_confidence_can_recover(name: str) -> None:
    method, index = _method(name), torch.arange(64)
    inside = method.task.candidates[index]
    first, last = inside.float().argmax(1), 9 - inside.flip(1).float().argmax(1)
    assert (first != last).all()
    for label in (first, last):
        found = _confidences_after(method, name, index, torch.full((64, 10), -1e4).scatter(1, label[:, None], 1e4))
        assert (found.gather(1, label[:, None]) == 1).all()


def test_confidences_start_uniform_over_the_candidates() -> None:
    for name in ("rc", "proden", "cavl", "pico", "crdpll"):
        method = _method(name)
        torch.testing.assert_close(method.confidences, uniform_confidences(method.task.candidates[:]))
    assert (_method("lws").confidences == 0.1).all()


def test_cavl_selects_a_candidate_even_if_all_activations_are_negative() -> None:
    method = _method("cavl")
    candidates = torch.tensor([[True, True] + [False] * 8])
    logits = torch.tensor([[-3.0, -2.0] + [0.0] * 8])
    assert method.refined(logits, candidates).argmax(1).item() == 1


def test_cavl_chooses_labels_after_the_warm_up() -> None:
    method = _method("cavl", epochs=8, cavl_warm_up=0.25)
    uniform = method.confidences.clone()
    for epoch in (1, 2, 3):
        method.start_epoch("train", epoch)
        method.step("train", epoch)
        method.after_step("train")
        assert torch.equal(method.confidences, uniform) == (epoch <= 2)
    assert method.confidences[method._drawn[0].index].max(1).values.eq(1).all()


def test_published_cavl_chooses_labels_from_the_first_step() -> None:
    method = _method("cavl", cavl_warm_up=0.0)
    method.start_epoch("train", 1)
    method.step("train", 1)
    method.after_step("train")
    assert method.confidences[method._drawn[0].index].max(1).values.eq(1).all()


def test_crdpll_pulls_three_views_towards_one_target_and_away_from_other_labels() -> None:
    method = _method("crdpll", epochs=8, batch_size=3)
    method.start_epoch("train", 1)
    logits = 3 * torch.randn(9, 10, generator=torch.Generator().manual_seed(0))
    method.task.logits = lambda *views: logits
    seen: list[Tensor] = []
    method.record_labels = lambda mean, index: seen.append(index)
    targets = method.confidences.double()
    for epoch, weight in ((1, 0.0), (2, 0.25), (5, 1.0), (8, 1.0)):
        step = method.step("train", epoch)
        index = seen[-1]
        views = logits.double().softmax(1).view(3, 3, 10)
        inside, target = method.task.candidates[index], targets[index]
        complementary = sum(-math.log(1 - views[0, i, j]) for i in range(3) for j in range(10) if not inside[i, j]) / 3
        consistency = sum((target * (target / view).log()).nansum() for view in views) / 3
        assert step.terms["complementary"].item() == pytest.approx(complementary, rel=1e-5)
        assert step.terms["consistency"].item() == pytest.approx(consistency.item(), rel=1e-5)
        assert step.loss.item() == pytest.approx(complementary + weight * consistency.item(), rel=1e-5)
        mean = views.prod(0) ** (1 / 3) * inside
        torch.testing.assert_close(method.confidences[index].double(), mean / mean.sum(1, keepdim=True))


def test_fully_supervised_training_does_not_depend_on_the_candidate_sets(tmp_path) -> None:
    for probability in ("0.1", "0.7"):
        assert run(tmp_path / probability, "--method", "supervised", "--flip-probability", probability) == 0
    few, many = (torch.load(tmp_path / name / "checkpoint.pt", weights_only=True)["model"] for name in ("0.1", "0.7"))
    torch.testing.assert_close(few, many, rtol=0, atol=0)


def test_fully_supervised_training_needs_true_labels(tmp_path, capsys) -> None:
    np.savez(tmp_path / "data.npz", features=np.eye(8), candidates=np.tile([True, True, False], (8, 1)))
    assert run(tmp_path / "run", "--method", "supervised", "--dataset", str(tmp_path / "data.npz")) == 2
    assert "method supervised trains with true labels, but the data have none" in capsys.readouterr().err


@pytest.mark.parametrize("name", REFINED_AFTER_STEP)
def test_refinement_uses_the_updated_network_and_leaves_batch_norm_statistics_unchanged(name: str) -> None:
    method = _method(name)
    model = method.task.model.train()
    last = method.task.config.epochs  # after any warm-up
    method.start_epoch("train", last)
    method.step("train", last)
    batch, view = method._drawn
    index = batch.index
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.5)
    means = [buffer.clone() for key, buffer in model.named_buffers() if "running" in key]
    method.after_step("train")
    assert all(map(torch.equal, means, [buffer for key, buffer in model.named_buffers() if "running" in key]))
    expected = method.refined(model(view.inputs).detach(), method.task.candidates[index])
    torch.testing.assert_close(method.confidences[index], expected)
    assert not torch.equal(means[0], next(buffer for key, buffer in model.named_buffers() if "running" in key))


@pytest.mark.parametrize("name", COMPARED)
def test_an_epoch_sees_no_instance_twice(name: str) -> None:
    method = _method(name, batch_size=100)
    method.start_epoch("train", 1)
    seen = torch.cat([method.draw()[0].index for _ in range(method.num_iterations("train"))])
    assert len(seen) == len(seen.unique()) == 1400


def test_a_batch_is_never_larger_than_the_training_set() -> None:
    method = _method("df", batch_size=10**6)
    assert method.num_iterations("train") == 1
    assert len(method.draw()[0]) == len(method.task.inputs)


@pytest.mark.parametrize("name", COMPARED)
def test_learning_rates_follow_the_schedule_of_each_method(name: str) -> None:
    method = _method(name, epochs=200, lr=0.1)
    rates = [method.learning_rate("train", epoch) for epoch in (1, 50, 51, 101, 200)]
    if name == "lws":
        assert rates == pytest.approx([0.1, 0.1 * 0.5**0.98, 0.05, 0.025, 0.1 * 0.5**3.98])
    elif name == "crdpll":
        assert rates == pytest.approx([0.1, 0.1, 0.1, 0.01, 0.001])
    elif name == "supervised":
        assert rates == pytest.approx([0.1, 0.1, 0.1, 0.01, 0.001])
        assert [method.learning_rate("train", epoch) for epoch in (80, 81, 120, 121)] == pytest.approx(
            [0.1, 0.01, 0.01, 0.001]
        )
    elif name == "pico":
        assert rates[0] == pytest.approx(0.1)
        assert rates[3] == pytest.approx((0.1 + 1e-4) / 2)
        assert 1e-4 < rates[4] < 2e-4
    else:
        assert rates == [0.1] * 5


def test_given_settings_override_the_defaults_of_a_method() -> None:
    for name, method in METHODS.items():
        config = build_config({"method": name}).to_json()
        assert {key: config[key] for key in method.defaults} == method.defaults
        assert build_config({"method": name, "lr": 0.003}).lr == 0.003


def test_help_describes_every_method(capsys) -> None:
    with pytest.raises(SystemExit):
        main(["--help"])
    lines = [line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines()]
    for name, method in METHODS.items():
        assert [name, method.help] in lines


def test_batch_size_comes_from_the_data_set() -> None:
    for dataset, batch_size in (("digits", 64), ("fmnist", 256), ("cifar10", 256), ("cifar100", 64), ("lost", 64)):
        config = build_config({"dataset": dataset, "method": "cc"})
        assert config.batch_size == config.pretrain_batch == batch_size


def test_an_unknown_method_is_a_one_line_error_that_names_the_choices(capsys) -> None:
    assert main(["--method", "guess"]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert (
        "unknown method 'guess': choose one of cc, rc, proden, lws, cavl, pico, crdpll, df, plsp, supervised" in error
    )


@pytest.mark.parametrize("name", COMPARED)
def test_the_loss_falls_in_the_first_epochs(tmp_path, name: str) -> None:
    out = tmp_path / "run"
    assert main(["--method", name, "--epochs", "6", "--out", str(out)]) == 0
    lines = metrics(out)
    assert [line["stage"] for line in lines] == ["train"] * 6
    assert lines[-1]["micro_f1"] > 0.6
    falling = "complementary" if name == "crdpll" else "loss"  # the weight of its other term grows
    assert lines[-1][falling] < lines[1][falling]
    if name in ("df", "cc", "supervised"):
        assert "labeled_purity" not in lines[-1]
    else:
        assert lines[-1]["labeled_purity"] > 0.6


@pytest.mark.parametrize("name", COMPARED)
def test_a_run_stopped_mid_epoch_resumes_bit_for_bit(tmp_path, name: str) -> None:
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    assert run(whole, "--method", name) == 0
    run_interrupted(broken, "--method", name)
    assert run(broken, "--resume") == 0
    assert metrics(broken) == metrics(whole)
    ends = [torch.load(out / "checkpoint.pt", weights_only=True) for out in (whole, broken)]
    for part in ("model", "method", "optimizer"):
        torch.testing.assert_close(ends[1][part], ends[0][part], rtol=0, atol=0)


@pytest.mark.parametrize("name", [*REFINED_AFTER_STEP, "proden", "pico", "crdpll"])
def test_confidences_are_float32_under_autocast(tmp_path, name: str) -> None:
    out = tmp_path / "run"
    assert run(out, "--method", name, "--amp", "bf16") == 0
    confidences = torch.load(out / "checkpoint.pt", weights_only=True)["method"]["confidences"]
    assert confidences.dtype == torch.float32
    assert torch.isfinite(confidences).all()


def test_a_run_without_a_stored_method_resumes_as_plsp(tmp_path, capsys) -> None:
    out = tmp_path / "run"
    assert run(out) == 0
    stored = json.loads((out / "config.json").read_text())
    del stored["method"], stored["lws_leverage"], stored["lws_surrogate"]
    (out / "config.json").write_text(json.dumps(stored))
    capsys.readouterr()
    assert run(out, "--resume", "--method", "proden") == 2
    assert "method was 'plsp', now 'proden'" in capsys.readouterr().err
    assert run(out, "--resume") == 0


def test_stored_runs_keep_the_behaviour_of_their_version(tmp_path) -> None:
    stored = build_config({"method": "cavl", "dataset": "fmnist"}).to_json()
    del stored["lws_surrogate"], stored["cavl_warm_up"], stored["augment_weak"]
    gone = {"ss_ramp": 1.0, "pretrain_loss": "mean", "likelihood_share": 0.0, "selection_memory": 0.0}
    (tmp_path / "config.json").write_text(json.dumps(stored | gone))
    config = read_config(tmp_path)
    assert (config.lws_surrogate, config.cavl_warm_up, config.augment_weak) == ("sigmoid", 0, True)


def test_a_run_without_a_stored_batch_size_resumes_with_its_pretrain_batch(tmp_path) -> None:
    out = tmp_path / "run"
    assert run(out, "--method", "df", "--batch-size", "100") == 0
    whole, stored = metrics(out), json.loads((out / "config.json").read_text())
    del stored["batch_size"]
    (out / "config.json").write_text(json.dumps(stored | {"pretrain_batch": 100}))
    assert read_config(out).batch_size == read_config_file(str(out / "config.json"))["batch_size"] == 100
    assert main(["--resume", "--out", str(out)]) == 0
    assert metrics(out) == whole


def test_default_directory_names_the_method_unless_it_is_plsp(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("plsp", "proden"):
        assert main([*SMALL, "--epochs", "1", "--iterations", "1", "--method", name]) == 0
    assert {path.name for path in (tmp_path / "runs").iterdir()} == {
        "digits-fps0.5-seed0",
        "proden-digits-fps0.5-seed0",
    }
