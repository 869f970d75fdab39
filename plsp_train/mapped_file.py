"""Rows of a memory-mapped .npy file, read by this process or by workers into shared memory.

NumPy and the standard library only, so that workers start fast and stay small.
"""

import mmap
import multiprocessing
import os
import signal
import threading
from multiprocessing.connection import wait
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path

import numpy as np


class MappedFile:
    """An array in a .npy file. Reading maps pages of the file and unmaps them again: they leave resident memory."""

    def __init__(self, path: Path) -> None:
        self._array = np.load(path, mmap_mode="r", allow_pickle=False)
        self._map = self._array.base if isinstance(self._array.base, mmap.mmap) else None

    @property
    def shape(self) -> tuple[int, ...]:
        return self._array.shape

    @property
    def dtype(self) -> np.dtype:
        return self._array.dtype

    def read(self, rows: np.ndarray, out: np.ndarray) -> None:
        """Copy rows into `out`."""
        np.take(self._array, rows, axis=0, out=out, mode="clip")  # unlike "raise", without a buffer
        if self._map is not None and hasattr(self._map, "madvise"):
            self._map.madvise(mmap.MADV_DONTNEED)


# ------------------------------------------------------------------------------------------------- in the workers

_file: MappedFile | None = None
_memories: dict[str, SharedMemory] = {}


def start_worker(path: Path) -> None:
    """Open the file. Ctrl-C is left to the parent, whose end, however it comes, ends the worker."""
    global _file
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    parent = multiprocessing.parent_process()
    assert parent is not None
    threading.Thread(target=_exit_after, args=(parent.sentinel,), daemon=True).start()
    _file = MappedFile(path)


def _exit_after(sentinel: int) -> None:
    wait([sentinel])
    os._exit(1)


def read_into(name: str, rows: np.ndarray) -> None:
    """Read rows into the shared memory of this name."""
    assert _file is not None
    if name not in _memories:
        _memories[name] = SharedMemory(name)
    out: np.ndarray = np.ndarray((len(rows), *_file.shape[1:]), _file.dtype, buffer=_memories[name].buf)
    _file.read(rows, out)
