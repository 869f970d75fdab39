"""Comparable times: all subjects are timed interleaved in one process."""

import statistics
import time
from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch

TURNS = 5
MOST_CALLS = 60  # per turn
SLOW_SECONDS = 3.0  # slower calls are timed once
_FLUSH_BYTES = 256 * 2**20  # exceeds the L2 cache of any GPU


class Timing(NamedTuple):
    """Seconds per call: median and quartiles."""

    median: float
    low: float
    high: float
    calls: int


class Clock:
    """Times one call: wall time on a CPU, events on a GPU after flushing its caches."""

    def __init__(self, device: torch.device) -> None:
        self._gpu = device.type == "cuda"
        if self._gpu:
            self._flush = torch.empty(_FLUSH_BYTES, dtype=torch.int8, device=device)

    def __call__(self, call: Callable[[], object]) -> float:
        if not self._gpu:
            start = time.perf_counter()
            call()
            return time.perf_counter() - start
        self._flush.zero_()
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        call()
        end.record()
        end.synchronize()
        return begin.elapsed_time(end) / 1e3


def interleaved(subjects: Mapping[str, Callable[[], object]], clock: Clock, seconds: float) -> dict[str, Timing]:
    """Time about `seconds` of calls of each subject; all must be warmed up.

    Subjects take turns of several calls, the first of which is not counted: a subject that allocates gigabytes must not
    charge the next one for cold caches and page faults. A slow subject is timed once.
    """
    times = {name: [clock(subject)] for name, subject in subjects.items()}
    for _ in range(TURNS):
        for name, subject in subjects.items():
            first = times[name][0]
            if first < SLOW_SECONDS:
                clock(subject)
                calls = max(1, min(MOST_CALLS, int(seconds / TURNS / first)))
                times[name] += [clock(subject) for _ in range(calls)]
    return {name: _summary(values) for name, values in times.items()}


def _summary(values: list[float]) -> Timing:
    low, median, high = statistics.quantiles(values, n=4) if len(values) > 1 else values * 3
    return Timing(median, low, high, len(values))
