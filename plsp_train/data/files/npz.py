"""NumPy archives: images or features, with candidate sets, annotators' answers or complementary labels."""

import zipfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from plsp_train.data.annotations import (
    annotator_agreement,
    checked_candidates,
    checked_class_names,
    did_you_mean,
    from_annotations,
    from_complementary,
    numbered_class_names,
)
from plsp_train.data.files.checks import agreement_note, feature_tensor, image_tensor, label_tensor, located
from plsp_train.data.files.memory import check_room
from plsp_train.data.files.options import Inputs, InputSpec, ReadOptions
from plsp_train.data.source import Source

INPUTS: dict[str, Callable[[np.ndarray], Tensor]] = {"images": image_tensor, "features": feature_tensor}
FORMS = ("candidates", "annotations", "complementary")
KEYS = (*INPUTS, *FORMS, "labels", "class_names", *(f"test_{key}" for key in INPUTS), "test_labels")


def read_npz(path: Path, options: ReadOptions) -> Source:
    return read_arrays(Archive(path), options)


def read_arrays(archive: "Archive", options: ReadOptions) -> Source:
    """Training data from the arrays of an archive."""
    path = archive.path
    kind = archive.one_of(tuple(INPUTS))
    form = archive.one_of(FORMS) if archive.holds(*FORMS) else None
    if form is None and not archive.holds("labels"):
        raise ValueError(f"{path} has none of {', '.join(FORMS)}, and no labels to draw candidate sets from")
    if options.annotators is not None and form != "annotations":
        raise ValueError(f"{path} has no annotations: the option annotators={options.annotators} does not apply")
    inputs, test_inputs = archive.inputs(kind)
    archive.check_lengths(kind, form, "labels")
    archive.check_lengths(f"test_{kind}", "test_labels")
    class_names = archive.class_names(form)
    candidates, notes = archive.candidates(form, len(class_names), options.annotators or "union")
    return Source(
        name=path.stem,
        inputs=inputs,
        class_names=class_names,
        candidates=candidates,
        labels=archive.labels("labels", len(class_names)),
        test_inputs=test_inputs,
        test_labels=archive.labels("test_labels", len(class_names)),
        notes=notes,
    )


def read_npz_inputs(path: Path, wanted: InputSpec) -> Inputs:
    kind = "images" if wanted.is_image else "features"
    archive = Archive(path)
    return Inputs(archive.converted(kind, INPUTS[kind]), unused=archive.others(kind))


class Archive:
    """The arrays of an .npz file, each read when it is asked for. Pickled objects are never loaded."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            with zipfile.ZipFile(path) as archive:
                members = archive.infolist()
        except Exception as error:  # zipfile raises errors of many kinds for a damaged file
            raise ValueError(f"{path} is not an .npz archive, or not a complete one ({error})") from error
        self._keys = [member.filename.removesuffix(".npy") for member in members]
        check_room(path, sum(member.file_size for member in members))
        self._arrays: dict[str, np.ndarray] = {}
        self._refuse_unknown_keys()

    def _refuse_unknown_keys(self) -> None:
        for key in self._keys:
            if key not in KEYS:
                hint = did_you_mean(key.removeprefix("train_"), KEYS)
                raise ValueError(f"{self.path} has the unknown array {key!r}; known arrays are {', '.join(KEYS)}{hint}")

    def holds(self, *keys: str) -> bool:
        return any(key in self._keys for key in keys)

    def others(self, *keys: str) -> tuple[str, ...]:
        """The keys of the file besides these."""
        return tuple(key for key in self._keys if key not in keys)

    def one_of(self, keys: tuple[str, ...]) -> str:
        """The one of these keys that is in the file."""
        present = [key for key in keys if self.holds(key)]
        if len(present) != 1:
            found = " and ".join(present) or "none"
            raise ValueError(f"{self.path} must have exactly one of {', '.join(keys)}, but has {found}")
        return present[0]

    def array(self, key: str) -> np.ndarray:
        if not self.holds(key):
            raise ValueError(f"{self.path} has no array {key!r}: it holds {', '.join(self._keys) or 'nothing'}")
        if key not in self._arrays:
            self._arrays[key] = self._read(key)
        return self._arrays[key]

    def _read(self, key: str) -> np.ndarray:
        try:
            array = self._load(key)
        except Exception as error:  # of many kinds for an array that is cut, altered, or claims an impossible size
            if "allow_pickle" in str(error) or "Python objects" in str(error):
                raise ValueError(
                    f"{self.path}: {key} holds pickled objects, which are never loaded: save a plain array"
                ) from error
            raise ValueError(f"{self.path}: {key} cannot be read: {error}") from error
        if not isinstance(array, np.ndarray):
            raise ValueError(f"{self.path}: {key} is not an array in NumPy's format")
        return array

    def _load(self, key: str) -> np.ndarray:
        with np.load(self.path, allow_pickle=False) as file:
            return file[key]

    def converted(self, key: str, convert: Callable[[np.ndarray], Tensor]) -> Tensor:
        array = self.array(key)
        with located(f"{self.path}: {key}"):
            return convert(array)

    def inputs(self, kind: str) -> tuple[Any, Any]:
        """Training inputs and, if there are any, test inputs."""
        other = next(key for key in INPUTS if key != kind)
        if self.holds(f"test_{other}"):
            raise ValueError(f"{self.path} has {kind} but test_{other}: both must be of the same kind")
        inputs = self._inputs(kind, kind)
        if not self.holds(f"test_{kind}"):
            return inputs, None
        test_inputs = self._inputs(f"test_{kind}", kind)
        if test_inputs.shape[1:] != inputs.shape[1:]:
            shapes = " and ".join(str(self.array(key).shape) for key in (kind, f"test_{kind}"))
            raise ValueError(f"{self.path}: {kind} and test_{kind} do not fit together, got {shapes}")
        return inputs, test_inputs

    def _inputs(self, key: str, kind: str) -> Any:
        return self.converted(key, INPUTS[kind])

    def check_lengths(self, inputs: str, *keys: str | None) -> None:
        for key in keys:
            if key is None or not self.holds(key):
                continue
            array = self.array(key)
            length, expected = array.shape[:1], len(self.array(inputs))
            if length != (expected,):
                found = f"has {length[0]} rows" if length else "is a single value"
                raise ValueError(f"{self.path}: {key} {found}, but {inputs} has {expected}")

    def class_names(self, form: str | None) -> tuple[str, ...]:
        """Those of the file, or numbers: as many as a matrix has columns, or up to the highest label."""
        if self.holds("class_names"):
            names = self.array("class_names")
            with located(f"{self.path}: class_names"):
                if names.ndim != 1 or names.dtype.kind != "U":
                    raise ValueError(f"must be strings of shape (l,), got {names.dtype} of shape {names.shape}")
                return checked_class_names(names.tolist())
        if form is not None and self.array(form).ndim == 2 and (form == "candidates" or self.array(form).dtype == bool):
            return numbered_class_names(self.array(form).shape[1])
        keys = [key for key in (form, "labels", "test_labels") if key is not None and self.holds(key)]
        numbers = [self.array(key) for key in keys if self.array(key).dtype.kind in "iu"]
        with located(self.path):
            return numbered_class_names(1 + max((int(array.max(initial=0)) for array in numbers), default=0))

    def candidates(self, form: str | None, num_classes: int, combine: str) -> tuple[Any, tuple[str, ...]]:
        """The candidate sets and remarks on where they come from."""
        if form is None:
            return None, ()
        given = self.array(form)
        with located(f"{self.path}: {form}"):
            convert = partial(_candidate_sets, form=form, num_classes=num_classes, combine=combine)
            sets = self._converted_sets(given, convert)
            if form != "annotations":
                return sets, ()
            agreement = annotator_agreement(given if given.ndim > 1 else given[:, None], num_classes)
            return sets, (agreement_note(agreement, combine),)

    def _converted_sets(self, given: np.ndarray, convert: Callable[[np.ndarray], Tensor]) -> Any:
        return convert(given)

    def labels(self, key: str, num_classes: int) -> Tensor | None:
        return self.converted(key, partial(label_tensor, num_classes=num_classes)) if self.holds(key) else None


def _candidate_sets(given: np.ndarray, form: str, num_classes: int, combine: str) -> Tensor:
    """bool (n, l) from any of the forms."""
    if form == "candidates":
        if given.shape[1:] != (num_classes,) or not np.isin(given, (0, 1)).all():
            raise ValueError(
                f"must be a boolean matrix with a column for each of the {num_classes} classes, "
                f"got {given.dtype} of shape {given.shape}"
            )
        return checked_candidates(given.astype(bool))
    given = given if given.ndim > 1 else given[:, None]
    if form == "complementary":
        return from_complementary(given, num_classes)
    return from_annotations(given, num_classes, combine)
