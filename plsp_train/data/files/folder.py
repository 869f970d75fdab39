"""Folders of images with a CSV that gives their candidate sets."""

from dataclasses import replace
from functools import partial
from pathlib import Path

import torch

from plsp_train.data.annotations import did_you_mean
from plsp_train.data.files.cache import cached_images
from plsp_train.data.files.columns import ANNOTATOR, Table, read_table
from plsp_train.data.files.images import Decoding, decode_images, image_files
from plsp_train.data.files.labelling import read_labelling
from plsp_train.data.files.options import Inputs, InputSpec, ReadOptions
from plsp_train.data.source import Source
from plsp_train.image_file import SUFFIXES

TABLE = "labels.csv"
COLUMNS = ("file", "candidates", "not", "label", "split")


def read_folder(folder: Path, options: ReadOptions) -> Source:
    """Read the images that the folder's CSV names. Decoded images are cached."""
    table = _read_labels(folder)
    labelling = read_labelling(table, options)  # its errors come before the long work
    paths = _image_paths(folder, table)
    size = (options.image_size, options.image_size) if options.image_size else None
    decode = partial(decode_images, paths, Decoding(size, workers=options.workers, progress=options.progress))
    decoded = cached_images(folder, paths, options.image_size, decode)
    source = labelling.source(folder.resolve().name, torch.from_numpy(decoded.images), table.text["file"])
    return replace(source, notes=(*_unnamed_images(folder, paths, table), *decoded.notes, *source.notes))


def read_image_inputs(path: Path, wanted: InputSpec) -> Inputs:
    """Read an image, or all images of a folder, in the shape that the network expects."""
    paths = image_files(path) if path.is_dir() else [path]
    if not paths:
        raise ValueError(f"{path} holds no image ({', '.join(SUFFIXES)})")
    channels, height, width = wanted.input_shape
    if channels not in (1, 3):
        raise ValueError(f"the network was trained on images of {channels} channels: give them as .npz, not as files")
    decoding = Decoding((height, width), channels, workers=wanted.workers, progress=wanted.progress)
    folder = path if path.is_dir() else path.parent
    names = tuple(image.relative_to(folder).as_posix() for image in paths)
    return Inputs(torch.from_numpy(decode_images(paths, decoding).images), names)


def _read_labels(folder: Path) -> Table:
    tables = sorted(folder.glob("*.csv"))
    path = folder / TABLE if folder / TABLE in tables or len(tables) != 1 else tables[0]
    if path not in tables:
        found = ", ".join(table.name for table in tables) or "no .csv file"
        raise FileNotFoundError(f"there is no {path} with the columns file and candidates; {folder} holds {found}")
    table = read_table(path, all_text=True)
    for column in table.text:
        if column not in COLUMNS and not column.startswith(ANNOTATOR):
            known = f"{', '.join(COLUMNS)} and {ANNOTATOR}…{did_you_mean(column, COLUMNS)}"
            raise ValueError(f"{path} has the unknown column {column!r}; known are {known}")
    if "file" not in table.text:
        raise ValueError(f"{path} has no column 'file': its columns are {', '.join(table.text)}")
    return table


def _image_paths(folder: Path, table: Table) -> list[Path]:
    paths: dict[Path, int] = {}
    for row, file in enumerate(table.text["file"]):
        path = folder / file
        if not path.is_file():
            raise FileNotFoundError(f"{table.place(row)}: there is no image {path}")
        if path in paths:
            first = table.row_name(paths[path])
            raise ValueError(f"{table.place(row)}: {file} is also in {first}: put all its candidates into one row")
        paths[path] = row
    return list(paths)


def _unnamed_images(folder: Path, paths: list[Path], table: Table) -> tuple[str, ...]:
    unnamed = sorted(set(image_files(folder)) - set(paths))
    if not unnamed:
        return ()
    first = unnamed[0].relative_to(folder).as_posix()
    return (f"Images in {folder} that {table.path.name} does not name: {len(unnamed)}, the first is {first}.",)
