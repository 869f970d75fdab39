"""The real compilers on every kernel, at the shapes of the training presets; no GPU is needed."""

import os
import subprocess
import sys

import pytest

pytest.importorskip("triton")

PRESETS = ("fmnist", "cifar10", "cifar100")
KERNELS = {
    "class_gram",
    "class_gram alone",
    "class_gram_backward",
    "class_gram_backward diagonal",
    "product_gram diagonal",
    "pair",
    "row_loss",
    "terms",
    "log_odds",
    "logits_gradient",
    "gram_gradient",
    "probit",
    "target_log_odds",
    "target_logits_gradient",
    "target_pair_gradient",
}


def compile_float32(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    # A process of its own: this one may have decorated the kernels for the interpreter.
    inherited = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "benchmarks.gpu_static", "--dtype", "float32", *arguments]
    return subprocess.run(command, env=inherited | environment, capture_output=True, text=True, check=False)


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
def test_compiling_is_refused_while_kernels_are_interpreted() -> None:
    result = compile_float32("--target", "sm_80", "--shape", "fmnist", TRITON_INTERPRET="1")
    assert result.returncode == 2
    assert "TRITON_INTERPRET" in result.stderr
