"""Small runs on the digits, in this process or in one of their own."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from plsp_train.cli import main

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


def metrics(out: Path) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return [{name: value for name, value in line.items() if name not in _CLOCK} for line in lines]
