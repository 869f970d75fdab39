"""What a run has learned about its training instances: `results.npz`."""

from collections.abc import Iterable
from dataclasses import MISSING, dataclass, fields, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from plsp_train.output_file import write_npz

_CHUNK = 1024  # instances whose probabilities of all classes are in memory at a time
# dtype and shape of every array; a letter stands for the same size everywhere.
_LAYOUT: dict[str, tuple[type, str]] = {
    "class_names": (np.str_, "l"),
    "row": (np.int64, "n"),
    "label": (np.int64, "n"),
    "confidence": (np.float32, "n"),
    "offsets": (np.int64, "o"),
    "classes": (np.int32, "c"),
    "probabilities": (np.float32, "c"),
    "prediction": (np.int64, "n"),
    "prediction_probability": (np.float32, "n"),
    "labeled": (np.bool_, "n"),
    "held_out": (np.bool_, "n"),
    "changes": (np.int32, "n"),
    "names": (np.str_, "n"),
    "true_label": (np.int64, "n"),
    "picture_index": (np.int64, "m"),
    "pictures": (np.uint8, "mCHW"),
    "test_confusion": (np.int64, "ll"),
}
_BELOW_L = ("label", "prediction", "true_label", "classes")


@dataclass(frozen=True, eq=False)
class Results:
    """The training instances in the order of their file, those held out for validation included."""

    class_names: np.ndarray
    row: np.ndarray
    """Position in the user's file."""
    label: np.ndarray
    """The candidate of highest probability."""
    confidence: np.ndarray
    """The probability of `label` among the candidates."""
    offsets: np.ndarray
    """The candidates of instance i are classes[offsets[i]:offsets[i + 1]]; `probabilities` likewise."""
    classes: np.ndarray
    probabilities: np.ndarray
    """Normalised over the candidates of an instance."""
    prediction: np.ndarray
    """The class of highest probability among all classes."""
    prediction_probability: np.ndarray
    labeled: np.ndarray
    """In the labelled set in the last epoch."""
    held_out: np.ndarray
    changes: np.ndarray
    """Number of epochs in which the label differed from that of the epoch before."""
    names: np.ndarray | None = None
    true_label: np.ndarray | None = None
    picture_index: np.ndarray | None = None
    """The instances that `pictures` show."""
    pictures: np.ndarray | None = None
    test_confusion: np.ndarray | None = None
    """Counts by true and predicted class."""

    def __post_init__(self) -> None:
        given = self.arrays()
        _check_layout(given)
        counts = np.diff(self.offsets)
        if len(self.offsets) != len(self) + 1 or self.offsets[0] != 0 or self.offsets[-1] != len(self.classes):
            raise ValueError(f"offsets must be {len(self) + 1} numbers from 0 to the length of classes")
        if (counts < 1).any():
            raise ValueError(f"offsets: instance {int((counts < 1).argmax())} has no candidates")
        bounds = dict.fromkeys(_BELOW_L, len(self.class_names)) | {"picture_index": len(self)}
        for name, bound in bounds.items():
            if name in given and ((given[name] < 0) | (given[name] >= bound)).any():
                raise ValueError(f"{name} must lie in 0..{bound - 1}")
        if (self.pictures is None) != (self.picture_index is None):
            raise ValueError("pictures and picture_index must be given together")
        if not self._among_candidates(self.label).all():
            raise ValueError("label must be one of the candidates of every instance")

    def __len__(self) -> int:
        return len(self.row)

    def candidates(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        """Candidates of one instance and their probabilities, the most probable first."""
        part = slice(self.offsets[index], self.offsets[index + 1])
        order = np.argsort(-self.probabilities[part], kind="stable")
        return self.classes[part][order], self.probabilities[part][order]

    def contradictions(self) -> np.ndarray:
        """(n,) bool: the prediction is none of the candidates."""
        return ~self._among_candidates(self.prediction)

    def take(self, index: np.ndarray) -> "Results":
        """These instances, in this order, without pictures."""
        sizes = np.diff(self.offsets)[index]
        offsets = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)
        candidate = np.arange(offsets[-1]) + np.repeat(self.offsets[:-1][index] - offsets[:-1], sizes)
        taken: dict[str, Any] = {"offsets": offsets, "picture_index": None, "pictures": None}
        for name, array in self.arrays().items():
            if _LAYOUT[name][1] == "n":
                taken[name] = array[index]
            elif _LAYOUT[name][1] == "c":
                taken[name] = array[candidate]
        return replace(self, **taken)

    def arrays(self) -> dict[str, np.ndarray]:
        """The arrays that are there, by their names."""
        given = {field.name: getattr(self, field.name) for field in fields(self)}
        return {name: array for name, array in given.items() if array is not None}

    def _among_candidates(self, labels: np.ndarray) -> np.ndarray:
        if len(self) == 0:
            return np.empty(0, dtype=np.bool_)
        matches = self.classes == np.repeat(labels, np.diff(self.offsets))
        return np.logical_or.reduceat(matches, self.offsets[:-1])


def save_results(path: Path, results: Results) -> None:
    """Write results.npz atomically."""
    write_npz(path, results.arrays())


def load_results(path: str | Path) -> Results:
    """Read results.npz. Pickled objects are refused."""
    try:
        with open(path, "rb") as file, np.load(file, allow_pickle=False) as arrays:
            content = {name: arrays[name] for name in arrays.files}
    except FileNotFoundError:
        raise FileNotFoundError(f"no results file {path}: it is written at the end of a run") from None
    except Exception as error:  # NumPy and zipfile raise errors of many kinds for a damaged file
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise ValueError(f"{path} is not a results file, or it is damaged ({reason})") from None
    missing = {field.name for field in fields(Results) if field.default is MISSING} - content.keys()
    unknown = content.keys() - _LAYOUT.keys()
    if missing or unknown:
        problem = "lacks" if missing else "holds unknown arrays"
        raise ValueError(f"{path} is not a results file: it {problem} {', '.join(sorted(missing or unknown))}")
    try:
        return Results(**content)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None


class NonFiniteLogits(ValueError):
    """No label can be chosen from them."""


class ChosenLabels(NamedTuple):
    """The arrays of `Results` that follow from logits and candidate sets."""

    label: np.ndarray
    confidence: np.ndarray
    offsets: np.ndarray
    classes: np.ndarray
    probabilities: np.ndarray
    prediction: np.ndarray
    prediction_probability: np.ndarray


def disambiguate(logits: Tensor | Iterable[Tensor], candidates: Tensor) -> ChosenLabels:
    """Choose the label of every instance from its candidate set.

    `logits` (n, l) may come in batches, in the order of `candidates` bool (n, l). Probabilities of all classes exist
    for one chunk of instances at a time.
    """
    batches = [logits] if isinstance(logits, Tensor) else logits
    candidates = candidates.cpu()
    parts, start = [], 0
    for batch in batches:
        for chunk in batch.split(_CHUNK):
            parts.append(disambiguate_batch(chunk, candidates[start : start + len(chunk)]))
            start += len(chunk)
    if start != len(candidates):
        raise ValueError(f"logits of {start} instances do not fit candidate sets of {len(candidates)}")
    return join(parts).disambiguation()


class Columns(NamedTuple):
    """What is known of some instances, on the CPU."""

    by_instance: list[Tensor]
    """Size of the candidate set, label, confidence, prediction, probability of the prediction."""
    by_candidate: list[Tensor]
    """Class and probability of each candidate, instance by instance."""

    def disambiguation(self) -> ChosenLabels:
        sizes, label, confidence, prediction, prediction_probability = (column.numpy() for column in self.by_instance)
        classes, probabilities = (column.numpy() for column in self.by_candidate)
        offsets = np.concatenate([[0], np.cumsum(sizes)])
        return ChosenLabels(label, confidence, offsets, classes, probabilities, prediction, prediction_probability)


def join(parts: Iterable[Columns]) -> Columns:
    """The columns of all instances, one part after the other."""
    return Columns(*([torch.cat(column) for column in zip(*part, strict=True)] for part in zip(*parts, strict=True)))


def disambiguate_batch(logits: Tensor, candidates: Tensor) -> Columns:
    """`disambiguate` for instances whose probabilities of all classes fit in memory."""
    logits, candidates = logits.cpu().double(), candidates.cpu()
    if not logits.isfinite().all():
        raise NonFiniteLogits("logits are not finite")
    among_candidates = logits.masked_fill(~candidates, -torch.inf).softmax(1)
    confidence, label = among_candidates.max(1)
    prediction_probability, prediction = logits.softmax(1).max(1)
    by_instance = [candidates.sum(1), label, confidence.float(), prediction, prediction_probability.float()]
    return Columns(by_instance, [candidates.nonzero()[:, 1].int(), among_candidates[candidates].float()])


def _check_layout(arrays: dict[str, np.ndarray]) -> None:
    sizes: dict[str, int] = {}
    for name, array in arrays.items():
        dtype, letters = _LAYOUT[name]
        if not isinstance(array, np.ndarray) or array.dtype.type is not dtype or array.ndim != len(letters):
            seen = f"{array.dtype} {array.shape}" if isinstance(array, np.ndarray) else type(array).__name__
            raise ValueError(f"{name} must be an array of {dtype.__name__} with {len(letters)} axes, got {seen}")
        for letter, size in zip(letters, array.shape, strict=True):
            if sizes.setdefault(letter, size) != size:
                raise ValueError(f"{name} has {size} entries along {letter}, other arrays have {sizes[letter]}")
