"""Profile a training step of plsp_train against the same trainer with eager parts.

    python -m benchmarks.training_step --dataset fmnist --data-root data

The eager trainer uses the reference loss, per-image torchvision augmentation and PyTorch's convolutions. Both trainers
are timed interleaved. Parts are timed around their calls, which is valid only on a CPU, where calls are synchronous.
Appends rows to benchmarks/results/<machine>.csv.
"""

import argparse
import functools
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from benchmarks import results
from benchmarks.measure import Row
from benchmarks.per_image import PerImageAugmentation
from benchmarks.timing import TURNS
from plsp_kernels import SemanticLoss, SemanticUpperBoundLoss
from plsp_train.config import build_config
from plsp_train.console import SilentReporter
from plsp_train.data import IndexSampler, Source
from plsp_train.engine import Engine
from plsp_train.models import native
from plsp_train.preparation import load_source, prepare

STAGE, EPOCH = "train", 1
PARTS = ("data", "augmentation", "network", "loss", "state", "optimiser", "rest")
OURS, EAGER = "plsp_train", "eager loss, image by image"


@contextmanager
def timed(part: str, seconds: dict[str, float]) -> Iterator[None]:
    start = time.perf_counter()
    yield
    seconds[part] += time.perf_counter() - start


def timed_method(owner: Any, name: str, part: str, seconds: dict[str, float]) -> Any:
    """Patch the function so that it adds its time to the part."""
    function = getattr(owner, name)

    @functools.wraps(function)
    def wrapper(*args: Any, **options: Any) -> Any:
        with timed(part, seconds):
            return function(*args, **options)

    return mock.patch.object(owner, name, wrapper)


def timed_loss(module: SemanticUpperBoundLoss, seconds: dict[str, float]) -> Any:
    """Patch the module's forward to time the state updates and the loss separately.

    The loss is differentiated immediately, so that its backward is timed separately from that of the network. The patch
    returns the sum of each input times its gradient, which has the same gradients.
    """
    function: Any = module.forward

    def wrapper(*args: Tensor, labeled_features: Tensor, index: Tensor, **options: Any) -> SemanticLoss:
        inputs, (labels, candidates) = args[:4], args[4:]
        leaves = [tensor.detach().requires_grad_() for tensor in inputs]
        with timed("state", seconds):
            module.covariance.update(labeled_features.detach(), labels)
        module.eval()  # computes the loss only; the updates are timed around it
        with timed("loss", seconds):
            loss = function(
                *leaves, labels, candidates, labeled_features=labeled_features.detach(), index=index, **options
            )
            gradients = torch.autograd.grad(loss.total, leaves)
        module.train()
        with timed("state", seconds):
            module.record(index, loss, candidates)
        products = [(tensor * gradient).sum() for tensor, gradient in zip(inputs, gradients, strict=True)]
        return loss._replace(total=torch.stack(products).sum())

    return mock.patch.object(module, "forward", wrapper)


def time_parts(engine: Engine, steps: int) -> dict[str, float]:
    """Return the mean seconds of each part of a step."""
    method: Any = engine.method
    seconds: dict[str, float] = defaultdict(float)
    with ExitStack() as patches:
        for patch in (
            timed_method(IndexSampler, "__next__", "data", seconds),
            timed_method(engine.augmentation, "weak", "augmentation", seconds),
            timed_method(engine.augmentation, "strong", "augmentation", seconds),
            timed_method(engine.model, "features", "network", seconds),
            timed_method(torch.Tensor, "backward", "network", seconds),
            timed_loss(method.loss, seconds),
            timed_method(engine.optimizer, "step", "optimiser", seconds),
        ):
            patches.enter_context(patch)
        start = time.perf_counter()
        run_steps(engine, steps)
        total = time.perf_counter() - start
    seconds["rest"] = total - sum(seconds.values())
    return {part: seconds[part] / steps for part in PARTS}


def run_steps(engine: Engine, steps: int) -> int:
    """Run the steps and return the number of images of the last one."""
    for _ in range(steps):
        step = engine._step(STAGE, EPOCH)
    return step.num_images


def build(name: str, source: Source, data_root: str, folder: str) -> Engine:
    impl = "auto" if name == OURS else "reference"
    config = build_config({"dataset": source.name, "data_root": data_root, "device": "cpu", "impl": impl})
    data, candidates = prepare(config, source)
    engine = Engine(config, data, candidates, Path(folder), SilentReporter())
    if name == EAGER:
        engine.augmentation = engine.method.task.augmentation = PerImageAugmentation(data, torch.channels_last)
    engine.method.start_epoch(STAGE, EPOCH)
    engine.model.train()
    return engine


def measure(source: Source, data_root: str, steps: int) -> list[Row]:
    names = (OURS, EAGER) if source.is_image else (OURS,)
    whole: dict[str, list[float]] = {name: [] for name in names}
    parts: dict[str, list[dict[str, float]]] = {name: [] for name in names}
    images = {}
    with tempfile.TemporaryDirectory() as folder:
        engines = {name: build(name, source, data_root, folder) for name in names}
        for _ in range(TURNS):
            for name, engine in engines.items():
                with mock.patch.object(native, "VERSIONS", ()) if name == EAGER else nullcontext():
                    images[name] = run_steps(engine, 2)
                    start = time.perf_counter()
                    run_steps(engine, steps)
                    whole[name].append((time.perf_counter() - start) / steps)
                    parts[name].append(time_parts(engine, steps))
    medians = {name: statistics.median(values) for name, values in whole.items()}
    return [
        {
            "case": "training_step",
            "name": source.name,
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
    parser.add_argument("--dataset", choices=("digits", "fmnist", "cifar10", "cifar100"), default="digits")
    parser.add_argument("--data-root", default="data", help="directory of the data sets")
    parser.add_argument("--steps", type=int, default=20, help="steps per turn")
    arguments = parser.parse_args()
    try:
        source = load_source({"dataset": arguments.dataset, "data_root": arguments.data_root})
    except (ValueError, OSError, ImportError) as error:
        print(f"benchmarks.training_step: error: {error}", file=sys.stderr)
        return 2
    device = torch.device("cpu")
    shared = results.environment(device)
    print(f"{source.name}; {shared['hardware']}, torch {shared['torch']}")
    found = measure(source, arguments.data_root, arguments.steps)
    for row in found:
        print(f"{row['subject']}: {row['step_ms']} ms per step, {row['images_per_second']:,} images/s")
        total = sum(row[f"{part}_ms"] for part in PARTS)
        for part in PARTS:
            print(f"  {part:<14}{row[f'{part}_ms']:>10.3f} ms {row[f'{part}_ms'] / total:>8.1%}")
    results.append(results.csv_path(device), [shared | row for row in found])
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
