"""NumPy archives."""

import pickle
import re
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from plsp_train.data.files import ReadOptions, read_source
from plsp_train.data.source import Source

random = np.random.default_rng(0)

FEATURES = random.normal(size=(6, 4))
IMAGES = random.integers(0, 256, (6, 5, 7, 3), dtype=np.uint8)
CANDIDATES = np.array([[1, 1, 0], [0, 1, 0], [0, 1, 1], [1, 0, 0], [0, 0, 1], [1, 0, 1]], dtype=bool)
LABELS = np.array([0, 1, 2, 0, 2, 2])
ANNOTATIONS = np.array([[0, 1, 0], [1, 1, 1], [2, 1, -1], [0, -1, -1], [2, 2, 2], [0, 2, 2]])


def read(path: Path, options: ReadOptions | None = None, **arrays: Any) -> Source:
    np.savez(path / "own.npz", **arrays)
    return read_source(path / "own.npz", options or ReadOptions())


def assert_refused(path: Path, message: str, **arrays: Any) -> None:
    with pytest.raises(ValueError, match=re.escape(message)) as error:
        read(path, **arrays)
    assert str(error.value).startswith(str(path / "own.npz"))
    assert str(error.value).count(str(path)) == 1
    assert "\n" not in str(error.value)


def test_features_with_everything(tmp_path: Path) -> None:
    source = read(
        tmp_path,
        features=FEATURES,
        candidates=CANDIDATES,
        labels=LABELS,
        class_names=np.array(["cat", "dog", "fox"]),
        test_features=FEATURES[:2],
        test_labels=LABELS[:2],
    )
    assert (source.name, source.class_names, source.notes) == ("own", ("cat", "dog", "fox"), ())
    assert source.inputs.dtype == torch.float32
    np.testing.assert_array_equal(source.inputs, FEATURES.astype(np.float32))
    assert source.candidates is not None
    np.testing.assert_array_equal(source.candidates, CANDIDATES)
    assert source.labels is not None
    assert source.labels.tolist() == LABELS.tolist()
    assert source.test_inputs is not None
    assert torch.equal(source.test_inputs, source.inputs[:2])
    assert source.test_labels is not None
    assert source.test_labels.tolist() == LABELS[:2].tolist()


def test_candidates_alone_are_enough(tmp_path: Path) -> None:
    source = read(tmp_path, features=FEATURES, candidates=CANDIDATES)
    assert source.class_names == ("0", "1", "2")
    assert (source.labels, source.test_inputs, source.test_labels, source.row_names) == (None, None, None, None)


def test_labels_alone_leave_the_candidate_sets_to_be_drawn(tmp_path: Path) -> None:
    source = read(tmp_path, features=FEATURES, labels=LABELS)
    assert source.candidates is None
    assert source.num_classes == 3


def test_images_get_their_channels_first(tmp_path: Path) -> None:
    colour = read(tmp_path, images=IMAGES, candidates=CANDIDATES, test_images=IMAGES[:1])
    assert colour.inputs.shape == (6, 3, 5, 7)
    assert colour.inputs.is_contiguous()
    np.testing.assert_array_equal(colour.inputs, IMAGES.transpose(0, 3, 1, 2))
    assert colour.test_labels is None
    grey = read(tmp_path, images=IMAGES[..., 0], candidates=CANDIDATES)
    np.testing.assert_array_equal(grey.inputs[:, 0], IMAGES[..., 0])


def test_annotations_become_their_union_or_vote_and_the_agreement_is_reported(tmp_path: Path) -> None:
    union = read(tmp_path, features=FEATURES, annotations=ANNOTATIONS)
    assert union.candidates is not None
    np.testing.assert_array_equal(union.candidates, CANDIDATES)
    # Of the five instances with two answers or more, two are unanimous; pairs agree in 1/3, 1, 0, 1, 1/3 of the cases.
    assert union.notes[0].startswith(
        "All annotators agree on 40.0% of the instances; two answers to an instance agree in 53.3% of the cases."
    )
    assert union.notes[0].endswith("every label that one of them gave.")
    vote = read(tmp_path, ReadOptions(annotators="vote"), features=FEATURES, annotations=ANNOTATIONS)
    assert vote.candidates is not None
    assert vote.candidates.sum(dim=1).tolist() == [1, 1, 2, 1, 1, 1]
    assert vote.notes[0].endswith("the labels with the most votes.")


def test_a_single_annotator_per_instance_has_no_agreement(tmp_path: Path) -> None:
    source = read(tmp_path, features=FEATURES, annotations=LABELS)
    assert source.notes[0].startswith("No instance has answers of two annotators.")


@pytest.mark.parametrize("wrong", [~CANDIDATES, np.where(CANDIDATES, -1, np.arange(3))])
def test_complementary_labels(tmp_path: Path, wrong: np.ndarray) -> None:
    source = read(tmp_path, features=FEATURES, complementary=wrong)
    assert source.candidates is not None
    np.testing.assert_array_equal(source.candidates, CANDIDATES)


def test_noise_and_absent_classes_are_remarks(tmp_path: Path) -> None:
    candidates = np.pad(CANDIDATES, ((0, 0), (0, 2)))
    names = np.array(["cat", "dog", "fox", "gnu", "hen"])
    source = read(tmp_path, features=FEATURES, candidates=candidates, labels=LABELS[::-1], class_names=names)
    assert source.notes == (
        "No candidate set holds gnu, hen: such a class cannot be learned.",
        "5 of 6 candidate sets (83.3%) lack the true label.",
    )


def test_options_that_do_not_apply_are_errors(tmp_path: Path) -> None:
    for options, message in (
        (ReadOptions(annotators="vote"), "has no annotations: the option annotators=vote does not apply"),
        (ReadOptions(image_size=32), "is not a folder of images: the option image_size=32 does not apply"),
    ):
        with pytest.raises(ValueError, match=message):
            read(tmp_path, options, features=FEATURES, candidates=CANDIDATES)


@pytest.mark.parametrize("options", [{"annotators": "mean"}, {"image_size": -1}, {"workers": -1}])
def test_impossible_options_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="must"):
        ReadOptions(**options)


GOOD = {"features": FEATURES, "candidates": CANDIDATES}
WITH_NAN = np.where(np.arange(24).reshape(6, 4) == 14, np.nan, FEATURES)


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({"candidates": CANDIDATES}, "exactly one of images, features, but has none"),
        (GOOD | {"images": IMAGES}, "exactly one of images, features, but has images and features"),
        ({"features": FEATURES}, "none of candidates, annotations, complementary, and no labels"),
        (GOOD | {"annotations": ANNOTATIONS}, "but has candidates and annotations"),
        (GOOD | {"candidate": CANDIDATES}, "unknown array 'candidate'"),
        (GOOD | {"candidate": CANDIDATES}, "did you mean 'candidates'?"),
        (GOOD | {"train_images": IMAGES}, "did you mean 'images'?"),
        (
            GOOD | {"class_names": np.array(["a", "b"])},
            "candidates: must be a boolean matrix",
        ),
        (GOOD | {"class_names": np.array([1, 2, 3])}, "class_names: must be strings"),
        (GOOD | {"class_names": np.array(["a", "b", "a"])}, "class_names: class names must be distinct"),
        (GOOD | {"features": WITH_NAN}, "features: row 3, column 2 is nan"),
        (GOOD | {"features": np.where(np.isnan(WITH_NAN), np.inf, FEATURES)}, "features: row 3, column 2 is inf"),
        (GOOD | {"features": np.where(np.isnan(WITH_NAN), 1e300, FEATURES)}, "features: row 3, column 2 is 1e+300"),
        (GOOD | {"features": FEATURES.astype(str)}, "features: features must be numbers"),
        (GOOD | {"features": FEATURES[0]}, "features: features must be numbers of shape n×d"),
        (GOOD | {"features": FEATURES[:0]}, "features: features must have at least one row"),
        (GOOD | {"features": FEATURES[:5]}, "candidates has 6 rows, but features has 5"),
        (GOOD | {"labels": LABELS[:4]}, "labels has 4 rows, but features has 6"),
        (GOOD | {"labels": LABELS + 1}, "labels: row 2 is 3, but classes are 0..2"),
        (GOOD | {"labels": LABELS - 1}, "labels: row 0 is -1, but classes are 0..2"),
        (GOOD | {"labels": LABELS / 1}, "labels: must be class numbers"),
        (GOOD | {"labels": np.int64(1)}, "labels is a single value"),
        (GOOD | {"test_labels": LABELS}, "has no array 'test_features'"),
        (GOOD | {"test_images": IMAGES}, "has features but test_images"),
        (GOOD | {"test_features": FEATURES[:, :3]}, "features and test_features do not fit together"),
        (GOOD | {"test_features": WITH_NAN}, "test_features: row 3, column 2 is nan"),
        (
            GOOD | {"test_features": FEATURES, "test_labels": LABELS[:2]},
            "test_labels has 2 rows",
        ),
        (GOOD | {"candidates": CANDIDATES & False}, "candidates: row 0 has no candidate"),
        (GOOD | {"candidates": CANDIDATES * 2}, "candidates: must be a boolean matrix"),
        (GOOD | {"candidates": LABELS}, "candidates: must be a boolean matrix"),
        ({"features": FEATURES, "annotations": ANNOTATIONS - 1}, "annotations: row 2 has -2"),
        ({"features": FEATURES, "annotations": np.where(LABELS == 1, -1, LABELS)}, "annotations: row 1 has no answer"),
        ({"features": FEATURES, "annotations": ANNOTATIONS / 1}, "annotations: must be class numbers"),
        ({"features": FEATURES, "annotations": ANNOTATIONS * 10**8}, "class number 200000000"),
        ({"features": FEATURES, "complementary": CANDIDATES | True}, "complementary: row 0 excludes every class"),
        ({"images": IMAGES / 255, "candidates": CANDIDATES}, "images: images must be uint8, got float64"),
        ({"images": IMAGES[0], "candidates": CANDIDATES}, "candidates has 6 rows, but images has 5"),
        ({"images": IMAGES[:, 0, 0], "candidates": CANDIDATES}, "images: images must be n×h×w or n×h×w×c"),
        ({"images": IMAGES.transpose(0, 3, 1, 2), "candidates": CANDIDATES}, "channels last, got shape (6, 3, 5, 7)"),
        (GOOD | {"labels": np.array([{}, 1, 2, 3, 4, 5], dtype=object)}, "labels holds pickled objects"),
    ],
)
def test_bad_arrays_are_named(tmp_path: Path, arrays: dict[str, np.ndarray], message: str) -> None:
    assert_refused(tmp_path, message, **arrays)


class Bomb:
    def __reduce__(self) -> Any:
        return pytest.fail, ("a pickle was executed",)


def test_pickles_are_never_loaded(tmp_path: Path) -> None:
    path = tmp_path / "own.npz"
    path.write_bytes(pickle.dumps(Bomb()))
    with pytest.raises(ValueError, match=r"own\.npz is not an \.npz archive"):
        read_source(path, ReadOptions())
    bomb = np.empty(6, dtype=object)
    bomb[:] = [Bomb()] * 6
    assert_refused(tmp_path, "labels holds pickled objects, which are never loaded", **GOOD, labels=bomb)


def test_a_member_that_is_not_an_array_is_named(tmp_path: Path) -> None:
    np.savez(tmp_path / "own.npz", **GOOD)
    with zipfile.ZipFile(tmp_path / "own.npz", "a") as archive:
        archive.writestr("labels", b"0 1 2 0 2 2")
    with pytest.raises(ValueError, match="labels is not an array in NumPy's format"):
        read_source(tmp_path / "own.npz", ReadOptions())


@pytest.mark.parametrize("content", [b"", b"not a zip", b"PK\3\4 cut"])
def test_files_that_are_not_archives_are_named(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "own.npz").write_bytes(content)
    with pytest.raises(ValueError, match=r"is not an \.npz archive, or not a complete one"):
        read_source(tmp_path / "own.npz", ReadOptions())


@settings(max_examples=50, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(position=st.floats(0, 1, exclude_max=True), value=st.integers(0, 255), cut=st.booleans())
def test_damaged_archives_are_one_line_errors_or_harmless(
    tmp_path: Path, position: float, value: int, cut: bool
) -> None:
    path = tmp_path / "own.npz"
    np.savez(path, **GOOD)
    content = bytearray(path.read_bytes())
    where = int(position * len(content))
    content[where:] = b"" if cut else bytes([value]) + content[where + 1 :]
    path.write_bytes(content)
    try:
        source = read_source(path, ReadOptions())
    except ValueError as error:
        message = str(error)
    else:
        np.testing.assert_array_equal(source.inputs, FEATURES.astype(np.float32))
        return
    assert message.startswith(str(path))
    assert "\n" not in message


def test_missing_and_unknown_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"there is no file or folder .*nowhere\.npz"):
        read_source(tmp_path / "nowhere.npz", ReadOptions())
    (tmp_path / "own.xlsx").touch()
    with pytest.raises(ValueError, match=r"own\.xlsx is not of a known kind: give \.npz, \.mat, \.csv, \.parquet, or"):
        read_source(tmp_path / "own.xlsx", ReadOptions())
