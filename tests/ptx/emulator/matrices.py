"""Matrix instructions: fragments spread over the threads of a warp, and their products.

A fragment is an array of registers and lanes. The layouts are those of the PTX manual, where lane = 4 · group + thread.
"""

from collections.abc import Sequence

import numpy as np

from emulator.forms import Execute, form
from emulator.fused import fma
from emulator.machine import WARP, Lanes, Machine
from emulator.operands import Read, addresses, bfloat16_to_float32, elements, reader, writer
from emulator.program import Immediate, Instruction, Operand, PtxError, Vector

# Bits that sums of pessimistic matrix products keep below their largest term. Published measurements of sm_80 and later
# find at least two more than the 24 of float32; none are assumed here.
SUM_BITS = 24


def _fragment(machine: Machine, lanes: Lanes, reads: Sequence[Read]) -> np.ndarray:
    """Registers of whole warps: (warps, registers, 8, 4)."""
    registers = np.stack([machine.values(read(machine, lanes), lanes) for read in reads])
    return registers.reshape(len(reads), -1, 8, 4).swapaxes(0, 1)


def _left(fragment: np.ndarray, per_register: int) -> np.ndarray:
    """A of 16 rows. Registers go over the halves of rows first, then over columns: (warps, 16, columns)."""
    warps, registers = fragment.shape[:2]
    parts = fragment.reshape(warps, registers // 2, 2, 8, 4, per_register)  # columns, row half, row, thread, element
    return parts.transpose(0, 2, 3, 1, 4, 5).reshape(warps, 16, -1)


def _right(fragment: np.ndarray, per_register: int) -> np.ndarray:
    """B of 8 columns: (warps, rows, 8)."""
    warps, registers = fragment.shape[:2]
    parts = fragment.reshape(warps, registers, 8, 4, per_register)  # rows, column, thread, element
    return parts.transpose(0, 1, 3, 4, 2).reshape(warps, -1, 8)


def _accumulator(fragment: np.ndarray) -> np.ndarray:
    """C of 16 rows (8 with two registers); pairs of columns in each thread: (warps, rows, columns)."""
    warps, registers = fragment.shape[:2]
    halves = 1 if registers == 2 else 2
    parts = fragment.reshape(
        warps, registers // (2 * halves), halves, 2, 8, 4
    )  # columns, row half, element, row, thread
    return parts.transpose(0, 2, 4, 1, 5, 3).reshape(warps, 8 * halves, -1)


def _registers(matrix: np.ndarray) -> np.ndarray:
    """The inverse of _accumulator, as one row of lanes for each register: (registers, threads)."""
    warps, rows, columns = matrix.shape
    parts = matrix.reshape(warps, rows // 8, 8, columns // 8, 4, 2)  # row half, row, columns, thread, element
    return parts.transpose(3, 1, 5, 0, 2, 4).reshape(rows * columns // WARP, -1)


def _unpack(fragment: np.ndarray, type_: str) -> np.ndarray:
    """Elements of 32-bit registers as float32, those of a register side by side in the last axis."""
    if type_ == "tf32":
        return (fragment & np.uint32(0xFFFFE000)).view(np.float32)[..., None]  # low bits are ignored
    halves = np.ascontiguousarray(fragment).view(np.uint16).reshape(*fragment.shape, 2)
    return bfloat16_to_float32(halves) if type_ == "bf16" else halves.view(np.float16).astype(np.float32)


def multiply(a: np.ndarray, b: np.ndarray, c: np.ndarray, pessimistic: bool) -> np.ndarray:
    """a·b + c of float32 matrices with a single rounding, or with truncated sums."""
    a, b = a.astype(np.float64), b.astype(np.float64)  # products of at most 11 bits each are exact
    if not pessimistic:
        return (a @ b + c).astype(np.float32)
    products = a[..., :, None, :] * b.swapaxes(-1, -2)[..., None, :, :]
    terms = np.concatenate([products, c[..., None].astype(np.float64)], axis=-1)
    return _truncated_sum(terms)


def _truncated_sum(terms: np.ndarray) -> np.ndarray:
    """Sum over the last axis; every term is cut at SUM_BITS below the largest, the sum to float32."""
    largest = np.abs(terms).max(-1, keepdims=True)
    unit = np.ldexp(1.0, np.frexp(largest)[1] - SUM_BITS)
    finite = np.isfinite(largest[..., 0])
    total = np.where(finite, (np.trunc(terms / unit) * unit).sum(-1), terms.sum(-1))
    nearest = total.astype(np.float32)
    beyond = finite & (np.abs(nearest.astype(np.float64)) > np.abs(total))
    return np.where(beyond, np.nextafter(nearest, np.float32(0)), nearest)


@form(r"mma\.sync\.aligned\.m16n8k(4|8|16)\.row\.col\.f32\.(?P<type>tf32|f16|bf16)\.(?P=type)\.f32", whole_warps=True)
def multiply_warp(instruction: Instruction, type: str) -> Execute:
    d, a, b, c = (elements(operand) for operand in instruction.operands)
    reads_a, reads_b = ([reader(operand, "b32") for operand in part] for part in (a, b))
    reads_c, writes = [reader(operand, "f32") for operand in c], [writer(operand, "f32") for operand in d]

    def execute(machine: Machine, lanes: Lanes) -> None:
        left, right = (_unpack(_fragment(machine, lanes, reads), type) for reads in (reads_a, reads_b))
        added = _accumulator(_fragment(machine, lanes, reads_c))
        width = left.shape[-1]
        product = multiply(_left(left, width), _right(right, width), added, machine.mode.pessimistic)
        for write, values in zip(writes, _registers(product), strict=True):
            write(machine, lanes, values)

    return execute


@form(r"mma\.sync\.aligned\.(m8n8k4|m16n8k(4|8|16))\.row\.col\.f64\.f64\.f64\.f64", whole_warps=True)
def multiply_warp_float64(instruction: Instruction) -> Execute:
    """A chain of fused multiply-adds over k."""
    d, *sources = (elements(operand) for operand in instruction.operands)
    reads, writes = [[reader(x, "f64") for x in part] for part in sources], [writer(x, "f64") for x in d]

    def execute(machine: Machine, lanes: Lanes) -> None:
        a, b, c = (_fragment(machine, lanes, part) for part in reads)
        left = a.reshape(len(a), 8, 4) if len(reads[0]) == 1 else _left(a[..., None], 1)
        right, total = _right(b[..., None], 1), _accumulator(c)
        for k in range(left.shape[2]):
            total = fma(left[:, :, k, None], right[:, None, k, :], total)
        for write, values in zip(writes, _registers(total), strict=True):
            write(machine, lanes, values)

    return execute


# Warp groups


def _shared_matrix(machine: Machine, lanes: Lanes, descriptors: np.ndarray, rows: int) -> np.ndarray:
    """A K-major matrix of 32 bytes a row that a descriptor points to, as bits: (warps, rows, 8).

    The descriptor holds, from bit 0, 32 and 62 on, the start and the distance of groups of eight rows in units of 16
    bytes, and how the rows of a group, one after the other, are swizzled.
    """
    per_warp = descriptors.reshape(-1, WARP)
    first = per_warp[:, :1]
    if (per_warp != first).any():
        raise PtxError("threads of a warp hold different matrix descriptors")
    swizzle, base_offset = first >> np.uint64(62), first >> np.uint64(49) & np.uint64(7)
    if (swizzle == 0).any() or base_offset.any():
        raise PtxError(f"the matrix descriptor {int(first[0, 0]):#x} is of an unsupported layout")
    start, stride = ((first >> np.uint64(shift) & np.uint64(0x3FFF)) << np.uint64(4) for shift in (0, 32))
    pitch = np.uint64(256) >> swizzle  # 128, 64 or 32 bytes
    row = np.arange(rows, dtype=np.uint64)
    offsets = (start + row // 8 * stride + row % 8 * pitch)[..., None] + 16 * np.arange(2, dtype=np.uint64)
    mask = (pitch // 16 - 1)[..., None]
    offsets ^= (offsets >> np.uint64(7) & mask) << np.uint64(4)
    owners = np.repeat(machine.numbers(lanes)[::WARP], 2 * rows)
    chunks = machine.shared_memory.load(offsets.reshape(-1), machine.warps(owners), 4, 4)
    return chunks.reshape(-1, rows, 8)


@form(r"wgmma\.mma_async\.sync\.aligned\.m64n(?P<columns>\d+)k8\.f32\.tf32\.tf32", whole_warps=True)
def multiply_group(instruction: Instruction, columns: str) -> Execute:
    """Each warp multiplies its 16 rows of A by B, when its group is waited for."""
    d, a, descriptor, accumulate, *scales = instruction.operands
    if any(not isinstance(scale, Immediate) or scale.bits != 1 for scale in scales):
        raise PtxError("negated operands are not supported")
    width, left = int(columns), _left_of_group(a)
    read_b, read_accumulate = reader(descriptor, "b64"), reader(accumulate, "pred")
    reads_c, writes = [reader(x, "f32") for x in elements(d)], [writer(x, "f32") for x in elements(d)]

    def execute(machine: Machine, lanes: Lanes) -> None:
        threads = machine.numbers(lanes)
        rows = left(machine, lanes)
        descriptors = machine.values(read_b(machine, lanes), lanes)
        adds = machine.values(read_accumulate(machine, lanes), lanes)

        def complete(chosen: np.ndarray) -> None:
            who = threads[chosen]
            right = _shared_matrix(machine, who, descriptors[chosen], width) & np.uint32(0xFFFFE000)
            added = _accumulator(_fragment(machine, who, reads_c))
            added = np.where(adds[chosen][::WARP, None, None], added, np.float32(0))
            columns_of_b = right.view(np.float32).swapaxes(1, 2)
            product = multiply(rows[chosen[::WARP] // WARP], columns_of_b, added, machine.mode.pessimistic)
            for write, values in zip(writes, _registers(product), strict=True):
                write(machine, who, values)

        machine.products.issue(threads, complete)

    return execute


def _left_of_group(a: Operand) -> Read:
    """The 16 rows of A that belong to each warp."""
    if not isinstance(a, Vector):
        raise PtxError("A of a warp group must be in registers")
    reads = [reader(register, "b32") for register in a.elements]
    return lambda machine, lanes: _left(_unpack(_fragment(machine, lanes, reads), "tf32"), 1)


@form(r"wgmma\.commit_group\.sync\.aligned", whole_warps=True)
def commit_products(instruction: Instruction) -> Execute:
    return lambda machine, lanes: machine.products.commit(machine.numbers(lanes))


@form(r"wgmma\.wait_group\.sync\.aligned", whole_warps=True)
def wait_for_products(instruction: Instruction) -> Execute:
    (keep,) = instruction.operands
    if not isinstance(keep, Immediate):
        raise PtxError(f"the number of groups is {keep}")
    return lambda machine, lanes: machine.products.wait(machine.numbers(lanes), keep.bits)


@form(r"wgmma\.fence\.sync\.aligned", whole_warps=True)
def fence_products(instruction: Instruction) -> Execute:
    return lambda machine, lanes: None


# Matrices of 16-bit elements between shared memory and fragments


def _row_owners(machine: Machine, lanes: Lanes, matrix: int) -> np.ndarray:
    """Positions of the eight lanes of each warp whose addresses are those of the rows of this matrix."""
    count = len(machine.numbers(lanes))
    return (np.arange(0, count, WARP)[:, None] + 8 * matrix + np.arange(8)).reshape(-1)


def _transposed(rows: np.ndarray) -> np.ndarray:
    """Each group of eight rows of eight, transposed."""
    return rows.reshape(-1, 8, 8).swapaxes(1, 2).reshape(-1, 8)


_MATRICES = r"\.sync\.aligned\.m8n8\.x(1|2|4)(?P<trans>\.trans)?\.shared(::cta)?\.b16"


@form(rf"ldmatrix{_MATRICES}", whole_warps=True)
def load_matrices(instruction: Instruction, trans: str | None) -> Execute:
    """Lane 4·row + column/2 receives two neighbours of a row, of the transposed matrix with .trans."""
    destination, source = instruction.operands
    address, writes = addresses(source), [writer(element, "b32") for element in elements(destination)]

    def execute(machine: Machine, lanes: Lanes) -> None:
        threads, where = machine.numbers(lanes), address(machine, lanes)
        for matrix, write in enumerate(writes):
            owners = _row_owners(machine, lanes, matrix)
            rows = machine.shared_memory.load(where[owners], machine.warps(threads[owners]), 2, 8)
            values = _transposed(rows) if trans else rows
            write(machine, lanes, np.ascontiguousarray(values).view(np.uint32).reshape(-1))

    return execute


@form(rf"stmatrix{_MATRICES}", whole_warps=True)
def store_matrices(instruction: Instruction, trans: str | None) -> Execute:
    """The inverse of ldmatrix."""
    destination, source = instruction.operands
    address, reads = addresses(destination), [reader(element, "b32") for element in elements(source)]

    def execute(machine: Machine, lanes: Lanes) -> None:
        threads, where = machine.numbers(lanes), address(machine, lanes)
        for matrix, read in enumerate(reads):
            owners = _row_owners(machine, lanes, matrix)
            values = np.ascontiguousarray(machine.values(read(machine, lanes), lanes))
            rows = values.view(np.uint16).reshape(-1, 8)
            stored = _transposed(rows) if trans else rows
            machine.shared_memory.store(where[owners], machine.warps(threads[owners]), stored)

    return execute
