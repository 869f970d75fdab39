"""Loaders, on small files in the formats that the real data sets have on disk."""

import gzip
import importlib
import os
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy.io import savemat
from scipy.sparse import csc_matrix

from plsp_train.config import build_config
from plsp_train.data import TrainTestData, datasets
from plsp_train.preparation import load_source, prepare
from plsp_train.torchvision_compat import import_torchvision

TEST_DATA = os.environ.get("PLSP_TEST_DATA")
needs_test_data = pytest.mark.skipif(TEST_DATA is None, reason="PLSP_TEST_DATA names no directory")

random = np.random.default_rng(0)


def load_dataset(name: str, root: str | Path = "data", **settings: Any) -> TrainTestData:
    """As a run with these settings has it."""
    given = {"dataset": name, "data_root": str(root), **settings}
    return prepare(build_config(given), load_source(given))[0]


def one_line(error: pytest.ExceptionInfo[BaseException]) -> str:
    assert "\n" not in str(error.value)
    return str(error.value)


# ----------------------------------------------------------------------------------------------------- digits


def test_digits_have_a_fixed_split() -> None:
    data, again = load_dataset("digits"), load_dataset("digits")
    assert data.train_inputs.shape == (1437, 1, 8, 8)
    assert data.test_inputs.shape == (360, 1, 8, 8)
    assert data.input_shape == (1, 8, 8)
    assert data.is_image
    assert data.train_candidates is None
    assert (data.train_inputs.min(), data.train_inputs.max()) == (0, 255)
    assert torch.equal(data.test_labels, again.test_labels)
    assert torch.equal(data.train_inputs, again.train_inputs)
    # Stratified: every class has its share of the test set.
    assert set(torch.bincount(data.test_labels).tolist()) <= {35, 36, 37}


def assert_statistics(data: TrainTestData) -> None:
    std, mean = torch.std_mean(data.train_inputs.double() / 255, dim=(0, 2, 3), correction=0)
    assert data.mean == pytest.approx(mean.tolist(), abs=1e-4)
    assert data.std == pytest.approx(std.tolist(), abs=1e-4)


def test_digits_are_normalised_by_their_own_statistics() -> None:
    assert_statistics(load_dataset("digits"))


def test_digits_need_no_torchvision() -> None:
    program = """
import sys
sys.modules["torchvision"] = None
from plsp_train.config import build_config
from plsp_train.data import build_augmentation
from plsp_train.preparation import load_source, prepare
import torch
data, _ = prepare(build_config({}), load_source({}))
build_augmentation(data).strong(data.train_inputs[:4], torch.Generator())
"""
    subprocess.run([sys.executable, "-c", program], check=True)


# ---------------------------------------------------------------------------------------------- Fashion-MNIST


def write_idx(path: Path, values: np.ndarray) -> None:
    header = bytes([0, 0, 8, values.ndim]) + b"".join(size.to_bytes(4, "big") for size in values.shape)
    content = header + values.tobytes()
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(gzip.compress(content) if path.suffix == ".gz" else content)


def write_fashion_mnist(directory: Path, suffix: str = ".gz") -> dict[str, np.ndarray]:
    arrays = {
        "train-images-idx3-ubyte": random.integers(0, 256, (20, 28, 28), dtype=np.uint8),
        "train-labels-idx1-ubyte": random.integers(0, 10, 20, dtype=np.uint8),
        "t10k-images-idx3-ubyte": random.integers(0, 256, (7, 28, 28), dtype=np.uint8),
        "t10k-labels-idx1-ubyte": random.integers(0, 10, 7, dtype=np.uint8),
    }
    for name, values in arrays.items():
        write_idx(directory / f"{name}{suffix}", values)
    return arrays


@pytest.fixture
def no_debian_package(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(datasets, "DEBIAN_FASHION_MNIST", tmp_path / "no-such-package")


@pytest.mark.usefixtures("no_debian_package")
@pytest.mark.parametrize("suffix", [".gz", ""])
@pytest.mark.parametrize("subdirectory", ["FashionMNIST/raw", "."])
def test_fashion_mnist_is_read_from_idx_files(tmp_path: Path, subdirectory: str, suffix: str) -> None:
    arrays = write_fashion_mnist(tmp_path / subdirectory, suffix)
    data = load_dataset("fmnist", tmp_path)
    assert data.train_inputs.dtype == torch.uint8
    assert data.train_labels.dtype == torch.int64
    assert data.train_inputs.shape == (20, 1, 28, 28)
    np.testing.assert_array_equal(data.train_inputs[:, 0], arrays["train-images-idx3-ubyte"])
    np.testing.assert_array_equal(data.train_labels, arrays["train-labels-idx1-ubyte"])
    np.testing.assert_array_equal(data.test_inputs[:, 0], arrays["t10k-images-idx3-ubyte"])
    np.testing.assert_array_equal(data.test_labels, arrays["t10k-labels-idx1-ubyte"])


def test_fashion_mnist_is_found_in_the_debian_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_fashion_mnist(tmp_path / "package")
    monkeypatch.setattr(datasets, "DEBIAN_FASHION_MNIST", tmp_path / "package")
    assert len(load_dataset("fmnist", tmp_path / "empty").test_inputs) == 7


@pytest.mark.usefixtures("no_debian_package")
def test_missing_fashion_mnist_says_where_to_put_it(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError) as error:
        load_dataset("fmnist", tmp_path)
    message = one_line(error)
    assert str(tmp_path / "FashionMNIST" / "raw") in message
    assert "dataset-fashion-mnist" in message
    assert "--download" in message


@pytest.mark.usefixtures("no_debian_package")
def test_download_goes_through_torchvision_and_its_failure_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class FashionMNIST:
        def __init__(self, root: Path, download: bool) -> None:
            assert download
            if root.name == "offline":
                raise RuntimeError("Error downloading x:\nTried y, got:\n<urlopen error>\n")
            write_fashion_mnist(root / "FashionMNIST" / "raw")

    monkeypatch.setattr(import_torchvision().datasets, "FashionMNIST", FashionMNIST)
    assert len(load_dataset("fmnist", tmp_path, download=True).train_inputs) == 20
    with pytest.raises(FileNotFoundError, match=r"could not download FashionMNIST into .*offline") as error:
        load_dataset("fmnist", tmp_path / "offline", download=True)
    one_line(error)


@pytest.mark.usefixtures("no_debian_package")
@pytest.mark.parametrize(
    "damage",
    [
        lambda content: content[: len(content) // 2],
        lambda content: b"not a gzip file",
        lambda content: gzip.compress(b""),
        lambda content: gzip.compress(gzip.decompress(content)[:-1]),
        lambda content: gzip.compress(b"\0\0\x0d" + gzip.decompress(content)[3:]),
    ],
    ids=["cut", "no gzip", "empty", "one byte short", "floats"],
)
def test_damaged_idx_file_is_named(tmp_path: Path, damage: object) -> None:
    write_fashion_mnist(tmp_path)
    path = tmp_path / "train-images-idx3-ubyte.gz"
    path.write_bytes(damage(path.read_bytes()))  # type: ignore[operator]
    with pytest.raises(ValueError, match=r"train-images-idx3-ubyte\.gz .*download it again") as error:
        load_dataset("fmnist", tmp_path)
    one_line(error)


@pytest.mark.skipif(not datasets.DEBIAN_FASHION_MNIST.is_dir(), reason="Debian's dataset-fashion-mnist not installed")
def test_the_real_fashion_mnist(tmp_path: Path) -> None:
    data = load_dataset("fmnist", tmp_path)
    assert (len(data.train_inputs), len(data.test_inputs)) == (60_000, 10_000)
    assert torch.bincount(data.train_labels).tolist() == [6000] * 10
    assert_statistics(data)


# ------------------------------------------------------------------------------------------------------ CIFAR


def write_cifar(root: Path, name: str) -> tuple[np.ndarray, np.ndarray]:
    """The python version's layout: rows of 3072 bytes (red, green, blue planes) in pickled dictionaries."""
    if name == "cifar10":
        directory, key, classes = root / "cifar-10-batches-py", "labels", 10
        files = {**{f"data_batch_{i}": 4 for i in range(1, 6)}, "test_batch": 6}
        meta = "batches.meta", {"label_names": [str(i) for i in range(classes)]}
    else:
        directory, key, classes = root / "cifar-100-python", "fine_labels", 100
        files = {"train": 20, "test": 6}
        meta = "meta", {"fine_label_names": [str(i) for i in range(classes)]}
    directory.mkdir(parents=True)
    images, labels = [], []
    for file, count in files.items():
        images.append(random.integers(0, 256, (count, 3072), dtype=np.uint8))
        labels.append(random.integers(0, classes, count).tolist())
        (directory / file).write_bytes(pickle.dumps({"data": images[-1], key: labels[-1]}, protocol=2))
    (directory / meta[0]).write_bytes(pickle.dumps(meta[1], protocol=2))
    return np.vstack(images).reshape(-1, 3, 32, 32), np.concatenate(labels)


@pytest.mark.parametrize("name", ["cifar10", "cifar100"])
@pytest.mark.parametrize("subdirectory", [".", "own"])
def test_cifar_is_read_from_its_batch_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, subdirectory: str
) -> None:
    images, labels = write_cifar(tmp_path / (name if subdirectory == "own" else "."), name)
    monkeypatch.setattr(
        import_torchvision().datasets.cifar, "check_integrity", lambda path, md5=None: os.path.isfile(path)
    )
    data = load_dataset(name, tmp_path)
    assert data.num_classes == {"cifar10": 10, "cifar100": 100}[name]
    assert data.train_inputs.is_contiguous()
    np.testing.assert_array_equal(torch.cat([data.train_inputs, data.test_inputs]), images)
    np.testing.assert_array_equal(torch.cat([data.train_labels, data.test_labels]), labels)
    assert len(data.test_inputs) == 6


@pytest.mark.parametrize("name", ["cifar10", "cifar100"])
def test_cifar_with_a_wrong_md5_is_refused_unopened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    write_cifar(tmp_path, name)
    monkeypatch.setattr(pickle, "load", lambda *_, **__: pytest.fail("an unchecked pickle was opened"))
    with pytest.raises(FileNotFoundError, match="wrong md5") as error:
        load_dataset(name, tmp_path)
    assert "--download" in one_line(error)


def test_missing_cifar_says_where_to_put_it(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError) as error:
        load_dataset("cifar100", tmp_path / "nowhere")
    message = one_line(error)
    assert str(tmp_path / "nowhere" / "cifar-100-python") in message
    assert "https://www.cs.toronto.edu/~kriz/cifar-100-python.tar.gz" in message
    assert "--download" in message


# -------------------------------------------------------------------------------------------------------- npz


def write_npz(path: Path, **changes: np.ndarray) -> dict[str, np.ndarray]:
    arrays = {
        "train_images": random.integers(0, 256, (12, 3, 32, 32), dtype=np.uint8),
        "train_labels": random.integers(0, 10, 12),
        "test_images": random.integers(0, 256, (5, 3, 32, 32), dtype=np.uint8),
        "test_labels": random.integers(0, 10, 5, dtype=np.uint8),
    } | changes
    np.savez(path, **arrays)
    return arrays


@pytest.mark.parametrize(("file", "root"), [("cifar10.npz", "."), ("mini.npz", "mini.npz")])
def test_npz_loads_through_the_preset(tmp_path: Path, file: str, root: str) -> None:
    arrays = write_npz(tmp_path / file)
    data = load_dataset("cifar10", tmp_path / root)
    assert (data.name, data.num_classes) == ("cifar10", 10)
    np.testing.assert_array_equal(data.train_inputs, arrays["train_images"])
    np.testing.assert_array_equal(data.test_labels, arrays["test_labels"])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"train_labels": np.array([{}] * 12)}, "must be an .npz of plain arrays"),
        ({"train_labels": np.zeros(11, dtype=np.int64)}, "12 training inputs but 11 labels"),
        ({"test_labels": np.full(5, 10)}, r"test labels must lie in 0\.\.9"),
        ({"test_images": np.zeros((5, 3, 32, 32))}, "test images must be uint8"),
        ({"test_images": np.zeros((5, 1, 32, 32), dtype=np.uint8)}, r"must be uint8 \(n, 3, H, W\)"),
    ],
)
def test_unusable_npz_is_explained(tmp_path: Path, changes: dict[str, np.ndarray], message: str) -> None:
    write_npz(tmp_path / "cifar10.npz", **changes)
    with pytest.raises(ValueError, match=message) as error:
        load_dataset("cifar10", tmp_path)
    one_line(error)


def test_npz_with_missing_keys_or_missing_file_is_an_error(tmp_path: Path) -> None:
    np.savez(tmp_path / "cifar10.npz", images=np.zeros(3))
    with pytest.raises(ValueError, match="named train_images, train_labels, test_images, test_labels"):
        load_dataset("cifar10", tmp_path)
    (tmp_path / "cifar10.npz").write_bytes(b"nonsense")
    with pytest.raises(ValueError, match=r"must be an \.npz"):
        load_dataset("cifar10", tmp_path)
    with pytest.raises(FileNotFoundError, match=r"no file .*other\.npz"):
        load_dataset("cifar10", tmp_path / "other.npz")


@needs_test_data
def test_the_real_miniature_of_cifar10() -> None:
    data = load_dataset("cifar10", Path(str(TEST_DATA)) / "cifar10-mini.npz")
    assert data.input_shape == (3, 32, 32)
    assert torch.bincount(data.train_labels, minlength=10).min() > 0


# ----------------------------------------------------------------------------------------------- partial labels


def write_mat(path: Path, *, sparse: bool) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    features = random.normal(3, 2, (40, 6))
    features[:, 5] = 1.5
    labels = np.arange(40) % 4
    target = np.eye(4)[labels].T
    candidates = np.maximum(target, random.integers(0, 2, (4, 40)))
    wrap = csc_matrix if sparse else np.asarray
    savemat(path, {"data": features, "target": wrap(target), "partial_target": wrap(candidates)})
    return features, labels, candidates


@pytest.mark.parametrize("sparse", [False, True])
def test_partial_label_mat_keeps_its_own_candidate_sets(tmp_path: Path, sparse: bool) -> None:
    features, labels, candidates = write_mat(tmp_path / "lost.mat", sparse=sparse)
    data = load_dataset("lost", tmp_path)
    assert (data.name, data.num_classes, data.input_shape, data.is_image) == ("lost", 4, (6,), False)
    assert (len(data.train_inputs), len(data.test_inputs)) == (36, 4)
    row_of = {row.astype(np.float32).tobytes(): i for i, row in enumerate(features)}
    train_rows = [row_of[row.numpy().tobytes()] for row in data.train_inputs]
    test_rows = [row_of[row.numpy().tobytes()] for row in data.test_inputs]
    assert sorted(train_rows + test_rows) == list(range(40))
    np.testing.assert_array_equal(data.train_labels, labels[train_rows])
    np.testing.assert_array_equal(data.test_labels, labels[test_rows])
    assert data.train_candidates is not None
    np.testing.assert_array_equal(data.train_candidates, candidates.T[train_rows] > 0)
    assert np.isfinite(data.std).all()
    assert min(data.std) > 0, "a constant feature stays at zero"
    again = load_dataset("lost", tmp_path / "lost.mat")
    assert torch.equal(data.train_inputs, again.train_inputs)
    other = load_dataset("lost", tmp_path, split_seed=1)
    assert not torch.equal(data.train_inputs, other.train_inputs)


@needs_test_data
@pytest.mark.parametrize(
    ("name", "instances", "features", "classes"),
    [("lost", 1122, 108, 16), ("MSRCv2", 1758, 48, 23), ("BirdSong", 4998, 38, 13)],
)
def test_the_real_partial_label_sets(name: str, instances: int, features: int, classes: int) -> None:
    data = load_dataset(name, str(TEST_DATA))
    assert len(data.train_inputs) + len(data.test_inputs) == instances
    assert (data.input_shape, data.num_classes) == ((features,), classes)
    assert data.train_candidates is not None
    assert data.train_candidates.gather(1, data.train_labels[:, None]).all()


def test_missing_mat_is_named(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"BirdSong\.mat"):
        load_dataset("BirdSong", tmp_path)


# ------------------------------------------------------------------------------------------------ names, recipe


def test_recipe_released_normalises_as_the_released_code(tmp_path: Path) -> None:
    write_npz(tmp_path / "any.npz")
    write_npz(
        tmp_path / "gray.npz",
        train_images=np.zeros((12, 1, 28, 28), np.uint8),
        test_images=np.zeros((5, 1, 28, 28), np.uint8),
    )
    cifar100 = load_dataset("cifar100", tmp_path / "any.npz", recipe="released")
    assert cifar100.mean == (0.485, 0.456, 0.406)
    assert cifar100.std == (0.229, 0.224, 0.225)
    fmnist = load_dataset("fmnist", tmp_path / "gray.npz", recipe="released")
    assert (fmnist.mean, fmnist.std) == ((0.1307,), (0.3081,))
    fmnist = load_dataset("fmnist", tmp_path / "gray.npz")
    assert (fmnist.mean, fmnist.std) == ((0.2860,), (0.3530,))
    paper, released = (load_dataset("cifar10", tmp_path / "any.npz", recipe=recipe) for recipe in datasets.RECIPES)
    assert (paper.mean, paper.std) == (released.mean, released.std)


def test_error_for_an_unknown_name_lists_the_known_ones() -> None:
    with pytest.raises(ValueError, match=r"neither a benchmark set \(digits, fmnist, cifar10, cifar100, lost"):
        load_source({"dataset": "mnist"})


# ------------------------------------------------------------------------------------------------- torchvision


def test_missing_torchvision_is_a_one_line_error_with_the_fix(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    import_torchvision.cache_clear()
    monkeypatch.setitem(sys.modules, "torchvision", None)
    with pytest.raises(ImportError, match="pip install torchvision") as error:
        load_dataset("cifar10", tmp_path)
    one_line(error)


def test_torchvision_works_with_this_torch() -> None:
    torchvision = import_torchvision()
    assert torchvision is import_torchvision()
    assert hasattr(torchvision.datasets, "CIFAR10")
    assert hasattr(importlib.import_module("torchvision.transforms.v2"), "functional")
