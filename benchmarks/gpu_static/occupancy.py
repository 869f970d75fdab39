"""Occupancy: resident programs per multiprocessor, from the published limits of each target."""

from typing import NamedTuple


class Limits(NamedTuple):
    """Limits of one streaming multiprocessor (NVIDIA) or compute unit (AMD); a warp is a wavefront on AMD."""

    warps: int
    blocks: int
    registers_per_partition: int
    """Counted per warp: registers per thread are multiplied by the threads of a warp. There are four partitions."""
    warp_size: int
    register_unit: int
    """Allocation granularity of registers per warp."""
    shared_bytes: int
    shared_unit: int
    shared_reserved: int
    """Reserved by the system in every block."""
    tensor_columns: int = 0
    source: str = "CUDA C++ Programming Guide, technical specifications per compute capability"


PARTITIONS = 4
KIB = 1024
_AMD = "LLVM's AMDGPU back end (llvm-calc-occupancy); CDNA 2 and CDNA 3 instruction set guides"
LIMITS = {
    "sm_80": Limits(64, 32, 16384, 32, 256, 164 * KIB, 128, KIB),
    "sm_86": Limits(48, 16, 16384, 32, 256, 100 * KIB, 128, KIB),
    "sm_89": Limits(48, 24, 16384, 32, 256, 100 * KIB, 128, KIB),
    "sm_90": Limits(64, 32, 16384, 32, 256, 228 * KIB, 128, KIB),
    "sm_100": Limits(64, 32, 16384, 32, 256, 228 * KIB, 128, KIB, tensor_columns=512),
    "sm_120": Limits(48, 24, 16384, 32, 256, 100 * KIB, 128, KIB),
    "gfx90a": Limits(32, 32, 512 * 64, 64, 8 * 64, 64 * KIB, 512, 0, source=_AMD),
    "gfx942": Limits(32, 32, 512 * 64, 64, 8 * 64, 64 * KIB, 512, 0, source=_AMD),
}


class Resident(NamedTuple):
    blocks: int
    limited_by: str


def resident_blocks(target: str, num_warps: int, registers: int, shared_bytes: int, tensor_columns: int) -> Resident:
    """Number of resident blocks of num_warps warps, and the resource that limits it."""
    limits = LIMITS[target]
    warp_registers = _rounded(max(registers, 1) * limits.warp_size, limits.register_unit)
    shared = _rounded(shared_bytes + limits.shared_reserved, limits.shared_unit)
    fitting = {
        "warps": limits.warps // num_warps,
        "blocks": limits.blocks,
        "registers": PARTITIONS * (limits.registers_per_partition // warp_registers) // num_warps,
    }
    if shared:
        fitting["shared memory"] = limits.shared_bytes // shared
    if tensor_columns:
        fitting["tensor memory"] = limits.tensor_columns // tensor_columns
    limited_by = min(fitting, key=lambda resource: fitting[resource])
    return Resident(fitting[limited_by], limited_by)


def _rounded(amount: int, unit: int) -> int:
    return -(-amount // unit) * unit
