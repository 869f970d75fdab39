"""Ahead-of-time compilation of every kernel at the shapes of the training presets, without a GPU."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", minversion="3.5")

from benchmarks.gpu_static.calls import FUNCTIONS

FOLDER = Path(__file__).parent
PRESETS = ("fmnist", "cifar10", "cifar100")
KERNELS = {
    "class_activation",
    "preparation",
    "class_gram",
    "class_gram alone",
    "class_gram_backward",
    "class_gram_backward diagonal",
    "product_gram diagonal",
    "pair",
    "row_loss",
    "totals",
    "covariance_update",
    "mean_update",
    "mean_update diagonal",
    "curriculum_thresholds",
    "curriculum_update",
    "log_odds",
    "logits_gradient",
    "gram_gradient",
    "probit",
    "label_groups",
    "full_columns",
    "diagonal_columns",
    "label_rows",
    "label_column_gradient",
    "label_weight_gradient",
    "label_weight_gradient diagonal",
    "cross_entropy_totals",
}


def run_python(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    # A subprocess, because this process may have decorated the kernels for the interpreter.
    inherited = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, *arguments]
    return subprocess.run(command, env=inherited | environment, capture_output=True, text=True, check=False)


def compile_float32(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return run_python("-m", "benchmarks.gpu_static", "--dtype", "float32", *arguments, **environment)


@pytest.mark.aot
@pytest.mark.parametrize("target", ["sm_80", "sm_90", "gfx942"])
def test_every_kernel_compiles_without_spilling_registers_at_every_preset(target: str) -> None:
    result = compile_float32("--target", target, "--shape", *PRESETS)
    assert result.returncode == 0, result.stdout + result.stderr
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in result.stdout.splitlines() if " · " in line]
    compiled = {(row[0], preset) for row in rows if len(row) == 5 for preset in row[1].split()}
    assert compiled == {(kernel, preset) for kernel in KERNELS for preset in PRESETS}
    assert "spilled" not in result.stdout


@pytest.mark.aot
def test_kernels_beyond_one_gram_tile_compile_without_spilling_registers() -> None:
    result = compile_float32("--target", "sm_80", "--shape", "large")
    assert result.returncode == 0, result.stdout + result.stderr
    assert "spilled" not in result.stdout
    assert "| product |" in result.stdout
    assert "| product_gram |" in result.stdout


@pytest.mark.aot
def test_compiling_in_interpreter_mode_is_an_error() -> None:
    result = compile_float32("--target", "sm_80", "--shape", "fmnist", TRITON_INTERPRET="1")
    assert result.returncode == 2
    assert "TRITON_INTERPRET" in result.stderr


@pytest.mark.aot
@pytest.mark.parametrize("target", ["sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_120", "gfx90a", "gfx942"])
def test_products_of_every_pair_of_dtypes_compile(target: str) -> None:
    result = run_python(str(FOLDER / "compile_dtypes.py"), target, PYTHONPATH=str(FOLDER.parents[1]))
    assert result.returncode == 0, result.stderr
    assert int(result.stdout) == 62


@pytest.mark.aot
def test_batch_sizes_share_one_binary_of_each_kernel() -> None:
    result = run_python(str(FOLDER / "count_binaries.py"), PYTHONPATH=str(FOLDER.parents[1]))
    assert result.returncode == 0, result.stderr
    counts = json.loads(result.stdout)
    assert counts == dict.fromkeys(counts, 1)
    assert {name.partition(",")[0] for name in counts} == set(FUNCTIONS)
    assert {name.partition(": ")[2] for name in counts} == KERNELS
