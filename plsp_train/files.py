"""Atomic file writes and locks. Standard library only, so that benchmarks can import it too."""

import contextlib
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

_UNFINISHED = ".new"


def write_atomically(path: Path, content: bytes, previous: Path | None = None) -> None:
    """Write beside the file, flush, and move into place: a reader sees the old content or the new, never a part.

    The old file is moved to `previous` if that is given, once the new one is safe on the disk.
    """
    temporary = path.with_name(path.name + _UNFINISHED)
    try:
        with open(temporary, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        if previous is not None and path.exists():
            os.replace(path, previous)
        os.replace(temporary, path)
    except OSError as error:
        with contextlib.suppress(OSError):
            temporary.unlink()
        # fsync and write do not know the name of the file.
        raise OSError(error.errno, error.strerror or str(error), str(path)) from error
    _flush_directory(path.parent)


def write_json(path: Path, content: Any) -> None:
    write_atomically(path, (json.dumps(content, indent=2) + "\n").encode())


def remove_unfinished(directory: Path) -> None:
    """Remove what a process that was killed while writing has left in a directory that this process has locked."""
    for path in directory.glob(f"*{_UNFINISHED}"):
        path.unlink()


@contextlib.contextmanager
def locked(directory: Path) -> Iterator[None]:
    """Lock a directory. The system releases the lock however the process ends."""
    # A file opened for writing: network file systems lock neither directories nor files opened for reading.
    with open(directory / ".lock", "wb") as file:
        with contextlib.suppress(ImportError, OSError):  # no locks on Windows and on some file systems
            import fcntl

            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                message = f"another process is using {directory}: wait until it ends, or choose another --out"
                raise ValueError(message) from None
        yield


def _flush_directory(directory: Path) -> None:
    """Make a move survive a power failure, where the system can flush directories."""
    with contextlib.suppress(OSError):
        descriptor = os.open(directory, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
