"""The examples for several processes, shortened, on two of them."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parent.parent / "examples"
RANKS, EPOCHS, ITERATIONS = 2, 10, 20

DRIVER = f"""
import runpy, sys
sys.path.insert(0, {str(EXAMPLES)!r})
import digits
digits.EPOCHS, digits.ITERATIONS = {EPOCHS}, {ITERATIONS}
runpy.run_path(sys.argv[1], run_name="__main__")
"""


@pytest.mark.parametrize(("name", "needs"), [("ddp.py", "torch"), ("with_accelerate.py", "accelerate")])
def test_processes_learn_together_and_hold_the_same_state(tmp_path: Path, name: str, needs: str) -> None:
    pytest.importorskip(needs)
    (tmp_path / "driver.py").write_text(DRIVER)
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(RANKS)]
    environment = {**os.environ, "ACCELERATE_USE_CPU": "1", "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*launcher, "driver.py", str(EXAMPLES / name)], cwd=tmp_path, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    *_, score = [line for line in done.stdout.splitlines() if "micro-F1" in line]
    assert float(score.rpartition(" ")[2]) > 0.7
    states = [line for line in done.stdout.splitlines() if line.startswith("covariances")]
    assert len(states) == RANKS
    assert len(set(states)) == 1
    assert f"of {EPOCHS * ITERATIONS * 64} features" in states[0], "of all processes"
