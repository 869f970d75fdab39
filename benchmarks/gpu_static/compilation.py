"""Compiles every binary of every kernel, for each target, shape and dtype."""

import contextlib
import functools
import hashlib
import itertools
import json
import os
from collections.abc import Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path

import triton

from benchmarks.gpu_static import ahead_of_time, instructions
from benchmarks.gpu_static.calls import FUNCTIONS, call
from benchmarks.gpu_static.instructions import CLASSES, instruction_mix
from benchmarks.gpu_static.occupancy import resident_blocks
from benchmarks.shapes import Shape
from plsp_train.files import write_atomically

CACHE = Path(__file__).parents[2] / "build" / "gpu_static"

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
    for target, dtype, shape in itertools.product(targets, dtypes, shapes):
        for launch in _launches(target, shape, dtype):
            specialised = ahead_of_time.specialise(launch, target)
            binary = found.setdefault(specialised.key, Binary(launch, specialised, [], []))
            binary.shapes += [shape.name] if shape.name not in binary.shapes else []
            binary.dtypes += [dtype] if dtype not in binary.dtypes else []
    return list(found.values())


def _launches(target: str, shape: Shape, dtype: str) -> list[ahead_of_time.Launch]:
    """Launches of every function, with the covariance kind of the shape and with diagonal covariances."""
    with ahead_of_time.recording(target) as launches:
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
        resources = _resources(binary.specialised)
    except Exception as error:  # a target unknown to the installed Triton must not hide the others
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        return row | {"note": f"not compiled: {reason}"}
    registers, shared_bytes = resources["registers"], resources["shared bytes"]
    resident = resident_blocks(target, options["num_warps"], registers, shared_bytes, resources.pop("tensor columns"))
    return (
        row
        | {name: str(count) for name, count in resources.items()}
        | {"resident blocks (computed)": str(resident.blocks), "limited by": resident.limited_by}
    )


def _resources(specialised: ahead_of_time.Specialised) -> dict[str, int]:
    """Resources and instructions of a binary, remembered in CACHE for as long as source and compiler are the same."""
    path = CACHE / hashlib.sha256(repr((*specialised.key, _tools())).encode()).hexdigest()
    with contextlib.suppress(FileNotFoundError):
        return dict(json.loads(path.read_text()))
    compiled = ahead_of_time.compile_kernel(specialised)
    found = {
        "registers": compiled.registers,
        "spill bytes": compiled.spill_bytes,
        "shared bytes": compiled.shared_bytes,
        "scalar registers": compiled.scalar_registers,
        "scalar spills": compiled.scalar_spills,
        "tensor columns": compiled.tensor_columns,
        **instruction_mix(compiled.assembly),
    }
    CACHE.mkdir(parents=True, exist_ok=True)
    write_atomically(path, json.dumps(found).encode())
    return found


@functools.cache
def _tools() -> tuple[str, ...]:
    """The compiler's version, and the code that reads its output."""
    modules = ahead_of_time, instructions
    return triton.__version__, *(Path(module.__file__ or "").read_text(encoding="utf-8") for module in modules)
