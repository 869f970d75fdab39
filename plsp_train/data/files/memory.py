"""Memory that a file needs once it is unpacked. A small file may claim, or unpack to, any size."""

from pathlib import Path


def check_room(where: Path | str, size: int) -> None:
    """Refuse to read more bytes than this machine has memory for."""
    available = _available_memory()
    if available is not None and size > available:
        raise ValueError(
            f"{where} unpacks to {size / 1e9:,.1f} GB, and only {available / 1e9:,.1f} GB of memory are available"
        )


def _available_memory() -> int | None:
    """In bytes; None where the system does not tell."""
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
        return next(1024 * int(line.split()[1]) for line in lines if line.startswith("MemAvailable:"))
    except (OSError, StopIteration):  # not on Linux
        return None
