"""Files of a run that survive a kill at any moment: written beside, flushed, and moved into place."""

import contextlib
import io
import json
import os
from pathlib import Path
from typing import Any

import torch


def write_atomically(path: Path, content: bytes) -> None:
    """The file holds its old content or the new one, never a part."""
    temporary = path.with_name(path.name + ".new")
    try:
        with open(temporary, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except OSError:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise


def write_json(path: Path, content: Any) -> None:
    write_atomically(path, (json.dumps(content, indent=2) + "\n").encode())


def save_tensors(path: Path, content: dict[str, Any]) -> None:
    buffer = io.BytesIO()
    torch.save(content, buffer)
    write_atomically(path, buffer.getvalue())


def load_tensors(path: Path, device: torch.device | str = "cpu") -> dict[str, Any]:
    """Only tensors and plain values: a file from elsewhere cannot run code."""
    try:
        return torch.load(path, map_location=device, weights_only=True)
    except FileNotFoundError:
        raise
    except Exception as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise ValueError(f"{path} is not a readable checkpoint ({reason})") from None
