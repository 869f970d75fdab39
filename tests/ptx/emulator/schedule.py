"""Executes a program: which threads run next, where they wait for each other.

Threads that stand at the same instruction execute it together. Among several places the lowest goes first, so that
threads that left a branch wait at its end for those still inside.
"""

import dataclasses
import re
from collections.abc import Mapping
from enum import Enum
from typing import NamedTuple, NoReturn

import numpy as np

from emulator import conversions, floats, integers, matrices, movement, warps  # noqa: F401 (fill the table of forms)
from emulator.forms import Execute, build
from emulator.machine import WARP, Grid, Lanes, Machine, Mode
from emulator.memory import GlobalMemory
from emulator.operands import Read, reader
from emulator.program import Immediate, Instruction, Program, PtxError, Symbol

# Programs of a large grid run in portions of so many threads, one portion after the other.
MOST_THREADS = 1 << 16


class Kind(Enum):
    PLAIN = "executes where it stands"
    WHOLE_WARPS = "waits for all threads of a warp"
    BRANCH = "continues elsewhere"
    BARRIER = "waits for all threads of a program"
    EXIT = "ends the thread"


@dataclasses.dataclass(frozen=True)
class Step:
    """One instruction, ready to execute."""

    instruction: Instruction
    kind: Kind
    guard: Read | None
    execute: Execute | None = None
    target: int = 0
    """Where a branch leads."""


class Launch(NamedTuple):
    """What a kernel is launched with."""

    grid: tuple[int, int, int]
    num_warps: int
    shared_bytes: int
    """Dynamic shared memory."""
    parameters: Mapping[str, int]
    """Bits of each parameter, by its name in the PTX."""


class Code:
    """A program with the code of each instruction."""

    def __init__(self, program: Program) -> None:
        self.program = program
        steps = [_step(instruction, program.labels) for instruction in program.instructions]
        unknown = {i.opcode: i for i, step in zip(program.instructions, steps, strict=True) if step is None}
        if unknown:
            found = "; ".join(map(str, unknown.values()))
            raise PtxError(f"{program.name} has instructions that the emulator does not know: {found}")
        self.steps = [step for step in steps if step is not None]

    def run(self, launch: Launch, memory: GlobalMemory, mode: Mode) -> None:
        num_threads, num_programs = WARP * launch.num_warps, int(np.prod(launch.grid))
        portion = max(1, MOST_THREADS // num_threads)
        shared = self.program.static_shared + launch.shared_bytes
        for first in range(0, num_programs, portion):
            grid = Grid(launch.grid, num_threads, first, min(portion, num_programs - first))
            machine = Machine(self.program, grid, shared, launch.parameters, memory, mode)
            with np.errstate(all="ignore"):
                _Schedule(self, machine).run()


def _step(instruction: Instruction, labels: Mapping[str, int]) -> Step | None:
    guard = reader(instruction.guard, "pred") if instruction.guard is not None else None
    opcode, operands = instruction.opcode, instruction.operands
    if opcode in ("ret", "exit"):
        return Step(instruction, Kind.EXIT, guard)
    if opcode in ("bra", "bra.uni"):
        (label,) = operands
        if not isinstance(label, Symbol) or label.name not in labels:
            raise PtxError(f"{instruction} leads nowhere")
        return Step(instruction, Kind.BRANCH, guard, target=labels[label.name])
    barrier = re.fullmatch(r"(bar|barrier)(\.cta)?\.sync(\.aligned)?", opcode)
    if barrier and operands == (Immediate(0),) and guard is None:
        return Step(instruction, Kind.BARRIER, None)
    built = build(instruction)
    if built is None:
        return None
    execute, whole_warps = built
    return Step(instruction, Kind.WHOLE_WARPS if whole_warps else Kind.PLAIN, guard, execute)


class _Places:
    """Threads by the instruction at which they stand."""

    def __init__(self) -> None:
        self.threads: dict[int, np.ndarray] = {}

    def __bool__(self) -> bool:
        return bool(self.threads)

    def add(self, place: int, threads: np.ndarray) -> None:
        if len(threads):
            self.threads[place] = np.sort(np.concatenate([self.take(place), threads]))

    def take(self, place: int) -> np.ndarray:
        return self.threads.pop(place, np.empty(0, np.int64))


class _Schedule:
    def __init__(self, code: Code, machine: Machine) -> None:
        self.code, self.machine = code, machine

    def run(self) -> None:
        teams = [_Places() for _ in self._teams()]
        for team, threads in zip(teams, self._teams(), strict=True):
            team.add(0, threads)
        while any(teams):
            teams = [self._until_barrier(team) for team in teams]
            self._pass_barrier(teams)

    def _teams(self) -> list[np.ndarray]:
        """Threads that run together until a barrier: all, or the warps of the same number of all programs."""
        machine = self.machine
        if machine.mode.warps == "together":
            return [machine.threads]
        numbers = machine.threads % machine.num_threads // WARP
        teams = [machine.threads[numbers == number] for number in range(machine.num_threads // WARP)]
        return teams if machine.mode.warps == "ascending" else teams[::-1]

    def _pass_barrier(self, teams: list[_Places]) -> None:
        machine = self.machine
        arrived = np.zeros(len(machine.shared_memory.epochs), np.int64)
        for team in teams:
            for threads in team.threads.values():
                arrived += np.bincount(machine.programs[threads], minlength=len(arrived))
        if ((arrived != 0) & (arrived != machine.num_threads)).any():
            self._fail(None, f"a barrier is reached by {arrived[arrived != 0].min()} of {machine.num_threads} threads")
        machine.shared_memory.epochs += arrived != 0

    def _until_barrier(self, running: _Places) -> _Places:
        """Run these threads until all have ended or wait at a barrier; those who wait stand behind it."""
        steps, waiting, parked = self.code.steps, _Places(), _Places()
        while running or parked:
            if not running:
                self._fail(steps[min(parked.threads)], "the threads of a warp do not all come here")
            place = min(running.threads)
            threads = running.take(place)
            while len(threads):
                step = steps[place]
                if step.kind is Kind.WHOLE_WARPS:
                    threads = self._gather(parked, place, threads)
                elif step.kind is Kind.BARRIER:
                    waiting.add(place + 1, threads)
                    break
                taken = self._guarded(step, threads)
                if step.kind in (Kind.PLAIN, Kind.WHOLE_WARPS):
                    self._execute(step, taken)
                else:
                    if step.kind is Kind.BRANCH:
                        running.add(step.target, taken)
                    running.add(place + 1, np.setdiff1d(threads, taken, assume_unique=True))
                    break
                place += 1
                if place in running.threads:
                    running.add(place, threads)
                    threads = running.take(place)
        return waiting

    def _gather(self, parked: _Places, place: int, threads: np.ndarray) -> np.ndarray:
        """Those that are here with their whole warp, counting threads that came earlier; the others are parked."""
        parked.add(place, threads)
        threads = parked.take(place)
        whole = self._in_whole_warps(threads)
        parked.add(place, threads[~whole])
        return threads[whole]

    def _in_whole_warps(self, threads: np.ndarray) -> np.ndarray:
        present = np.bincount(threads // WARP, minlength=self.machine.count // WARP)
        return present[threads // WARP] == WARP

    def _guarded(self, step: Step, threads: np.ndarray) -> np.ndarray:
        """Threads whose guard holds."""
        if step.guard is None:
            return threads
        return threads[step.guard(self.machine, self._lanes(threads))]

    def _lanes(self, threads: np.ndarray) -> Lanes:
        return slice(None) if len(threads) == self.machine.count else threads

    def _execute(self, step: Step, threads: np.ndarray) -> None:
        if not len(threads):
            return
        if step.kind is Kind.WHOLE_WARPS and not self._in_whole_warps(threads).all():
            self._fail(step, "the guard excludes threads of a warp")
        assert step.execute is not None
        try:
            step.execute(self.machine, self._lanes(threads))
        except (PtxError, IndexError, KeyError, TypeError, ValueError) as error:
            self._fail(step, str(error), error)

    def _fail(self, step: Step | None, what: str, cause: Exception | None = None) -> NoReturn:
        where = f" at {step.instruction}" if step is not None else ""
        raise PtxError(f"{self.code.program.name}{where}: {what}") from cause
