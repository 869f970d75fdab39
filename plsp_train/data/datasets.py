"""Benchmark data sets: images in uint8, or real partial-label data. User files are read by `files`."""

import gzip
import math
import zlib
from collections.abc import Callable
from functools import partial
from io import BufferedIOBase
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from plsp_train.data.files import ReadOptions, read_source
from plsp_train.data.files.memory import check_room
from plsp_train.data.source import Source
from plsp_train.registry import Registry
from plsp_train.torchvision_compat import import_torchvision

RECIPES = ("paper", "released")
REAL_PARTIAL_LABEL_SETS = ("lost", "MSRCv2", "BirdSong")

DATASETS: Registry[Callable[[Path], Source]] = Registry("dataset")
"""Functions of the data root that return a `Source`, by name."""

# Debian's package dataset-fashion-mnist installs the four original files here.
DEBIAN_FASHION_MNIST = Path("/usr/share/datasets/fashion-mnist")

Statistics = tuple[tuple[float, ...], tuple[float, ...]]

# Mean and standard deviation per channel of each training set, in units of the full range 0..255.
_STATISTICS: dict[str, Statistics] = {
    "digits": ((0.3054,), (0.3760,)),
    "fmnist": ((0.2860,), (0.3530,)),
    "cifar10": ((0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)),
    "cifar100": ((0.5071, 0.4865, 0.4409), (0.2673, 0.2564, 0.2762)),
}
# The released code uses MNIST's statistics for Fashion-MNIST and ImageNet's for CIFAR-100.
_RELEASED_STATISTICS: dict[str, Statistics] = _STATISTICS | {
    "fmnist": ((0.1307,), (0.3081,)),
    "cifar100": ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)),
}


def published_statistics(dataset: str, recipe: str) -> Statistics | None:
    """Mean and standard deviation of a benchmark set by recipe: its own, or those that the released code uses."""
    return (_RELEASED_STATISTICS if recipe == "released" else _STATISTICS).get(dataset)


def load_benchmark(name: str, root: Path, *, download: bool = False) -> Source:
    """Load a registered data set from `root`, a directory or, for one kept in an .npz or .mat file, that file.

    An .npz holds train_images, train_labels, test_images and test_labels, images as uint8 (n, C, H, W); a directory
    may hold it as <name>.npz. `download` gets missing files with torchvision; `digits` is part of scikit-learn.
    """
    load = DATASETS[name]
    if download:
        if name not in _DOWNLOADS:
            raise ValueError(f"--download cannot fetch {name}, only {', '.join(_DOWNLOADS)}")
        _DOWNLOADS[name](root)
    return load(root)


@DATASETS.register("digits")
def load_digits(root: Path) -> Source:
    """scikit-learn's 8×8 digits: a fixed split into 1437 training and 360 test images."""
    from sklearn.datasets import load_digits
    from sklearn.model_selection import train_test_split

    digits = load_digits()
    images = np.rint(digits.images * (255 / 16)).astype(np.uint8)[:, None]
    train, test = train_test_split(np.arange(len(images)), test_size=360, stratify=digits.target, random_state=0)
    parts = (*_tensors(images[train], digits.target[train]), *_tensors(images[test], digits.target[test]))
    return _labelled("digits", parts, tuple(map(str, range(10))))


def _tensors(images: np.ndarray, labels: np.ndarray) -> tuple[Tensor, Tensor]:
    images = np.ascontiguousarray(images, dtype=images.dtype.newbyteorder("="))
    return torch.from_numpy(images), torch.from_numpy(labels.astype(np.int64))


_Parts = tuple[Tensor, Tensor, Tensor, Tensor]


def _labelled(name: str, parts: _Parts, class_names: tuple[str, ...], where: Path | None = None) -> Source:
    """Check and wrap the training images, training labels, test images and test labels of a benchmark set."""
    place = where or name
    channels = len(_STATISTICS[name][0])
    for part, inputs, labels in (("training", *parts[:2]), ("test", *parts[2:])):
        if len(inputs) != len(labels) or labels.dim() != 1 or len(labels) == 0:
            raise ValueError(
                f"{place}: {len(inputs)} {part} inputs but {len(labels)} labels; need as many, at least one"
            )
        if labels.min() < 0 or labels.max() >= len(class_names):
            raise ValueError(f"{place}: {part} labels must lie in 0..{len(class_names) - 1}")
        if inputs.dim() != 4 or inputs.dtype != torch.uint8 or inputs.shape[1] != channels:
            found = f"{inputs.dtype} {tuple(inputs.shape)}"
            raise ValueError(f"{place}: {part} images must be uint8 (n, {channels}, H, W), got {found}")
    inputs, labels, test_inputs, test_labels = parts
    return Source(name, inputs, class_names, labels=labels, test_inputs=test_inputs, test_labels=test_labels)


def _archive(name: str, root: Path) -> Path | None:
    """The .npz that holds the set, if it is kept in one."""
    archive = root if root.suffix == ".npz" else root / f"{name}.npz"
    return archive if archive.is_file() or root.suffix == ".npz" else None


def _load_npz(path: Path) -> _Parts:
    keys = ("train_images", "train_labels", "test_images", "test_labels")
    if not path.is_file():
        raise FileNotFoundError(f"no file {path}: give an existing .npz with {', '.join(keys)}, or a directory")
    try:
        with np.load(path, allow_pickle=False) as arrays:
            unused = sorted(set(arrays.files) - set(keys))
            train_images, train_labels, test_images, test_labels = (arrays[key] for key in keys)
    except Exception as error:  # NumPy and zipfile raise errors of many kinds for a damaged file
        raise ValueError(f"{path} must be an .npz of plain arrays named {', '.join(keys)} ({error})") from error
    if unused:
        raise ValueError(
            f"{path} also holds {', '.join(unused)}, which a benchmark set does not use: for candidate sets of your "
            f"own, train with --dataset {path} (see docs/data.md for its keys)"
        )
    for key, array in zip(keys, (train_images, train_labels, test_images, test_labels), strict=True):
        if not isinstance(array, np.ndarray) or array.dtype.kind not in "biuf" or array.ndim == 0:
            raise ValueError(f"{path}: {key} must be an array of numbers")
    return (*_tensors(train_images, train_labels), *_tensors(test_images, test_labels))


# ---------------------------------------------------------------------------------------------- Fashion-MNIST

_FASHION_MNIST_FILES = (
    "train-images-idx3-ubyte",
    "train-labels-idx1-ubyte",
    "t10k-images-idx3-ubyte",
    "t10k-labels-idx1-ubyte",
)


_FASHION_MNIST_CLASSES = (
    *("T-shirt/top", "trouser", "pullover", "dress", "coat"),
    *("sandal", "shirt", "sneaker", "bag", "ankle boot"),
)


@DATASETS.register("fmnist")
def load_fashion_mnist(root: Path) -> Source:
    """From an .npz, or the four original files below `root` or where Debian's package puts them."""
    archive = _archive("fmnist", root)
    if archive is not None:
        return _labelled("fmnist", _load_npz(archive), _FASHION_MNIST_CLASSES, archive)
    paths = _find_fashion_mnist(root)
    if paths is None:
        raise FileNotFoundError(
            f"Fashion-MNIST's four *-ubyte.gz files are not in {', '.join(map(str, _fashion_mnist_places(root)))}: put "
            f"them into {_fashion_mnist_places(root)[0]}, install Debian's dataset-fashion-mnist, or use --download"
        )
    train_images, train_labels, test_images, test_labels = map(read_idx, paths)
    parts = (*_tensors(train_images[:, None], train_labels), *_tensors(test_images[:, None], test_labels))
    return _labelled("fmnist", parts, _FASHION_MNIST_CLASSES)


def _download_fashion_mnist(root: Path) -> None:
    if _archive("fmnist", root) is None and _find_fashion_mnist(root) is None:
        _download(import_torchvision().datasets.FashionMNIST, root)


def _fashion_mnist_places(root: Path) -> tuple[Path, ...]:
    return root / "FashionMNIST" / "raw", root, DEBIAN_FASHION_MNIST


def _find_fashion_mnist(root: Path) -> list[Path] | None:
    for place in _fashion_mnist_places(root):
        for suffix in (".gz", ""):
            paths = [place / f"{name}{suffix}" for name in _FASHION_MNIST_FILES]
            if all(path.is_file() for path in paths):
                return paths
    return None


_READ_SIZE = 1 << 24
_MOST_DIMS = 32  # of NumPy's arrays, in all versions


def read_idx(path: Path) -> np.ndarray:
    """Read MNIST's idx format of unsigned bytes, gzipped or not.

    Two zero bytes, the type code 8, the number of dimensions, each dimension as a big-endian uint32, the values.
    """
    try:
        with gzip.open(path) if path.suffix == ".gz" else open(path, "rb") as file:
            return _read_idx(path, file)
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise ValueError(f"{path} is not a complete gzip file ({error}): download it again") from error
    except MemoryError as error:
        raise ValueError(f"{path} does not fit into memory") from error


def _read_idx(path: Path, file: BufferedIOBase) -> np.ndarray:
    """Read what the header claims, and no more: a gzip file may unpack to any size."""
    start = file.read(4)
    num_dims = start[3] if start[:3] == b"\0\0\x08" and len(start) == 4 and start[3] <= _MOST_DIMS else 0
    shape = np.frombuffer(file.read(4 * num_dims).ljust(4 * num_dims, b"\0"), dtype=">u4").tolist()
    size = math.prod(shape)
    check_room(path, size)
    content = bytearray()
    while len(content) <= size and (part := file.read(min(_READ_SIZE, size + 1 - len(content)))):
        content += part
    if size == 0 or num_dims == 0 or len(content) != size:
        raise ValueError(f"{path} is not a complete idx file of unsigned bytes: download it again")
    return np.frombuffer(content, dtype=np.uint8).reshape(shape)


# ------------------------------------------------------------------------------------------------------ CIFAR


@DATASETS.register("cifar10")
def load_cifar10(root: Path) -> Source:
    return _load_cifar("cifar10", root)


@DATASETS.register("cifar100")
def load_cifar100(root: Path) -> Source:
    return _load_cifar("cifar100", root)


def _load_cifar(name: str, root: Path) -> Source:
    """From an .npz, or the official batch files: pickles, which torchvision opens only if their md5 matches."""
    archive = _archive(name, root)
    if archive is not None:
        class_names = tuple(map(str, range({"cifar10": 10, "cifar100": 100}[name])))
        return _labelled(name, _load_npz(archive), class_names, archive)
    cifar, directory = _cifar(name, root)
    try:
        train_set, test_set = cifar(directory, train=True), cifar(directory, train=False)
    except RuntimeError as error:
        raise FileNotFoundError(
            f"no {root / name}.npz, and {directory / cifar.base_folder} lacks files or holds some with a wrong md5: "
            f"unpack {cifar.url} into {directory}, or use --download"
        ) from error
    train, test = (
        _tensors(part.data.transpose(0, 3, 1, 2), np.asarray(part.targets)) for part in (train_set, test_set)
    )
    return _labelled(name, (*train, *test), tuple(train_set.classes))


def _cifar(name: str, root: Path) -> tuple[Any, Path]:
    """torchvision's class, and the directory that holds or will hold its files."""
    cifar = getattr(import_torchvision().datasets, name.upper())
    return cifar, next((place for place in (root, root / name) if (place / cifar.base_folder).is_dir()), root)


def _download_cifar(name: str, root: Path) -> None:
    if _archive(name, root) is None:
        _download(*_cifar(name, root))


def _download(dataset: type, root: Path) -> None:
    """Let torchvision download, verify and unpack missing files."""
    try:
        dataset(root, download=True)
    except (OSError, RuntimeError) as error:
        reason = " ".join(str(error).split())
        raise FileNotFoundError(f"could not download {dataset.__name__} into {root}: {reason}") from error


_DOWNLOADS: dict[str, Callable[[Path], None]] = {
    "fmnist": _download_fashion_mnist,
    "cifar10": partial(_download_cifar, "cifar10"),
    "cifar100": partial(_download_cifar, "cifar100"),
}

# ------------------------------------------------------------------------------------- real partial-label data


def _load_partial_label_set(name: str, root: Path) -> Source:
    return read_source(root if root.suffix == ".mat" else root / f"{name}.mat", ReadOptions())


for _name in REAL_PARTIAL_LABEL_SETS:
    DATASETS.register(_name)(partial(_load_partial_label_set, _name))
