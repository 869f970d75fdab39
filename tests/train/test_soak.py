"""A short run of each of the two long tests: `make soak` and `make fuzz` are the whole ones."""

import os
import subprocess
import sys
from pathlib import Path


def _run(script: str, *options: str) -> str:
    command = [sys.executable, str(Path(__file__).with_name(script)), *options]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr
    return ended.stdout


def test_killed_runs_end_like_undisturbed_ones() -> None:
    options = ("--kills", "10", "--torchrun-kills", "0", "--methods", "plsp,proden")
    assert _run("soak.py", *options).startswith("10 kills ")


def test_broken_files_are_refused_in_one_line() -> None:
    assert _run("fuzz.py", "--inputs", "500", "--no-bombs").endswith("findings 0\n")
