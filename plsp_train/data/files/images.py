"""Image files as one array: decoded by worker processes and resized."""

import multiprocessing
import os
import signal
import statistics
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import BrokenExecutor, ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from plsp_train import image_file
from plsp_train.image_file import Header

_SMALLEST_SIDE, _LARGEST_SIDE, _SIDE_STEP = 32, 128, 8
# Below this, starting processes takes as long as decoding.
_BYTES_WORTH_WORKERS = 50_000_000
_IMAGES_PER_TASK = 16

_Map = Callable[[Callable[[Path], Any], Iterable[Path]], Iterator[Any]]


@dataclass(frozen=True)
class Decoding:
    """How files become arrays."""

    size: tuple[int, int] | None = None
    """Height and width; None: a square of `fitting_side`."""
    channels: int | None = None
    """1 or 3; None: 1 if all images are grey."""
    workers: int | None = None
    progress: bool = False


class Decoded(NamedTuple):
    images: np.ndarray
    """uint8 (n, C, H, W)"""
    notes: tuple[str, ...] = ()


def decode_images(paths: list[Path], how: Decoding) -> Decoded:
    """Decode and resize image files. The aspect ratio is not kept, and nothing is cut off."""
    with _mapping(paths, how.workers) as mapped:
        headers = list(_with_progress(mapped(image_file.read_header, paths), paths, "reading sizes", how.progress))
        side = fitting_side(headers)
        height, width = how.size or (side, side)
        channels = how.channels or (1 if all(header.is_grey for header in headers) else 3)
        images = np.empty((len(paths), channels, height, width), dtype=np.uint8)
        decoded = mapped(partial(image_file.decode, shape=images.shape[1:]), paths)
        for position, image in enumerate(_with_progress(decoded, paths, "decoding images", how.progress)):
            images[position] = image
    return Decoded(images, _notes(headers, height, width))


def fitting_side(headers: list[Header]) -> int:
    """The median side of the images, rounded to a multiple of 8, within 32..128."""
    median = statistics.median([side for header in headers for side in (header.width, header.height)])
    return min(max(_SIDE_STEP * round(median / _SIDE_STEP), _SMALLEST_SIDE), _LARGEST_SIDE)


def image_files(folder: Path) -> list[Path]:
    """The image files in a folder and below, by name, without hidden ones."""
    files = (path for path in folder.rglob("*") if path.suffix.lower() in image_file.SUFFIXES)
    return sorted(path for path in files if not path.name.startswith(".") and path.is_file())


def _notes(headers: list[Header], height: int, width: int) -> tuple[str, ...]:
    notes = []
    resized = sum((header.height, header.width) != (height, width) for header in headers)
    if resized:
        notes.append(f"{resized} of {len(headers)} images were resized to {width}×{height} pixels.")
    transparent = sum(header.is_transparent for header in headers)
    if transparent:
        notes.append(f"Transparent parts became white in {transparent} of {len(headers)} images.")
    return tuple(notes)


@contextmanager
def _mapping(paths: list[Path], workers: int | None) -> Iterator[_Map]:
    """A `map` over files, by worker processes if there are any."""
    if workers is None:
        total = sum(path.stat().st_size for path in paths)
        workers = os.cpu_count() or 0 if total > _BYTES_WORTH_WORKERS else 0
    if workers == 0:
        yield map
        return
    # Forking a process in which PyTorch runs threads can deadlock. Ctrl-C is left to this process.
    context, ignore = multiprocessing.get_context("spawn"), (signal.SIGINT, signal.SIG_IGN)
    with ProcessPoolExecutor(workers, context, initializer=signal.signal, initargs=ignore) as pool:
        try:
            yield partial(pool.map, chunksize=_IMAGES_PER_TASK)
        except BrokenExecutor:
            message = "a process that decodes images was killed, probably for lack of memory: use fewer --workers"
            raise ValueError(message) from None
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise


def _with_progress(items: Iterator[Any], paths: list[Path], label: str, show: bool) -> Iterator[Any]:
    """With a progress bar on a terminal."""
    if not show:
        return items
    from tqdm import tqdm

    return iter(tqdm(items, total=len(paths), desc=label, unit="image", leave=False, disable=None))
