"""Global and shared memory. What a GPU would silently get wrong raises here."""

import ctypes
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from emulator.program import PtxError

UNSIGNED: dict[int, type[np.unsignedinteger[Any]]] = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}
POISON = 0xFF  # not-a-number in every floating-point type
MARKS = 256  # more than the warps of a program: an access to shared memory is marked epoch · MARKS + warp


class Segment(NamedTuple):
    """Memory that a kernel may touch: the storage of one argument."""

    name: str
    start: int
    size: int


class Warps(NamedTuple):
    """Program and warp of each thread of an access."""

    programs: np.ndarray
    numbers: np.ndarray


def _check_aligned(addresses: np.ndarray, size: int) -> None:
    wrong = addresses % np.uint64(size) != 0
    if wrong.any():
        raise PtxError(f"an access of {size} bytes at {int(addresses[wrong][0]):#x}, which is no multiple of {size}")


def _units(memory: np.ndarray, itemsize: int, count: int) -> np.ndarray:
    """The same bytes as rows of `count` elements."""
    usable = len(memory) - len(memory) % (itemsize * count)
    return memory[:usable].view(UNSIGNED[itemsize]).reshape(-1, count)


class GlobalMemory:
    """The tensors of a launch, at their addresses in this process."""

    def __init__(self, segments: Sequence[Segment]) -> None:
        self.segments = sorted((s for s in segments if s.size), key=lambda segment: segment.start)
        self.starts = np.array([segment.start for segment in self.segments], np.uint64)
        self.ends = np.array([segment.start + segment.size for segment in self.segments], np.uint64)
        # One array from the first tensor to the last. Only elements that were checked to lie in a tensor are touched.
        self.origin = np.uint64(self.segments[0].start & ~15 if self.segments else 0)
        span = int(self.ends.max() - self.origin) + 15 if self.segments else 0
        self.bytes = np.ctypeslib.as_array((ctypes.c_uint8 * (span & ~15)).from_address(int(self.origin)))

    def load(self, addresses: np.ndarray, itemsize: int, count: int) -> np.ndarray:
        """`count` unsigned integers for each address: (n, count)."""
        self._check(addresses, itemsize * count)
        return _units(self.bytes, itemsize, count)[(addresses - self.origin) // np.uint64(itemsize * count)]

    def store(self, addresses: np.ndarray, values: np.ndarray) -> None:
        """Write values (n, count)."""
        count = values.shape[1]
        self._check(addresses, values.itemsize * count)
        units = _units(self.bytes, values.itemsize, count)
        units[(addresses - self.origin) // np.uint64(values.itemsize * count)] = values

    def _check(self, addresses: np.ndarray, size: int) -> None:
        _check_aligned(addresses, size)
        owner = np.searchsorted(self.starts, addresses, "right") - 1
        outside = owner < 0
        outside |= addresses + np.uint64(size) > self.ends[owner] if self.segments else True
        if outside.any():
            raise PtxError(self._describe(int(addresses[outside][0]), size))

    def _describe(self, address: int, size: int) -> str:
        if not self.segments:
            return f"an access of {size} bytes at {address:#x}: the launch has no tensors"

        def distance(segment: Segment) -> int:
            return max(segment.start - address, address + size - segment.start - segment.size)

        nearest = min(self.segments, key=distance)
        side = "before the storage" if address < nearest.start else "past the end"
        return f"an access of {size} bytes reaches {distance(nearest)} bytes {side} of {nearest.name}"


class SharedMemory:
    """Shared memory of all programs of a launch, with the last accesses of each byte.

    Warps may exchange data only across a barrier. If between two barriers one warp writes a byte and another reads it,
    the result depends on which comes first: a race.
    """

    def __init__(self, num_programs: int, size: int) -> None:
        self.size = size
        self.stride = -(-size // 128) * 128
        self.bytes = np.full(num_programs * self.stride, POISON, np.uint8)
        self.epochs = np.ones(num_programs, np.int64)  # one more than the barriers passed
        self.written = np.zeros(len(self.bytes), np.int32)  # mark of the last write
        self.read = np.zeros(len(self.bytes), np.int32)

    def load(self, offsets: np.ndarray, warps: Warps, itemsize: int, count: int) -> np.ndarray:
        size = itemsize * count
        units, marks = self._locate(offsets, warps, size)
        self._check_race(self.written.reshape(-1, size)[units], marks, "reads what another wrote")
        read = self.read.reshape(-1, size)
        # A byte that several warps read in one epoch carries the mark of none of them.
        several = _conflict(read[units], marks)
        read[units] = np.where(several, marks | np.int32(MARKS - 1), marks)
        return _units(self.bytes, itemsize, count)[units]

    def store(self, offsets: np.ndarray, warps: Warps, values: np.ndarray) -> None:
        size = values.itemsize * values.shape[1]
        units, marks = self._locate(offsets, warps, size)
        self._check_race(self.read.reshape(-1, size)[units], marks, "overwrites what another reads")
        _units(self.bytes, values.itemsize, values.shape[1])[units] = values
        self.written.reshape(-1, size)[units] = marks

    def _locate(self, offsets: np.ndarray, warps: Warps, size: int) -> tuple[np.ndarray, np.ndarray]:
        """Place of each access in units of its size, and its mark: (n,), (n, 1)."""
        _check_aligned(offsets, size)
        outside = offsets + np.uint64(size) > self.size
        if outside.any():
            first = int(offsets[outside][0])
            raise PtxError(f"an access of {size} bytes at {first} of {self.size} bytes of shared memory")
        units = (warps.programs * self.stride + offsets.astype(np.int64)) // size
        return units, (self.epochs[warps.programs] * MARKS + warps.numbers).astype(np.int32)[:, None]

    def _check_race(self, last: np.ndarray, marks: np.ndarray, what: str) -> None:
        if _conflict(last, marks).any():
            raise PtxError(f"a race in shared memory: without a barrier between them, a warp {what}")


def _conflict(last: np.ndarray, marks: np.ndarray) -> np.ndarray:
    """Whether the last access was by another warp in the same epoch."""
    return (last // MARKS == marks // MARKS) & (last != marks)
