"""Tensors on disk: checkpoints and trained models.

A file is what torch.save writes, a zip archive, with a checksum of all its bytes in the archive's comment. torch.load
alone does not verify the checksums of the archive's members and would return altered numbers.
"""

import hashlib
import io
from pathlib import Path
from typing import Any

import torch

from plsp_train.files import write_atomically

_CHECKPOINT, _PREVIOUS = "checkpoint.pt", "checkpoint.previous.pt"
_SEAL = b"plsp blake2b "
_DIGEST_SIZE = 16
# The length of the archive's comment, then the comment, end a zip archive.
_LENGTH_SIZE, _COMMENT_SIZE = 2, len(_SEAL) + 2 * _DIGEST_SIZE
_READ_SIZE = 1 << 20


class DamagedFile(ValueError):
    """The content of a file is not what was written."""


def save_tensors(path: Path, content: dict[str, Any], previous: Path | None = None) -> None:
    """Write a file atomically; the old one is kept as `previous` if that is given."""
    buffer = io.BytesIO()
    torch.save(content, buffer)
    archive = buffer.getvalue()[:-_LENGTH_SIZE] + _COMMENT_SIZE.to_bytes(_LENGTH_SIZE, "little")
    digest = hashlib.blake2b(archive, digest_size=_DIGEST_SIZE).hexdigest().encode()
    write_atomically(path, archive + _SEAL + digest, previous)


def load_tensors(path: Path, device: torch.device | str = "cpu", *, ours: bool = True) -> dict[str, Any]:
    """Load tensors and plain values only, so an untrusted file cannot execute code.

    A file of ours must have its checksum; one of someone else's, such as pretrained weights, may have none.
    """
    with open(path, "rb") as file:
        size = file.seek(0, 2)
        digest = _stored_digest(file, size)
        if digest is None and ours:
            raise DamagedFile(f"{path} was not written by plsp_train, or its end is missing")
        if digest is not None and digest != _digest(file, size - _COMMENT_SIZE):
            raise DamagedFile(f"{path} is damaged: its content does not match its checksum")
        file.seek(0)
        try:
            return torch.load(file, map_location=device, weights_only=True)
        except Exception:  # of many kinds; their texts recommend options of torch.load that would execute code
            message = f"{path} is not readable: it must be written by torch.save and hold tensors and plain values only"
            raise ValueError(message) from None


def _stored_digest(file: io.BufferedReader, size: int) -> bytes | None:
    if size < _COMMENT_SIZE:
        return None
    file.seek(size - _COMMENT_SIZE)
    comment = file.read(_COMMENT_SIZE)
    return comment.removeprefix(_SEAL) if comment.startswith(_SEAL) else None


def _digest(file: io.BufferedReader, size: int) -> bytes:
    digest = hashlib.blake2b(digest_size=_DIGEST_SIZE)
    file.seek(0)
    while size > 0:
        part = file.read(min(size, _READ_SIZE))
        digest.update(part)
        size -= len(part) or size  # a file that shrinks meanwhile
    return digest.hexdigest().encode()


# ------------------------------------------------------------------------------------------------- checkpoints


def has_checkpoint(directory: Path) -> bool:
    """Also true after a kill between the two moves of `save_checkpoint`."""
    return (directory / _CHECKPOINT).exists() or (directory / _PREVIOUS).exists()


def save_checkpoint(directory: Path, content: dict[str, Any]) -> None:
    """Write a checkpoint and keep the one before it."""
    save_tensors(directory / _CHECKPOINT, content, directory / _PREVIOUS)


def load_checkpoint(directory: Path, device: torch.device | str) -> tuple[dict[str, Any], Path, str]:
    """The latest checkpoint that is intact, its file, and a remark if it is not the latest one; empty if it is."""
    path, previous = directory / _CHECKPOINT, directory / _PREVIOUS
    try:
        return load_tensors(path, device), path, ""
    except FileNotFoundError:
        return load_tensors(previous, device), previous, ""
    except DamagedFile as error:
        try:
            return load_tensors(previous, device), previous, f"{error}; continuing from the one before, {previous.name}"
        except (OSError, ValueError):
            raise DamagedFile(
                f"{error}, and there is no intact {previous.name}: start again in another --out"
            ) from None
