"""Peak memory of a call: of the process as the operating system sees it, or of the GPU's allocator."""

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
    """Largest memory in use during the call above that before it; NaN where the system does not tell (Linux does)."""
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
    ctypes.CDLL(None).malloc_trim(0)  # hand freed memory back, or the call would reuse it unseen
    _CLEAR.write_text("5")  # resets the peak to the present size
    before = _kilobytes(_STATUS, "VmRSS")
    call()
    return 1024 * (_kilobytes(_STATUS, "VmHWM") - before)


def available_bytes(device: torch.device) -> int:
    """What a call may use without harm; without limit where the system does not tell."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    meminfo = Path("/proc/meminfo")
    return 1024 * _kilobytes(meminfo, "MemAvailable") if meminfo.exists() else 2**62
