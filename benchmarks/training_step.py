"""Where a training step of plsp_train spends its time, beside the same trainer with eager parts.

    python -m benchmarks.training_step --dataset fmnist --data-root data

The eager trainer computes the loss by the reference and augments image by image with torchvision. Both take turns.
Parts are timed where they are called, so only on a CPU, where a call returns when its work is done. Rows are appended
to benchmarks/results/<machine>.csv.
"""

import argparse
import functools
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor

import plsp_train.methods.plsp
from benchmarks import results
from benchmarks.measure import Row
from benchmarks.per_image import PerImageAugmentation
from benchmarks.timing import TURNS
from plsp_kernels import SemanticLoss
from plsp_train.config import build_config
from plsp_train.data import AUGMENT_POLICIES, IndexSampler, TrainTestData, load_dataset
from plsp_train.engine import Engine, draw_candidates
from plsp_train.report import Reporter

STAGE, EPOCH = "train", 1
PARTS = ("data", "augmentation", "network", "loss", "state", "optimiser", "rest")
OURS, EAGER = "plsp_train", "eager loss, image by image"


@contextmanager
def timed(part: str, seconds: dict[str, float]) -> Iterator[None]:
    start = time.perf_counter()
    yield
    seconds[part] += time.perf_counter() - start


def timed_method(owner: Any, name: str, part: str, seconds: dict[str, float]) -> Any:
    """A patch under which the function adds its time to the part."""
    function = getattr(owner, name)

    @functools.wraps(function)
    def wrapper(*args: Any, **options: Any) -> Any:
        with timed(part, seconds):
            return function(*args, **options)

    return mock.patch.object(owner, name, wrapper)


def timed_loss(seconds: dict[str, float]) -> Any:
    """A patch under which the loss is differentiated at once, so that its backward is timed apart from the network's.

    What it returns has the same gradients: the scalar product of each input with its gradient.
    """
    function = plsp_train.methods.plsp.semantic_upper_bound_loss

    def wrapper(*args: Tensor, **options: Any) -> SemanticLoss:
        inputs, others = args[:4], args[4:]
        leaves = [tensor.detach().requires_grad_() for tensor in inputs]
        with timed("loss", seconds):
            loss = function(*leaves, *others, **options)
            gradients = torch.autograd.grad(loss.total, leaves)
        products = [(tensor * gradient).sum() for tensor, gradient in zip(inputs, gradients, strict=True)]
        return loss._replace(total=torch.stack(products).sum())

    return mock.patch.object(plsp_train.methods.plsp, "semantic_upper_bound_loss", wrapper)


def time_parts(engine: Engine, steps: int) -> dict[str, float]:
    """Mean seconds of each part of a step."""
    method: Any = engine.method
    seconds: dict[str, float] = defaultdict(float)
    with ExitStack() as patches:
        for patch in (
            timed_method(IndexSampler, "__next__", "data", seconds),
            timed_method(engine.augmentation, "weak", "augmentation", seconds),
            timed_method(engine.augmentation, "strong", "augmentation", seconds),
            timed_method(engine.model, "features", "network", seconds),
            timed_method(torch.Tensor, "backward", "network", seconds),
            timed_loss(seconds),
            timed_method(method.covariance, "update", "state", seconds),
            timed_method(method.curriculum, "update", "state", seconds),
            timed_method(engine.optimizer, "step", "optimiser", seconds),
        ):
            patches.enter_context(patch)
        start = time.perf_counter()
        run_steps(engine, steps)
        total = time.perf_counter() - start
    seconds["rest"] = total - sum(seconds.values())
    return {part: seconds[part] / steps for part in PARTS}


def run_steps(engine: Engine, steps: int) -> int:
    """The number of images of the last step."""
    for _ in range(steps):
        step = engine._step(STAGE, EPOCH)
    return step.num_images


def build(name: str, data: TrainTestData, data_root: str, folder: str) -> Engine:
    impl = "torch" if name == OURS else "reference"
    config = build_config({"dataset": data.name, "data_root": data_root, "device": "cpu", "impl": impl})
    engine = Engine(config, data, draw_candidates(config, data), Path(folder), Reporter())
    if name == EAGER:
        engine.augmentation = engine.method.task.augmentation = PerImageAugmentation(data, torch.channels_last)
    engine.method.start_epoch(STAGE, EPOCH)
    engine.model.train()
    return engine


def measure(data: TrainTestData, data_root: str, steps: int) -> list[Row]:
    names = (OURS, EAGER) if data.name in AUGMENT_POLICIES else (OURS,)
    whole: dict[str, list[float]] = {name: [] for name in names}
    parts: dict[str, list[dict[str, float]]] = {name: [] for name in names}
    images = {}
    with tempfile.TemporaryDirectory() as folder:
        engines = {name: build(name, data, data_root, folder) for name in names}
        for _ in range(TURNS):
            for name, engine in engines.items():
                images[name] = run_steps(engine, 2)
                start = time.perf_counter()
                run_steps(engine, steps)
                whole[name].append((time.perf_counter() - start) / steps)
                parts[name].append(time_parts(engine, steps))
    medians = {name: statistics.median(values) for name, values in whole.items()}
    return [
        {
            "case": "training_step",
            "name": data.name,
            "subject": name,
            "step_ms": round(1e3 * medians[name], 3),
            "step_low_ms": round(1e3 * min(whole[name]), 3),
            "step_high_ms": round(1e3 * max(whole[name]), 3),
            "step_calls": TURNS * steps,
            "images_per_second": round(images[name] / medians[name]),
            **{f"{part}_ms": round(1e3 * statistics.median(turn[part] for turn in parts[name]), 3) for part in PARTS},
            "times_faster_than_reference": round(medians[EAGER] / medians[name], 3) if EAGER in medians else "",
        }
        for name in names
    ]


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.training_step",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--dataset", choices=AUGMENT_POLICIES, default="digits")
    parser.add_argument("--data-root", default="data", help="folder of the data sets")
    parser.add_argument("--steps", type=int, default=20, help="steps of a turn")
    arguments = parser.parse_args()
    try:
        data = load_dataset(arguments.dataset, arguments.data_root)
    except (ValueError, OSError, ImportError) as error:
        print(f"benchmarks.training_step: error: {error}", file=sys.stderr)
        return 2
    device = torch.device("cpu")
    shared = results.environment(device)
    print(f"{data.name}; {shared['hardware']}, torch {shared['torch']}")
    found = measure(data, arguments.data_root, arguments.steps)
    for row in found:
        print(f"{row['subject']}: {row['step_ms']} ms a step, {row['images_per_second']:,} images/s")
        total = sum(row[f"{part}_ms"] for part in PARTS)
        for part in PARTS:
            print(f"  {part:<14}{row[f'{part}_ms']:>10.3f} ms {row[f'{part}_ms'] / total:>8.1%}")
    results.append(results.csv_path(device), [shared | row for row in found])
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
