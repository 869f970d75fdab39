"""Data and settings at the edge, through the whole trainer and every method."""

import json
import math
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from plsp_train.checkpoint import load_tensors
from plsp_train.cli import main
from plsp_train.engine import Engine
from plsp_train.methods import METHODS, Iteration
from plsp_train.models import MODELS
from small_runs import run

QUICK = [
    *("--epochs", "2", "--pretrain-epochs", "1", "--iterations", "2", "--batch-size", "8", "--pretrain-batch", "8"),
    *(
        "--labeled-batch",
        "4",
        "--unlabeled-batch",
        "8",
        "--k",
        "3",
        "--test-fraction",
        "0",
        "--validation-fraction",
        "0",
    ),
]
NUM_CLASSES, NUM_FEATURES = 4, 5
PARTIAL_LABEL_METHODS = [name for name, method in METHODS.items() if not method.uses_true_labels]


@pytest.fixture(autouse=True)
def _no_curves(monkeypatch: pytest.MonkeyPatch) -> None:
    """Drawing curves takes longer than these runs."""
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)


def _sets(count: int, seed: int = 0) -> np.ndarray:
    random = np.random.default_rng(seed)
    sets = random.random((count, NUM_CLASSES)) < 0.4
    sets[np.arange(count), np.arange(count) % NUM_CLASSES] = True
    return sets


def _features(count: int) -> np.ndarray:
    return np.random.default_rng(1).normal(size=(count, NUM_FEATURES)).astype(np.float32)


def _absent_class() -> dict[str, np.ndarray]:
    sets = _sets(30)
    sets[:, 2] = False
    sets[~sets.any(1), 0] = True
    return {"features": _features(30), "candidates": sets}


def _all_full_but_one() -> dict[str, np.ndarray]:
    sets = np.ones((30, NUM_CLASSES), dtype=bool)
    sets[0, 1:] = False
    return {"features": _features(30), "candidates": sets}


def _one_instance_of_a_class() -> dict[str, np.ndarray]:
    sets = _sets(30)
    sets[:, 3] = False
    sets[~sets.any(1), 0] = True
    sets[7] = np.arange(NUM_CLASSES) == 3
    return {"features": _features(30), "candidates": sets}


def _one_class_certain() -> dict[str, np.ndarray]:
    sets = np.ones((30, NUM_CLASSES), dtype=bool)
    sets[:20, 1:] = False
    return {"features": _features(30), "candidates": sets}


def _duplicates() -> dict[str, np.ndarray]:
    image = np.random.default_rng(0).integers(0, 255, (1, 8, 8), np.uint8)
    return {"images": image.repeat(20, axis=0), "candidates": _sets(20)}


DATA: dict[str, Callable[[], dict[str, np.ndarray]]] = {
    "a class without instances": _absent_class,
    "full sets but one": _all_full_but_one,
    "fewer instances than a batch": lambda: {"features": _features(5), "candidates": _sets(5)},
    "one instance of a class": _one_instance_of_a_class,
    "one class alone is certain": _one_class_certain,
    "constant features": lambda: {"features": np.ones((20, NUM_FEATURES), np.float32), "candidates": _sets(20)},
    "equal images": _duplicates,
    "black images": lambda: {"images": np.zeros((20, 8, 8), np.uint8), "candidates": _sets(20)},
    "huge features": lambda: {"features": 1e18 * _features(20), "candidates": _sets(20)},
    "tiny features": lambda: {"features": 1e-30 * _features(20), "candidates": _sets(20)},
    "two instances": lambda: {"features": _features(2), "candidates": np.eye(2, NUM_CLASSES, dtype=bool)},
}


def _assert_no_trace_of_nan(out: Path) -> None:
    """Checkpoints, models, metrics and summary hold finite numbers only."""
    for path in out.glob("*.pt"):
        for tensor in _tensors(load_tensors(path)):
            assert tensor.isfinite().all(), path
    for path in (*out.glob("*.jsonl"), *out.glob("*.json")):
        assert "NaN" not in path.read_text(), path
        assert "Infinity" not in path.read_text(), path


def _tensors(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    parts = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else ()
    return [tensor for part in parts for tensor in _tensors(part)]


@pytest.mark.parametrize("method", PARTIAL_LABEL_METHODS)
@pytest.mark.parametrize("kind", DATA)
def test_extreme_data_train_with_every_method(
    tmp_path: Path, method: str, kind: str, capsys: pytest.CaptureFixture[str]
) -> None:
    np.savez(tmp_path / "data.npz", **DATA[kind]())
    out = tmp_path / "run"
    assert main(["--dataset", f"{tmp_path}/data.npz", "--method", method, *QUICK, "--out", str(out)]) == 0
    _assert_no_trace_of_nan(out)
    assert (
        len((out / "metrics.jsonl").read_text().splitlines())
        == json.loads((out / "summary.json").read_text())["epochs"]
    )


@pytest.mark.parametrize("method", PARTIAL_LABEL_METHODS)
def test_batches_of_one(tmp_path: Path, method: str, capsys: pytest.CaptureFixture[str]) -> None:
    np.savez(tmp_path / "data.npz", features=_features(4), candidates=_sets(4))
    ones = [f"--{name}=1" for name in ("batch-size", "pretrain-batch", "labeled-batch", "unlabeled-batch", "k")]
    out, common = tmp_path / "run", ["--dataset", f"{tmp_path}/data.npz", "--method", method, *QUICK, *ones]
    assert main([*common, "--model", "linear", "--out", str(out)]) == 0
    _assert_no_trace_of_nan(out)
    capsys.readouterr()
    code = main([*common, "--model", "mlp", "--out", str(tmp_path / "mlp")])
    if method == "crdpll":  # a batch of three views
        assert code == 0
        return
    assert code == 2
    assert "batch normalisation cannot train on a batch of one" in _error(capsys)


def _error(capsys: pytest.CaptureFixture[str]) -> str:
    """What was printed as an error, without warnings of settings that have no effect."""
    return "".join(line for line in capsys.readouterr().err.splitlines(keepends=True) if "warning:" not in line)


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("shape", [(1, 1), (5, 7), (8, 3), (33, 34)], ids=str)
def test_odd_image_sizes_train_or_say_what_fits(
    tmp_path: Path, model: str, shape: tuple[int, int], capsys: pytest.CaptureFixture[str]
) -> None:
    images = np.random.default_rng(0).integers(0, 255, (6, *shape, 3), np.uint8)
    np.savez(tmp_path / "data.npz", images=images, candidates=_sets(6))
    quick = [*QUICK, "--epochs", "1", "--iterations", "1", "--pretrain-epochs", "0"]
    code = main(["--dataset", f"{tmp_path}/data.npz", "--model", model, *quick, "--out", str(tmp_path / "run")])
    error = _error(capsys)
    assert code == 0 or (code == 2 and error.count("\n") == 1), error


# ---------------------------------------------------------------------------------------------------- numerics


@pytest.mark.parametrize(
    "settings",
    [
        ["--strength", "1e30"],
        ["--strength", "1e-300"],
        ["--lr", "1e30"],
        ["--lr", "1e-300"],
        ["--beta", "1e300"],
        ["--beta", "1e-300"],
        ["--ss-weight", "1e38"],
        ["--weight-decay", "1e30"],
        ["--strength", "1e18", "--covariance", "diagonal"],
        ["--lr", "1e12", "--amp", "bf16"],
        ["--lr", "1e4", "--amp", "fp16"],
    ],
    ids=" ".join,
)
def test_absurd_settings_train_on_or_stop_with_an_explanation(
    tmp_path: Path, settings: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "run"
    code = run(out, "--epochs", "1", *settings)
    error = capsys.readouterr().err
    assert code in (0, 1)
    if code:
        assert error.count("\n") == 1
        assert any(word in error for word in ("--lr", "--strength", "--amp"))
    _assert_no_trace_of_nan(out)


def test_a_batch_that_overflows_in_half_precision_is_skipped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One batch overflows; the scaler skips its step, the epoch goes on, and the metrics count it."""
    step, number = Engine._step, [0]

    def overflowing(self: Engine, stage: str, epoch: int) -> Iteration:
        number[0] += 1
        hook = self.model.classifier.register_forward_pre_hook(lambda _, inputs: (inputs[0] * math.inf,))
        if number[0] != 3:
            hook.remove()
        try:
            return step(self, stage, epoch)
        finally:
            hook.remove()

    monkeypatch.setattr(Engine, "_step", overflowing)
    out = tmp_path / "run"
    assert run(out, "--amp", "fp16", "--pretrain-epochs", "0") == 0
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert [line.get("overflows", 0) for line in lines] == [1, 0, 0]
    assert all(math.isfinite(line["loss"]) for line in lines)
    _assert_no_trace_of_nan(out)
