"""Kill runs with SIGKILL, resume them, and compare what they leave with runs that nothing disturbed.

    python tests/train/soak.py --kills 300 --torchrun-kills 10 --minutes 60

Runs are killed at random moments and inside every kind of file operation: with half a file written, and before and
after it is flushed and moved. A killed run is continued with --resume, or with the same command if it has no checkpoint
yet. At its end, its metrics, weights and results must equal those of an undisturbed run bit for bit, and no temporary
file may be left. Runs are forked from a process that has trained before, so that a kill costs no imports.
"""

import argparse
import builtins
import contextlib
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from plsp_train import files
from plsp_train.checkpoint import has_checkpoint, load_tensors
from plsp_train.cli import main as train
from plsp_train.methods import METHODS
from small_runs import SMALL, metrics

MOST_KILLS_PER_RUN = 12
FILE_OPERATIONS = 25  # a whole run has about 35: files are written, flushed and moved; a resumed run has fewer
TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "plsp_train")


class Disturbed(Exception):
    """A run did not survive its kills."""


# ------------------------------------------------------------------------------------------- processes to kill


def forked(arguments: Sequence[str], log: Path, before: Callable[[], None] = lambda: None) -> int:
    """Start a run in a process of its own; returns its number."""
    pid = os.fork()
    if pid:
        return pid
    exit_code = 70
    try:
        with open(log, "ab") as file:
            os.dup2(file.fileno(), 1)
            os.dup2(file.fileno(), 2)
        before()
        exit_code = train(arguments)
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(exit_code)


def ended(pid: int, seconds: float) -> int | None:
    """The exit code of a process that ends in time, negative for a signal; None if it is still running."""
    deadline = time.monotonic() + seconds
    while True:
        found, status = os.waitpid(pid, os.WNOHANG)
        if found:
            return os.waitstatus_to_exitcode(status)
        if time.monotonic() >= deadline:
            return None
        time.sleep(0.002)


def kill_in_file_operation(number: int, generator: random.Random) -> None:
    """Let this process kill itself inside its file operation of this number, counted from 1."""
    count, after = [0], generator.random() < 0.5
    real_open, real_sync, real_replace = builtins.open, os.fsync, os.replace

    def due() -> bool:
        count[0] += 1
        return count[0] == number

    def die() -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    def around(operation: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            dies = due()
            if dies and not after:
                die()
            operation(*arguments)
            if dies:
                die()

        return call

    class Written:
        """A file of which only the first half is written."""

        def __init__(self, file: Any) -> None:
            self.file = file

        def __enter__(self) -> "Written":
            return self

        def __exit__(self, *error: object) -> None:
            self.file.close()

        def write(self, content: bytes) -> None:
            if due():
                self.file.write(content[: len(content) // 2])
                self.file.flush()
                die()
            self.file.write(content)

        def __getattr__(self, name: str) -> Any:
            return getattr(self.file, name)

    files.open = lambda path, mode: Written(real_open(path, mode)) if mode == "wb" else real_open(path, mode)  # type: ignore[attr-defined]
    files.os.fsync, files.os.replace = around(real_sync), around(real_replace)  # type: ignore[assignment]


# ----------------------------------------------------------------------------------------------------- outcomes


def result_of(out: Path) -> dict[str, Any]:
    """All that a finished run leaves and that does not depend on the clock."""
    with np.load(out / "results.npz", allow_pickle=False) as results:
        arrays = {f"results/{name}": results[name].tobytes() for name in results.files}
    state = load_tensors(out / "model.pt")["state_dict"]
    weights = {f"model/{name}": tensor.numpy().tobytes() for name, tensor in state.items()}
    names = sorted(path.name for path in out.iterdir())
    return {"metrics": metrics(out), "files": names, **arrays, **weights}


def compare(out: Path, expected: dict[str, Any]) -> None:
    found = result_of(out)
    different = sorted(name for name in expected.keys() | found.keys() if found.get(name) != expected.get(name))
    if different:
        raise Disturbed(f"{out} differs from the undisturbed run in {', '.join(different)}")


def resumed(arguments: Sequence[str], out: Path) -> list[str]:
    return [*arguments, "--out", str(out), *(["--resume"] if has_checkpoint(out) else [])]


# --------------------------------------------------------------------------------------------------------- soak


class Soak:
    def __init__(self, folder: Path, seed: int, seconds: float) -> None:
        self.folder = folder
        self.generator = random.Random(seed)
        self.deadline = time.monotonic() + seconds
        self.kills: Counter[str] = Counter()
        self.runs = 0
        self._undisturbed: dict[str, tuple[dict[str, Any], float]] = {}

    @property
    def is_over(self) -> bool:
        return time.monotonic() > self.deadline

    def undisturbed(self, method: str) -> tuple[dict[str, Any], float]:
        """The result of a run and its duration."""
        if method not in self._undisturbed:
            out, start = self.folder / f"undisturbed-{method}", time.monotonic()
            log = self.folder / f"undisturbed-{method}.txt"
            if ended(forked([*settings(method), "--out", str(out)], log), 600) != 0:
                raise Disturbed(f"the undisturbed run failed: {log.read_text()}")
            self._undisturbed[method] = result_of(out), time.monotonic() - start
        return self._undisturbed[method]

    def disturb(self, method: str, most_kills: int) -> None:
        """Kill one run several times, let it end, and compare."""
        expected, duration = self.undisturbed(method)
        out, log = self.folder / f"run{self.runs}", self.folder / f"run{self.runs}.txt"
        left = min(most_kills, self.generator.randint(1, MOST_KILLS_PER_RUN))
        while True:
            exit_code = self._attempt(resumed(settings(method), out), log, duration, may_kill=left > 0)
            if exit_code == 0:
                break
            if exit_code != -signal.SIGKILL:
                raise Disturbed(f"{method}: exit code {exit_code}: {log.read_text()}")
            left -= 1
        compare(out, expected)
        shutil.rmtree(out)
        self.runs += 1

    def _attempt(self, arguments: Sequence[str], log: Path, duration: float, may_kill: bool) -> int:
        if not may_kill:
            pid, kind, seconds = forked(arguments, log), "", 600.0
        elif self.generator.random() < 0.5:
            number, own = self.generator.randint(1, FILE_OPERATIONS), random.Random(self.generator.random())
            pid, kind, seconds = forked(arguments, log, lambda: kill_in_file_operation(number, own)), "writing", 600.0
        else:
            pid, kind, seconds = forked(arguments, log), "moment", self.generator.uniform(0, 0.8 * duration)
        exit_code = ended(pid, seconds)
        if exit_code is None:
            os.kill(pid, signal.SIGKILL)
            _, status = os.waitpid(pid, 0)
            exit_code = os.waitstatus_to_exitcode(status)
        if exit_code == -signal.SIGKILL:
            if not kind:
                raise Disturbed(f"a run did not end within {seconds:.0f} s: {log.read_text()}")
            self.kills[kind] += 1
        return exit_code

    def disturb_torchrun(self, kills: int) -> None:
        """Kill all processes of runs on two ranks at once."""
        arguments = settings("plsp")
        undisturbed, start = self.folder / "undisturbed-torchrun", time.monotonic()
        self._torchrun(arguments, undisturbed, 600)
        expected, duration = result_of(undisturbed), time.monotonic() - start
        while kills > 0 and not self.is_over:
            out = self.folder / f"torchrun{self.runs}"
            left = min(kills, self.generator.randint(1, 3))
            while left and self._torchrun(arguments, out, self.generator.uniform(0.2, 1) * duration) != 0:
                left, kills = left - 1, kills - 1
                self.kills["torchrun"] += 1
            self._torchrun(arguments, out, 600)
            compare(out, expected)
            shutil.rmtree(out)
            self.runs += 1

    def _torchrun(self, arguments: Sequence[str], out: Path, seconds: float) -> int:
        with open(self.folder / "torchrun.txt", "ab") as log:
            command = [*TORCHRUN, *resumed(arguments, out)]
            process = subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True)
            try:
                return process.wait(seconds)
            except subprocess.TimeoutExpired:
                children = descendants(process.pid)
                for pid in [process.pid, *children]:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)
                process.wait()
                return -signal.SIGKILL


def descendants(pid: int) -> list[int]:
    """Processes that this one has started, directly or not: torchrun gives every rank a session of its own."""
    try:
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    except FileNotFoundError:
        return []
    return [found for child in map(int, children) for found in (child, *descendants(child))]


def settings(method: str) -> list[str]:
    return [*SMALL, "--method", method]


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=300, help="of single processes (default: %(default)s)")
    parser.add_argument("--torchrun-kills", type=int, default=10, help="of runs on two ranks (default: %(default)s)")
    parser.add_argument("--minutes", type=float, default=60, help="start no run after this time (default: %(default)s)")
    parser.add_argument("--methods", default=",".join(METHODS), help="separated by commas (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of the moments to kill at (default: %(default)s)")
    options = parser.parse_args(argv)
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    torch.set_num_threads(1)
    methods, start = options.methods.split(","), time.monotonic()
    with tempfile.TemporaryDirectory(prefix="plsp-soak-") as folder:
        soak = Soak(Path(folder), options.seed, 60 * options.minutes)
        with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere):
            train([*settings(methods[0]), "--out", f"{folder}/first"])
        try:
            while soak.kills.total() < options.kills and not soak.is_over:
                soak.disturb(methods[soak.runs % len(methods)], options.kills - soak.kills.total())
            if options.torchrun_kills:
                soak.disturb_torchrun(options.torchrun_kills)
        except Disturbed as error:
            print(f"FAILED after {soak.kills.total()} kills: {error}", file=sys.stderr)
            return 1
    kinds = soak.kills
    print(
        f"{kinds.total()} kills ({kinds['moment']} at random moments, {kinds['writing']} while writing files, "
        f"{kinds['torchrun']} under torchrun) of {soak.runs} runs of {len(methods)} methods in "
        f"{time.monotonic() - start:.0f} s: every run ended like an undisturbed one"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
