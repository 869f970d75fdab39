"""Compiles every binary of every kernel, for each target, shape and dtype."""

import os
from collections.abc import Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context

from benchmarks.gpu_static import ahead_of_time
from benchmarks.gpu_static.calls import FUNCTIONS, call
from benchmarks.gpu_static.instructions import CLASSES, instruction_mix
from benchmarks.gpu_static.occupancy import resident_blocks
from benchmarks.shapes import Shape

Row = dict[str, str]
"""One binary; the columns are those of the CSV."""
COLUMNS = (
    *("target", "kernel", "shapes", "dtypes", "tile", "warps", "stages", "registers", "spill bytes", "shared bytes"),
    *("scalar registers", "scalar spills", "resident blocks (computed)", "limited by", *CLASSES, "note"),
)


@dataclass
class Binary:
    launch: ahead_of_time.Launch
    specialised: ahead_of_time.Specialised
    shapes: list[str]
    dtypes: list[str]


def binaries(targets: Iterable[str], shapes: Iterable[Shape], dtypes: Iterable[str]) -> list[Binary]:
    """Binaries that the public functions would launch; launches with the same binary are merged."""
    found: dict[tuple[str, ...], Binary] = {}
    targets = list(targets)
    for dtype in dtypes:
        for shape in shapes:
            for launch in _launches(shape, dtype):
                for target in targets:
                    specialised = ahead_of_time.specialise(launch, target)
                    binary = found.setdefault(specialised.key, Binary(launch, specialised, [], []))
                    binary.shapes += [shape.name] if shape.name not in binary.shapes else []
                    binary.dtypes += [dtype] if dtype not in binary.dtypes else []
    return sorted(found.values(), key=lambda binary: targets.index(binary.specialised.target))


def _launches(shape: Shape, dtype: str) -> list[ahead_of_time.Launch]:
    """Launches of every function, with the covariance kind of the shape and with diagonal covariances."""
    with ahead_of_time.recording() as launches:
        for covariance in {shape.covariance: None, "diagonal": None}:
            for function in FUNCTIONS:
                call(function, shape._replace(covariance=covariance), dtype, "triton")
    return launches


_binaries: list[Binary] = []  # inherited by forked workers, as it cannot be pickled


def compile_all(every: Sequence[Binary]) -> list[Row]:
    """Compile with one process per core; returns one row per binary."""
    _binaries[:] = every
    with ProcessPoolExecutor(os.cpu_count(), mp_context=get_context("fork")) as pool:
        return list(pool.map(_compile, range(len(every))))


def _compile(index: int) -> Row:
    binary = _binaries[index]
    launch, (target, _, options) = binary.launch, binary.specialised
    tile = [f"{name.removeprefix('BLOCK_')}{size}" for name, size in launch.options.items() if "BLOCK" in name]
    row = dict.fromkeys(COLUMNS, "") | {
        "target": target,
        "kernel": launch.name,
        "shapes": " ".join(binary.shapes),
        "dtypes": " ".join(binary.dtypes),
        "tile": " ".join(tile),
        "warps": str(options["num_warps"]),
        "stages": str(options["num_stages"]),
    }
    try:
        compiled = ahead_of_time.compile_kernel(binary.specialised)
    except Exception as error:  # a target unknown to the installed Triton must not hide the others
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        return row | {"note": f"not compiled: {reason}"}
    resident = resident_blocks(
        target, options["num_warps"], compiled.registers, compiled.shared_bytes, compiled.tensor_columns
    )
    mix = {name: str(count) for name, count in instruction_mix(compiled.assembly).items()}
    return (
        row
        | mix
        | {
            "registers": str(compiled.registers),
            "spill bytes": str(compiled.spill_bytes),
            "shared bytes": str(compiled.shared_bytes),
            "scalar registers": str(compiled.scalar_registers),
            "scalar spills": str(compiled.scalar_spills),
            "resident blocks (computed)": str(resident.blocks),
            "limited by": resident.limited_by,
        }
    )
