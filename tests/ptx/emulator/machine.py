"""Threads, registers and memories of one launch."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

import numpy as np

from emulator.memory import UNSIGNED, GlobalMemory, SharedMemory, Warps
from emulator.program import Program, PtxError

WARP = 32
WIDTHS = {"b8": 1, "b16": 2, "b32": 4, "b64": 8, "f16": 2, "f32": 4, "f64": 8}
WIDTHS |= {f"{sign}{8 * width}": width for sign in "su" for width in (1, 2, 4, 8)}

Lanes: TypeAlias = slice | np.ndarray
"""Threads that execute an instruction: slice(None) for all, otherwise their sorted numbers."""


@dataclass(frozen=True)
class Mode:
    """How to execute what PTX leaves open."""

    pessimistic: bool = False
    """Approximate instructions err by as much as PTX allows; matrix instructions truncate their sums."""
    warps: str = "together"
    """Order between barriers: "together", or one after another, "ascending" or "descending"."""


@dataclass(frozen=True)
class Grid:
    """Programs that run at the same time: `count` of those of a launch, from number `first` on."""

    shape: tuple[int, int, int]
    num_threads: int
    first: int
    count: int


class Machine:
    """State of the threads of some programs. Thread i belongs to program i // num_threads."""

    def __init__(
        self,
        program: Program,
        grid: Grid,
        shared_bytes: int,
        parameters: Mapping[str, int],
        memory: GlobalMemory,
        mode: Mode,
    ) -> None:
        self.parameters, self.global_memory, self.mode = parameters, memory, mode
        self.num_threads = grid.num_threads
        self.count = grid.count * grid.num_threads
        self.threads = np.arange(self.count)
        self.programs = self.threads // grid.num_threads
        self.shared_memory = SharedMemory(grid.count, shared_bytes)
        self.registers = {register.name: _undefined(register.type, self.count) for register in program.registers()}
        self.special = _special_registers(grid, self.threads, self.programs)
        self.copies = AsyncGroups(self.count)
        self.products = AsyncGroups(self.count)

    def numbers(self, lanes: Lanes) -> np.ndarray:
        return self.threads if isinstance(lanes, slice) else lanes

    def warps(self, lanes: Lanes) -> Warps:
        return Warps(self.programs[lanes], self.threads[lanes] % self.num_threads // WARP)

    def values(self, array: np.ndarray, lanes: Lanes) -> np.ndarray:
        """An operand, which may be one constant for all, as one element per lane."""
        return np.broadcast_to(array, (len(self.numbers(lanes)),))


def _undefined(type_: str, count: int) -> np.ndarray:
    """A register before it is written: poison, which shows up as NaN in a result."""
    if type_ == "pred":
        return np.zeros(count, np.bool_)
    if type_ not in WIDTHS:
        raise PtxError(f"registers of type .{type_} are not supported")
    return ~np.zeros(count, UNSIGNED[WIDTHS[type_]])


def _special_registers(grid: Grid, threads: np.ndarray, programs: np.ndarray) -> Mapping[str, np.ndarray]:
    number, (x, y, z) = grid.first + programs, grid.shape
    thread = threads % grid.num_threads
    return {
        name: np.broadcast_to(np.asarray(value, np.uint32), threads.shape)
        for name, value in {
            "%tid.x": thread,
            "%tid.y": 0,
            "%tid.z": 0,
            "%ntid.x": grid.num_threads,
            "%ntid.y": 1,
            "%ntid.z": 1,
            "%laneid": thread % WARP,
            "%warpid": thread // WARP,
            "%ctaid.x": number % x,
            "%ctaid.y": number // x % y,
            "%ctaid.z": number // (x * y),
            "%nctaid.x": x,
            "%nctaid.y": y,
            "%nctaid.z": z,
        }.items()
    }


class Operation(NamedTuple):
    """An asynchronous operation of some threads that is not complete yet."""

    threads: np.ndarray
    positions: np.ndarray
    """Of these threads, among those that issued it."""
    groups: np.ndarray
    """Number of the group it belongs to, for each thread."""
    complete: Callable[[np.ndarray], None]
    """Performs it for the threads at these positions."""


class AsyncGroups:
    """Operations that take effect when their thread waits for them, as late as PTX allows."""

    def __init__(self, num_threads: int) -> None:
        self.committed = np.zeros(num_threads, np.int64)
        self.pending: list[Operation] = []

    def issue(self, threads: np.ndarray, complete: Callable[[np.ndarray], None]) -> None:
        """Add an operation to the open group."""
        self.pending.append(Operation(threads, np.arange(len(threads)), self.committed[threads], complete))

    def commit(self, threads: np.ndarray) -> None:
        """Close the open group."""
        self.committed[threads] += 1

    def wait(self, threads: np.ndarray, keep: int) -> None:
        """Complete all closed groups but the latest `keep`."""
        waiting = np.zeros(len(self.committed), np.bool_)
        waiting[threads] = True
        remaining = []
        for operation in self.pending:
            owners = operation.threads
            ready = waiting[owners] & (operation.groups < self.committed[owners] - keep)
            if ready.any():
                operation.complete(operation.positions[ready])
            if not ready.all():
                threads, positions, groups = (array[~ready] for array in operation[:3])
                remaining.append(Operation(threads, positions, groups, operation.complete))
        self.pending = remaining
