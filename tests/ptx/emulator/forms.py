"""The table of instructions: patterns of opcodes and what builds the code that executes them."""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np

from emulator.machine import Lanes, Machine
from emulator.operands import reader, writer
from emulator.program import Instruction, PtxError

Execute: TypeAlias = Callable[[Machine, Lanes], None]
Build: TypeAlias = Callable[..., Execute]


@dataclass(frozen=True)
class Form:
    pattern: re.Pattern[str]
    build: Build
    whole_warps: bool
    """All threads of a warp must execute it together."""


_FORMS: list[Form] = []


def form(pattern: str, whole_warps: bool = False) -> Callable[[Build], Build]:
    """Register a builder for the opcodes that match the whole pattern; its named groups become arguments.

    A modifier that no pattern allows makes the instruction unknown: nothing is ignored.
    """

    def register(build: Build) -> Build:
        _FORMS.append(Form(re.compile(pattern), build, whole_warps))
        return build

    return register


def build(instruction: Instruction) -> tuple[Execute, bool] | None:
    """Code that executes the instruction, and whether it needs whole warps; None if the instruction is unknown."""
    for candidate in _FORMS:
        match = candidate.pattern.fullmatch(instruction.opcode)
        if match is None:
            continue
        try:
            return candidate.build(instruction, **match.groupdict()), candidate.whole_warps
        except (PtxError, TypeError, ValueError) as error:
            raise PtxError(f"{instruction} cannot be executed: {error}") from error
    return None


def lanewise(
    instruction: Instruction, function: Callable[..., Any], sources: Sequence[str], result: str | None = None
) -> Execute:
    """Apply the function to operands of these types, in every lane; the result has the type of the first by default."""
    destination, *operands = instruction.operands
    reads = [reader(operand, type_) for operand, type_ in zip(operands, sources, strict=True)]
    write = writer(destination, result or sources[0])

    def execute(machine: Machine, lanes: Lanes) -> None:
        write(machine, lanes, np.asarray(function(*[read(machine, lanes) for read in reads])))

    return execute
