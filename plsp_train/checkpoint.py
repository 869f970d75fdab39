"""Tensors on disk: checkpoints and trained models."""

import io
from pathlib import Path
from typing import Any

import torch

from plsp_train.files import write_atomically


def save_tensors(path: Path, content: dict[str, Any]) -> None:
    buffer = io.BytesIO()
    torch.save(content, buffer)
    write_atomically(path, buffer.getvalue())


def load_tensors(path: Path, device: torch.device | str = "cpu") -> dict[str, Any]:
    """Load tensors and plain values only, so an untrusted file cannot execute code."""
    try:
        return torch.load(path, map_location=device, weights_only=True)
    except FileNotFoundError:
        raise
    except Exception as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise ValueError(f"{path} is not a readable checkpoint ({reason})") from None
