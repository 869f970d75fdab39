"""Images that are read from a memory-mapped file when they are needed: training sets larger than memory."""

import multiprocessing
import os
import sys
import weakref
from collections.abc import Iterator, Sequence
from concurrent.futures import BrokenExecutor, Future, ProcessPoolExecutor
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from plsp_train import mapped_file
from plsp_train.mapped_file import MappedFile

_MOST_WORKERS = 8
_SAMPLE = 65536  # images from which the statistics of a set are estimated


class MappedImages:
    """uint8 images (n, C, H, W) in a .npy file of shape n×h×w or n×h×w×c. Indexing reads some of them.

    `prefetch` asks worker processes for images that will be indexed soon. Nothing depends on whether it was called.
    """

    def __init__(self, path: Path, workers: int | None = None, rows: Tensor | None = None) -> None:
        self._file = MappedFile(path)
        self._path, self._workers = path, workers
        self._readers = _readers(path, workers)
        self._rows = torch.arange(self._file.shape[0]) if rows is None else rows

    dtype = torch.uint8
    device = torch.device("cpu")

    @property
    def shape(self) -> tuple[int, ...]:
        height, width, *channels = self._file.shape[1:]
        return len(self), *(channels or [1]), height, width

    def __len__(self) -> int:
        return len(self._rows)

    def dim(self) -> int:
        return 4

    def take(self, rows: Tensor) -> "MappedImages":
        """These images, still in the file."""
        return MappedImages(self._path, self._workers, self._rows[rows])

    def sample(self, most: int = _SAMPLE) -> "MappedImages":
        """At most so many images, evenly spaced."""
        if len(self) <= most:
            return self
        return self.take(torch.arange(most) * len(self) // most)

    def split(self, size: int) -> Iterator[Tensor]:
        """All images in batches, the next one being read while one is used."""
        yield from self.batches([slice(start, start + size) for start in range(0, len(self), size)])

    def batches(self, parts: Sequence[slice]) -> Iterator[Tensor]:
        """The images of each of these parts, the next one being read while one is used."""
        for number, part in enumerate(parts):
            for following in parts[number : number + 2]:
                self.prefetch(following)
            yield self[part]

    def __getitem__(self, index: Tensor | slice) -> Tensor:
        """Images (N, C, H, W) on the CPU."""
        rows = self._file_rows(index)
        images = self._readers.take(rows)
        if images is None:
            images = np.empty((len(rows), *self._file.shape[1:]), np.uint8)
            self._file.read(rows, images)
        found = torch.from_numpy(images)
        return found[:, None] if found.dim() == 3 else found.permute(0, 3, 1, 2).contiguous()

    def _file_rows(self, index: Tensor | slice) -> np.ndarray:
        return self._rows[index if isinstance(index, slice) else index.cpu()].numpy()

    def prefetch(self, index: Tensor | slice) -> None:
        """Let workers read these images, to be indexed soon in the same order."""
        self._readers.request(self._file_rows(index))


Inputs = Tensor | MappedImages
"""Inputs of a data set: in memory, or images in a file."""


def batches_of(inputs: Inputs, parts: Sequence[slice]) -> Iterator[Tensor]:
    """The inputs of each part, read ahead where they come from a file."""
    return (inputs[part] for part in parts) if isinstance(inputs, Tensor) else inputs.batches(parts)


class _Request(NamedTuple):
    memory: SharedMemory
    done: "Future[None]"


class _Readers:
    """Worker processes that read ahead into shared memory. They start when asked and end with this object.

    Once one of them is killed, nothing is read ahead any more.
    """

    def __init__(self, path: Path, workers: int | None) -> None:
        count = workers or min(_MOST_WORKERS, os.cpu_count() or 1)
        # Forking a process in which PyTorch runs threads can deadlock.
        context = multiprocessing.get_context("spawn")
        self._pool = ProcessPoolExecutor(count, context, initializer=mapped_file.start_worker, initargs=(path,))
        self._shape, self._capacity = MappedFile(path).shape[1:], 2 * count + 4
        self._requests: dict[bytes, _Request] = {}
        self._free: list[SharedMemory] = []
        self._is_broken = False
        weakref.finalize(self, _close, self._pool, self._requests, self._free)

    def request(self, rows: np.ndarray) -> None:
        key = rows.tobytes()
        if self._is_broken or key in self._requests or len(rows) == 0:
            return
        if len(self._requests) == self._capacity:  # the oldest was never asked for
            self.take(np.frombuffer(next(iter(self._requests)), rows.dtype))
        memory = self._memory(len(rows) * int(np.prod(self._shape)))
        try:
            self._requests[key] = _Request(memory, self._pool.submit(mapped_file.read_into, memory.name, rows))
        except BrokenExecutor:
            self._free.append(memory)
            self._give_up()

    def take(self, rows: np.ndarray) -> np.ndarray | None:
        """The rows, if they were requested and read."""
        request = self._requests.pop(rows.tobytes(), None)
        if request is None:
            return None
        self._free.append(request.memory)
        try:
            request.done.result()
        except BrokenExecutor:
            self._give_up()
            return None
        images: np.ndarray = np.ndarray((len(rows), *self._shape), np.uint8, buffer=request.memory.buf)
        return images.copy()

    def _give_up(self) -> None:
        if not self._is_broken:
            message = "a process that reads images ahead was killed (is /dev/shm full?): reading without such processes"
            print(f"plsp_train: warning: {message}", file=sys.stderr)
        self._is_broken = True

    def _memory(self, size: int) -> SharedMemory:
        """A free block of at least this size; smaller ones are given back."""
        while self._free:
            memory = self._free.pop()
            if memory.size >= size:
                return memory
            _release(memory)
        return SharedMemory(create=True, size=size)


_READING: "weakref.WeakValueDictionary[Path, _Readers]" = weakref.WeakValueDictionary()
"""The readers of each file, shared by all parts of it."""


def _readers(path: Path, workers: int | None) -> _Readers:
    readers = _READING.get(path)
    if readers is None:
        readers = _READING[path] = _Readers(path, workers)
    return readers


def _close(pool: ProcessPoolExecutor, requests: dict[bytes, _Request], free: list[SharedMemory]) -> None:
    pool.shutdown(wait=True, cancel_futures=True)
    for memory in [*free, *(request.memory for request in requests.values())]:
        _release(memory)


def _release(memory: SharedMemory) -> None:
    memory.close()
    memory.unlink()
