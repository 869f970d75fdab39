"""Peak memory of a call, from the operating system on a CPU or from the allocator on a GPU."""

import ctypes
import gc
from collections.abc import Callable
from pathlib import Path

import torch

_STATUS, _CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")


def _kilobytes(file: Path, field: str) -> int:
    for line in file.read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1])
    raise RuntimeError(f"{file} has no {field}")


def peak_extra_bytes(call: Callable[[], object], device: torch.device) -> float:
    """Peak memory during the call minus memory before it; NaN if the system does not report it (Linux does)."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        call()
        torch.cuda.synchronize(device)
        return torch.cuda.max_memory_allocated(device) - before
    if not _CLEAR.exists():
        return float("nan")
    ctypes.CDLL(None).malloc_trim(0)  # return freed memory to the system, or its reuse would go unnoticed
    _CLEAR.write_text("5")  # resets the peak to the current size
    before = _kilobytes(_STATUS, "VmRSS")
    call()
    return 1024 * (_kilobytes(_STATUS, "VmHWM") - before)


def available_bytes(device: torch.device) -> int:
    """Memory available to a call; unlimited if the system does not report it."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    meminfo = Path("/proc/meminfo")
    return 1024 * _kilobytes(meminfo, "MemAvailable") if meminfo.exists() else 2**62
