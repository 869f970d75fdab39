"""Write the table of docs/compiled-code.md: rounding errors of the compiled kernels.

    python tests/ptx/error_table.py [--write]

Every launch of the public functions in float32 is executed twice from the same inputs: as it is, and with all
floating-point tensors in float64, where the kernels compute in float64. The error of a launch is the largest difference
between the two, divided by the largest element of the output. Entries are the largest error over `SHAPES`, both kinds
of covariance and all launches of a kernel. Errors of inputs do not count, since both executions start from the same.
"""

import argparse
import re
import sys
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from emulator.launch import Emulator
from emulator.machine import Mode

ROOT = Path(__file__).parents[2]
DOCUMENT = ROOT / "docs" / "compiled-code.md"
TABLE = re.compile(r"(?<=<!-- errors: generated -->\n).*?(?=<!-- end of errors -->)", re.DOTALL)
SHAPES = [(2, 5, 7, 19), (3, 4, 41, 84), (1, 2, 130, 33)]  # Bl, Bu, l, d
STRENGTH = 0.7
TARGETS = ("sm_80", "sm_90")
MODES = {"": Mode(), ", pessimistic": Mode(pessimistic=True)}


class ComparingEmulator(Emulator):
    """Executes every launch in float64 too, and keeps the largest error of each kernel."""

    def __init__(self, target: str, mode: Mode) -> None:
        super().__init__(target, mode)
        self.errors: dict[str, float] = defaultdict(float)

    def launch(self, kernel: Any, grid: Any, args: tuple[Any, ...], options: Mapping[str, Any]) -> None:
        exact = _in_float64(args)
        before = [arg.clone() if isinstance(arg, Tensor) else arg for arg in args]
        super().launch(kernel, grid, exact, options)
        super().launch(kernel, grid, args, options)
        for old, actual, truth in zip(before, args, exact, strict=True):
            if isinstance(actual, Tensor):
                name = kernel.__name__.strip("_").removesuffix("_kernel")
                self.errors[name] = max(self.errors[name], _error(old, actual, truth))


def _in_float64(args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Copies of the arguments. Tensors keep their strides, and those that share a storage share one again."""
    storages: dict[tuple[int, torch.dtype], Tensor] = {}

    def convert(arg: Any) -> Any:
        if not isinstance(arg, Tensor) or not arg.numel():
            return arg
        storage, dtype = arg.untyped_storage(), torch.float64 if arg.is_floating_point() else arg.dtype
        key = storage.data_ptr(), arg.dtype
        if key not in storages:
            storages[key] = torch.empty(0, dtype=arg.dtype).set_(storage).to(dtype, copy=True)
        return storages[key].as_strided(arg.shape, arg.stride(), arg.storage_offset())

    return tuple(convert(arg) for arg in args)


def _error(before: Tensor, actual: Tensor, truth: Tensor) -> float:
    """Relative to the largest element that the launch wrote; infinite if integers differ."""
    written = (actual != before) & ~(actual.isnan() & before.isnan())
    if not written.any():
        return 0.0
    actual, truth = actual[written].double(), truth[written].double()
    if not before.is_floating_point():
        return 0.0 if torch.equal(actual, truth) else float("inf")
    equal = (actual == truth) | (actual.isnan() & truth.isnan())  # infinities among them
    difference = torch.where(equal, 0.0, (actual - truth).abs()).max()
    scale = truth[truth.isfinite()].abs().max() if truth.isfinite().any() else truth.new_tensor(1.0)
    return float(difference / scale) if difference else 0.0


def measure(target: str, mode: Mode) -> dict[str, float]:
    """Errors of every kernel that the public functions and a training step launch."""
    emulator = ComparingEmulator(target, mode)
    # Only now, when Triton has been imported for compilation.
    sys.path.append(str(ROOT / "tests" / "kernels"))
    from accuracy_table import results
    from cases import KINDS, make_problem

    with emulator.serving_launches():
        for shape in SHAPES:
            for kind in KINDS:
                problem = make_problem(*shape, dtype=torch.float32, kind=kind)
                results(problem, "triton", STRENGTH, 0.5)
                training_step(problem, kind)
    return dict(emulator.errors)


def training_step(problem: Any, kind: str) -> None:
    """The loss with the updates of its state."""
    from plsp_kernels import SemanticUpperBoundLoss

    (num_unlabeled, num_classes), num_features = problem.candidates.shape, problem.weight.shape[1]
    criterion = SemanticUpperBoundLoss(num_unlabeled, num_classes, num_features, covariance=kind, impl="triton")
    # Statistics of earlier batches: those of one batch alone may be exactly zero, and errors are relative.
    criterion.covariance.covariance.copy_(problem.covariance)
    criterion.covariance.count.fill_(3)
    criterion(
        problem.labeled_logits,
        problem.weak_logits,
        problem.strong_logits,
        problem.weight,
        problem.labels,
        problem.candidates,
        labeled_features=problem.weight[problem.labels],
        index=torch.arange(num_unlabeled),
        strength=STRENGTH,
    )


def table() -> str:
    columns = {f"{target}{name}": measure(target, mode) for target in TARGETS for name, mode in MODES.items()}
    lines = ["| kernel | " + " | ".join(columns) + " |", "|---|" + "--:|" * len(columns)]
    for kernel in sorted(set().union(*columns.values())):
        entries = [f"{errors[kernel]:.1e}" if errors[kernel] else "0" for errors in columns.values()]
        lines.append(f"| {kernel} | " + " | ".join(entries) + " |")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description="Rounding errors of the kernels as compiled PTX.")
    parser.add_argument("--write", action="store_true", help="write the table into docs/compiled-code.md")
    found = parser.parse_args()
    text = table()
    print(text, end="")
    if found.write:
        document = DOCUMENT.read_text(encoding="utf-8")
        DOCUMENT.write_text(TABLE.sub(lambda _: text, document), encoding="utf-8")


if __name__ == "__main__":
    main()
