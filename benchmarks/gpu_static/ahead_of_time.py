"""Ahead-of-time compilation of the kernels as they would be launched, without a GPU.

Inside `recording`, public functions run on meta tensors, and launches are recorded instead of executed. Block sizes,
argument types and divisibility are those of a real call.
"""

import contextlib
import re
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import triton
from torch.utils._python_dispatch import TorchDispatchMode
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, make_backend
from triton.runtime.jit import JITFunction, create_function_from_signature

from plsp_kernels import dispatch
from plsp_kernels.ops.registration import KERNELS
from plsp_kernels.triton_impl import tiles

TARGETS = {
    **{f"sm_{arch}": GPUTarget("cuda", arch, 32) for arch in (80, 86, 89, 90, 100, 120)},
    **{arch: GPUTarget("hip", arch, 64) for arch in ("gfx90a", "gfx942")},
}


class Launch(NamedTuple):
    """One recorded call of `tiles.launch`."""

    kernel: Any
    grid: tuple[int, ...]
    args: tuple[Any, ...]
    options: dict[str, Any]

    @property
    def name(self) -> str:
        name = self.kernel.__name__.strip("_").removesuffix("_kernel")
        name += " diagonal" if self.options.get("DIAGONAL") else ""
        return name + (" alone" if self.options.get("SAVE_PRODUCT") is False else "")

    @property
    def arguments(self) -> dict[str, Any]:
        """Arguments of the kernel, by parameter name."""
        return {**dict(zip(self.kernel.arg_names, self.args, strict=False)), **self.options}


class Specialised(NamedTuple):
    """A kernel with the types, constants and divisibility of its arguments, which determine the binary."""

    target: str
    source: ASTSource
    options: dict[str, Any]

    @property
    def key(self) -> tuple[str, str, str]:
        return self.target, self.source.hash(), str(sorted(self.options.items()))


@dataclass(frozen=True)
class Compiled:
    """One kernel, compiled for one target."""

    registers: int
    """Per thread; vector registers on AMD."""
    spill_bytes: int
    """Per thread, to memory."""
    shared_bytes: int
    """Per program."""
    assembly: str
    """Machine code as text: SASS or AMDGCN."""
    tensor_columns: int = 0
    """Columns of tensor memory per program; sm_100 only."""
    scalar_registers: int = 0
    """Per wavefront, on AMD."""
    scalar_spills: int = 0
    """Scalar registers spilled to lanes of a vector register, on AMD."""


class _CallLaunchers(TorchDispatchMode):
    """Runs the launchers of our operators on meta tensors, which would otherwise use the fake implementations."""

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        if func.namespace != "plsp":
            return func(*args, **(kwargs or {}))
        return KERNELS[func.overloadpacket.__name__](*args)


@contextlib.contextmanager
def recording(target: str = "sm_80") -> Iterator[list[Launch]]:
    """Context in which "triton" and "auto" select the kernels on meta tensors too, with the tiles of a target.

    Yields the list of launches.
    """
    launches: list[Launch] = []

    def recorder(kernel: Any, grid: Sequence[int], *args: Any, **options: Any) -> None:
        launches.append(Launch(kernel, tuple(grid), args, options))

    with (
        mock.patch.object(tiles, "launch", recorder),
        mock.patch.object(tiles, "target", return_value=target),
        mock.patch.object(dispatch, "_resolve", lambda impl, *asked: "triton" if impl == "auto" else impl),
        _CallLaunchers(),
    ):
        yield launches


def specialise(launch: Launch, target: str) -> Specialised:
    """Specialise on types, constants and divisibility of the arguments, as Triton does at launch."""
    kernel = launch.kernel
    if not isinstance(kernel, JITFunction):
        raise RuntimeError("kernels cannot be compiled while TRITON_INTERPRET is set; unset it and restart")
    backend = make_backend(TARGETS[target])
    bind = create_function_from_signature(kernel.signature, kernel.params, backend)
    bound, specialization, given = bind(*launch.args, **launch.options)
    parsed, signature, constants, attributes = kernel._pack_args(backend, launch.options, bound, specialization, given)
    return Specialised(target, ASTSource(kernel, signature, constants, attributes), parsed.__dict__)


def compile_kernel(specialised: Specialised) -> Compiled:
    """Compile for the target with the compilers that Triton ships."""
    target = TARGETS[specialised.target]
    compiled = triton.compile(specialised.source, target=target, options=specialised.options)
    if target.backend == "hip":
        assembly = compiled.asm["amdgcn"]
        return Compiled(
            registers=_number(r"\.vgpr_count:\s+(\d+)", assembly),
            spill_bytes=4 * _number(r"\.vgpr_spill_count:\s+(\d+)", assembly),
            shared_bytes=compiled.metadata.shared,
            assembly=assembly,
            scalar_registers=_number(r"\.sgpr_count:\s+(\d+)", assembly),
            scalar_spills=_number(r"\.sgpr_spill_count:\s+(\d+)", assembly),
        )
    report = _assembler_report(compiled.asm["ptx"], target.arch)
    return Compiled(
        registers=_number(r"Used (\d+) registers", report),
        spill_bytes=_number(r"(\d+) bytes spill stores", report),
        shared_bytes=compiled.metadata.shared,
        assembly=_disassemble(compiled.asm["cubin"]),
        tensor_columns=compiled.metadata.tmem_size,
    )


def _assembler_report(ptx: str, arch: int) -> str:
    from triton.backends.nvidia.compiler import get_ptxas

    gpu_name = re.search(r"^\.target (sm_\w+)", ptx, re.MULTILINE)
    assert gpu_name is not None
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.ptx"
        path.write_text(ptx)
        command = [get_ptxas(arch).path, "-v", f"--gpu-name={gpu_name[1]}", str(path), "-o", str(path) + ".cubin"]
        return subprocess.run(command, check=True, capture_output=True, text=True).stderr


def _disassemble(cubin: bytes) -> str:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [knobs.nvidia.nvdisasm.path, "-c", file.name]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def _number(pattern: str, text: str) -> int:
    found = re.search(pattern, text)
    assert found is not None, f"no {pattern!r} in the compiler's report"
    return int(found[1])
