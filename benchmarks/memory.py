"""Peak memory of a call, as the operating system sees it."""

import ctypes
import gc
from collections.abc import Callable
from pathlib import Path

_STATUS, _CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")


def _kilobytes(field: str) -> int:
    for line in _STATUS.read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1])
    raise RuntimeError(f"{_STATUS} has no {field}")


def peak_extra_bytes(call: Callable[[], object]) -> float:
    """Largest resident memory during the call above that before it; NaN where the system does not tell (Linux does)."""
    if not _CLEAR.exists():
        return float("nan")
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)  # hand freed memory back, or the call would reuse it unseen
    _CLEAR.write_text("5")  # resets the peak to the present size
    before = _kilobytes("VmRSS")
    call()
    return 1024 * (_kilobytes("VmHWM") - before)
