"""Broken files, full disks, and processes that get in each other's way: one line, an exit code, and nothing lost."""

import builtins
import errno
import importlib
import json
import os
import random
import resource
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from plsp_train import files
from plsp_train.checkpoint import DamagedFile, load_tensors, save_tensors
from plsp_train.cli import main
from plsp_train.command import run_command
from plsp_train.data.files import cache
from plsp_train.data.files.images import Decoded
from plsp_train.files import locked
from small_runs import metrics, run, run_interrupted

COMMANDS = ("disambiguate", "predict", "report", "sweep", "table")
TINY = ["--pretrain-epochs", "0", "--epochs", "2", "--iterations", "1"]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that nothing disturbed."""
    out = tmp_path_factory.mktemp("faults") / "whole"
    assert run(out) == 0
    return out


@pytest.fixture(scope="module")
def interrupted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same run, stopped within its second training epoch."""
    out = tmp_path_factory.mktemp("faults") / "interrupted"
    run_interrupted(out)
    return out


@pytest.fixture
def broken(tmp_path: Path, interrupted: Path) -> Path:
    """A copy of the interrupted run to damage."""
    return Path(shutil.copytree(interrupted, tmp_path / "broken"))


@pytest.fixture
def one_line(capsys: pytest.CaptureFixture[str]) -> Callable[[], str]:
    """What was printed as an error since the last call: a single line without torch's advice to load unsafely."""

    def read() -> str:
        error = capsys.readouterr().err
        assert error.count("\n") == 1, error
        assert "weights_only" not in error
        return error

    return read


# ------------------------------------------------------------------------------------------------- checkpoints


def _truncate(content: bytes) -> bytes:
    return content[: len(content) // 2]


def _flip_bytes(content: bytes) -> bytes:
    flipped, generator = bytearray(content), random.Random(0)
    for position in generator.sample(range(len(content) // 4, 3 * len(content) // 4), 400):
        flipped[position] ^= 0xFF
    return bytes(flipped)


@pytest.mark.parametrize("damage", [_truncate, _flip_bytes, lambda content: b"", lambda content: b"no checkpoint"])
def test_a_damaged_checkpoint_is_noticed_and_the_previous_one_used(
    broken: Path, whole: Path, damage: Callable[[bytes], bytes], capsys: pytest.CaptureFixture[str]
) -> None:
    path = broken / "checkpoint.pt"
    path.write_bytes(damage(path.read_bytes()))
    assert run(broken, "--resume") == 0
    assert "continuing from the one before, checkpoint.previous.pt" in capsys.readouterr().out
    assert metrics(broken) == metrics(whole)


def test_every_changed_byte_is_noticed(tmp_path: Path) -> None:
    path = tmp_path / "tensors.pt"
    save_tensors(path, {"weight": torch.arange(5.0), "name": "five"})
    content = path.read_bytes()
    assert torch.equal(torch.load(path, weights_only=True)["weight"], torch.arange(5.0))
    for position in range(len(content)):
        path.write_bytes(content[:position] + bytes([content[position] ^ 1]) + content[position + 1 :])
        with pytest.raises(DamagedFile, match="tensors"):
            load_tensors(path)
    for size in range(0, len(content), 7):
        path.write_bytes(content[:size])
        with pytest.raises(DamagedFile, match="tensors"):
            load_tensors(path)


def test_a_kill_between_the_moves_of_a_checkpoint_loses_nothing(broken: Path, whole: Path) -> None:
    os.replace(broken / "checkpoint.pt", broken / "checkpoint.previous.pt")
    assert run(broken, "--resume") == 0
    assert metrics(broken) == metrics(whole)


def test_two_damaged_checkpoints_are_an_error(broken: Path, one_line: Callable[[], str]) -> None:
    for name in ("checkpoint.pt", "checkpoint.previous.pt"):
        (broken / name).write_bytes(_truncate((broken / name).read_bytes()))
    one_line_before(broken, one_line, "there is no intact checkpoint.previous.pt: start again")


def one_line_before(out: Path, one_line: Callable[[], str], expected: str) -> None:
    """Resuming is refused with a line that names the file, and leaves the metrics alone."""
    before = (out / "metrics.jsonl").read_bytes()
    assert run(out, "--resume") == 2
    error = one_line()
    assert expected in error
    assert str(out / "c") in error  # checkpoint.pt or config.json
    assert (out / "metrics.jsonl").read_bytes() == before


def _without(key: str) -> Callable[[dict[str, Any]], Any]:
    return lambda state: {name: value for name, value in state.items() if name != key}


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (_without("optimizer"), "not a complete checkpoint: it lacks optimizer"),
        (_without("torch_generator"), "it lacks torch_generator"),
        (_without("format"), "another version of plsp_train"),
        (lambda state: state | {"format": 2}, "another version of plsp_train"),
        (lambda state: {"state_dict": state["model"], "format": 3}, "is not a checkpoint"),
        (lambda state: [1, 2], "is not a checkpoint"),
        (lambda state: state | {"model": {"weight": torch.ones(1)}}, "does not fit this run"),
        (lambda state: state | {"optimizer": 7}, "does not fit this run"),
        (lambda state: state | {"generator": torch.zeros(3)}, "does not fit this run"),
        (lambda state: state | {"history": "none"}, "does not fit this run"),
        (lambda state: state | {"steps_done": -4}, "does not fit this run"),
        (lambda state: state | {"epochs_done": 99}, "does not fit this run"),
    ],
)
def test_an_intact_checkpoint_of_another_run_is_refused(
    broken: Path, one_line: Callable[[], str], change: Callable[[dict[str, Any]], Any], expected: str
) -> None:
    path = broken / "checkpoint.pt"
    save_tensors(path, change(load_tensors(path)))
    one_line_before(broken, one_line, expected)


def test_a_model_in_place_of_a_checkpoint_is_refused(broken: Path, whole: Path, one_line: Callable[[], str]) -> None:
    shutil.copy(whole / "model.pt", broken / "checkpoint.pt")
    one_line_before(broken, one_line, "is not a checkpoint")


# ---------------------------------------------------------------------------------------------------- settings


@pytest.mark.parametrize("content", [b"\xff\xfe\x00", b'{"lr": 0.1', b"[]", b"[" * 100_000, b'{"lr": "high"}', b"{}}"])
def test_a_broken_config_is_named(broken: Path, one_line: Callable[[], str], content: bytes) -> None:
    (broken / "config.json").write_bytes(content)
    one_line_before(broken, one_line, "config.json")


@pytest.mark.parametrize("content", [b"\xff\xfe\x00\x01", b"lr = ", b"a = " + b"[" * 5000, b"\x7fELF"])
@pytest.mark.parametrize("suffix", [".toml", ".json"])
def test_broken_settings_are_named(tmp_path: Path, one_line: Callable[[], str], content: bytes, suffix: str) -> None:
    path = tmp_path / f"settings{suffix}"
    path.write_bytes(content)
    assert main(["--config", str(path)]) == 2
    assert f"cannot read settings from {path}" in one_line()


def test_a_directory_that_is_no_text_is_named(tmp_path: Path, one_line: Callable[[], str]) -> None:
    (tmp_path / "settings.toml").write_text("out = 5")
    assert main(["--resume", "--config", str(tmp_path / "settings.toml")]) == 2
    assert "out must be str, got 5" in one_line()


# ------------------------------------------------------------------------------------- full and read-only disks


@contextmanager
def _failing(kind: str, out: Path, number: int) -> Iterator[list[str]]:
    """Let every write into the directory fail from this one on; yields the names of the files that failed."""
    seen, failed = [0], []
    real_sync, real_open = os.fsync, builtins.open

    def fail(name: str, code: int) -> None:
        seen[0] += 1
        if seen[0] >= number:
            failed.append(name)
            raise OSError(code, os.strerror(code), name)

    def sync(descriptor: int) -> None:
        fail("", errno.ENOSPC)
        real_sync(descriptor)

    def opened(file: Any, mode: str = "r", *rest: Any, **options: Any) -> Any:
        if str(file).startswith(str(out)) and mode[0] in "wa" and not str(file).endswith(".lock"):
            fail(str(file), errno.EROFS)
        return real_open(file, mode, *rest, **options)

    with pytest.MonkeyPatch.context() as patch:
        if kind == "full":
            patch.setattr(files.os, "fsync", sync)
            patch.setattr(files, "_flush_directory", lambda directory: None)
        else:
            patch.setattr(builtins, "open", opened)
        yield failed


@pytest.mark.parametrize(
    ("kind", "text"), [("full", "No space left on device"), ("read-only", "Read-only file system")]
)
def test_any_failing_write_is_a_one_line_error_and_loses_nothing(
    tmp_path: Path, one_line: Callable[[], str], kind: str, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)  # drawing curves takes longer than training
    undisturbed = tmp_path / "undisturbed"
    assert run(undisturbed, *TINY) == 0
    number, exit_code = 0, 2
    while exit_code == 2:
        number += 1
        out = tmp_path / f"{number}"
        with _failing(kind, out, number) as failed:
            exit_code = run(out, *TINY)
        if failed:
            assert exit_code == 2
            error = one_line()
            assert text in error
            assert str(out) in error
            assert not list(out.glob("*.new"))
            resumes = (out / "checkpoint.pt").exists()
            assert run(out, *TINY, *(["--resume"] if resumes else [])) == 0
        assert metrics(out) == metrics(undisturbed)
    # ambiguity, settings, two checkpoints, model, results and summary; appended metrics are not flushed
    assert number - 1 == {"full": 7, "read-only": 9}[kind]


@contextmanager
def _limited(kind: int, soft: int) -> Iterator[None]:
    before = resource.getrlimit(kind)
    resource.setrlimit(kind, (soft, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(kind, before)


def test_a_file_size_limit_is_a_one_line_error_and_loses_nothing(
    broken: Path, whole: Path, one_line: Callable[[], str]
) -> None:
    checkpoint = (broken / "checkpoint.pt").read_bytes()
    with _limited(resource.RLIMIT_FSIZE, len(checkpoint) // 2):
        assert run(broken, "--resume") == 2
    assert f"File too large: '{broken / 'checkpoint.pt'}'" in one_line()
    assert (broken / "checkpoint.pt").read_bytes() == checkpoint
    assert run(broken, "--resume") == 0
    assert metrics(broken) == metrics(whole)


def test_running_out_of_memory_is_a_one_line_error(
    tmp_path: Path, one_line: Callable[[], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    candidates = np.ones((12, 2), dtype=bool)
    candidates[::2, 0] = candidates[1::4, 1] = False
    np.savez(tmp_path / "wide.npz", features=np.eye(12, 20_000, dtype=np.float32), candidates=candidates)
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    arguments = ["--dataset", f"{tmp_path}/wide.npz", "--model", "linear", "--out", f"{tmp_path}/run"]
    monkeypatch.setattr(sys, "argv", ["plsp_train", *arguments])  # two class covariances of 1.6 GB each
    with _limited(resource.RLIMIT_AS, used + 2**29), pytest.raises(SystemExit) as ended:
        run_command("plsp_train", "plsp_train.cli")
    assert ended.value.code == 1
    assert "out of memory" in one_line()


# -------------------------------------------------------------------------------------------- stops and restarts


def test_resuming_before_the_first_checkpoint_says_what_to_do(tmp_path: Path, one_line: Callable[[], str]) -> None:
    for names in ([], ["ambiguity.json"], ["ambiguity.json", "config.json"]):
        for name in names:
            (tmp_path / name).write_text(json.dumps({}))
        assert run(tmp_path, "--resume") == 2
        assert "has no checkpoint yet: run the same command again without --resume" in one_line()


def test_an_interrupt_while_importing_is_quiet(tmp_path: Path) -> None:
    """Extension modules turn a KeyboardInterrupt inside their imports into other errors."""
    (tmp_path / "interrupted.py").write_text(
        "import os, signal, time\n"
        "try:\n"
        "    os.kill(os.getpid(), signal.SIGINT)\n"
        "    time.sleep(60)\n"
        "except KeyboardInterrupt:\n"
        "    raise ImportError('numpy.core.multiarray failed to import')\n"
    )
    command = (
        "import signal; signal.signal(signal.SIGINT, signal.default_int_handler);"  # shells ignore it in the background
        "from plsp_train.command import run_command; run_command('plsp_train', 'interrupted')"
    )
    environment = {**os.environ, "PYTHONPATH": f"{Path.cwd()}:{tmp_path}"}
    ended = subprocess.run([sys.executable, "-c", command], env=environment, capture_output=True, check=False)
    assert (ended.returncode, ended.stdout, ended.stderr) == (-2, b"", b"")


@pytest.mark.parametrize(
    ("output", "code", "said"),
    [
        ("/dev/full", 2, "plsp_train: error: [Errno 28] No space left on device: 'standard output'\n"),
        (None, 0, ""),
    ],
    ids=["full", "closed"],
)
def test_closed_or_full_standard_output(tmp_path: Path, output: str | None, code: int, said: str) -> None:
    redirection = f"> {output}" if output else ">&-"
    command = f"exec {sys.executable} -m plsp_train {' '.join(TINY)} --out {tmp_path} {redirection}"
    ended = subprocess.run(command, shell=True, stderr=subprocess.PIPE, text=True, check=False)
    assert (ended.returncode, ended.stderr) == (code, said)


@pytest.mark.parametrize("module", ["cli", *(f"{name}.cli" for name in COMMANDS)])
def test_unknown_options_are_one_line(module: str, one_line: Callable[[], str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        importlib.import_module(f"plsp_train.{module}").main(["--nonsense"])
    assert stopped.value.code == 2
    assert one_line().startswith(f"plsp_train.{module}: error: ".replace(".cli", ""))


def test_help_is_printed_in_any_encoding() -> None:
    command = [sys.executable, "-m", "plsp_train", "--help"]
    environment = {**os.environ, "PYTHONIOENCODING": "ascii"}
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stderr) == (0, "")
    assert "\\u03b2, scale of the probit" in ended.stdout


def test_a_sweep_that_is_started_twice_says_so(tmp_path: Path, one_line: Callable[[], str]) -> None:
    from plsp_train.sweep.cli import main as sweep_main

    with locked(tmp_path):
        assert sweep_main(["--seed", "0", "1", "--out", str(tmp_path)]) == 2
    assert f"another process is using {tmp_path}" in one_line()
    assert [path.name for path in tmp_path.iterdir()] == [".lock"]


def test_unfinished_files_of_a_killed_run_are_removed(broken: Path, whole: Path) -> None:
    for name in ("checkpoint.pt.new", "model.pt.new", "summary.json.new"):
        (broken / name).write_bytes(b"half")
    assert run(broken, "--resume") == 0
    assert metrics(broken) == metrics(whole)
    assert {path.name for path in broken.iterdir()} == {path.name for path in whole.iterdir()}


def test_unfinished_files_do_not_accumulate_in_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PLSP_CACHE", str(tmp_path / "cache"))
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache" / "images-0.npz.new").write_bytes(b"half")
    cache.cached_images(tmp_path, [], 0, lambda: Decoded(np.zeros((0, 1, 2, 2), np.uint8)))
    assert not list((tmp_path / "cache").glob("*.new"))
