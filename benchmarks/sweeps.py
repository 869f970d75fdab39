"""Scaling of the loss with batch size, number of classes and number of features."""

import math
from collections.abc import Iterator

import torch

from benchmarks.measure import Row, measure
from benchmarks.shapes import Shape
from benchmarks.subjects import COMPILED, COMPILED_GRAM_FORM, CONTEXT

FIRST = Shape("sweep", 16, 64, 32, 64)
SWEEPS = {
    "batch": [FIRST._replace(num_labeled=size // 4, num_unlabeled=size) for size in (16, 64, 256, 1024, 4096, 16384)],
    "classes": [FIRST._replace(num_classes=count) for count in (16, 32, 64, 128, 256, 512, 1024)],
    "features": [FIRST._replace(num_features=count) for count in (32, 64, 128, 256, 512, 1024)],
}
_VARIED = {"batch": "num_unlabeled", "classes": "num_classes", "features": "num_features"}
_EAGER_BYTES = 2**30  # limit of the reference in a sweep


def measure_sweep(name: str, device: torch.device, *, seconds: float) -> Iterator[Row]:
    for shape in SWEEPS[name]:
        samples = shape.num_labeled + 2 * shape.num_unlabeled
        small = 8 * samples * shape.num_classes**2 * shape.num_features <= _EAGER_BYTES
        for row in measure("loss", shape, device, seconds=seconds, eager=small, compiled=False):
            if row["subject"] not in (COMPILED, COMPILED_GRAM_FORM, *CONTEXT):
                note = row["note"].replace("skipped by --quick", "left out: the eager reference is swept up to 1 GiB")
                yield {**row, "name": f"sweep over {name}", "note": note}


def points(rows: list[dict[str, str]], name: str, subject: str) -> list[tuple[int, float]]:
    """(size, milliseconds per step) of one sweep, sorted by size."""
    return sorted(
        (int(row[_VARIED[name]]), float(row["step_ms"]))
        for row in rows
        if row["name"] == f"sweep over {name}" and row["subject"] == subject and row["step_ms"]
    )


def exponent(measured: list[tuple[int, float]]) -> float:
    """Least-squares slope of log time over log size for the last three points, the asymptotic regime."""
    x, y = ([math.log(value) for value in values] for values in zip(*measured[-3:], strict=True))
    mean_x, mean_y = sum(x) / len(x), sum(y) / len(y)
    covariance = sum((a - mean_x) * (b - mean_y) for a, b in zip(x, y, strict=True))
    return covariance / sum((a - mean_x) ** 2 for a in x)
