"""benchmarks.gpu_static: its counts and formulas against hand counts and published examples, and its stored results."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch

pytest.importorskip("triton", minversion="3.5")

from triton.runtime import interpreter

import plsp_kernels
from benchmarks import results
from benchmarks.gpu_static import __main__ as command
from benchmarks.gpu_static import ahead_of_time, compilation, report
from benchmarks.gpu_static.calls import DTYPES, FUNCTIONS, LOSS
from benchmarks.gpu_static.compilation import COLUMNS
from benchmarks.gpu_static.instructions import instruction_mix
from benchmarks.gpu_static.occupancy import resident_blocks
from benchmarks.gpu_static.operations import launch_operations
from benchmarks.gpu_static.roofline import GPUS, roofline, seconds
from benchmarks.gpu_static.work import AtenCounter, Work, count
from benchmarks.shapes import SHAPES, Shape
from plsp_kernels import ops
from plsp_kernels.triton_impl import tiles

interpreted = pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") != "1", reason="counts what Triton's interpreter executes"
)


REWRITE = "the kernels have changed: run python -m benchmarks.gpu_static --write"
QUICK_ROWS = """
import json
from benchmarks.gpu_static import __main__ as command, compilation
from benchmarks.shapes import SHAPES
targets, names, dtypes = command.QUICK.values()
every = compilation.binaries(targets, [SHAPES[name] for name in names], dtypes)
print(json.dumps(compilation.compile_all(every)))
"""


@pytest.mark.aot
def test_quick_run_compiles_to_the_stored_registers_and_instructions() -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}

    def run(*arguments: str) -> str:
        result = subprocess.run([sys.executable, *arguments], env=environment, capture_output=True, text=True)
        assert result.returncode == 0, result.stdout + result.stderr
        return result.stdout

    assert "nothing was measured on a GPU" in run("-m", "benchmarks.gpu_static", "--quick")
    found = json.loads(run("-c", QUICK_ROWS))
    stored = [
        row
        for row in results.read(report.COMPILED_CSV)
        if row["target"] == "sm_80" and "fmnist" in row["shapes"].split() and "float32" in row["dtypes"].split()
    ]
    merged = ("shapes", "dtypes")  # the stored rows name all that share the binary
    assert [{name: row[name] for name in COLUMNS if name not in merged} for row in found] == [
        {name: row[name] for name in COLUMNS if name not in merged} for row in stored
    ], REWRITE


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("function", FUNCTIONS)
def test_launches_bytes_and_operations_are_the_stored_ones(function: str, shape: str) -> None:
    wanted = function, shape, "float32", "triton"
    stored = [
        row
        for row in results.read(report.ROOFLINE_CSV)
        if (row["function"], row["shape"], row["dtype"], row["implementation"]) == wanted
    ]
    assert roofline(function, SHAPES[shape], "float32", "triton") == stored, REWRITE


def test_document_agrees_with_stored_results() -> None:
    text = report.DOCUMENT.read_text(encoding="utf-8")
    compiled, counted = results.read(report.COMPILED_CSV), results.read(report.ROOFLINE_CSV)
    assert report.document(text, compiled, counted) == text
    changed = [row | {"registers": "999"} for row in compiled]
    assert report.document(text, changed, counted) != text


def test_stored_results_are_complete_without_spills_at_presets() -> None:
    compiled, counted = results.read(report.COMPILED_CSV), results.read(report.ROOFLINE_CSV)
    assert report.failures(compiled) == []
    assert {row["target"] for row in compiled} == set(ahead_of_time.TARGETS)
    assert {shape for row in compiled for shape in row["shapes"].split()} == set(SHAPES)
    assert {dtype for row in compiled for dtype in row["dtypes"].split()} == set(DTYPES)
    assert {(row["shape"], row["dtype"]) for row in counted} == {(shape, dtype) for shape in SHAPES for dtype in DTYPES}


def test_spill_at_a_preset_fails(capsys: pytest.CaptureFixture[str]) -> None:
    row = dict.fromkeys(COLUMNS, "0") | {"target": "sm_80", "kernel": "pair", "note": ""}
    cases = [
        ("fmnist", "float32", "8", 1),
        ("fmnist", "float32", "0", 0),
        ("fmnist", "float64", "8", 0),  # float64 is only for tests
        ("large", "float32", "8", 0),
    ]
    for shape, dtype, spilled, code in cases:
        faked = [row | {"shapes": shape, "dtypes": dtype, "spill bytes": spilled}]
        with mock.patch.object(command, "binaries"), mock.patch.object(command, "compile_all", return_value=faked):
            assert command.main(["--quick"]) == code
        assert ("pair on sm_80" in capsys.readouterr().err) == bool(code)


def test_kernel_that_does_not_compile_fails_and_keeps_its_row() -> None:
    row = dict.fromkeys(COLUMNS, "") | {"target": "sm_90", "kernel": "pair", "shapes": "large", "dtypes": "float32"}
    row["note"] = "not compiled: no such target"
    assert report.failures([row]) == ["pair on sm_90 (large; float32) not compiled: no such target"]
    assert "not compiled: no such target" in report.resources([row])


def test_binary_is_compiled_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compiled = mock.Mock(return_value=ahead_of_time.Compiled(40, 8, 1024, "  /*0010*/  FFMA R0, R1, R2, R3 ;"))
    monkeypatch.setattr(ahead_of_time, "compile_kernel", compiled)
    monkeypatch.setattr(compilation, "CACHE", tmp_path / "cache")
    binaries = [mock.Mock(key=("sm_80", source, "{}")) for source in ("one", "one", "other")]
    found = [compilation._resources(binary) for binary in binaries]
    assert found[0] == found[1]
    assert (found[0]["registers"], found[0]["spill bytes"], found[0]["float"]) == (40, 8, 1)
    assert compiled.call_args_list == [mock.call(binaries[0]), mock.call(binaries[2])]


def test_partial_results_are_not_written(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as error:
        command.main(["--write", "--target", "sm_80"])
    assert error.value.code == 2
    assert "leave the other options out" in capsys.readouterr().err


def test_resident_blocks_match_published_examples() -> None:
    # CUDA C++ Best Practices Guide, "Calculating occupancy": 37 registers, blocks of 128 and of 320 threads, on
    # multiprocessors of 65,536 registers and 64 warps.
    assert resident_blocks("sm_80", 4, 37, 0, 0) == (12, "registers")
    assert resident_blocks("sm_80", 10, 37, 0, 0) == (4, "registers")
    # LLVM's llvm-calc-occupancy: groups of 512 with 50 vector registers fill all 32 wavefronts of a compute unit.
    assert resident_blocks("gfx90a", 8, 50, 0, 0) == (4, "warps")


def test_resident_blocks_by_each_resource() -> None:
    assert resident_blocks("sm_86", 1, 16, 0, 0) == (16, "blocks")
    assert resident_blocks("sm_80", 4, 32, 40 * 1024, 0) == (4, "shared memory")  # 41 KiB each of 164
    assert resident_blocks("sm_100", 4, 32, 0, 256) == (2, "tensor memory")


def test_roofline_matches_hand_computation() -> None:
    work = Work("class_gram", 6_000_000_000, 1_000_000, 100_000_000, 80_000_000)
    assert seconds(work, GPUS["A100"], "float32", "triton") == pytest.approx(3 * 6e9 / 156e12)
    assert seconds(work, GPUS["A100"], "float32", "reference") == pytest.approx(6e9 / 19.5e12)
    assert seconds(work, GPUS["MI300X"], "float32", "triton") == pytest.approx(6e9 / 163.4e12)
    assert seconds(work, GPUS["A100"], "float64", "triton") == pytest.approx(6e9 / 19.5e12)
    assert seconds(work._replace(matrix_operations=0), GPUS["A100"], "float32", "triton") == pytest.approx(1e8 / 2039e9)


def test_counts_of_a_simple_function_match_hand_count() -> None:
    x, w = torch.empty(6, 5, device="meta"), torch.empty(5, 7, device="meta")
    row, index = torch.empty(1, 7, device="meta"), torch.empty(4, dtype=torch.int64, device="meta")
    with AtenCounter() as counter:
        y = x @ w
        z = y + row.expand(6, 7)
        z.sum(1)
        z.t()
        z[index]
    assert counter.work == [
        Work("aten::mm", 2 * 6 * 5 * 7, 0, 4 * (30 + 35 + 42), 4 * 42),
        Work("aten::add", 0, 42, 4 * (42 + 7 + 42), 4 * 42),
        Work("aten::sum", 0, 42, 4 * (42 + 6), 4 * 42),
        Work("aten::index", 0, 0, 4 * (28 + 28) + 8 * 4, 4 * 42),  # four rows, not all six
    ]


def test_counts_of_a_launch_match_hand_count() -> None:
    shape = Shape("small", 2, 3, 20, 40)  # five slots of twenty classes; tiles of 32 classes and 16 features
    work = {work.kernel: work for work in count(LOSS, shape, "float32", "triton")}["class_gram"]
    read = 4 * (20 * 40 + 5 * 40 * 40 + 5)
    written = 4 * 5 * (20 * 20 + 20 * 40)
    assert work.bytes == read + written
    assert work.matrix_operations == 2 * 5 * 32 * 48 * (48 + 32)
    half = {work.kernel: work for work in count(LOSS, shape, "bfloat16", "triton")}["class_gram"]
    assert work.bytes - half.bytes == 2 * 5 * 40 * 40  # only Σ reaches the kernel in half precision


@pytest.fixture
def executed() -> Iterator[list[float]]:
    """Operations executed by the interpreter: in matrix products, and all others."""
    counts = [0.0, 0.0]
    arithmetic = {np.add, np.subtract, np.multiply, np.divide, np.minimum, np.maximum}
    arithmetic |= {np.exp, np.exp2, np.log, np.floor}
    builder, reduction = interpreter.InterpreterBuilder, interpreter.ReduceOps
    binary, unary, rsqrt, dot = builder.binary_op, builder.unary_op, builder.create_rsqrt, builder.create_dot
    reduce = reduction.apply_impl

    def counted(data: Any, result: Any) -> Any:
        counts[1] += data.size if data.dtype.kind == "f" else 0
        return result

    def counted_operation(method: Any) -> Any:
        def call(self: Any, *args: Any) -> Any:
            result = method(self, *args)
            return counted(result.data, result) if args[-1] in arithmetic else result

        return call

    def counted_rsqrt(self: Any, arg: Any) -> Any:
        return counted(arg.data, rsqrt(self, arg))

    def counted_reduction(self: Any, tensors: Any) -> Any:
        return counted(tensors[0].handle.data, reduce(self, tensors))

    def counted_dot(self: Any, a: Any, b: Any, *args: Any) -> Any:
        counts[0] += 2 * a.data.size * b.data.shape[1]
        return dot(self, a, b, *args)

    with (
        mock.patch.object(builder, "binary_op", counted_operation(binary)),
        mock.patch.object(builder, "unary_op", counted_operation(unary)),
        mock.patch.object(builder, "create_rsqrt", counted_rsqrt),
        mock.patch.object(builder, "create_dot", counted_dot),
        mock.patch.object(reduction, "apply_impl", counted_reduction),
    ):
        yield counts


@interpreted
@pytest.mark.filterwarnings("ignore:divide by zero")
@pytest.mark.parametrize(
    ("num_classes", "dtype", "diagonal"),
    [(32, torch.float32, False), (130, torch.float32, False), (32, torch.float64, True)],
)
def test_operations_match_the_interpreter(
    executed: list[float], num_classes: int, dtype: torch.dtype, diagonal: bool
) -> None:
    generator = torch.Generator().manual_seed(0)
    num_labeled, num_unlabeled, num_features = 1, 3, 20

    def normal(*size: int) -> torch.Tensor:
        return torch.randn(*size, generator=generator, dtype=dtype)

    weight = normal(num_classes, num_features).requires_grad_()
    labeled, weak, strong = (normal(n, num_classes).requires_grad_() for n in (num_labeled, *[num_unlabeled] * 2))
    covariance = normal(num_classes, num_features) ** 2
    if not diagonal:
        covariance = torch.diag_embed(covariance)
    candidates = torch.ones(num_unlabeled, num_classes, dtype=torch.bool)
    candidates[:, ::2] = False
    # A distinct class per sample, so that no slot is unused; threshold 0, so that every row counts.
    classes = torch.arange(num_labeled + num_unlabeled)
    labels, pseudo_labels = classes[:num_labeled], classes[num_labeled:]
    real, ratios = tiles.launch, []

    def launch(kernel: Any, grid: Any, *args: Any, **options: Any) -> None:
        executed[:] = [0.0, 0.0]
        real(kernel, grid, *args, **options)
        recorded = ahead_of_time.Launch(kernel, tuple(grid), args, options)
        matrix, others = launch_operations(recorded)
        assert executed[0] == matrix, recorded.name
        if others:
            ratios.append((recorded.name, executed[1] / others))

    with mock.patch.object(tiles, "launch", launch):
        plsp_kernels.semantic_upper_bound_loss(
            *(labeled, weak, strong, weight, covariance, labels, candidates),
            strength=0.01,
            thresholds=0.0,
            pseudo_labels=pseudo_labels,
            argmax_in_candidates=False,
            impl="triton",
        ).total.backward()
        samples = weak, weight, covariance, pseudo_labels
        plsp_kernels.semantic_log_softmax(*samples, strength=0.01, impl="triton").sum().backward()
        plsp_kernels.semantic_cross_entropy(*samples, strength=0.01, impl="triton").sum().backward()
        plsp_kernels.probit_probabilities(*samples, strength=0.01, impl="triton")
        means, counts = torch.zeros_like(weight), torch.zeros(num_classes, dtype=torch.int64)
        features = normal(num_labeled + num_unlabeled, num_features)
        ops.covariance_update(covariance.clone(), means, counts, counts.clone(), features, classes, "triton")
        ops.curriculum_thresholds(counts, 0.7, False, "triton")
    for name, ratio in ratios:
        assert 0.8 < ratio < 1.2, f"{name}: {ratio:.2f} of the formula's operations"


def test_instructions_are_classified() -> None:
    sass = """
        /*0000*/                   MOV R1, c[0x0][0x28] ;
        /*0010*/              @!P0 LDG.E R2, [R4.64] ;
        /*0020*/                   LDGSTS.E [R3], [R4.64] ;
        /*0030*/                   HMMA.1688.F32.TF32 R4, R8, R12, R4 ;
        /*0040*/                   FFMA R2, R2, R3, R4 ;
        /*0050*/                   MUFU.EX2 R2, R2 ;
        /*0060*/                   LDS R2, [R3] ;
        /*0070*/                   STL [R1], R2 ;
        /*0080*/              @P1  BRA `(.L_x_1) ;
        /*0090*/                   NOP;
    """
    classes = ("matrix", "float", "special", "shared", "global", "async copy", "local", "control", "other")
    assert instruction_mix(sass) == dict.fromkeys(classes, 1)
    amdgcn = """
	.amdgcn_target "amdgcn-amd-amdhsa--gfx942"
	v_mfma_f32_32x32x2_f32 a[0:15], v0, v1, a[0:15]
	v_pk_fma_f32 v[0:1], v[2:3], v[4:5], v[6:7]
	v_exp_f32_e32 v0, v0
	ds_read_b128 v[0:3], v4
	global_load_dwordx4 v[0:3], v[4:5], off
	scratch_store_dword off, v0, s0
	s_cbranch_vccz .LBB0_2
	v_lshlrev_b32_e32 v0, 2, v0
	s_nop 0
    """
    assert instruction_mix(amdgcn) == dict.fromkeys(classes, 1) | {"async copy": 0}
