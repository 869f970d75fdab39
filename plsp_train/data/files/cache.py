"""Decoded images kept between runs, outside the user's folders."""

import hashlib
import io
import json
import os
from collections.abc import Callable
from pathlib import Path

import numpy as np

from plsp_train.data.files.images import Decoded
from plsp_train.files import locked, remove_unfinished, write_atomically

_FORMAT = 1


def cache_directory() -> Path:
    """$PLSP_CACHE, or plsp in $XDG_CACHE_HOME, or in ~/.cache."""
    own = os.environ.get("PLSP_CACHE")
    return Path(own or Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "plsp").expanduser()


def cached_images(folder: Path, paths: list[Path], image_size: int, decode: Callable[[], Decoded]) -> Decoded:
    """The decoded images of these files, from the cache unless a file, its size or time, or the image size is new."""
    states = [(str(path), path.stat().st_size, path.stat().st_mtime_ns) for path in paths]
    content = json.dumps([_FORMAT, str(folder.resolve()), image_size, states])
    cache = cache_directory() / f"images-{hashlib.sha256(content.encode()).hexdigest()[:32]}.npz"
    found = _load(cache, len(paths))
    if found is not None:
        return found
    decoded = decode()
    try:
        _save(cache, decoded)
    except (OSError, ValueError) as error:
        return decoded._replace(notes=(*decoded.notes, f"The decoded images could not be cached: {error}."))
    return decoded


def _load(cache: Path, count: int) -> Decoded | None:
    """What the cache holds; None if it does not exist or is damaged, which the checksums of the archive tell."""
    try:
        with np.load(cache, allow_pickle=False) as arrays:
            images, notes = arrays["images"], arrays["notes"]
    except Exception:  # whatever is wrong with it, it is written anew
        return None
    return Decoded(images, tuple(notes.tolist())) if images.shape[:1] == (count,) else None


def _save(cache: Path, decoded: Decoded) -> None:
    cache.parent.mkdir(parents=True, exist_ok=True)
    buffer = io.BytesIO()
    np.savez(buffer, images=decoded.images, notes=np.array(decoded.notes, dtype=str))
    with locked(cache.parent):
        remove_unfinished(cache.parent)
        write_atomically(cache, buffer.getvalue())
