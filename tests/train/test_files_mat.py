"""MATLAB files of users, and the public partial-label sets."""

import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy.io import savemat
from scipy.sparse import csc_matrix

from plsp_train.data.files import InputSpec, ReadOptions, read_inputs, read_source

TEST_DATA = os.environ.get("PLSP_TEST_DATA")
needs_test_data = pytest.mark.skipif(TEST_DATA is None, reason="PLSP_TEST_DATA names no directory")

random = np.random.default_rng(0)

DATA = random.normal(size=(8, 5))
TARGET = np.eye(3)[random.integers(0, 3, 8)]
PARTIAL = np.maximum(TARGET, np.eye(3)[random.integers(0, 3, 8)])


@pytest.mark.parametrize("store", [np.asarray, csc_matrix], ids=["dense", "sparse"])
@pytest.mark.parametrize("data", [DATA, DATA.T], ids=["n×d", "d×n"])
@pytest.mark.parametrize("sets", [np.asarray, np.transpose], ids=["n×l", "l×n"])
@pytest.mark.parametrize("truth", [np.asarray, np.transpose], ids=["n×l", "l×n"])
def test_every_orientation_gives_the_same_source(
    tmp_path: Path, store: Callable, data: np.ndarray, sets: Callable, truth: Callable
) -> None:
    content = {"data": store(data), "partial_target": store(sets(PARTIAL)), "target": store(truth(TARGET))}
    savemat(tmp_path / "own.mat", content)
    source = read_source(tmp_path / "own.mat", ReadOptions())
    assert (source.name, source.class_names, source.notes) == ("own", ("0", "1", "2"), ())
    assert source.inputs.dtype == torch.float32
    np.testing.assert_array_equal(source.inputs, DATA.astype(np.float32))
    assert source.candidates is not None
    np.testing.assert_array_equal(source.candidates, PARTIAL > 0)
    assert source.labels is not None
    np.testing.assert_array_equal(source.labels, TARGET.argmax(axis=1))


def test_true_labels_are_optional_and_unused_variables_are_named(tmp_path: Path) -> None:
    savemat(tmp_path / "own.mat", {"data": DATA, "partial_target": PARTIAL.T, "fold": [1, 2], "info": {"a": 1}})
    source = read_source(tmp_path / "own.mat", ReadOptions())
    assert source.labels is None
    assert source.notes == ("Variables of own.mat that are not used: fold, info.",)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"data": DATA}, "has no variable 'partial_target': it holds data"),
        ({"Data": DATA, "partial_target": PARTIAL}, "has no variable 'data': it holds partial_target, Data"),
        ({"data": DATA[:7], "partial_target": PARTIAL}, "data 7×5 and partial_target 8×3 have no length in common"),
        ({"data": DATA[:, :3], "partial_target": PARTIAL[:3]}, "of data 8×3 and partial_target 3×3 is ambiguous"),
        ({"data": random.normal(size=(8, 8)), "partial_target": PARTIAL}, "the orientation of data 8×8"),
        ({"data": DATA, "partial_target": PARTIAL * 0.5}, "partial_target: must be a matrix of 0 and 1"),
        (
            {"data": DATA, "partial_target": np.diag([1, 1, 0]).repeat([4, 2, 2], 0)},
            "partial_target: instance 6",
        ),
        ({"data": DATA * np.inf, "partial_target": PARTIAL}, "data: row 0, column 0 is"),
        ({"data": DATA[None], "partial_target": PARTIAL}, "must be matrices, got 1×8×5 and 8×3"),
        ({"data": {"x": 1}, "partial_target": PARTIAL}, "data 1×1 and partial_target 8×3"),
        (
            {"data": DATA, "partial_target": PARTIAL, "target": TARGET[:7]},
            "target: must have the shape of",
        ),
        ({"data": DATA, "partial_target": PARTIAL, "target": TARGET * 0}, "target: instance 0 has 0 true labels"),
        ({"data": DATA, "partial_target": PARTIAL, "target": TARGET * 2}, "target: must be a matrix of 0 and 1"),
    ],
)
def test_bad_variables_are_named(tmp_path: Path, content: dict[str, Any], message: str) -> None:
    path = tmp_path / "own.mat"
    savemat(path, content)
    with pytest.raises(ValueError, match=re.escape(message)) as error:
        read_source(path, ReadOptions())
    assert str(error.value).startswith(str(path))
    assert str(error.value).count(str(path)) == 1
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "cannot be read as a MATLAB file"),
        (b"not a MATLAB file" * 20, "cannot be read as a MATLAB file"),
        (b"MATLAB 7.3 MAT-file".ljust(124) + b"\x00\x02IM", "version 7.3: save it with save(…, '-v7')"),
    ],
    ids=["empty", "text", "version 7.3"],
)
def test_unreadable_files_are_named(tmp_path: Path, content: bytes, message: str) -> None:
    (tmp_path / "own.mat").write_bytes(content)
    with pytest.raises(ValueError, match=re.escape(message)) as error:
        read_source(tmp_path / "own.mat", ReadOptions())
    assert "\n" not in str(error.value)


def test_a_truncated_file_is_a_one_line_error(tmp_path: Path) -> None:
    path = tmp_path / "own.mat"
    savemat(path, {"data": DATA, "partial_target": PARTIAL})
    content = path.read_bytes()
    for length in range(0, len(content), 37):
        path.write_bytes(content[:length])
        with pytest.raises(ValueError, match=r"own\.mat") as error:
            read_source(path, ReadOptions())
        assert "\n" not in str(error.value)


def test_annotators_do_not_apply(tmp_path: Path) -> None:
    savemat(tmp_path / "own.mat", {"data": DATA, "partial_target": PARTIAL})
    with pytest.raises(ValueError, match="the option annotators=union does not apply"):
        read_source(tmp_path / "own.mat", ReadOptions(annotators="union"))


@pytest.mark.parametrize("data", [DATA, DATA.T])
def test_predictions_need_only_the_data(tmp_path: Path, data: np.ndarray) -> None:
    savemat(tmp_path / "own.mat", {"data": data})
    found = read_inputs(tmp_path / "own.mat", InputSpec((5,)))
    np.testing.assert_array_equal(found.inputs, DATA.astype(np.float32))
    with pytest.raises(ValueError, match="trained on features 6, got"):
        read_inputs(tmp_path / "own.mat", InputSpec((6,)))
    savemat(tmp_path / "own.mat", {"features": data})
    with pytest.raises(ValueError, match="has no variable 'data': it holds features"):
        read_inputs(tmp_path / "own.mat", InputSpec((5,)))


@needs_test_data
@pytest.mark.parametrize(
    ("name", "shape", "num_classes", "mean_size"),
    [("lost", (1122, 108), 16, 2.23), ("MSRCv2", (1758, 48), 23, 3.16), ("BirdSong", (4998, 38), 13, 2.18)],
)
def test_the_real_sets(name: str, shape: tuple[int, int], num_classes: int, mean_size: float) -> None:
    source = read_source(Path(str(TEST_DATA)) / f"{name}.mat", ReadOptions())
    assert (tuple(source.inputs.shape), source.num_classes, source.notes) == (shape, num_classes, ())
    assert source.candidates is not None
    assert source.labels is not None
    assert float(source.candidates.sum(dim=1).double().mean()) == pytest.approx(mean_size, abs=0.01)
    assert source.candidates.gather(1, source.labels[:, None]).all()


@needs_test_data
def test_real_annotators() -> None:
    source = read_source(Path(str(TEST_DATA)) / "cifar10-annotators.npz", ReadOptions())
    assert source.inputs.shape == (12_000, 3, 32, 32)
    assert source.class_names[3] == "cat"
    assert source.notes[0].startswith("All annotators agree on 59.6% of the instances")
    assert source.notes[1] == "240 of 12000 candidate sets (2.0%) lack the true label."
