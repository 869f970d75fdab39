"""Executes the launches of Triton kernels on CPU tensors: compiled for a GPU, run by the emulator."""

import contextlib
import os
import struct
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

from torch import Tensor

from emulator.machine import Mode
from emulator.memory import GlobalMemory, Segment
from emulator.program import PtxError, parse
from emulator.schedule import Code, Launch

TARGETS = ("sm_80", "sm_86", "sm_89", "sm_90")


def import_triton() -> Any:
    """Import Triton for compilation, and let the library believe in the interpreter, which serves CPU tensors too."""
    os.environ["TRITON_INTERPRET"] = "0"
    import triton
    from triton import knobs
    from triton.runtime.jit import JITFunction

    if not isinstance(triton.language.sum, JITFunction):
        raise PtxError("Triton was imported with TRITON_INTERPRET=1, and its functions can no longer be compiled")
    knobs.runtime.interpret = False
    os.environ["TRITON_INTERPRET"] = "1"
    return triton


@dataclass
class Statistics:
    """Work done for one kernel."""

    launches: int = 0
    programs: int = 0
    seconds: float = 0.0
    binaries: set[str] = field(default_factory=set)

    def count(self, grid: tuple[int, int, int], binary: str, seconds: float) -> None:
        self.launches += 1
        self.programs += grid[0] * grid[1] * grid[2]
        self.seconds += seconds
        self.binaries.add(binary)


class Emulator:
    """Compiles kernels for one target and executes them."""

    def __init__(self, target: str, mode: Mode) -> None:
        if target not in TARGETS:
            raise ValueError(f"target must be one of {', '.join(TARGETS)}, got {target!r}")
        self.target, self.mode = target, mode
        self.triton = import_triton()
        self.compiled: dict[str, tuple[Code, int]] = {}
        self.statistics: dict[str, Statistics] = {}

    @contextlib.contextmanager
    def serving_launches(self) -> Iterator[None]:
        """Context in which every launch of a kernel is executed here, with the tiles of the target."""
        from triton.runtime.jit import JITFunction

        from plsp_kernels.triton_impl import tiles

        def run(kernel: Any, *args: Any, grid: Any, warmup: bool = False, **options: Any) -> None:
            self.launch(kernel, grid, args, options)

        with (
            mock.patch.object(JITFunction, "run", run),
            mock.patch.object(tiles, "target", return_value=self.target),
        ):
            yield

    def launch(self, kernel: Any, grid: Any, args: tuple[Any, ...], options: Mapping[str, Any]) -> None:
        start = time.perf_counter()
        source, arguments, parsed = self._specialise(kernel, args, options)
        key = f"{source.hash()} {sorted(parsed.items())}"
        if key not in self.compiled:
            compiled = self.triton.compile(source, target=self._gpu(), options=parsed)
            self.compiled[key] = Code(parse(compiled.asm["ptx"])), compiled.metadata.shared
        code, shared = self.compiled[key]
        passed = {name: arguments[name] for name, kind in source.signature.items() if kind != "constexpr"}
        bits = [_bits(name, value, source.signature[name]) for name, value in passed.items()]
        bits += [0] * (len(code.program.parameters) - len(bits))  # pointers to scratch memory, which no kernel here has
        parameters = {name: value for (name, _), value in zip(code.program.parameters, bits, strict=True)}
        shape = tuple(grid(arguments) if callable(grid) else grid)
        shape += (1,) * (3 - len(shape))
        launched = Launch(shape, parsed["num_warps"], shared, parameters)
        code.run(launched, GlobalMemory(_segments(passed)), self.mode)
        self.statistics.setdefault(kernel.__name__, Statistics()).count(shape, key, time.perf_counter() - start)

    def _gpu(self) -> Any:
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", int(self.target.removeprefix("sm_")), 32)

    def _specialise(self, kernel: Any, args: tuple[Any, ...], options: Mapping[str, Any]) -> tuple[Any, Any, Any]:
        """Types, constants and divisibility of the arguments, as Triton finds them when it launches."""
        from triton.compiler import ASTSource, make_backend
        from triton.runtime.jit import create_function_from_signature

        backend = make_backend(self._gpu())
        bind = create_function_from_signature(kernel.signature, kernel.params, backend)
        bound, specialization, given = bind(*args, **options)
        parsed, signature, constants, attributes = kernel._pack_args(backend, options, bound, specialization, given)
        return ASTSource(kernel, signature, constants, attributes), bound, parsed.__dict__


def _segments(arguments: Mapping[str, Any]) -> list[Segment]:
    """Storages of the tensors; one that several share is named after all of them."""
    names: dict[tuple[int, int], list[str]] = {}
    for name, value in arguments.items():
        if isinstance(value, Tensor):
            if value.device.type != "cpu":
                raise PtxError(f"{name} is on {value.device}: hide GPUs with CUDA_VISIBLE_DEVICES= to emulate them")
            storage = value.untyped_storage()
            names.setdefault((storage.data_ptr(), storage.nbytes()), []).append(name)
    return [Segment(", ".join(owners), start, size) for (start, size), owners in names.items()]


def _bits(name: str, value: Any, kind: str) -> int:
    """Encoding of an argument."""
    if isinstance(value, Tensor):
        return value.data_ptr()
    if kind in ("fp32", "fp64"):
        return int.from_bytes(struct.pack("<f" if kind == "fp32" else "<d", value), "little")
    if isinstance(value, int):
        return value & (2**64 - 1)
    raise PtxError(f"argument {name} of type {kind} is not supported: {value!r}")
