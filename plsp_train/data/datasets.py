"""Data sets as whole tensors: images in uint8, or real-valued feature vectors with their own candidate sets."""

import gzip
import zipfile
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from plsp_train.data.torchvision_compat import import_torchvision

RECIPES = ("paper", "released")
REAL_PARTIAL_LABEL_SETS = ("lost", "MSRCv2", "BirdSong")
DATASETS = ("digits", "fmnist", "cifar10", "cifar100", *REAL_PARTIAL_LABEL_SETS)

# Where Debian's package dataset-fashion-mnist puts the four original files.
DEBIAN_FASHION_MNIST = Path("/usr/share/datasets/fashion-mnist")

_Statistics = tuple[tuple[float, ...], tuple[float, ...]]

# Mean and standard deviation per channel of each training set, in units of the full range 0..255.
_STATISTICS: dict[str, _Statistics] = {
    "digits": ((0.3054,), (0.3760,)),
    "fmnist": ((0.2860,), (0.3530,)),
    "cifar10": ((0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)),
    "cifar100": ((0.5071, 0.4865, 0.4409), (0.2673, 0.2564, 0.2762)),
}
# The released code takes MNIST's statistics for Fashion-MNIST and ImageNet's for CIFAR-100.
_RELEASED_STATISTICS: dict[str, _Statistics] = _STATISTICS | {
    "fmnist": ((0.1307,), (0.3081,)),
    "cifar100": ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)),
}
_NUM_CLASSES = {"digits": 10, "fmnist": 10, "cifar10": 10, "cifar100": 100}


@dataclass(frozen=True)
class TrainTestData:
    """A data set in memory.

    Inputs are uint8 images (n, C, H, W) or float32 vectors (n, d); labels are the true classes, int64 (n,).
    `mean` and `std` normalise: per channel in units of 0..255 for images, per feature for vectors.
    `train_candidates` (n, l) are the candidate sets that came with the data; None where they are to be generated.
    """

    name: str
    num_classes: int
    train_inputs: Tensor
    train_labels: Tensor
    test_inputs: Tensor
    test_labels: Tensor
    mean: tuple[float, ...]
    std: tuple[float, ...]
    train_candidates: Tensor | None = None

    def __post_init__(self) -> None:
        for part, inputs, labels in (
            ("training", self.train_inputs, self.train_labels),
            ("test", self.test_inputs, self.test_labels),
        ):
            if len(inputs) != len(labels) or len(labels) == 0:
                raise ValueError(
                    f"{self.name}: {len(inputs)} {part} inputs but {len(labels)} labels; need as many, > 0"
                )
            if labels.min() < 0 or labels.max() >= self.num_classes:
                raise ValueError(f"{self.name}: {part} labels must lie in 0..{self.num_classes - 1}")
            if self.is_image and (inputs.dtype != torch.uint8 or inputs.shape[1] != len(self.mean)):
                raise ValueError(
                    f"{self.name}: {part} images must be uint8 (n, {len(self.mean)}, H, W), "
                    f"got {inputs.dtype} {tuple(inputs.shape)}"
                )

        candidates = self.train_candidates
        if candidates is not None and (
            candidates.shape != (len(self.train_labels), self.num_classes) or not candidates.any(dim=1).all()
        ):
            raise ValueError(f"{self.name}: every training instance needs a candidate set, and none may be empty")

    @property
    def is_image(self) -> bool:
        return self.train_inputs.dim() == 4

    @property
    def input_shape(self) -> tuple[int, ...]:
        """(C, H, W) of an image, (d,) of a vector."""
        return tuple(self.train_inputs.shape[1:])


def load_dataset(
    name: str, root: str | Path = "data", *, download: bool = False, recipe: str = "paper"
) -> TrainTestData:
    """Load one of `DATASETS` from `root`, a folder or, for a data set kept in one .npz or .mat file, that file.

    An .npz holds train_images, train_labels, test_images and test_labels, images as uint8 (n, C, H, W); a folder
    may hold it as <name>.npz. `download` fetches missing files with torchvision; `digits` is part of scikit-learn.
    The recipe decides the normalisation: the data set's own statistics, or those of the released code.
    """
    if name not in DATASETS:
        raise ValueError(f"unknown dataset {name!r}: choose one of {', '.join(DATASETS)}")
    if recipe not in RECIPES:
        raise ValueError(f"unknown recipe {recipe!r}: choose one of {', '.join(RECIPES)}")
    root = Path(root).expanduser()
    if name in REAL_PARTIAL_LABEL_SETS:
        return load_partial_label_mat(root if root.suffix == ".mat" else root / f"{name}.mat")
    train_inputs, train_labels, test_inputs, test_labels = _load_images(name, root, download)
    mean, std = (_RELEASED_STATISTICS if recipe == "released" else _STATISTICS)[name]
    return TrainTestData(
        name, _NUM_CLASSES[name], train_inputs, train_labels, test_inputs, test_labels, mean=mean, std=std
    )


_Parts = tuple[Tensor, Tensor, Tensor, Tensor]


def _load_images(name: str, root: Path, download: bool) -> _Parts:
    if name == "digits":
        return _load_digits()
    archive = root if root.suffix == ".npz" else root / f"{name}.npz"
    if archive.is_file() or root.suffix == ".npz":
        return _load_npz(archive)
    if name == "fmnist":
        return _load_fashion_mnist(root, download)
    return _load_cifar(name, root, download)


def _load_digits() -> _Parts:
    """scikit-learn's 8×8 digits, split into 1437 training and 360 test images, always the same ones."""
    from sklearn.datasets import load_digits
    from sklearn.model_selection import train_test_split

    digits = load_digits()
    images = np.rint(digits.images * (255 / 16)).astype(np.uint8)[:, None]
    train, test = train_test_split(np.arange(len(images)), test_size=360, stratify=digits.target, random_state=0)
    return (*_tensors(images[train], digits.target[train]), *_tensors(images[test], digits.target[test]))


def _tensors(images: np.ndarray, labels: np.ndarray) -> tuple[Tensor, Tensor]:
    return torch.from_numpy(np.ascontiguousarray(images)), torch.from_numpy(labels.astype(np.int64))


def _load_npz(path: Path) -> _Parts:
    keys = ("train_images", "train_labels", "test_images", "test_labels")
    if not path.is_file():
        raise FileNotFoundError(f"no file {path}: give an existing .npz with {', '.join(keys)}, or a folder")
    try:
        with np.load(path, allow_pickle=False) as arrays:
            train_images, train_labels, test_images, test_labels = (arrays[key] for key in keys)
    except (KeyError, ValueError, zipfile.BadZipFile) as error:
        raise ValueError(f"{path} must be an .npz of plain arrays named {', '.join(keys)} ({error})") from error
    return (*_tensors(train_images, train_labels), *_tensors(test_images, test_labels))


# ---------------------------------------------------------------------------------------------- Fashion-MNIST

_FASHION_MNIST_FILES = (
    "train-images-idx3-ubyte",
    "train-labels-idx1-ubyte",
    "t10k-images-idx3-ubyte",
    "t10k-labels-idx1-ubyte",
)


def _load_fashion_mnist(root: Path, download: bool) -> _Parts:
    raw_folder = root / "FashionMNIST" / "raw"
    places = (raw_folder, root, DEBIAN_FASHION_MNIST)
    paths = _find_fashion_mnist(places)
    if paths is None and download:
        _download(import_torchvision().datasets.FashionMNIST, root)
        paths = _find_fashion_mnist((raw_folder,))
    if paths is None:
        raise FileNotFoundError(
            f"Fashion-MNIST's four *-ubyte.gz files are not in {', '.join(map(str, places))}: put them into "
            f"{raw_folder}, install Debian's dataset-fashion-mnist, or let --download fetch them"
        )
    train_images, train_labels, test_images, test_labels = map(read_idx, paths)
    return (*_tensors(train_images[:, None], train_labels), *_tensors(test_images[:, None], test_labels))


def _find_fashion_mnist(places: tuple[Path, ...]) -> list[Path] | None:
    for place in places:
        for suffix in (".gz", ""):
            paths = [place / f"{name}{suffix}" for name in _FASHION_MNIST_FILES]
            if all(path.is_file() for path in paths):
                return paths
    return None


def read_idx(path: Path) -> np.ndarray:
    """Read MNIST's idx format of unsigned bytes, gzipped or not.

    Two zero bytes, the type code 8, the number of dimensions, each dimension as a big-endian uint32, the values.
    """
    try:
        content = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    except (EOFError, gzip.BadGzipFile) as error:
        raise ValueError(f"{path} is not a complete gzip file ({error}): fetch it again") from error
    num_dims = content[3] if content[:3] == b"\0\0\x08" and len(content) > 3 else 0
    header = 4 + 4 * num_dims
    shape = np.frombuffer(content[4:header], dtype=">u4").astype(np.int64) if len(content) >= header else np.empty(0)
    if num_dims == 0 or len(content) != header + int(np.prod(shape)):
        raise ValueError(f"{path} is not a complete idx file of unsigned bytes: fetch it again")
    return np.frombuffer(content, dtype=np.uint8, offset=header).reshape(shape).copy()


# ------------------------------------------------------------------------------------------------------ CIFAR


def _load_cifar(name: str, root: Path, download: bool) -> _Parts:
    """Read the official archive's batch files. They are pickles: torchvision opens them only if their md5 is right."""
    cifar = getattr(import_torchvision().datasets, name.upper())
    folder = next((place for place in (root, root / name) if (place / cifar.base_folder).is_dir()), root)
    if download:
        _download(cifar, folder)
    try:
        parts = [cifar(folder, train=True), cifar(folder, train=False)]
    except RuntimeError as error:
        raise FileNotFoundError(
            f"no {root / name}.npz, and {folder / cifar.base_folder} lacks files or holds some with a wrong md5: "
            f"unpack {cifar.url} into {folder}, or let --download fetch it"
        ) from error
    train, test = (_tensors(part.data.transpose(0, 3, 1, 2), np.asarray(part.targets)) for part in parts)
    return (*train, *test)


def _download(dataset: type, root: Path) -> None:
    """Let a torchvision data set fetch, check and unpack the files that are not there yet."""
    try:
        dataset(root, download=True)
    except (OSError, RuntimeError) as error:
        reason = " ".join(str(error).split())
        raise FileNotFoundError(f"could not download {dataset.__name__} into {root}: {reason}") from error


# ------------------------------------------------------------------------------------- real partial-label data

_TEST_SHARE = 0.1


def load_partial_label_mat(path: str | Path, *, split_seed: int = 0) -> TrainTestData:
    """Load a real partial-label data set in the field's usual MATLAB layout, a tenth of it held out as test set.

    `data` (n, d) are the features, `target` (l, n) the true labels, `partial_target` (l, n) the candidate sets,
    the last two dense or sparse. Features are normalised by the training part's mean and standard deviation.
    """
    from scipy import io, sparse  # type: ignore[import-untyped]

    path = Path(path).expanduser()
    if not path.is_file():
        raise FileNotFoundError(f"no file {path}: put the .mat file of this partial-label data set there")
    try:
        content = io.loadmat(path, variable_names=("data", "target", "partial_target"))
        features, target, candidates = (
            np.asarray(value.toarray() if sparse.issparse(value) else value)
            for value in (content["data"], content["target"], content["partial_target"])
        )
    except (KeyError, ValueError, NotImplementedError, io.matlab.MatReadError) as error:
        raise ValueError(f"{path} must be a MATLAB file with data, target and partial_target ({error})") from error
    if features.ndim != 2 or target.shape != candidates.shape or target.shape[1] != len(features):
        raise ValueError(
            f"{path}: data (n, d), target (l, n) and partial_target (l, n) do not fit together, "
            f"got {features.shape}, {target.shape}, {candidates.shape}"
        )

    inputs = torch.from_numpy(features.astype(np.float32))
    labels = torch.from_numpy(target.argmax(axis=0))
    candidate_sets = torch.from_numpy(candidates.T > 0).contiguous()
    order = torch.randperm(len(inputs), generator=torch.Generator().manual_seed(split_seed))
    test, train = order.tensor_split([round(_TEST_SHARE * len(inputs))])
    std, mean = torch.std_mean(inputs[train], dim=0, correction=0)
    return TrainTestData(
        name=path.stem,
        num_classes=len(target),
        train_inputs=inputs[train],
        train_labels=labels[train],
        test_inputs=inputs[test],
        test_labels=labels[test],
        mean=tuple(mean.tolist()),
        std=tuple(torch.where(std > 0, std, 1.0).tolist()),  # a constant feature stays at zero
        train_candidates=candidate_sets[train],
    )
