"""Small runs on the digits, in this process or in one of their own."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

from plsp_train.cli import main
from plsp_train.config import build_config
from plsp_train.data import build_augmentation, load_dataset
from plsp_train.engine import draw_candidates
from plsp_train.methods import Task
from plsp_train.models import build_model

SMALL = [
    *("--pretrain-epochs", "1"),
    *("--epochs", "3"),
    *("--iterations", "6"),
    *("--pretrain-batch", "256"),
    *("--labeled-batch", "16"),
    *("--unlabeled-batch", "48"),
]
_CLOCK = ("seconds", "images_per_second")  # what may differ between two runs of the same numbers


def run(out: Path, *arguments: str) -> int:
    return main([*SMALL, "--out", str(out), *arguments])


def start(out: Path, *arguments: str) -> "subprocess.Popen[str]":
    command = [sys.executable, "-m", "plsp_train", *SMALL, "--out", str(out), *arguments]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def digits_task(**given: object) -> Task:
    config = build_config({"dataset": "digits", **given})
    data = load_dataset("digits")
    torch.manual_seed(0)
    return Task(
        config=config,
        model=build_model("mlp", data.input_shape, data.num_classes),
        inputs=data.train_inputs,
        candidates=draw_candidates(config, data),
        true_labels=data.train_labels,
        augmentation=build_augmentation(data),
        generator=torch.Generator().manual_seed(1),
    )


def metrics(out: Path) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return [{name: value for name, value in line.items() if name not in _CLOCK} for line in lines]
