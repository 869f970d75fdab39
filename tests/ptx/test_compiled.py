"""A part of `make ptx`: Triton kernels as compiled PTX, each target in a process of its own.

This process has imported Triton for the interpreter, if at all.
"""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", minversion="3.5")

ROOT = Path(__file__).parents[2]
PARTS = ("", "_step", "_cross_entropy", "_state", "_tuning")
KERNEL_TESTS = [f"tests/kernels/test_triton{part}.py" for part in PARTS]
# One test in float32 of every launcher; the other dtypes and shapes are left to `make ptx`.
STATE = "(not_finite and few) or (curriculum_update and sets and 64) or thresholds_have"
SELECTION = f"small_kernels or (plain_float32 and dtype0) or first_tiling or {STATE}"
KERNELS = {
    name
    for path in (ROOT / "plsp_kernels" / "triton_impl").glob("*.py")
    for name in re.findall(r"^def _(\w+)_kernel\(", path.read_text(encoding="utf-8"), re.MULTILINE)
}


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {"PYTHONPATH": "tests/ptx", "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, "-m", "pytest", "-p", "emulator.plugin", "-p", "no:cacheprovider", *arguments]
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)


@pytest.mark.aot
@pytest.mark.parametrize(
    ("target", "mode"), [("sm_80", ["--ptx-pessimistic"]), ("sm_90", ["--ptx-warps", "descending"])]
)
def test_kernels_are_right_as_compiled_code(target: str, mode: list[str]) -> None:
    result = run("--ptx-target", target, *mode, "-k", SELECTION, "tests/ptx/small_kernels.py", *KERNEL_TESTS)
    assert result.returncode == 0, result.stdout + result.stderr
    assert f"executed as PTX of {target}" in result.stdout
    assert len(KERNELS) > 20
    assert set(re.findall(r"^_(\w+)_kernel: \d+ launches", result.stdout, re.MULTILINE)) >= KERNELS


@pytest.mark.aot
def test_wrong_kernel_fails_and_names_the_access(tmp_path: Path) -> None:
    """A load one element too far is found although that element exists in memory."""
    wrong = tmp_path / "test_wrong.py"
    wrong.write_text(
        "import torch, triton\n"
        "import triton.language as tl\n\n"
        "@triton.jit\n"
        "def _shift_kernel(x_ptr, y_ptr, BLOCK: tl.constexpr):\n"
        "    i = tl.arange(0, BLOCK)\n"
        "    tl.store(y_ptr + i, tl.load(x_ptr + i + 1))\n\n"
        "def test_shift():\n"
        "    x, y = torch.zeros(64), torch.zeros(64)\n"
        "    _shift_kernel[(1,)](x, y, BLOCK=64)\n",
        encoding="utf-8",
    )
    result = run("--ptx-target", "sm_80", "--rootdir", str(tmp_path), str(wrong))
    assert result.returncode == 1, result.stdout + result.stderr
    assert re.search(r"_shift_kernel at `[^`]*ld\.global[^`]*` \(line \d+, test_wrong\.py:7\)", result.stdout)
    assert "bytes past the end of x_ptr" in result.stdout
