"""Runs on user data, from the file to the results, by the command line."""

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from plsp_train.cli import main
from plsp_train.config import build_config
from plsp_train.data import REAL_PARTIAL_LABEL_SETS, Source
from plsp_train.preparation import load_source
from plsp_train.results import load_results
from plsp_train.rules import rules
from small_runs import metrics

QUICK = ["--epochs", "2", "--pretrain-epochs", "2", "--iterations", "4"]


def write_vectors(path: Path, *keys: str, count: int = 120) -> dict[str, np.ndarray]:
    """Three separated classes in an .npz with the arrays that are named."""
    random = np.random.default_rng(0)
    truth = random.integers(0, 3, count)
    candidates = (random.random((count, 3)) < 0.4) | np.eye(3, dtype=bool)[truth]
    candidates[candidates.all(1), (truth[candidates.all(1)] + 1) % 3] = False
    arrays = {
        "features": np.eye(3)[truth] * 3 + random.normal(0, 0.4, (count, 3)),
        "candidates": candidates,
        "labels": truth,
        "class_names": np.array(["ant", "bee", "cat"]),
    }
    np.savez(path, **{key: arrays[key] for key in keys})
    return arrays


def summary(out: Path) -> dict[str, Any]:
    return json.loads((out / "summary.json").read_text())


def test_without_true_labels_a_run_reports_what_can_be_known(tmp_path, capsys) -> None:
    arrays = write_vectors(tmp_path / "own.npz", "features", "candidates", "class_names")
    out = tmp_path / "run"
    assert main(["--dataset", str(tmp_path / "own.npz"), "--out", str(out), *QUICK]) == 0
    shown = capsys.readouterr().out
    assert "own: 120 training instances, no test set, 3 classes" in shown
    assert "12 of the training instances are held out for validation" in shown
    last = metrics(out)[-1]
    assert {"covering_rate", "approximated_accuracy", "label_agreement", "mask_rate"} <= last.keys()
    assert not {"micro_f1", "labeled_purity", "pseudo_label_purity"} & last.keys()
    assert "disambiguation_accuracy" not in summary(out)
    results = load_results(out / "results.npz")
    assert results.row.tolist() == list(range(120))
    assert results.held_out.sum() == 12
    assert arrays["candidates"][np.arange(120), results.label].all()
    assert results.true_label is None
    assert (out / "model_selected_by_covering_rate.pt").exists()


def test_true_labels_are_for_testing_and_reporting_only(tmp_path) -> None:
    arrays = write_vectors(tmp_path / "own.npz", "features", "candidates", "labels")
    out = tmp_path / "run"
    assert main(["--dataset", str(tmp_path / "own.npz"), "--out", str(out), *QUICK]) == 0
    assert summary(out)["micro_f1"] > 0.9
    results = load_results(out / "results.npz")
    assert len(results) == 108, "a tenth is held out to test on"
    assert (results.true_label == arrays["labels"][results.row]).all()
    assert summary(out)["disambiguation_accuracy"] == (results.label == results.true_label).mean()
    assert results.test_confusion is not None
    assert results.test_confusion.sum() == 12

    arrays["labels"] = np.zeros_like(arrays["labels"])
    np.savez(tmp_path / "wrong.npz", **{key: arrays[key] for key in ("features", "candidates", "labels")})
    other = tmp_path / "other"
    assert main(["--dataset", str(tmp_path / "wrong.npz"), "--out", str(other), *QUICK]) == 0
    first, second = (torch.load(run / "model.pt", weights_only=True)["state_dict"] for run in (out, other))
    assert all(torch.equal(first[name], second[name]) for name in first), "training does not see true labels"


def test_labels_without_candidate_sets_have_them_drawn(tmp_path, capsys) -> None:
    write_vectors(tmp_path / "own.npz", "features", "labels")
    arguments = ["--dataset", str(tmp_path / "own.npz"), *QUICK]
    assert main([*arguments, "--out", str(tmp_path / "run"), "--flip-probability", "0.2"]) == 0
    assert json.loads((tmp_path / "run" / "config.json").read_text())["candidates"] == "fps"
    write_vectors(tmp_path / "sets.npz", "features", "candidates")
    assert main(["--dataset", str(tmp_path / "sets.npz"), "--candidates", "fps"]) == 2
    assert "sets comes with candidate sets: remove --candidates fps" in capsys.readouterr().err


@pytest.mark.parametrize("labelled", [True, False])
def test_folds_train_a_run_each_and_resume_where_they_stopped(tmp_path, capsys, labelled: bool) -> None:
    write_vectors(tmp_path / "own.npz", "features", "candidates", *(["labels"] if labelled else []))
    out = tmp_path / "run"
    assert main(["--dataset", str(tmp_path / "own.npz"), "--folds", "3", "--out", str(out), *QUICK]) == 0
    whole = json.loads((out / "folds.json").read_text())
    assert ("micro_f1" in whole["scores"]) == labelled
    assert ("covering_rate" in whole["scores"]) == (not labelled)
    assert len(next(iter(whole["scores"].values()))["folds"]) == 3
    (out / "folds.json").unlink()
    for name in ("summary.json", "checkpoint.pt"):
        (out / "fold3" / name).unlink()
    before = (out / "fold1" / "model.pt").stat().st_mtime_ns
    assert main(["--resume", "--out", str(out)]) == 0
    assert json.loads((out / "folds.json").read_text()) == whole
    assert (out / "fold1" / "model.pt").stat().st_mtime_ns == before, "a finished fold is kept"
    assert main(["--dataset", str(tmp_path / "own.npz"), "--folds", "3", "--out", str(out)]) == 2
    assert "already holds a run" in capsys.readouterr().err


def test_settings_are_chosen_by_held_out_candidate_sets(tmp_path, capsys) -> None:
    write_vectors(tmp_path / "own.npz", "features", "candidates")
    out = tmp_path / "run"
    arguments = ["--dataset", str(tmp_path / "own.npz"), "--out", str(out), *QUICK]
    assert main([*arguments, "--select", "model,normalise"]) == 0
    told = json.loads((out / "selection.json").read_text())
    assert len(told["trials"]) == 4, "two networks, then two more scales for the better one"
    best = max(trial["covering_rate"] for trial in told["trials"])
    chosen = next(trial for trial in told["trials"] if told["chosen"].items() <= trial.items())
    assert chosen["covering_rate"] == best
    config = json.loads((out / "config.json").read_text())
    assert {name: config[name] for name in told["chosen"]} == told["chosen"]
    assert f"--select: model {config['model']}" in capsys.readouterr().out


def test_data_that_changed_since_the_checkpoint_are_refused(tmp_path, capsys) -> None:
    arrays = write_vectors(tmp_path / "own.npz", "features", "candidates")
    out = tmp_path / "run"
    assert main(["--dataset", str(tmp_path / "own.npz"), "--out", str(out), *QUICK]) == 0
    arrays["features"][5, 1] += 1
    np.savez(tmp_path / "own.npz", features=arrays["features"], candidates=arrays["candidates"])
    assert main(["--resume", "--out", str(out)]) == 2
    assert "the data set has changed" in capsys.readouterr().err


def test_missing_true_labels_are_noticed_without_them(tmp_path, capsys) -> None:
    """Every sixteenth set lacks the true label, and the network comes to contradict it."""
    arrays = write_vectors(tmp_path / "own.npz", "features", count=600)
    truth = arrays["labels"]
    sets = np.eye(3, dtype=bool)[truth]
    sets[::16] = np.eye(3, dtype=bool)[(truth[::16] + 1) % 3]
    np.savez(tmp_path / "noisy.npz", features=arrays["features"], candidates=sets)
    arguments = ["--epochs", "10", "--method", "cc", "--validation-fraction", "0.3"]
    assert main(["--dataset", str(tmp_path / "noisy.npz"), "--out", str(tmp_path / "noisy"), *arguments]) == 0
    np.savez(tmp_path / "clean.npz", features=arrays["features"], candidates=arrays["candidates"])
    assert main(["--dataset", str(tmp_path / "clean.npz"), "--out", str(tmp_path / "clean"), *arguments]) == 0
    assert not summary(tmp_path / "clean")["warnings"]
    assert any("may lack the true label" in warning for warning in summary(tmp_path / "noisy")["warnings"])


def test_a_class_that_loses_its_labelled_set_is_named(tmp_path) -> None:
    arrays = write_vectors(tmp_path / "own.npz", "features", count=120)
    sets = arrays["candidates"].copy()
    sets[:, 2] = False
    sets[~sets.any(1), 0] = True
    sets[0] = [True, True, False]
    np.savez(tmp_path / "lost.npz", features=arrays["features"], candidates=sets)
    out = tmp_path / "run"
    assert main(["--dataset", str(tmp_path / "lost.npz"), "--out", str(out), *QUICK]) == 0
    assert any("for 2 in the last epoch" in warning for warning in summary(out)["warnings"])


@pytest.mark.parametrize(
    ("shape", "count", "expected"),
    [
        (
            (20,),
            500,
            {"model": "mlp", "batch_size": 32, "k": 15, "epochs": 50, "recipe": "robust", "align_sizes": True},
        ),
        ((20,), 20_000, {"model": "mlp", "batch_size": 256, "k": 200, "iterations": 79}),
        (
            (1, 28, 28),
            2000,
            {"model": "lenet", "labeled_batch": 32, "epochs": 100, "recipe": "robust", "lr": 0.05},
        ),
        ((3, 48, 48), 2000, {"model": "densenet", "recipe": "paper", "lr": 0.1}),
        ((3, 128, 96), 2000, {"model": "torchvision:resnet18"}),
        ((1, 8, 8), 2000, {"model": "mlp"}),
    ],
)
def test_settings_follow_from_size_and_kind(shape: tuple[int, ...], count: int, expected: dict[str, object]) -> None:
    inputs = torch.zeros(count, *shape, dtype=torch.uint8 if len(shape) == 3 else torch.float32)
    source = Source("own", inputs, tuple(map(str, range(10))), candidates=torch.ones(count, 10, dtype=torch.bool))
    config = build_config({"dataset": "own.npz"}, source).to_json()
    assert expected.items() <= config.items()
    assert config["validation_fraction"] == 0.1, "no labels: held-out candidate sets"
    assert config["candidates"] == "own"


def test_the_robust_recipe_gives_way_to_the_users_choice() -> None:
    source = Source("own", torch.zeros(500, 20), ("a", "b"), candidates=torch.ones(500, 2, dtype=torch.bool))
    chosen = {"dataset": "own.npz", "recipe": "paper"}
    for given in (chosen, {"dataset": "own.npz", "method": "cc"}):
        config = build_config(given, source)
        assert (config.recipe, config.align_sizes, config.schedule) == ("paper", False, "step")
    assert not build_config({"dataset": "own.npz", "align_sizes": False}, source).align_sizes


def test_features_that_share_a_unit_share_a_scale() -> None:
    vectors = torch.randn(500, 10, generator=torch.Generator().manual_seed(0))
    for units, expected in ((torch.linspace(1, 50, 10), "global"), (torch.logspace(0, 4, 10), "feature")):
        source = Source("own", vectors * units, ("a", "b"), candidates=torch.ones(500, 2, dtype=torch.bool))
        assert build_config({"dataset": "own.npz"}, source).normalise == expected


@pytest.mark.skipif("PLSP_TEST_DATA" not in os.environ, reason="PLSP_TEST_DATA names no directory")
@pytest.mark.parametrize("name", REAL_PARTIAL_LABEL_SETS)
def test_presets_of_the_real_sets_are_what_the_rules_give(name: str) -> None:
    source = load_source({"dataset": str(Path(os.environ["PLSP_TEST_DATA"]) / f"{name}.mat")})
    expected = rules(source) | {"recipe": "paper"}  # the default of benchmark sets
    assert expected.items() <= build_config({"dataset": name}).to_json().items()


@pytest.mark.parametrize(
    ("arguments", "warned"),
    [
        (["--horizontal-flip"], []),
        (["--no-horizontal-flip"], ["--horizontal-flip"]),
        (["--split-seed", "3"], ["--split-seed"]),
        (["--noise-rate", "0.2"], ["--noise-rate"]),
    ],
)
def test_options_without_effect_on_these_data_are_named(
    tmp_path, capsys, arguments: list[str], warned: list[str]
) -> None:
    write_vectors(tmp_path / "own.npz", "features", "candidates")
    out = str(tmp_path / "run")
    assert main(["--dataset", str(tmp_path / "own.npz"), "--out", out, *QUICK, *arguments]) == 0
    assert [line.split()[2] for line in capsys.readouterr().err.splitlines()] == warned


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--annotators", "vote"], "annotators"),
        (["--image-size", "32"], "image_size"),
        (["--test-fraction", "0.2"], "test_fraction needs true labels"),
        (["--model", "densenet"], "densenet takes images, got vectors"),
        (["--impl", "triton"], "impl='triton' "),
        (["--select", "normalise,", "--epochs", "1"], "--select takes"),
        (["--pretrained", "nowhere.pt"], "nowhere.pt"),
    ],
)
def test_options_that_do_not_fit_the_data_are_one_line_errors(
    tmp_path, capsys, monkeypatch: pytest.MonkeyPatch, arguments: list[str], message: str
) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    write_vectors(tmp_path / "own.npz", "features", "candidates")
    out = str(tmp_path / "run")
    assert main(["--dataset", str(tmp_path / "own.npz"), "--out", out, *arguments]) == 2
    error = capsys.readouterr().err
    assert error.startswith("plsp_train: error: ")
    assert error.count("\n") == 1
    assert message in error


def test_a_diverging_run_blames_the_rate_and_claims_no_checkpoint(tmp_path, capsys) -> None:
    write_vectors(tmp_path / "own.npz", "features", "candidates")
    out = tmp_path / "run"
    assert main(["--dataset", str(tmp_path / "own.npz"), "--out", str(out), "--lr", "1e18"]) == 1
    error = capsys.readouterr().err
    assert "try a smaller --lr" in error
    assert ("checkpoint" in error) == (out / "checkpoint.pt").exists()
