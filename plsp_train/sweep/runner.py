"""Parallel runs, each in its own process that logs into its directory."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from plsp_train.runs import read_json
from plsp_train.sweep.grid import GridRun

LOG = "log.txt"
_SCORE = "micro_f1_last10"
_POLL_SECONDS = 0.1
_REFRESH_SECONDS = 0.5


class Failure(NamedTuple):
    run: GridRun
    exit_code: int

    def __str__(self) -> str:
        lines = (self.run.directory / LOG).read_text(encoding="utf-8", errors="replace").split("\n")
        last = next((line for line in reversed(lines) if line.strip()), "no output")
        return f"{self.run.name}: exit code {self.exit_code}: {last}"


class SweepOutcome(NamedTuple):
    num_done: int
    failures: list[Failure]
    stop_signal: int | None


class Progress:
    """One progress bar on a terminal, a line per finished run elsewhere."""

    def __init__(self, num_runs: int) -> None:
        self._bar: Any = None
        self._num_runs, self._num_over, self._num_failed, self._next = num_runs, 0, 0, 0.0
        if sys.stdout.isatty():
            from tqdm import tqdm

            self._bar = tqdm(total=num_runs, unit="run", dynamic_ncols=True)

    def refresh(self, running: Sequence[GridRun]) -> None:
        if self._bar is None or time.monotonic() < self._next:
            return
        self._next = time.monotonic() + _REFRESH_SECONDS
        failed = [f"{self._num_failed} failed"] if self._num_failed else []
        self._bar.set_postfix_str(", ".join(failed + [f"{run.name} epoch {_epochs_done(run)}" for run in running]))

    def over(self, run: GridRun, result: str, failed: bool) -> None:
        self._num_over += 1
        self._num_failed += failed
        if self._bar is None:
            print(f"[{self._num_over}/{self._num_runs}] {run.name}: {result}", flush=True)
        else:
            self._bar.update()

    def close(self) -> None:
        if self._bar is not None:
            self._bar.close()


def execute(runs: Sequence[GridRun], jobs: int) -> SweepOutcome:
    """Train all runs, `jobs` at a time. A failure does not stop the others; on a signal the running ones save."""
    threads = max(1, _num_cores() // max(1, min(jobs, len(runs))))
    environment = {"OMP_NUM_THREADS": str(threads), **os.environ}
    waiting, running = deque(runs), dict[GridRun, "subprocess.Popen[bytes]"]()
    num_done, failures, progress = 0, list[Failure](), Progress(len(runs))
    with _collect_signals() as signals:
        try:
            num_told = 0
            while running or (waiting and not signals):
                while waiting and len(running) < jobs and not signals:
                    run = waiting.popleft()
                    running[run] = _start(run, environment)
                while num_told < len(signals):  # a second signal interrupts the current step
                    num_told += 1
                    _terminate(running.values())
                progress.refresh(list(running))
                time.sleep(_POLL_SECONDS)
                for run in [run for run, process in running.items() if process.poll() is not None]:
                    exit_code = running.pop(run).returncode
                    if exit_code == 0:
                        num_done += 1
                        progress.over(run, _result(run), failed=False)
                    elif not signals:
                        failures.append(Failure(run, exit_code))
                        progress.over(run, f"failed with exit code {exit_code}", failed=True)
        finally:
            # No run outlives the sweep, whatever went wrong here.
            _terminate(running.values())
            for process in running.values():
                process.wait()
            progress.close()
    return SweepOutcome(num_done, failures, signals[0] if signals else None)


def _start(run: GridRun, environment: dict[str, str]) -> "subprocess.Popen[bytes]":
    run.directory.mkdir(parents=True, exist_ok=True)
    with open(run.directory / LOG, "ab") as log:
        # In its own session: Ctrl-C on the terminal reaches the sweep only, which signals each run once.
        return subprocess.Popen(
            [sys.executable, "-m", "plsp_train", *run.arguments()],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            env=environment,
            start_new_session=True,
        )


def _terminate(processes: Any) -> None:
    for process in processes:
        process.terminate()


@contextlib.contextmanager
def _collect_signals() -> Iterator[list[int]]:
    """Collect the signals that would have ended this process."""
    received: list[int] = []
    names = ("SIGINT", "SIGTERM", "SIGHUP")  # SIGHUP, a closed terminal, does not exist on Windows
    numbers = [getattr(signal, name) for name in names if hasattr(signal, name)]
    before = {number: signal.signal(number, lambda number, frame: received.append(number)) for number in numbers}
    try:
        yield received
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _num_cores() -> int:
    with contextlib.suppress(AttributeError):  # not on all systems
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _epochs_done(run: GridRun) -> int:
    try:
        return (run.directory / "metrics.jsonl").read_bytes().count(b"\n")
    except FileNotFoundError:
        return 0


def _result(run: GridRun) -> str:
    """The scores of a run that can be tested, and how long it took."""
    folds = run.directory / "folds.json"
    if folds.exists():
        score = read_json(folds)["scores"].get(_SCORE)
        return f"micro-F1 {score['mean']:.4f} ± {score['std']:.4f} over the folds" if score else "all folds trained"
    summary = read_json(run.directory / "summary.json")
    tested = f"micro-F1 {summary[_SCORE]:.4f} over the last ten epochs, " if _SCORE in summary else ""
    return f"{tested}{summary['seconds']:.0f} s"
