"""Moving data: registers, parameters, both memories, asynchronous copies, atomics."""

from collections.abc import Callable

import numpy as np

from emulator.forms import Execute, form, lanewise
from emulator.machine import WIDTHS, Lanes, Machine
from emulator.operands import DTYPES, UNSIGNED, addresses, elements, reader, writer
from emulator.program import Address, Immediate, Instruction, PtxError, Symbol, Vector

_VALUE = r"(?P<type>pred|[bsu](8|16|32|64)|f16|f32|f64)"


@form(rf"mov\.{_VALUE}")
def move(instruction: Instruction, type: str) -> Execute:
    destination, source = instruction.operands
    if isinstance(destination, Vector):
        return _unpack(destination, instruction, type)
    if isinstance(source, Vector):
        return _pack(source, instruction, type)
    return lanewise(instruction, np.copy, [type])


def _unpack(parts: Vector, instruction: Instruction, type_: str) -> Execute:
    """Registers from one wide register, lowest bits first."""
    narrow = f"b{8 * WIDTHS[type_] // len(parts.elements)}"
    read = reader(instruction.operands[1], type_)
    writes = [writer(part, narrow) for part in parts.elements]

    def execute(machine: Machine, lanes: Lanes) -> None:
        values = np.ascontiguousarray(read(machine, lanes)).view(DTYPES[narrow]).reshape(-1, len(writes))
        for position, write in enumerate(writes):
            write(machine, lanes, values[:, position].copy())

    return execute


def _pack(parts: Vector, instruction: Instruction, type_: str) -> Execute:
    """One wide register from several, lowest bits first."""
    narrow = f"b{8 * WIDTHS[type_] // len(parts.elements)}"
    reads = [reader(part, narrow) for part in parts.elements]
    write = writer(instruction.operands[0], type_)

    def execute(machine: Machine, lanes: Lanes) -> None:
        values = np.stack(np.broadcast_arrays(*(read(machine, lanes) for read in reads)), axis=1)
        write(machine, lanes, values.view(DTYPES[type_])[:, 0])

    return execute


@form(r"selp\.(?P<type>[bsu](16|32|64)|f32|f64)")
def select(instruction: Instruction, type: str) -> Execute:
    return lanewise(instruction, lambda a, b, which: np.where(which, a, b), [type, type, "pred"])


@form(r"cvta\.to\.(global|shared)\.u64")
def to_space(instruction: Instruction) -> Execute:
    """Global addresses are generic addresses here."""
    return lanewise(instruction, np.copy, ["u64"])


@form(rf"ld\.param\.{_VALUE}")
def load_parameter(instruction: Instruction, type: str) -> Execute:
    destination, source = instruction.operands
    if not isinstance(source, Address) or not isinstance(source.base, Symbol) or source.offset:
        raise PtxError(f"a parameter is {source}")
    name, write = source.base.name, writer(destination, type)
    mask = (1 << 8 * WIDTHS[type]) - 1

    def execute(machine: Machine, lanes: Lanes) -> None:
        bits = np.array([machine.parameters[name] & mask], UNSIGNED[WIDTHS[type]])
        write(machine, lanes, bits.view(DTYPES[type]))

    return execute


# Caching hints and the order of accesses by other programs change no result here.
_ORDER = r"(\.volatile|\.relaxed|\.acquire|\.release)?(\.cta|\.gpu|\.sys)?"
_CACHE = r"(\.L[12]::\w+|\.ca|\.cg|\.cs|\.wb|\.wt|\.nc)*"
_ACCESS = rf"{_ORDER}(?P<space>\.global|\.shared(::cta)?){_CACHE}(\.v[248])?\.(?P<type>[bsu](8|16|32|64)|f32|f64)"


@form(rf"ld{_ACCESS}")
def load(instruction: Instruction, space: str, type: str) -> Execute:
    destination, source = instruction.operands
    address, writes = addresses(source), [writer(element, type) for element in elements(destination)]
    size, shared = WIDTHS[type], space != ".global"

    def execute(machine: Machine, lanes: Lanes) -> None:
        where = address(machine, lanes)
        if shared:
            values = machine.shared_memory.load(where, machine.warps(lanes), size, len(writes))
        else:
            values = machine.global_memory.load(where, size, len(writes))
        for position, write in enumerate(writes):
            write(machine, lanes, values[:, position].copy().view(DTYPES[type]))

    return execute


@form(rf"st{_ACCESS}")
def store(instruction: Instruction, space: str, type: str) -> Execute:
    destination, source = instruction.operands
    address, reads = addresses(destination), [reader(element, f"b{8 * WIDTHS[type]}") for element in elements(source)]
    shared = space != ".global"

    def execute(machine: Machine, lanes: Lanes) -> None:
        where = address(machine, lanes)
        values = np.stack([machine.values(read(machine, lanes), lanes) for read in reads], axis=1)
        if shared:
            machine.shared_memory.store(where, machine.warps(lanes), values)
        else:
            machine.global_memory.store(where, values)

    return execute


# Asynchronous copies


@form(r"cp\.async\.(ca|cg)\.shared\.global(\.L2::\w+)?")
def copy_async(instruction: Instruction) -> Execute:
    """Reads global memory at once and writes shared memory when its group is waited for."""
    to, source, size, *used = instruction.operands
    if not isinstance(size, Immediate):
        raise PtxError(f"the size of a copy is {size}")
    target, origin, count = addresses(to), addresses(source), size.bits // 4
    read_used = reader(used[0], "u32") if used else None

    def execute(machine: Machine, lanes: Lanes) -> None:
        threads, where, start = machine.numbers(lanes), target(machine, lanes), origin(machine, lanes)
        wanted = np.full(len(threads), True)
        if read_used is not None:
            amounts = machine.values(read_used(machine, lanes), lanes)
            wanted = amounts == size.bits
            if (amounts[~wanted] != 0).any():
                raise PtxError("a copy of a part of its bytes is not supported")
        data = np.zeros((len(threads), count), np.uint32)  # bytes that are not copied are zero
        if wanted.any():
            data[wanted] = machine.global_memory.load(start[wanted], 4, count)

        def complete(chosen: np.ndarray) -> None:
            machine.shared_memory.store(where[chosen], machine.warps(threads[chosen]), data[chosen])

        machine.copies.issue(threads, complete)

    return execute


@form(r"cp\.async\.commit_group")
def commit_copies(instruction: Instruction) -> Execute:
    return lambda machine, lanes: machine.copies.commit(machine.numbers(lanes))


@form(r"cp\.async\.wait_(?P<which>group|all)")
def wait_for_copies(instruction: Instruction, which: str) -> Execute:
    if which == "all":

        def wait_all(machine: Machine, lanes: Lanes) -> None:
            machine.copies.commit(machine.numbers(lanes))
            machine.copies.wait(machine.numbers(lanes), 0)

        return wait_all
    (keep,) = instruction.operands
    if not isinstance(keep, Immediate):
        raise PtxError(f"the number of groups is {keep}")
    return lambda machine, lanes: machine.copies.wait(machine.numbers(lanes), keep.bits)


@form(r"(fence|membar|griddepcontrol)\.[\w.:]+")
def fence(instruction: Instruction) -> Execute:
    """Memory is always up to date here."""
    return lambda machine, lanes: None


# Atomics

_ATOMIC: dict[str, Callable[..., np.ndarray]] = {
    **{"add": np.add, "min": np.minimum, "max": np.maximum},
    **{"and": np.bitwise_and, "or": np.bitwise_or, "xor": np.bitwise_xor},
    "exch": lambda old, new: new,
}

# The order of an atomic with other accesses, and the threads to which it applies, in any order of modifiers.
_ATOMICITY = r"(\.(relaxed|acquire|release|acq_rel|cta|gpu|sys|global))*"


@form(rf"atom{_ATOMICITY}\.(?P<name>add|min|max|and|or|xor|exch)\.(?P<type>[bsu](32|64)|f32|f64)")
def atomic(instruction: Instruction, name: str, type: str) -> Execute:
    """Threads take their turn in the order of their numbers."""
    destination, source, operand = instruction.operands
    address, read, write = addresses(source), reader(operand, type), writer(destination, type)
    combine, size = _ATOMIC[name], WIDTHS[type]

    def execute(machine: Machine, lanes: Lanes) -> None:
        where = address(machine, lanes)
        values, old = machine.values(read(machine, lanes), lanes), np.empty(len(where), DTYPES[type])
        for turn in range(len(where)):
            one = slice(turn, turn + 1)
            old[one] = machine.global_memory.load(where[one], size, 1)[:, 0].view(DTYPES[type])
            new = np.array([[combine(old[turn], values[turn])]], DTYPES[type])
            machine.global_memory.store(where[one], new.view(UNSIGNED[size]))
        write(machine, lanes, old)

    return execute
