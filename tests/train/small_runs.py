"""Small runs on the digits, in this process or in their own."""

import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from plsp_train.cli import main
from plsp_train.config import build_config
from plsp_train.data import (
    Split,
    TrainTestData,
    build_augmentation,
    load_benchmark,
    published_statistics,
    split_source,
)
from plsp_train.engine import Engine
from plsp_train.methods import Iteration, Task
from plsp_train.models import build_model
from plsp_train.preparation import load_source, prepare

SMALL = [
    *("--pretrain-epochs", "1"),
    *("--epochs", "3"),
    *("--iterations", "6"),
    *("--pretrain-batch", "256"),
    *("--labeled-batch", "16"),
    *("--unlabeled-batch", "48"),
]
_CLOCK = ("seconds", "images_per_second")  # may differ between equal runs


def run(out: Path, *arguments: str) -> int:
    return main([*SMALL, "--out", str(out), *arguments])


def run_interrupted(out: Path, *arguments: str, steps: int = 3) -> None:
    """A run that is stopped by a signal in that step of its second training epoch."""
    step = Engine._step

    def with_signal(self: Engine, stage: str, epoch: int) -> Iteration:
        if (stage, epoch, self.steps_done + 1) == ("train", 2, steps):
            self.stop_signal = signal.SIGINT
        return step(self, stage, epoch)

    with mock.patch.object(Engine, "_step", with_signal):
        assert run(out, *arguments) == 130
    assert torch.load(out / "checkpoint.pt", weights_only=True)["steps_done"] == steps


def start(out: Path, *arguments: str) -> "subprocess.Popen[str]":
    command = [sys.executable, "-m", "plsp_train", *SMALL, "--out", str(out), *arguments]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def digits() -> TrainTestData:
    return split_source(load_benchmark("digits", Path()), Split(), statistics=published_statistics("digits", "paper"))


def digits_task(**given: object) -> Task:
    config = build_config({"dataset": "digits", **given})
    data, candidates = prepare(config, load_source({"dataset": "digits"}))
    torch.manual_seed(0)
    return Task(
        config=config,
        model=build_model("mlp", data.input_shape, data.num_classes),
        inputs=data.train_inputs,
        candidates=candidates,
        true_labels=data.train_labels,
        augmentation=build_augmentation(data),
        generator=torch.Generator().manual_seed(1),
    )


def metrics(out: Path) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return [{name: value for name, value in line.items() if name not in _CLOCK} for line in lines]
