"""The same seed gives the same bits on a CPU."""

import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from plsp_train.checkpoint import load_tensors
from plsp_train.determinism import deterministic_algorithms
from plsp_train.methods import METHODS
from small_runs import metrics, run

SHORT = ["--epochs", "2", "--iterations", "3"]


def _equal(ours: Any, theirs: Any) -> bool:
    if isinstance(ours, torch.Tensor):
        return torch.equal(ours, theirs)
    if isinstance(ours, dict):
        return ours.keys() == theirs.keys() and all(_equal(ours[key], theirs[key]) for key in ours)
    if isinstance(ours, list | tuple):
        return len(ours) == len(theirs) and all(map(_equal, ours, theirs))
    return bool(ours == theirs)


@pytest.mark.parametrize("method", METHODS)
def test_runs_of_one_seed_end_with_the_same_bits(
    tmp_path: Path, method: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Everything that a checkpoint holds, with and without --deterministic, which must not change a CPU's numbers."""
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    plain, again = tmp_path / "plain", tmp_path / "again"
    assert run(plain, *SHORT, "--method", method) == 0
    assert run(again, *SHORT, "--method", method, "--deterministic") == 0
    assert not torch.are_deterministic_algorithms_enabled()
    assert metrics(plain) == metrics(again)
    ours, theirs = (load_tensors(out / "checkpoint.pt") for out in (plain, again))
    for name in ("model", "optimizer", "method", "generator", "torch_generator", "labels", "changes"):
        assert _equal(ours[name], theirs[name]), name


def test_an_operator_without_a_deterministic_form_is_named() -> None:
    with pytest.raises(ValueError, match=r"--deterministic: .*some_kernel"), deterministic_algorithms(True):
        raise RuntimeError("some_kernel does not have a deterministic implementation, but you set ...\nmore")
    assert not torch.are_deterministic_algorithms_enabled()
