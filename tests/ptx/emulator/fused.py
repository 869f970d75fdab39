"""a·b + c with one rounding, by a few lines of C that are compiled at the first use."""

import ctypes
import functools
import os
import subprocess
import tempfile
from pathlib import Path

import numpy as np

from emulator.program import PtxError

SOURCE = Path(__file__).with_suffix(".c")


@functools.cache
def _library() -> ctypes.CDLL:
    compiler = os.environ.get("CC", "cc")
    with tempfile.TemporaryDirectory(prefix="plsp-ptx-") as folder:
        path = Path(folder) / "fused.so"
        # For this processor, which need not have the instruction: without it the C library computes the same.
        command = [compiler, "-O2", "-march=native", "-shared", "-fPIC", "-o", str(path), str(SOURCE), "-lm"]
        try:
            subprocess.run(command, check=True, capture_output=True, text=True)
        except FileNotFoundError as error:
            raise PtxError(f"executing PTX needs a C compiler: {compiler!r} was not found; set CC to one") from error
        except subprocess.CalledProcessError as error:
            raise PtxError(f"{' '.join(command)} failed:\n{error.stderr}") from error
        return ctypes.CDLL(str(path))


def fma(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
    """Arrays of one floating-point type, broadcast against each other."""
    library, dtype = _library(), a.dtype
    function = library.fma32 if dtype == np.float32 else library.fma64
    inputs = [np.ascontiguousarray(array) for array in np.broadcast_arrays(a, b, c)]
    result = np.empty(inputs[0].shape, dtype)
    pointers = [ctypes.c_void_p(array.ctypes.data) for array in (*inputs, result)]
    function(*pointers, ctypes.c_int64(result.size))
    return result
