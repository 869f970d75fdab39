"""Compile every kernel ahead of time, without a GPU, and report what the compilers made of it.

    python -m plsp_kernels.triton_impl.aot --targets sm_80 sm_90 gfx942 --presets fmnist cifar10 cifar100

The launchers run once per preset on tensors without memory while a recorder stands in for `tiles.launch`, so block
sizes, argument types and divisibility are those of a real launch. The exit code is 1 if any kernel spills registers.
"""

import argparse
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, make_backend
from triton.runtime.jit import JITFunction, create_function_from_signature

from plsp_kernels import triton_impl
from plsp_kernels.triton_impl import tiles

TARGETS = {
    **{f"sm_{arch}": GPUTarget("cuda", arch, 32) for arch in (80, 86, 89, 90, 100, 120)},
    **{arch: GPUTarget("hip", arch, 64) for arch in ("gfx90a", "gfx942")},
}
DEFAULT_TARGETS = ("sm_80", "sm_90", "gfx942")
DTYPES = {"float32": torch.float32, "float64": torch.float64, "bfloat16": torch.bfloat16, "float16": torch.float16}


class Preset(NamedTuple):
    """The shapes of one training step."""

    num_labeled: int
    num_unlabeled: int
    num_classes: int
    num_features: int


PRESETS = {
    "fmnist": Preset(64, 256, 10, 84),
    "cifar10": Preset(64, 256, 10, 69),
    "cifar100": Preset(16, 64, 100, 512),
    "thousand": Preset(64, 64, 1000, 512),  # more classes than one tile of the Gram matrix
}
DEFAULT_PRESETS = ("fmnist", "cifar10", "cifar100")


@dataclass(frozen=True)
class Launch:
    """One recorded call of `tiles.launch`."""

    kernel: Any
    grid: tuple[int, ...]
    args: tuple[Any, ...]
    options: dict[str, Any]


@dataclass
class Compiled:
    """One kernel as compiled for one target."""

    kernel: str
    target: str
    dtype: str
    grids: dict[str, tuple[int, ...]]
    """The grid of the launch at each preset that uses this very binary."""
    num_warps: int
    num_stages: int
    constants: dict[str, Any]
    registers: int
    """Per thread; vector registers on AMD."""
    spill_bytes: int
    """Per thread."""
    shared_bytes: int
    assembly: str = field(repr=False)
    """PTX or AMDGCN text."""


def record(call: Callable[[], Any]) -> list[Launch]:
    """What a call of launchers would launch."""
    launches: list[Launch] = []

    def recorder(kernel: Any, grid: Sequence[int], *args: Any, **options: Any) -> None:
        launches.append(Launch(kernel, tuple(grid), args, options))

    with mock.patch.object(tiles, "launch", recorder):
        call()
    return launches


def run_all_launchers(preset: Preset, dtype: torch.dtype) -> None:
    """Every launcher once, on tensors without memory in the shapes of a training step."""
    num_labeled, num_unlabeled, num_classes, num_features = preset
    num_samples = num_labeled + num_unlabeled
    num_slots = min(num_samples, num_classes)

    def floats(*shape: int) -> Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    def integers(*shape: int) -> Tensor:
        return torch.empty(shape, dtype=torch.int64, device="meta")

    weight, classes, strength, beta = floats(num_classes, num_features), integers(num_slots), 0.01, 1.0
    for covariance in (floats(num_classes, num_features, num_features), floats(num_classes, num_features)):
        gram, product = triton_impl.class_gram(weight, covariance, classes, True)
        triton_impl.class_gram_backward(torch.empty_like(gram), weight, covariance, classes, product)

    rows, slots = floats(num_labeled + 2 * num_unlabeled, num_classes), integers(num_labeled + 2 * num_unlabeled)
    candidates = torch.empty(num_unlabeled, num_classes, dtype=torch.bool, device="meta")
    labels, thresholds = integers(num_labeled), torch.empty(num_classes, device="meta")
    _, odds, grad_odds, *_ = triton_impl.upper_bound(
        rows, gram, slots, labels, candidates, None, thresholds, strength, beta, True
    )
    triton_impl.log_odds(rows, gram, slots, strength)
    triton_impl.log_odds_backward(grad_odds, rows, odds, gram, slots, strength, True, True)
    triton_impl.probit_probabilities(rows, gram, slots, strength, beta)

    odds = triton_impl.target_log_odds(rows, gram, slots, slots, strength)
    triton_impl.target_log_odds_backward(odds, rows, odds, gram, slots, slots, strength, True, True)


def compile_all(
    targets: Iterable[str] = DEFAULT_TARGETS,
    presets: Iterable[str] = DEFAULT_PRESETS,
    dtypes: Iterable[str] = ("float32",),
) -> list[Compiled]:
    """Every kernel for every target; launches that differ only in their grid share one row."""
    rows: dict[Any, Compiled] = {}
    for dtype in dtypes:
        for preset in presets:
            launches = record(lambda: run_all_launchers(PRESETS[preset], DTYPES[dtype]))  # noqa: B023
            for target in targets:
                for launch in launches:
                    source, options = _specialise(launch, TARGETS[target])
                    key = (target, launch.kernel.__name__, source.hash(), str(options))
                    if key not in rows:
                        rows[key] = _compile(launch, source, options, target, dtype)
                    rows[key].grids[preset] = launch.grid
    return list(rows.values())


def _specialise(launch: Launch, target: GPUTarget) -> tuple[ASTSource, dict[str, Any]]:
    """Types, constants and divisibility of the arguments, found as Triton finds them when it launches."""
    kernel = launch.kernel
    if not isinstance(kernel, JITFunction):
        raise RuntimeError("kernels cannot be compiled while TRITON_INTERPRET is set; unset it and start again")
    options = dict(launch.options)
    if "PRECISION" in options:
        options["PRECISION"] = tiles.dot_precision(target.backend)
    backend = make_backend(target)
    bind = create_function_from_signature(kernel.signature, kernel.params, backend)
    bound, specialization, given = bind(*launch.args, **options)
    parsed, signature, constants, attributes = kernel._pack_args(backend, options, bound, specialization, given)
    return ASTSource(kernel, signature, constants, attributes), parsed.__dict__


def _compile(launch: Launch, source: ASTSource, options: dict[str, Any], target: str, dtype: str) -> Compiled:
    compiled = triton.compile(source, target=TARGETS[target], options=options)
    is_hip = TARGETS[target].backend == "hip"
    assembly = compiled.asm["amdgcn" if is_hip else "ptx"]
    registers, spill_bytes = _amd_usage(assembly) if is_hip else _nvidia_usage(assembly, TARGETS[target].arch)
    names = launch.kernel.arg_names
    return Compiled(
        kernel=launch.kernel.__name__,
        target=target,
        dtype=dtype,
        grids={},
        num_warps=options["num_warps"],
        num_stages=options["num_stages"],
        constants={names[index]: value for (index,), value in source.constants.items() if names[index].isupper()},
        registers=registers,
        spill_bytes=spill_bytes,
        shared_bytes=compiled.metadata.shared,
        assembly=assembly,
    )


def _nvidia_usage(ptx: str, arch: int) -> tuple[int, int]:
    """Registers and spilled bytes by the assembler that Triton ships."""
    from triton.backends.nvidia.compiler import get_ptxas

    gpu_name = re.search(r"^\.target (sm_\w+)", ptx, re.MULTILINE)
    assert gpu_name is not None
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.ptx"
        path.write_text(ptx)
        command = [get_ptxas(arch).path, "-v", f"--gpu-name={gpu_name[1]}", str(path), "-o", str(path) + ".cubin"]
        report = subprocess.run(command, check=True, capture_output=True, text=True).stderr
    return _number(r"Used (\d+) registers", report), _number(r"(\d+) bytes spill stores", report)


def _amd_usage(amdgcn: str) -> tuple[int, int]:
    return _number(r"\.vgpr_count:\s+(\d+)", amdgcn), 4 * _number(r"\.vgpr_spill_count:\s+(\d+)", amdgcn)


def _number(pattern: str, text: str) -> int:
    found = re.search(pattern, text)
    assert found is not None, f"no {pattern!r} in the compiler's report"
    return int(found[1])


def table(rows: Iterable[Compiled]) -> str:
    """The report as a Markdown table."""
    lines = [
        "| kernel | dtype | target | presets | tile | registers | spill bytes | shared bytes | warps |",
        "|---|---|---|---|---|--:|--:|--:|--:|",
    ]
    for row in rows:
        blocks = [f"{name.removeprefix('BLOCK_')}{value}" for name, value in row.constants.items() if "BLOCK" in name]
        diagonal = " diagonal" if row.constants.get("DIAGONAL") else ""
        cells = (
            row.kernel.strip("_").removesuffix("_kernel") + diagonal,
            row.dtype,
            row.target,
            " ".join(row.grids),
            " ".join(blocks),
            row.registers,
            row.spill_bytes,
            row.shared_bytes,
            row.num_warps,
        )
        lines.append("| " + " | ".join(map(str, cells)) + " |")
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Compile every kernel ahead of time and report registers and spills.")
    parser.add_argument("--targets", nargs="+", choices=TARGETS, default=DEFAULT_TARGETS)
    parser.add_argument("--presets", nargs="+", choices=PRESETS, default=DEFAULT_PRESETS)
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES, default=("float32",))
    options = parser.parse_args(arguments)
    rows = compile_all(options.targets, options.presets, options.dtypes)
    print(table(rows))
    spilling = sorted({f"{row.kernel} on {row.target}" for row in rows if row.spill_bytes})
    if spilling:
        print("spilled registers: " + ", ".join(spilling), file=sys.stderr)
    return 1 if spilling else 0


if __name__ == "__main__":
    sys.exit(main())
