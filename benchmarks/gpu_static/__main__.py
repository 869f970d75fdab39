"""Compile the kernels for GPU targets and compute roofline times, without a GPU.

    python -m benchmarks.gpu_static --quick                               # one target, the fmnist shape
    python -m benchmarks.gpu_static --target sm_90 --shape cifar100
    python -m benchmarks.gpu_static --write                               # everything, into docs/gpu-static.md

Everything is computed, nothing measured. The exit code is 1 if a kernel does not compile or spills registers in float32
at the shape of a preset.
"""

import argparse
import sys
import time
from collections.abc import Sequence

from benchmarks.gpu_static import report
from benchmarks.gpu_static.ahead_of_time import TARGETS
from benchmarks.gpu_static.calls import DTYPES, FUNCTIONS
from benchmarks.gpu_static.compilation import binaries, compile_all
from benchmarks.gpu_static.roofline import roofline
from benchmarks.shapes import SHAPES

QUICK = {"target": ["sm_80"], "shape": ["fmnist"], "dtype": ["float32"]}


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu_static", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--target", nargs="+", choices=TARGETS, default=[*TARGETS])
    parser.add_argument("--shape", nargs="+", choices=SHAPES, default=[*SHAPES])
    parser.add_argument("--dtype", nargs="+", choices=DTYPES, default=[*DTYPES])
    parser.add_argument("--quick", action="store_true", help="only sm_80, fmnist and float32")
    parser.add_argument("--write", action="store_true", help="write docs/gpu-static.md and its CSV files")
    options = parser.parse_args(arguments)
    if options.quick:
        parser.set_defaults(**QUICK)
        options = parser.parse_args(arguments)
    chosen = options.target, options.shape, options.dtype
    if options.write and chosen != ([*TARGETS], [*SHAPES], [*DTYPES]):
        parser.error("--write wants every target, shape and dtype: leave the other options out")

    start = time.perf_counter()
    shapes = [SHAPES[name] for name in options.shape]
    try:
        compiled = compile_all(binaries(options.target, shapes, options.dtype))
    except RuntimeError as error:
        parser.error(str(error))
    counted = [
        row
        for function in FUNCTIONS
        for shape in shapes
        for dtype in options.dtype
        for impl in ("triton", "reference")
        for row in roofline(function, shape, dtype, impl)
    ]
    print("Computed from compiled code and operation counts; nothing was measured on a GPU.")
    for dtype in options.dtype:
        print(f"\n{dtype}: registers per thread · shared bytes · resident blocks (computed)\n")
        print(report.resources(compiled, dtype))
        print(f"\n{dtype}: kernels / eager reference, forward and backward, roofline time (computed)\n")
        print(report.totals(counted, dtype))
    if options.write:
        report.write(compiled, counted)
    print(f"\n{len(compiled)} binaries in {time.perf_counter() - start:.0f} s")
    failed = report.failures(compiled)
    for failure in failed:
        print(failure, file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
