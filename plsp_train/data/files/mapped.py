"""Folders of .npy files: the arrays of an .npz archive, a file each. Images stay in their file until they are used."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from plsp_train.data.annotations import RowError
from plsp_train.data.candidate_sets import CHUNK, CandidateSets
from plsp_train.data.files.checks import check_images, located
from plsp_train.data.files.npz import Archive, read_arrays
from plsp_train.data.files.options import ReadOptions
from plsp_train.data.mapped import MappedImages
from plsp_train.data.source import Source


def holds_arrays(folder: Path) -> bool:
    """Whether this is a folder of arrays, not of images."""
    return (folder / "images.npy").is_file()


def read_array_folder(folder: Path, options: ReadOptions) -> Source:
    if options.image_size:
        raise ValueError(f"{folder} holds arrays: the option image_size={options.image_size} does not apply")
    return read_arrays(_ArrayFolder(folder, options.workers), options)


class _ArrayFolder(Archive):
    """Its arrays are memory-mapped; candidate sets are packed a chunk at a time."""

    def __init__(self, folder: Path, workers: int | None) -> None:
        self.path, self._workers = folder, workers
        self._keys = sorted(file.stem for file in folder.glob("*.npy"))
        self._arrays = {}
        self._refuse_unknown_keys()

    def _load(self, key: str) -> np.ndarray:
        return np.load(self._file(key), mmap_mode="r", allow_pickle=False)

    def _file(self, key: str) -> Path:
        return self.path / f"{key}.npy"

    def _inputs(self, key: str, kind: str) -> Any:
        if kind != "images":
            return super()._inputs(key, kind)
        array = self.array(key)
        with located(self._file(key)):
            check_images(array)
        return MappedImages(self._file(key).resolve(), self._workers)

    def _converted_sets(self, given: np.ndarray, convert: Callable[[np.ndarray], Tensor]) -> CandidateSets:
        return CandidateSets.pack(_converted_chunks(given, convert))


def _converted_chunks(given: np.ndarray, convert: Callable[[np.ndarray], Tensor]) -> Iterator[Tensor]:
    for start in range(0, len(given), CHUNK):
        try:
            yield convert(given[start : start + CHUNK])
        except RowError as error:
            raise RowError(start + error.row, error.problem) from None
