"""Instructions by which the threads of a warp exchange values. All 32 must take part."""

import numpy as np

from emulator.forms import Execute, form
from emulator.machine import WARP, Lanes, Machine
from emulator.operands import elements, reader, writer
from emulator.program import Instruction, Operand, PtxError


def _check_mask(mask: Operand) -> Execute:
    """Code that requires the mask to name all threads of a warp."""
    read = reader(mask, "b32")

    def check(machine: Machine, lanes: Lanes) -> None:
        if (read(machine, lanes) != np.uint32(0xFFFFFFFF)).any():
            raise PtxError("only masks of all threads of a warp are supported")

    return check


@form(r"shfl\.sync\.(?P<mode>bfly|idx|up|down)\.b32", whole_warps=True)
def shuffle(instruction: Instruction, mode: str) -> Execute:
    """The value of another lane, or the own one where that lane lies outside the segment of the clamp operand."""
    destination, source, lane, clamp, mask = instruction.operands
    check = _check_mask(mask)
    reads = [reader(operand, "b32") for operand in (source, lane, clamp)]
    value_part, *valid_part = elements(destination)
    write, writes_valid = writer(value_part, "b32"), [writer(part, "pred") for part in valid_part]

    def execute(machine: Machine, lanes: Lanes) -> None:
        check(machine, lanes)
        value, offset, limits = (machine.values(read(machine, lanes), lanes) for read in reads)
        own = np.arange(len(value)) % WARP
        offset, limits = offset.astype(np.int64) & 31, limits.astype(np.int64)
        segment, clamped = limits >> 8 & 31, limits & 31
        last = (own & segment) | (clamped & ~segment)
        other = {
            "bfly": own ^ offset,
            "idx": (own & segment) | (offset & ~segment),
            "up": own - offset,
            "down": own + offset,
        }[mode]
        valid = other >= last if mode == "up" else other <= last
        other = np.where(valid, other, own)
        write(machine, lanes, value[np.arange(len(value)) - own + other])
        for write_valid in writes_valid:
            write_valid(machine, lanes, valid)

    return execute


_REDUCTIONS: dict[str, np.ufunc] = {
    **{"add": np.add, "min": np.minimum, "max": np.maximum},
    **{"and": np.bitwise_and, "or": np.bitwise_or, "xor": np.bitwise_xor},
}


@form(r"redux\.sync\.(?P<name>add|min|max|and|or|xor)\.(?P<type>[bsu]32)", whole_warps=True)
def reduce(instruction: Instruction, name: str, type: str) -> Execute:
    destination, source, mask = instruction.operands
    check = _check_mask(mask)
    read, write = reader(source, type), writer(destination, type)
    function = _REDUCTIONS[name]

    def execute(machine: Machine, lanes: Lanes) -> None:
        check(machine, lanes)
        values = machine.values(read(machine, lanes), lanes).reshape(-1, WARP)
        write(machine, lanes, np.repeat(function.reduce(values, axis=1, dtype=values.dtype), WARP))

    return execute


@form(r"vote\.sync\.(?P<name>any|all|ballot)\.(pred|b32)", whole_warps=True)
def vote(instruction: Instruction, name: str) -> Execute:
    destination, source, mask = instruction.operands
    check = _check_mask(mask)
    read, write = reader(source, "pred"), writer(destination, "b32" if name == "ballot" else "pred")

    def execute(machine: Machine, lanes: Lanes) -> None:
        check(machine, lanes)
        votes = machine.values(read(machine, lanes), lanes).reshape(-1, WARP)
        if name == "ballot":
            results = np.packbits(votes, axis=1, bitorder="little").view(np.uint32)
        else:
            results = np.asarray(votes.any(1) if name == "any" else votes.all(1))
        write(machine, lanes, np.repeat(results.reshape(-1), WARP))

    return execute


@form(r"bar\.warp\.sync", whole_warps=True)
def synchronise(instruction: Instruction) -> Execute:
    """Threads of a warp that execute the same instruction are never apart here."""
    (mask,) = instruction.operands
    return _check_mask(mask)
