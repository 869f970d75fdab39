"""A run that is killed, stopped or starved continues to the numbers of one that was not."""

import os
import signal
import time
from pathlib import Path

import pytest
import torch

from plsp_train import files
from plsp_train.engine import Engine
from plsp_train.files import locked
from small_runs import metrics, run, run_interrupted, start

LONG = ["--epochs", "6", "--iterations", "60"]


def _wait_for_lines(out: Path, count: int, process) -> None:  # type: ignore[no-untyped-def]
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        if (out / "metrics.jsonl").exists() and len((out / "metrics.jsonl").read_text().splitlines()) >= count:
            return
        assert process.poll() is None, process.communicate()
        time.sleep(0.01)
    raise AssertionError("the run did not get that far in time")


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, object]]:
    out = tmp_path_factory.mktemp("uninterrupted") / "run"
    assert start(out, *LONG).wait() == 0
    return metrics(out)


def _resume(out: Path) -> None:
    process = start(out, *LONG, "--resume")
    _, errors = process.communicate()
    assert process.returncode == 0, errors


def test_a_killed_run_resumes_to_the_same_metrics(tmp_path, uninterrupted) -> None:
    out = tmp_path / "run"
    process = start(out, *LONG)
    _wait_for_lines(out, 3, process)
    time.sleep(0.05)  # into the next epoch
    process.send_signal(signal.SIGKILL)
    process.wait()
    _resume(out)
    assert metrics(out) == uninterrupted


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_stopped_run_saves_and_resumes_with_the_printed_command(
    tmp_path, uninterrupted, number: int, code: int
) -> None:
    out = tmp_path / "run"
    process = start(out, *LONG)
    _wait_for_lines(out, 2, process)
    process.send_signal(number)
    shown, _ = process.communicate()
    assert process.returncode == code
    assert f"--resume --out {out}" in shown
    _resume(out)
    assert metrics(out) == uninterrupted


class _Stop(Exception):
    pass


@pytest.mark.parametrize("steps", [1, 4, 5])
def test_a_run_stopped_mid_epoch_resumes_bit_for_bit(tmp_path, steps: int) -> None:
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    assert run(whole) == 0
    run_interrupted(broken, steps=steps)
    assert run(broken, "--resume") == 0
    assert metrics(broken) == metrics(whole)
    weights = [torch.load(out / "model.pt", weights_only=True)["state_dict"] for out in (whole, broken)]
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])


def test_a_kill_while_writing_a_checkpoint_keeps_the_old_one(tmp_path, monkeypatch) -> None:
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    assert run(whole) == 0
    real, calls = os.replace, []

    def die_at_the_third(source, target) -> None:  # type: ignore[no-untyped-def]
        calls.append(target)
        if sum(Path(call).name == "checkpoint.pt" for call in calls) == 3:
            raise _Stop  # the new file is complete beside the old one, as after a kill before the move
        real(source, target)

    with monkeypatch.context() as patch:
        patch.setattr(files.os, "replace", die_at_the_third)
        with pytest.raises(_Stop):
            run(broken)
    (broken / "checkpoint.pt.new").write_bytes(b"half a checkpoint")
    assert run(broken, "--resume") == 0
    assert metrics(broken) == metrics(whole)


def test_a_locked_directory_is_refused(tmp_path, capsys) -> None:
    out = tmp_path / "run"
    out.mkdir()
    for arguments in ([], ["--resume"]):
        with locked(out):
            before = {path: path.read_bytes() for path in out.iterdir()}
            capsys.readouterr()
            assert run(out, *arguments) == 2
            error = capsys.readouterr().err
            assert f"another process is using {out}" in error
            assert error.count("\n") == 1
            assert {path: path.read_bytes() for path in out.iterdir()} == before
        assert run(out, *arguments) == 0


def test_a_run_locks_its_directory_until_it_ends(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    out, step, refusals = tmp_path / "run", Engine._step, []

    def look_first(self: Engine, stage: str, epoch: int):  # type: ignore[no-untyped-def]
        with pytest.raises(ValueError, match="is using"), locked(out):
            pass
        refusals.append(stage)
        return step(self, stage, epoch)

    monkeypatch.setattr(Engine, "_step", look_first)
    assert run(out) == 0
    assert {"pretrain", "train"} == set(refusals)
    with locked(out):
        pass


def test_resuming_with_other_settings_is_an_error_that_names_them(tmp_path, capsys) -> None:
    out = tmp_path / "run"
    assert run(out) == 0
    capsys.readouterr()
    assert run(out, "--resume", "--lr", "0.3", "--k", "9") == 2
    error = capsys.readouterr().err
    assert "lr was 0.05, now 0.3" in error
    assert "k was 50, now 9" in error


def test_resuming_a_finished_run_changes_nothing(tmp_path) -> None:
    out = tmp_path / "run"
    assert run(out) == 0
    before = metrics(out)
    assert run(out, "--resume") == 0
    assert metrics(out) == before


def test_a_non_finite_loss_stops_the_run_and_keeps_the_checkpoint(tmp_path, capsys) -> None:
    out = tmp_path / "run"
    assert run(out, "--lr", "1e18") == 1
    error = capsys.readouterr().err
    assert "the loss became" in error
    assert "learning rate 1e+18" in error
    assert error.count("\n") == 1


def test_runs_agree_if_and_only_if_their_seeds_do(tmp_path) -> None:
    for name, seed in (("a", "5"), ("b", "5"), ("c", "6")):
        assert run(tmp_path / name, "--seed", seed) == 0
    assert metrics(tmp_path / "a") == metrics(tmp_path / "b")
    assert metrics(tmp_path / "a") != metrics(tmp_path / "c")
