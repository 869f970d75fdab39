"""Run the tests and the benchmark on a GPU, count launches, time every kernel, and write one file to send.

    python -m benchmarks.gpu_check                       # writes build/gpu-check.json

Without a GPU it does nothing and exits with code 2. Whatever fails, the file is written all the same, with the error
in place of the missing section, and the exit code is 1.
"""

import argparse
import json
import subprocess
import sys
import traceback
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from benchmarks import results
from benchmarks.problem import STRENGTH, Problem
from benchmarks.shapes import SHAPES, Shape
from benchmarks.subjects import NUM_INSTANCES
from plsp_kernels import SemanticUpperBoundLoss
from plsp_train.files import write_atomically

ROOT = Path(__file__).parent.parent
OUT = ROOT / "build" / "gpu-check.json"
TESTS = ("pytest", "-q", "-m", "not aot", "tests/kernels", "tests/test_launches.py")
BENCHMARK = ("benchmarks", "--device", "cuda")
STEPS = 20


def run(module: str, *arguments: str) -> dict[str, Any]:
    """Run a module of Python in the checkout, showing its output; returns command, exit code and output."""
    command = [sys.executable, "-m", module, *arguments]
    print("$", *command, flush=True)
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert process.stdout is not None
    lines = []
    for line in process.stdout:
        print(line, end="", flush=True)
        lines.append(line)
    return {"command": " ".join(["python", *command[1:]]), "exit_code": process.wait(), "output": "".join(lines)}


def kernel_times(shape: Shape, device: torch.device) -> list[dict[str, Any]]:
    """Kernels of one training step in float32: launches per step and mean time of a launch, by the profiler."""
    problem, num_classes = Problem(shape, device), shape.num_classes
    criterion = SemanticUpperBoundLoss(NUM_INSTANCES, num_classes, shape.num_features, covariance=shape.covariance)
    criterion.to(device)
    logits = problem.labeled, problem.weak, problem.strong
    index = torch.arange(shape.num_unlabeled, device=device)

    def step() -> None:
        for leaf in (*logits, problem.weight):
            leaf.grad = None
        loss = criterion(
            *(*logits, problem.weight, problem.labels, problem.candidates),
            labeled_features=problem.features,
            index=index,
            strength=STRENGTH,
        )
        loss.total.backward()

    for _ in range(3):  # compiles the kernels
        step()
    torch.cuda.synchronize(device)
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        for _ in range(STEPS):
            step()
        torch.cuda.synchronize(device)
    return [
        {
            "kernel": event.key,
            "launches_per_step": event.count / STEPS,
            "microseconds": event.device_time_total / event.count,
        }
        for event in profiler.key_averages()
        if event.device_type == DeviceType.CUDA
    ]


def counted_launches() -> dict[str, Any]:
    """Launches of the loss and of a step by shape and dtype, as `python -m benchmarks.launches` counts them."""
    from benchmarks.launches import DTYPES, launches_of  # needs triton, which a machine without a GPU may lack

    return {
        name: {
            dtype: {part: launches.counts() for part, launches in launches_of(shape, dtype).items()} for dtype in DTYPES
        }
        for name, shape in SHAPES.items()
    }


def attempt(section: Callable[[], Any]) -> Any:
    """The section, or the error in its place: one failure must not cost the results of everything else."""
    try:
        return section()
    except Exception as error:
        traceback.print_exc()
        return {"error": f"{type(error).__name__}: {error}"}


def check(device: torch.device) -> dict[str, Any]:
    """All sections of the report."""
    return {
        "environment": results.environment(device),
        "tests": run(*TESTS),
        "benchmark": run(*BENCHMARK),
        "launches_counted": attempt(counted_launches),
        "kernels_timed": {name: attempt(partial(kernel_times, shape, device)) for name, shape in SHAPES.items()},
        "benchmark_rows": results.read(results.csv_path(device)),
    }


def succeeded(report: dict[str, Any]) -> bool:
    """Whether both commands ended well and no section is an error."""
    sections = report["launches_counted"], *report["kernels_timed"].values()
    failed = any(isinstance(section, dict) and "error" in section for section in sections)
    return not failed and report["tests"]["exit_code"] == report["benchmark"]["exit_code"] == 0


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu_check",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--out", type=Path, default=OUT, help="file to write (default: build/gpu-check.json)")
    options = parser.parse_args(arguments)
    if not torch.cuda.is_available():
        print("gpu_check: error: torch found no GPU; run this on a machine with one", file=sys.stderr)
        return 2
    report = check(torch.device("cuda"))
    options.out.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(options.out, json.dumps(report, indent=2).encode())
    print(f"wrote {options.out}; please send this file")
    return 0 if succeeded(report) else 1


if __name__ == "__main__":
    raise SystemExit(main())
