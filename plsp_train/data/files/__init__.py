"""Readers of user data: NumPy archives, MATLAB files, tables, and folders of images.

Every reader returns a `Source`. Its errors name the file, the key or column, and the row; nothing is ever unpickled.
"""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from plsp_train.data.files.checks import remarks
from plsp_train.data.files.folder import read_folder, read_image_inputs
from plsp_train.data.files.mapped import holds_arrays, read_array_folder
from plsp_train.data.files.mat import read_mat, read_mat_inputs
from plsp_train.data.files.npz import read_npz, read_npz_inputs
from plsp_train.data.files.options import Inputs, InputSpec, ReadOptions
from plsp_train.data.files.table import read_table_inputs, read_table_source
from plsp_train.data.source import Source
from plsp_train.image_file import SUFFIXES

__all__ = ["InputSpec", "Inputs", "ReadOptions", "read_inputs", "read_source"]

_READERS: dict[str, Callable[[Path, ReadOptions], Source]] = {
    ".npz": read_npz,
    ".mat": read_mat,
    ".csv": read_table_source,
    ".parquet": read_table_source,
}
_INPUT_READERS: dict[str, Callable[[Path, InputSpec], Inputs]] = {
    ".npz": read_npz_inputs,
    ".mat": read_mat_inputs,
    ".csv": read_table_inputs,
    ".parquet": read_table_inputs,
}


def read_source(path: Path, options: ReadOptions) -> Source:
    """Read training data: an .npz, .mat, .csv or .parquet file, a folder of .npy files, or one of images with a CSV."""
    path = _existing(path)
    if path.is_dir():
        source = read_array_folder(path, options) if holds_arrays(path) else read_folder(path, options)
    elif options.image_size:
        raise ValueError(f"{path} is not a folder of images: the option image_size={options.image_size} does not apply")
    else:
        source = _by_suffix(path, _READERS)(path, options)
    return replace(source, notes=source.notes + remarks(source))


def read_inputs(path: Path, wanted: InputSpec) -> Inputs:
    """Read the inputs of predictions from a file of any of these kinds, a folder of images, or one image."""
    path = _existing(path)
    is_picture = path.is_dir() or path.suffix.lower() in SUFFIXES
    read = read_image_inputs if is_picture else _by_suffix(path, _INPUT_READERS)
    if is_picture and not wanted.is_image:
        raise ValueError(f"{path} holds images, but the network was trained on vectors")
    if wanted.is_image and not is_picture and path.suffix.lower() != ".npz":
        raise ValueError(
            f"{path} holds vectors, but the network was trained on images: give a folder or .npz of images"
        )
    found = read(path, wanted)
    if tuple(found.inputs.shape[1:]) != wanted.input_shape:
        expected, shape = ("×".join(map(str, shape)) for shape in (wanted.input_shape, found.inputs.shape[1:]))
        kind = "channels, height and width" if wanted.is_image else "features"
        raise ValueError(f"{path}: the network was trained on {kind} {expected}, got {shape}")
    return found


def _existing(path: Path) -> Path:
    path = Path(path).expanduser()
    if not path.exists():
        raise FileNotFoundError(f"there is no file or folder {path}")
    return path


def _by_suffix(path: Path, readers: dict[str, Callable]) -> Callable:
    try:
        return readers[path.suffix.lower()]
    except KeyError:
        raise ValueError(f"{path} is not of a known kind: give {', '.join(readers)}, or a folder of images") from None
