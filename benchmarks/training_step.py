"""Where a training step of plsp_train spends its time.

    python -m benchmarks.training_step                  # digits
    python -m benchmarks.training_step --dataset fmnist

Parts are timed where they are called, so only on a CPU, where a call returns when its work is done.
"""

import argparse
import functools
import tempfile
import time
from collections import defaultdict
from pathlib import Path
from typing import Any
from unittest import mock

import torch

import plsp_kernels.ops.class_gram
import plsp_kernels.ops.upper_bound
import plsp_train.methods.plsp
from plsp_train.config import build_config
from plsp_train.data import DATASETS, load_dataset
from plsp_train.engine import Engine, draw_candidates
from plsp_train.report import Reporter

STAGE, EPOCH = "train", 1


def timed(owner: Any, name: str, part: str, seconds: dict[str, float]) -> Any:
    """A patch under which the function adds its time to the part."""
    function = getattr(owner, name)

    @functools.wraps(function)
    def wrapper(*args: Any, **options: Any) -> Any:
        start = time.perf_counter()
        result = function(*args, **options)
        seconds[part] += time.perf_counter() - start
        return result

    return mock.patch.object(owner, name, wrapper)


def measure(engine: Engine, steps: int) -> dict[str, float]:
    """Mean seconds of each part and of the whole step."""
    method: Any = engine.method
    method.start_epoch(STAGE, EPOCH)
    engine.model.train()
    for _ in range(5):
        engine._step(STAGE, EPOCH)
    seconds: dict[str, float] = defaultdict(float)
    patches = [
        timed(engine.augmentation, "weak", "augmentation", seconds),
        timed(engine.augmentation, "strong", "augmentation", seconds),
        timed(engine.model, "features", "network, forward", seconds),
        timed(plsp_train.methods.plsp, "semantic_upper_bound_loss", "semantic loss, forward", seconds),
        timed(plsp_kernels.ops.upper_bound, "log_odds_backward", "semantic loss, backward", seconds),
        timed(plsp_kernels.ops.class_gram, "class_gram_backward", "semantic loss, backward", seconds),
        timed(method.covariance, "update", "covariance update", seconds),
        timed(method.curriculum, "update", "threshold update", seconds),
        timed(engine.optimizer, "step", "optimiser", seconds),
    ]
    for patch in patches:
        patch.start()
    start = time.perf_counter()
    for _ in range(steps):
        engine._step(STAGE, EPOCH)
    total = time.perf_counter() - start
    mock.patch.stopall()
    seconds["rest, mostly the network's backward"] = total - sum(seconds.values())
    return {part: value / steps for part, value in seconds.items()} | {"step": total / steps}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.training_step", description=__doc__.split("\n")[0])
    parser.add_argument("--dataset", choices=DATASETS, default="digits")
    parser.add_argument("--data-root", default="data")
    parser.add_argument("--steps", type=int, default=100)
    arguments = parser.parse_args()
    config = build_config({"dataset": arguments.dataset, "data_root": arguments.data_root, "device": "cpu"})
    data = load_dataset(config.dataset, config.data_root)
    with tempfile.TemporaryDirectory() as folder:
        engine = Engine(config, data, draw_candidates(config, data), Path(folder), Reporter())
        parts = measure(engine, arguments.steps)
    print(f"{config.dataset}, {config.model}, torch {torch.__version__}, {torch.get_num_threads()} threads")
    for part, value in parts.items():
        print(f"{part:<38}{1e3 * value:8.2f} ms {value / parts['step']:8.1%}")


if __name__ == "__main__":
    main()
