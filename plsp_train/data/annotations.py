"""Forms of candidate sets: matrices, lists of labels, annotators' answers, labels known to be wrong.

Each function returns one boolean matrix (n, l), or says which row prevents it.
"""

import difflib
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

COMBINATIONS = ("union", "vote")
MISSING = -1
SEPARATOR = "|"

_MOST_NAMES_SHOWN = 20
_MOST_CLASSES = 100_000  # one wrong number must not claim all memory


class RowError(ValueError):
    """A fault in one row, counted from zero. A reader can name the row in the user's terms, such as a line."""

    def __init__(self, row: int, problem: str) -> None:
        super().__init__(f"row {row} {problem}")
        self.row = row
        self.problem = problem


def candidate_matrix(given: Any, class_names: Sequence[str] | None = None) -> tuple[Tensor, tuple[str, ...]]:
    """Bring candidate sets of any form into a boolean matrix (n, l), and name its l classes.

    Parameters
    ----------
    given
        - a boolean or 0/1 array (n, l);
        - an integer array (n, m) of annotators' answers, -1 for a missing one; a candidate set is their union;
        - a sequence of n candidate sets, each a collection of names or class numbers, names separated by `|`, or one
          label.
    class_names
        Names of classes 0..l-1. By default, the names that occur, sorted, or the numbers up to the highest that occurs.
    """
    if isinstance(given, Tensor):
        given = given.numpy(force=True)
    elif hasattr(given, "to_numpy"):  # a pandas or polars table
        given = given.to_numpy()
    names = None if class_names is None else checked_class_names(class_names)
    if isinstance(given, np.ndarray) and given.ndim not in (1, 2):
        raise ValueError(f"candidate sets must be a matrix of instances and classes, got shape {given.shape}")
    if isinstance(given, np.ndarray) and given.ndim == 2 and given.dtype.kind in "biuf":
        return _from_array(given, names)
    entries = list(given)
    if _rows_are_all(entries, (bool, np.bool_)):
        return _from_array(_stacked(entries), names)
    return _from_sets(entries, names)


def from_annotations(answers: np.ndarray, num_classes: int, combine: str = "union") -> Tensor:
    """Candidate sets from the answers of m annotators, class numbers (n, m) with -1 where one is missing.

    `union` takes every label that someone gave; `vote` takes the labels with the most votes, all of them in a tie.
    """
    if combine not in COMBINATIONS:
        raise ValueError(f"annotators must be one of {', '.join(COMBINATIONS)}, got {combine!r}")
    votes = _votes(answers, num_classes)
    unanswered = votes.max(axis=1, initial=0) == 0
    if unanswered.any():
        raise RowError(int(unanswered.argmax()), "has no answer from any annotator")
    return checked_candidates(votes > 0 if combine == "union" else votes == votes.max(axis=1, keepdims=True))


def from_complementary(wrong: np.ndarray, num_classes: int) -> Tensor:
    """Candidate sets from labels known to be wrong: bool (n, l), or class numbers (n, m) with -1 for none."""
    if wrong.dtype != bool:
        excluded = _votes(wrong, num_classes) > 0
    elif wrong.shape[1:] != (num_classes,):
        raise ValueError(f"must have one column for each of the {num_classes} classes, got shape {wrong.shape}")
    else:
        excluded = wrong
    if excluded.all(axis=1).any():
        raise RowError(int(excluded.all(axis=1).argmax()), "excludes every class")
    return checked_candidates(~excluded)


class Agreement(NamedTuple):
    """How far annotators agree, over the instances with at least two answers."""

    unanimous: float
    """Share of the instances on which all answers are equal."""
    pairwise: float
    """Share of equal pairs among the pairs of answers to an instance, averaged over instances."""


def annotator_agreement(answers: np.ndarray, num_classes: int) -> Agreement | None:
    """The agreement of answers (n, m); None if no instance has two."""
    votes = _votes(answers, num_classes)
    votes = votes[votes.sum(axis=1) > 1]
    if len(votes) == 0:
        return None
    total = votes.sum(axis=1)
    equal_pairs = (votes * (votes - 1)).sum(axis=1) / (total * (total - 1))
    return Agreement(unanimous=float((votes.max(axis=1) == total).mean()), pairwise=float(equal_pairs.mean()))


def checked_class_names(class_names: Iterable[str]) -> tuple[str, ...]:
    """Class names as a tuple of distinct, non-empty strings."""
    names = tuple(str(name).strip() for name in class_names)
    seen: set[str] = set()
    for number, name in enumerate(names):
        if not name or name in seen:
            raise ValueError(f"class names must be distinct and not empty, but class {number} is named {name!r}")
        seen.add(name)
    return names


def sorted_class_names(names: Iterable[str]) -> tuple[str, ...]:
    """Distinct names in alphabetical order, or in numerical order if all are whole numbers."""
    distinct = set(names)
    if all(name.isdecimal() for name in distinct):
        return tuple(sorted(distinct, key=lambda name: (int(name), name)))
    return tuple(sorted(distinct))


def numbered_class_names(num_classes: int) -> tuple[str, ...]:
    """Names of classes that are only known by number."""
    if num_classes > _MOST_CLASSES:
        raise ValueError(f"there is a class number {num_classes - 1}: give class names if that is intended")
    return tuple(map(str, range(num_classes)))


def checked_candidates(matrix: np.ndarray) -> Tensor:
    """Candidate sets from which something can be learned: none is empty, and not all of them are full."""
    if 0 in matrix.shape:
        raise ValueError(f"candidate sets must be a matrix of instances and classes, got shape {matrix.shape}")
    empty = ~matrix.any(axis=1)
    if empty.any():
        raise RowError(int(empty.argmax()), "has no candidate: remove the instance, or make every label a candidate")
    if matrix.all():
        raise ValueError(f"every candidate set holds all classes ({matrix.shape[1]}), so nothing can be learned")
    return torch.from_numpy(np.ascontiguousarray(matrix))


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """`; did you mean …?` if one of the known names is close to it, otherwise nothing."""
    close = difflib.get_close_matches(name, list(known), n=1)
    return f"; did you mean {close[0]!r}?" if close else ""


def shortened(names: Sequence[str]) -> str:
    """The names separated by commas, without the end of a very long list."""
    rest = len(names) - _MOST_NAMES_SHOWN
    return ", ".join(names[:_MOST_NAMES_SHOWN]) + (f" and {rest} more" if rest > 0 else "")


# ----------------------------------------------------------------------------------------------------- arrays


def _from_array(array: np.ndarray, names: tuple[str, ...] | None) -> tuple[Tensor, tuple[str, ...]]:
    columns = array.shape[1]
    is_mask = array.dtype == bool or bool(np.isin(array, (0, 1)).all())
    if is_mask and (names is None or len(names) == columns):
        return checked_candidates(array.astype(bool)), names or numbered_class_names(columns)
    if array.dtype.kind not in "iu":
        expected = "0 and 1" if names is None else f"0 and 1 with {len(names)} columns"
        raise ValueError(f"candidate sets must be a matrix of {expected}, got {array.dtype} of shape {array.shape}")
    names = names or numbered_class_names(int(array.max(initial=0)) + 1)
    return from_annotations(array, len(names)), names


def _votes(answers: np.ndarray, num_classes: int) -> np.ndarray:
    """(n, l): how often each class was the answer."""
    if answers.ndim != 2 or answers.dtype.kind not in "iu":
        raise ValueError(
            f"must be class numbers of shape (n, m) with -1 for a missing one, got {answers.dtype} {answers.shape}"
        )
    wrong = (answers < MISSING) | (answers >= num_classes)
    if wrong.any():
        row, column = np.argwhere(wrong)[0]
        raise RowError(
            int(row), f"has {answers[row, column]}: classes are 0..{num_classes - 1}, and -1 is a missing answer"
        )
    votes = np.zeros((len(answers), num_classes), dtype=np.int32)
    for column in answers.T:  # a column holds each row once, so that the sum loses nothing
        given = np.flatnonzero(column != MISSING)
        votes[given, column[given]] += 1
    return votes


# ------------------------------------------------------------------------------------------- sequences of sets


def _from_sets(entries: list[Any], names: tuple[str, ...] | None) -> tuple[Tensor, tuple[str, ...]]:
    _refuse_nested_mask(entries)
    sets = [_labels_of(entry, row) for row, entry in enumerate(entries)]
    flat = [label for labels in sets for label in labels]
    by_name = bool(flat) and isinstance(flat[0], str)
    for row, labels in enumerate(sets):
        for label in labels:
            if isinstance(label, str) != by_name:
                raise RowError(row, f"has the label {label!r}: give all labels by name, or all by number")
    if names is None:
        names = sorted_class_names(flat) if by_name else numbered_class_names(max(flat, default=-1) + 1)
    return checked_candidates(label_mask(sets, names)), names


def label_mask(sets: Sequence[Sequence[Any]], class_names: Sequence[str]) -> np.ndarray:
    """Mark in a boolean matrix (n, l) the labels of each set, all given by name or all by number."""
    number_of: dict[Any, int] = {name: number for number, name in enumerate(class_names)}
    number_of.update((number, number) for number in range(len(class_names)))
    mask = np.zeros((len(sets), len(class_names)), dtype=bool)
    for row, labels in enumerate(sets):
        for label in labels:
            if label not in number_of:
                by_name = isinstance(label, str)
                known = shortened(class_names) if by_name else f"0..{len(class_names) - 1}"
                hint = did_you_mean(label, class_names) if by_name else ""
                raise RowError(row, f"has the unknown label {label!r}; known are {known}{hint}")
            mask[row, number_of[label]] = True
    return mask


def _labels_of(entry: Any, row: int) -> list[Any]:
    """The labels of one candidate set: all strings or all integers, as far as they were given so."""
    if isinstance(entry, str):
        labels: list[Any] = split_names(entry, row)
    elif isinstance(entry, Iterable):
        labels = list(entry)
    else:
        labels = [entry]
    for position, label in enumerate(labels):
        if isinstance(label, str):
            labels[position] = label.strip()
        elif isinstance(label, int | np.integer) and not isinstance(label, bool):
            labels[position] = int(label)
        else:
            raise RowError(row, f"has {label!r} among its candidates: labels are names or class numbers")
    return labels


def split_names(text: str, row: int) -> list[str]:
    """The names in `cat|dog`; none in an empty text."""
    names = [name.strip() for name in text.split(SEPARATOR)] if text.strip() else []
    if "" in names:
        raise RowError(row, f"has an empty name in {text!r}")
    return names


def _rows_are_all(entries: list[Any], kind: type | tuple[type, ...]) -> bool:
    """Whether the entries are sequences, none of them empty, of nothing but values of this kind."""
    if not entries or not all(isinstance(entry, list | tuple | np.ndarray) and len(entry) > 0 for entry in entries):
        return False
    return all(isinstance(value, kind) for entry in entries for value in entry)


def _stacked(entries: list[Any]) -> np.ndarray:
    width = len(entries[0])
    for row, entry in enumerate(entries):
        if len(entry) != width:
            raise RowError(row, f"has {len(entry)} values, and row 0 has {width}")
    return np.array(entries)


def _refuse_nested_mask(entries: list[Any]) -> None:
    if not _rows_are_all(entries, (int, np.integer)):
        return
    if len({len(entry) for entry in entries}) == 1 < len(entries[0]) and all(set(entry) <= {0, 1} for entry in entries):
        raise ValueError(
            "nested lists of 0 and 1 may be a matrix or class numbers: pass numpy.array(candidates) for a 0/1 matrix, "
            "or a list of sets for class numbers"
        )
