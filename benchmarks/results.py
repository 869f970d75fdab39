"""Rows in `benchmarks/results/<machine>.csv`. Every run appends its rows with versions and hardware."""

import csv
import io
import os
import platform
import re
import subprocess
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch

from benchmarks.measure import Row
from plsp_train.files import write_atomically

FOLDER = Path(__file__).parent / "results"


def hardware(device: torch.device) -> str:
    """Name of the hardware, for example 'Intel Xeon, 2 threads'."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{_cpu_name()}, {torch.get_num_threads()} threads"


def _cpu_name() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        match = re.search(r"^model name\s*:\s*(.+)$", cpuinfo.read_text(), re.MULTILINE)
        if match:
            return re.sub(r"\((R|TM)\)| (Processor|CPU)\b.*$", "", match[1]).strip()
    return platform.processor() or platform.machine()


def csv_path(device: torch.device, folder: Path = FOLDER) -> Path:
    name = re.sub(r"[^a-z0-9]+", "-", hardware(device).lower()).strip("-")
    return folder / f"{name}.csv"


def environment(device: torch.device) -> Row:
    """Columns shared by all rows of a run."""
    return {
        "run": datetime.now(timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ"),
        "commit": _commit(),
        "hardware": hardware(device),
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "triton": _triton_version(),
    }


def _commit() -> str:
    """Measured commit, with a + if the work tree is dirty; empty outside a clone."""
    command = ["git", "describe", "--always", "--abbrev=10", "--dirty=+", "--exclude=*"]
    try:
        found = subprocess.run(command, cwd=Path(__file__).parent, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return ""
    return found.stdout.strip()


def _triton_version() -> str:
    try:
        import triton
    except ImportError:
        return ""
    return triton.__version__


def read(path: Path) -> list[dict[str, str]]:
    if not path.exists():
        return []
    with open(path, newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def append(path: Path, rows: list[Row]) -> None:
    """Append the rows; new columns stay empty in older rows."""
    path.parent.mkdir(parents=True, exist_ok=True)
    together: list[dict[str, Any]] = [*read(path), *rows]
    names = list(dict.fromkeys(name for row in together for name in row))
    text = io.StringIO()
    writer = csv.DictWriter(text, names, restval="", lineterminator="\n")
    writer.writeheader()
    writer.writerows(together)
    write_atomically(path, text.getvalue().encode())
