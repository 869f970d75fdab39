"""Grids of runs: what they expand to, and that they skip, resume, fail and stop as they should."""

import contextlib
import dataclasses
import io
import json
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

import plsp_train.cli
from plsp_train.config import Config, build_config
from plsp_train.sweep import runner
from plsp_train.sweep.cli import main
from plsp_train.sweep.grid import GridRun, expand
from small_runs import SMALL, metrics

DIVERGING = "1e+18"


def _names(capsys: pytest.CaptureFixture[str], *arguments: str) -> list[str]:
    assert main(["--dry-run", *arguments]) == 0
    return [line.split()[1] for line in capsys.readouterr().out.splitlines()]


# ----------------------------------------------------------------------------------------------------------- the grid


def test_every_combination_is_a_run_named_by_its_settings(tmp_path, capsys) -> None:
    grid = ["--method", "plsp", "cc", "--flip-probability", "0.3", "0.5", "--seed", "0", "7", "--lr", "0.1"]
    assert set(_names(capsys, *grid, "--out", str(tmp_path))) == {
        f"{method}-digits-fps{flip}-lr0.1-seed{seed}"
        for method in ("plsp", "cc")
        for flip in ("0.3", "0.5")
        for seed in (0, 7)
    }
    assert not any(tmp_path.iterdir()), "a dry run leaves nothing behind"


def test_settings_without_effect_add_no_runs(tmp_path, capsys) -> None:
    out = ["--out", str(tmp_path)]
    assert _names(capsys, "--candidates", "uss", "fps", "--flip-probability", "0.3", "0.7", *out) == [
        "plsp-digits-uss-seed0",
        "plsp-digits-fps0.3-seed0",
        "plsp-digits-fps0.7-seed0",
    ]
    assert _names(capsys, "--method", "plsp", "df", "--k", "5", "9", *out) == [
        "plsp-digits-fps0.5-k5-seed0",
        "plsp-digits-fps0.5-k9-seed0",
        "df-digits-fps0.5-seed0",
    ]
    assert _names(capsys, "--dataset", "lost", "--flip-probability", "0.3", "0.5", *out) == ["plsp-lost-seed0"]
    assert _names(capsys, "--candidates", "noisy", "--noise-rate", "0.1", "0.2", *out) == [
        "plsp-digits-noisy0.5-noise0.1-seed0",
        "plsp-digits-noisy0.5-noise0.2-seed0",
    ]


def test_booleans_take_true_or_false(tmp_path, capsys) -> None:
    assert _names(capsys, "--semantic", "true", "false", "--out", str(tmp_path)) == [
        "plsp-digits-fps0.5-semantic-seed0",
        "plsp-digits-fps0.5-no_semantic-seed0",
    ]


def test_the_papers_grid_has_36_points(tmp_path, capsys) -> None:
    names = _names(capsys, "--paper-grid", "--out", str(tmp_path))
    assert len(set(names)) == 36
    assert "plsp-digits-fps0.5-lr0.0001-weight_decay1e-06-seed0" in names
    assert "plsp-digits-fps0.5-lr0.5-weight_decay0.1-seed0" in names


def test_the_arguments_of_a_run_give_its_settings(tmp_path, capsys) -> None:
    (planned,) = expand({"semantic": [False], "lr": [1e-5]}, {"download": True, "data_root": "-odd"}, tmp_path)
    assert plsp_train.cli.main([*planned.arguments(), "--print-config"]) == 0
    config = json.loads(capsys.readouterr().out)
    wanted = {"semantic": False, "lr": 1e-5, "download": True, "data_root": "-odd", "out": str(planned.directory)}
    assert config == build_config(wanted).to_json()


def test_help_lists_every_setting(capsys) -> None:
    with pytest.raises(SystemExit):
        main(["--help"])
    text = capsys.readouterr().out
    for setting in dataclasses.fields(Config):
        assert "--" + setting.name.replace("_", "-") in text


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--seed", "0", "-1"], "seed must be at least 0, got -1"),
        (["--jobs", "0"], "--jobs must be at least 1"),
        (["--paper-grid", "--weight-decay", "0"], "--paper-grid sets --weight-decay itself"),
        (["--k", "5", "--", "--k", "6"], "--k is given before and after --"),
        (["--", "--resume"], "--resume is not allowed after --"),
        (["--", "--out", "elsewhere"], "--out is not allowed after --"),
        (["--", "--config", "missing.toml"], "missing.toml"),
    ],
)
def test_invalid_input_is_a_one_line_error_before_any_run_starts(
    tmp_path, monkeypatch, capsys, arguments, message
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(arguments) == 2
    error = capsys.readouterr().err
    assert error.startswith("plsp_train.sweep: error: ")
    assert message in error
    assert error.count("\n") == 1
    assert not any(tmp_path.iterdir())


def test_settings_from_a_file_apply_to_all_runs_unless_the_grid_sets_them(tmp_path, capsys) -> None:
    (tmp_path / "c.toml").write_text('candidates = "uss"\nout = "elsewhere"\nseed = 5\n')
    assert _names(capsys, "--seed", "1", "2", "--", "--config", str(tmp_path / "c.toml")) == [
        "plsp-digits-uss-seed1",
        "plsp-digits-uss-seed2",
    ]


# --------------------------------------------------------------------------------------------------------- real runs


@pytest.fixture(scope="module")
def half_failed(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, int, str, str]:
    """A sweep of a run that diverges and one that does not: its directory, exit code, output and errors."""
    out, shown, errors = tmp_path_factory.mktemp("sweep"), io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(shown), contextlib.redirect_stderr(errors):
        exit_code = main(["--out", str(out), "--jobs", "2", "--lr", DIVERGING, "0.05", "--", *SMALL])
    return out, exit_code, shown.getvalue(), errors.getvalue()


def test_a_failing_run_is_reported_and_does_not_stop_others(half_failed) -> None:
    out, exit_code, shown, errors = half_failed
    assert exit_code == 1
    (failure,) = errors.splitlines()
    assert failure.startswith(f"failed: plsp-digits-fps0.5-lr{DIVERGING}-seed0: exit code 1: ")
    assert "the loss became" in failure
    good = out / "plsp-digits-fps0.5-lr0.05-seed0"
    summary = json.loads((good / "summary.json").read_text())
    assert f"{good.name}: micro-F1 {summary['micro_f1_last10']:.4f}" in shown
    assert "1 of 2 runs are finished" in shown
    assert "candidate sets of" in (good / "log.txt").read_text(), "what the run said is in its log"


def test_a_finished_run_is_skipped(half_failed, monkeypatch, capsys) -> None:
    out = half_failed[0]
    monkeypatch.setattr(runner, "_start", None)
    assert main(["--out", str(out), "--lr", "0.05", "--", *SMALL]) == 0
    assert "1 of 1 runs are already finished" in capsys.readouterr().out


def test_a_directory_with_other_settings_is_an_error_that_names_them(half_failed, monkeypatch, capsys) -> None:
    out = half_failed[0]
    monkeypatch.setattr(runner, "_start", None)
    assert main(["--out", str(out), "--lr", "0.05", "0.1", "--", *SMALL, "--k", "9"]) == 2
    error = capsys.readouterr().err
    assert "lr0.05-seed0 holds a run with other settings: k was 50, now 9" in error
    assert error.count("\n") == 1


def test_an_interrupted_run_is_resumed(half_failed, tmp_path, capsys) -> None:
    name = "plsp-digits-fps0.5-lr0.05-seed0"
    whole, broken = half_failed[0] / name, tmp_path / name
    shutil.copytree(whole, broken)
    (broken / "summary.json").unlink()
    assert main(["--out", str(tmp_path), "--lr", "0.05", "--dry-run", "--", *SMALL]) == 0
    assert capsys.readouterr().out.split() == ["interrupted", name]
    assert main(["--out", str(tmp_path), "--lr", "0.05", "--", *SMALL]) == 0
    assert f"resuming {broken}" in (broken / "log.txt").read_text()
    assert metrics(broken) == metrics(whole)


@pytest.mark.parametrize(
    ("options", "result"), [([], "plsp-own-seed0: "), (["--folds", "2"], "plsp-own-folds2-seed0: micro-F1 ")]
)
def test_runs_without_a_test_set_and_cross_validations_are_finished_once(
    tmp_path, monkeypatch, capsys, options: list[str], result: str
) -> None:
    generator = np.random.default_rng(0)
    labels = generator.integers(0, 3, 60)
    arrays = {"features": generator.normal(size=(60, 4)), "candidates": np.eye(3, dtype=bool)[labels]}
    np.savez(tmp_path / "own.npz", **arrays, **({"labels": labels} if options else {}))
    common = ["--pretrain-epochs", "1", "--epochs", "1", "--iterations", "1", "--select", "lr"]
    command = ["--dataset", str(tmp_path / "own.npz"), *options, "--out", str(tmp_path / "sweep"), "--", *common]
    assert main(command) == 0
    assert result in capsys.readouterr().out
    monkeypatch.setattr(runner, "_start", None)
    assert main(command) == 0
    assert "1 of 1 runs are already finished" in capsys.readouterr().out


def test_a_signal_lets_the_runs_save_and_the_same_command_continues(tmp_path) -> None:
    arguments = ["--out", str(tmp_path), "--seed", "0", "1"]
    command = [sys.executable, "-m", "plsp_train.sweep", *arguments, "--", *SMALL, "--epochs", "10000"]
    sweep = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    first, second = (tmp_path / f"plsp-digits-fps0.5-seed{seed}" for seed in (0, 1))
    deadline = time.monotonic() + 120
    while not (first / "metrics.jsonl").exists():
        assert sweep.poll() is None, sweep.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.02)
    sweep.send_signal(signal.SIGINT)
    shown, errors = sweep.communicate()
    assert sweep.returncode == 130
    assert "stopped by SIGINT with 0 of 2 runs finished; the same command continues" in shown
    assert errors == "", "a run that was told to stop did not fail"
    assert "continue with: python -m plsp_train --resume" in (first / "log.txt").read_text(), "it was saved"
    assert not second.exists()


# -------------------------------------------------------------------------------------------------------- side by side


class _FakeProcess:
    """Ends at its second look."""

    def __init__(self) -> None:
        self.looks, self.returncode = 0, 0

    def poll(self) -> int | None:
        self.looks += 1
        return None if self.looks < 2 else self.returncode


@pytest.mark.parametrize(("jobs", "threads"), [(1, "8"), (2, "4"), (3, "2"), (100, "1")])
def test_jobs_limit_the_processes_and_share_the_cores(tmp_path, monkeypatch, jobs: int, threads: str) -> None:
    started: list[_FakeProcess] = []
    side_by_side: list[int] = []

    def start(planned: GridRun, environment: dict[str, str]) -> _FakeProcess:
        assert environment["OMP_NUM_THREADS"] == threads
        started.append(_FakeProcess())
        side_by_side.append(sum(process.looks < 2 for process in started))
        return started[-1]

    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(runner, "_num_cores", lambda: 8)
    monkeypatch.setattr(runner, "_POLL_SECONDS", 0)
    monkeypatch.setattr(runner, "_start", start)
    monkeypatch.setattr(runner, "_result", lambda planned: "done")
    outcome = runner.execute(expand({"seed": range(10)}, {}, tmp_path), jobs)
    assert (outcome.num_done, outcome.failures, outcome.stop_signal) == (10, [], None)
    assert max(side_by_side) == min(jobs, 10)


def test_omp_num_threads_of_the_user_is_kept(tmp_path, monkeypatch) -> None:
    seen = []

    def start(planned: GridRun, environment: dict[str, str]) -> _FakeProcess:
        seen.append(environment["OMP_NUM_THREADS"])
        return _FakeProcess()

    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    monkeypatch.setattr(runner, "_start", start)
    monkeypatch.setattr(runner, "_result", lambda planned: "done")
    runner.execute(expand({}, {}, tmp_path), 1)
    assert seen == ["3"]
