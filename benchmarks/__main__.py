"""Benchmark the loss, its functions and its state updates against eager PyTorch, in one run.

    python -m benchmarks            # everything: long, most of it at the large shapes
    python -m benchmarks --quick    # under a minute: small shapes in full, cifar100 without the eager reference

Appends rows to benchmarks/results/<machine>.csv and draws figures next to it; --quick only prints.
A result that disagrees with the reference is an error, regardless of its speed.
"""

import argparse
import sys
from collections.abc import Iterator

import torch

from benchmarks import results
from benchmarks.measure import Disagreement, Row, measure
from benchmarks.plots import draw
from benchmarks.shapes import ALL_SHAPES, SUPERVISED
from benchmarks.subjects import CASES, SUPERVISED_CASES
from benchmarks.sweeps import SWEEPS, measure_sweep
from benchmarks.table import latest

_QUICK_SHAPES = ("fmnist", "cifar100")


def rows(device: torch.device, cases: list[tuple[str, str]], sweeps: list[str], quick: bool) -> Iterator[Row]:
    """Measure cases, each at a shape, and sweeps."""
    seconds = 0.2 if quick else 1.5
    for shape_name, case in cases:
        shape = ALL_SHAPES[shape_name]
        eager = shape.num_classes < 50 or not quick
        yield from measure(case, shape, device, seconds=seconds, eager=eager, compiled=not quick)
    for sweep in sweeps:
        yield from measure_sweep(sweep, device, seconds=seconds / 3)


def line(row: Row) -> str:
    sizes = f"{row['num_labeled']}+{row['num_unlabeled']}, {row['num_classes']}, {row['num_features']}"
    if row["note"]:
        return f"{row['case']:18} {row['name']:20} {sizes:22} {row['subject']:19} {row['note']}"
    times = [f"{row[name]:>10} ms" if row[name] != "" else 13 * " " for name in ("forward_ms", "step_ms")]
    ratios = [
        f"{row[name]:>8} x {what}" if row[name] != "" else ""
        for name, what in (
            ("times_faster_than_reference", "faster than the reference"),
            ("times_faster_than_gram_form", "faster than the Gram form"),
            ("times_bare_bmm", "bmm"),
            ("times_gemms", "GEMMs"),
        )
    ]
    if row["aten_calls"] != "":
        ratios.append(f"{row['aten_calls']} ATen calls")
    return (
        f"{row['case']:18} {row['name']:20} {sizes:22} {row['subject']:19} {' '.join(times)}"
        f" {row['memory_mib']:>9} MiB  {row['error']:8} {' '.join(ratios)}"
    ).rstrip()


def _selection(arguments: argparse.Namespace) -> tuple[list[tuple[str, str]], list[str]]:
    """Requested pairs of shape and case, and sweeps; by default all of them, or a small subset with --quick."""
    shapes, cases, sweeps = (getattr(arguments, name) or [] for name in ("shape", "case", "sweep"))
    if not shapes and (cases or not sweeps):
        shapes = list(_QUICK_SHAPES if arguments.quick else ALL_SHAPES)
        if not cases and not arguments.quick:
            sweeps = list(SWEEPS)
    possible = {
        shape: [case for case in cases or CASES if shape not in SUPERVISED or case in SUPERVISED_CASES]
        for shape in shapes
    }
    if arguments.shape:
        for shape, found in possible.items():
            if not found:
                raise ValueError(
                    f"--shape {shape} has no unlabelled batch; use it with --case {' '.join(SUPERVISED_CASES)}"
                )
    return [(shape, case) for shape, found in possible.items() for case in found], sweeps


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="check that everything runs and agrees")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", help="cpu or cuda")
    parser.add_argument("--shape", nargs="+", choices=ALL_SHAPES, help="run only these shapes (default: all)")
    parser.add_argument("--case", nargs="+", choices=CASES, help="run only these cases (default: all)")
    parser.add_argument("--sweep", nargs="+", choices=SWEEPS, help="run only these sweeps (default: all)")
    arguments = parser.parse_args()
    quick = arguments.quick
    try:
        device = torch.device(arguments.device)
        if device.type == "cuda" and not torch.cuda.is_available():
            raise ValueError("torch found no GPU; use --device cpu")
    except (RuntimeError, ValueError) as error:
        print(f"benchmarks: error: --device {arguments.device}: {error}", file=sys.stderr)
        return 2
    try:
        cases, sweeps = _selection(arguments)
    except ValueError as error:
        print(f"benchmarks: error: {error}", file=sys.stderr)
        return 2

    shared = results.environment(device)
    print(f"{shared['hardware']}, torch {shared['torch']}, float32; median times of forward and forward + backward")
    path = results.csv_path(device)
    try:
        for row in rows(device, cases, sweeps, quick):
            print(line(row), flush=True)
            if not quick:
                results.append(path, [shared | row])
    except Disagreement as error:
        print(f"benchmarks: {error}", file=sys.stderr)
        return 1
    if not quick:
        pictures = draw(latest(results.read(path)), path.with_suffix(""))
        print(f"wrote rows to {path}, figures: {', '.join(picture.name for picture in pictures)}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
