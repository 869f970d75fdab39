"""Hand-written PTX for the tests of the emulator."""

from collections.abc import Sequence

import numpy as np

from emulator.machine import Mode
from emulator.memory import GlobalMemory, Segment
from emulator.program import parse
from emulator.schedule import Code, Launch

DEFAULT = Mode()
REGISTERS = """
    .reg .pred %p<8>;
    .reg .b16 %h<8>;
    .reg .b32 %r<64>;
    .reg .b64 %d<64>;
    .reg .b32 %thread;
    .reg .b64 %where;
"""


def module(body: str, names: Sequence[str], shared: int = 0) -> str:
    """A kernel with pointers of these names; each pointer is in the register of its name."""
    parameters = ", ".join(f".param .u64 {name}_parameter" for name in names)
    loads = "\n".join(f".reg .b64 %{name};\nld.param.b64 %{name}, [{name}_parameter];" for name in names)
    memory = f".shared .align 16 .b8 memory[{shared}];" if shared else ""
    return f"""
        .version 8.7
        .target sm_90a
        .address_size 64
        {memory}
        .visible .entry snippet({parameters})
        {{
            {REGISTERS}
            mov.u32 %thread, %tid.x;
            {loads}
            {body}
            ret;
        }}
    """


def run(
    body: str,
    arrays: dict[str, np.ndarray],
    shared: int = 0,
    num_warps: int = 1,
    num_programs: int = 1,
    mode: Mode = DEFAULT,
) -> None:
    """Execute the body; it writes into the arrays."""
    code = Code(parse(module(body, list(arrays), shared)))
    pointers = {f"{name}_parameter": array.ctypes.data for name, array in arrays.items()}
    memory = GlobalMemory([Segment(name, array.ctypes.data, array.nbytes) for name, array in arrays.items()])
    code.run(Launch((num_programs, 1, 1), num_warps, 0, pointers), memory, mode)


def load(register: str, name: str, itemsize: int) -> str:
    """Element %thread of an array."""
    return f"mad.wide.u32 %where, %thread, {itemsize}, %{name}; ld.global.b{8 * itemsize} {register}, [%where];"


def store(register: str, name: str, itemsize: int) -> str:
    return f"mad.wide.u32 %where, %thread, {itemsize}, %{name}; st.global.b{8 * itemsize} [%where], {register};"


_BANKS = {1: "%h", 2: "%h", 4: "%r", 8: "%d"}


def apply(opcode: str, operands: Sequence[np.ndarray], result: type[np.generic], mode: Mode = DEFAULT) -> np.ndarray:
    """Results of one instruction for each element of its operands; booleans are predicates."""
    count = len(operands[0])
    padded = -(-count // 32) * 32
    arrays = {f"in{i}": np.resize(operand, padded) for i, operand in enumerate(operands)}
    arrays["out"] = np.zeros(padded, result)
    lines, names = [], []
    for i, operand in enumerate(operands):
        size = operand.itemsize
        register = f"{_BANKS[size]}{i + 1}"
        lines.append(load(register, f"in{i}", size))
        if operand.dtype == np.bool_:
            lines.append(f"setp.ne.b16 %p{i + 1}, {register}, 0;")
            register = f"%p{i + 1}"
        names.append(register)
    size = arrays["out"].itemsize
    destination = "%p0" if result is np.bool_ else f"{_BANKS[size]}0"
    lines.append(f"{opcode} {', '.join([destination, *names])};")
    if result is np.bool_:
        lines.append("selp.b16 %h0, 1, 0, %p0;")
        destination = "%h0"
    lines.append(store(destination, "out", size))
    run("\n".join(lines), arrays, num_warps=padded // 32, mode=mode)
    return arrays["out"][:count]


def pairs(values: Sequence[float] | np.ndarray, dtype: type[np.generic]) -> tuple[np.ndarray, np.ndarray]:
    """All ordered pairs of the values."""
    array = np.array(values).astype(dtype)
    return np.repeat(array, len(array)), np.tile(array, len(array))


def assert_same_bits(actual: np.ndarray, expected: np.ndarray) -> None:
    """Equal to the last bit; any NaN equals any other."""
    assert actual.dtype == expected.dtype
    both_nan = (actual != actual) & (expected != expected)
    raw = np.dtype(f"u{actual.itemsize}")
    same = (actual.view(raw) == expected.view(raw)) | both_nan
    assert same.all(), f"{actual[~same][:4]} where {expected[~same][:4]} is expected"
