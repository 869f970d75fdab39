"""Typed access to operands: readers and writers that are built once per instruction."""

from collections.abc import Callable
from typing import TypeAlias

import numpy as np

from emulator.machine import WIDTHS, Lanes, Machine
from emulator.memory import UNSIGNED
from emulator.program import Address, Discard, Immediate, Negated, Operand, PtxError, Register, Special, Vector

DTYPES: dict[str, type[np.generic]] = {
    "pred": np.bool_,
    "f16": np.float16,
    "f32": np.float32,
    "f64": np.float64,
    "tf32": np.float32,
    "bf16": np.float32,  # widened when read; written only by conversions
    **{f"{kind}{8 * width}": dtype for kind in "bu" for width, dtype in UNSIGNED.items()},
    **{"s8": np.int8, "s16": np.int16, "s32": np.int32, "s64": np.int64},
}

Read: TypeAlias = Callable[[Machine, Lanes], np.ndarray]
Write: TypeAlias = Callable[[Machine, Lanes, np.ndarray], None]


def reader(operand: Operand, type_: str) -> Read:
    """The operand as an array of the type: an element per lane, or a single one if it is constant."""
    dtype = DTYPES[type_]
    if isinstance(operand, Negated):
        predicate = operand.register.name
        return lambda machine, lanes: ~machine.registers[predicate][lanes]
    if isinstance(operand, Register):
        return _register_reader(operand, type_)
    if isinstance(operand, Special):
        name = operand.name
        return lambda machine, lanes: _special(machine, name)[lanes].view(dtype)
    if isinstance(operand, Immediate):
        constant = _constant(operand, dtype)
        return lambda machine, lanes: constant
    raise PtxError(f"an operand of type .{type_} is {operand}")


def _register_reader(register: Register, type_: str) -> Read:
    name, dtype = register.name, DTYPES[type_]
    if type_ == "pred":
        if register.type != "pred":
            raise PtxError(f"{name} is no predicate")
        return lambda machine, lanes: machine.registers[name][lanes]
    if type_ == "bf16":
        return lambda machine, lanes: bfloat16_to_float32(machine.registers[name][lanes])
    size, held = np.dtype(dtype).itemsize, WIDTHS[register.type]
    if held < size:
        raise PtxError(f"{name} holds {held} bytes and is read as .{type_}")
    if held > size:
        return lambda machine, lanes: machine.registers[name][lanes].astype(UNSIGNED[size]).view(dtype)
    return lambda machine, lanes: machine.registers[name][lanes].view(dtype)


def bfloat16_to_float32(bits: np.ndarray) -> np.ndarray:
    return (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)


def _special(machine: Machine, name: str) -> np.ndarray:
    if name not in machine.special:
        raise PtxError(f"the special register {name} is not supported")
    return machine.special[name]


def _constant(immediate: Immediate, dtype: type[np.generic]) -> np.ndarray:
    if dtype == np.bool_:
        return np.array([immediate.bits != 0])
    size = np.dtype(dtype).itemsize
    if immediate.width not in (None, 8 * size):
        raise PtxError(f"a constant of {immediate.width} bits where {8 * size} are expected")
    return np.array([immediate.bits & ((1 << 8 * size) - 1)], UNSIGNED[size]).view(dtype)


def writer(operand: Operand, type_: str) -> Write:
    """Write results of the type, extended to the width of the register: signed types by their sign."""
    if isinstance(operand, Discard):
        return lambda machine, lanes, values: None
    if not isinstance(operand, Register):
        raise PtxError(f"a result goes to {operand}")
    name = operand.name
    if type_ == "pred" or operand.type == "pred":
        if type_ != operand.type:
            raise PtxError(f"a result of type .{type_} goes to {name} of type .{operand.type}")

        def write_predicate(machine: Machine, lanes: Lanes, values: np.ndarray) -> None:
            machine.registers[name][lanes] = values

        return write_predicate
    size, held = np.dtype(DTYPES[type_]).itemsize, WIDTHS[operand.type]
    if held < size:
        raise PtxError(f"a result of type .{type_} goes to {name} of {held} bytes")
    extended = np.dtype(f"i{held}" if type_.startswith("s") else f"u{held}")

    def write(machine: Machine, lanes: Lanes, values: np.ndarray) -> None:
        if held != size:
            values = values.view(DTYPES[type_]).astype(extended)
        machine.registers[name][lanes] = values.view(UNSIGNED[held])

    return write


def elements(operand: Operand) -> tuple[Operand, ...]:
    """Elements of a vector; a scalar is a vector of one."""
    return operand.elements if isinstance(operand, Vector) else (operand,)


def addresses(operand: Operand) -> Read:
    """Addresses as uint64."""
    if not isinstance(operand, Address) or not (operand.base is None or isinstance(operand.base, Register)):
        raise PtxError(f"an address is {operand}")
    offset = np.uint64(operand.offset & (2**64 - 1))
    if operand.base is None:
        return lambda machine, lanes: machine.values(np.array([offset]), lanes)
    name, dtype = operand.base.name, UNSIGNED[WIDTHS[operand.base.type]]

    def read(machine: Machine, lanes: Lanes) -> np.ndarray:
        # Wraps at the width of the register: shared memory is addressed by 32 bits.
        return (machine.registers[name][lanes] + offset.astype(dtype)).astype(np.uint64)

    return read
