"""Checks and conversions that every format shares, and remarks on what was read."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from plsp_train.data.annotations import Agreement, RowError, shortened
from plsp_train.data.candidate_sets import CandidateSets
from plsp_train.data.source import Source


@contextmanager
def located(where: Path | str, row_name: Callable[[int], str] = "row {}".format) -> Iterator[None]:
    """Put the file, or the file and key, before the message of a ValueError, and name its row as the user knows it."""
    try:
        yield
    except RowError as error:
        raise ValueError(f"{where}: {row_name(error.row)} {error.problem}") from error
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from error


def image_tensor(images: np.ndarray) -> Tensor:
    """uint8 images n×h×w or n×h×w×c as a tensor (n, C, H, W)."""
    check_images(images)
    if images.ndim == 3:
        return torch.from_numpy(np.ascontiguousarray(images[:, None]))
    return torch.from_numpy(np.ascontiguousarray(images.transpose(0, 3, 1, 2)))


def check_images(images: np.ndarray) -> None:
    """Refuse all but uint8 images n×h×w or n×h×w×c."""
    if images.dtype != np.uint8:
        raise ValueError(f"images must be uint8, got {images.dtype}: scale them to 0..255 and call .astype(np.uint8)")
    if images.ndim not in (3, 4) or 0 in images.shape:
        raise ValueError(f"images must be n×h×w or n×h×w×c, and not empty, got shape {images.shape}")
    if images.ndim == 4 and images.shape[1] in (1, 3, 4) and images.shape[3] > 4:
        raise ValueError(f"images must have their channels last, got shape {images.shape}: transpose(0, 2, 3, 1)")


def feature_tensor(features: np.ndarray) -> Tensor:
    """Finite numbers n×d as a float32 tensor."""
    if features.ndim != 2 or features.dtype.kind not in "biuf":
        raise ValueError(f"features must be numbers of shape n×d, got {features.dtype} of shape {features.shape}")
    if 0 in features.shape:
        raise ValueError(f"features must have at least one row and one column, got shape {features.shape}")
    place = first_not_finite(features)
    if place is not None:
        row, column = place
        raise ValueError(f"row {row}, column {column} is {features[place]}, but features must be finite in float32")
    return torch.from_numpy(np.ascontiguousarray(features, dtype=np.float32))


def first_not_finite(features: np.ndarray) -> tuple[int, int] | None:
    """Row and column of the first value that is NaN, infinite, or too large for float32."""
    with np.errstate(over="ignore"):
        finite = np.isfinite(features.astype(np.float32, copy=False))
    if finite.all():
        return None
    row, column = np.argwhere(~finite)[0]
    return int(row), int(column)


def label_tensor(labels: np.ndarray, num_classes: int) -> Tensor:
    """Class numbers (n,) as an int64 tensor."""
    if labels.ndim != 1 or labels.dtype.kind not in "iu":
        raise ValueError(f"must be class numbers of shape (n,), got {labels.dtype} of shape {labels.shape}")
    wrong = (labels < 0) | (labels >= num_classes)
    if wrong.any():
        row = int(wrong.argmax())
        raise ValueError(f"row {row} is {labels[row]}, but classes are 0..{num_classes - 1}")
    return torch.from_numpy(labels.astype(np.int64))


def agreement_note(agreement: Agreement | None, combine: str) -> str:
    taken = {"union": "every label that one of them gave", "vote": "the labels with the most votes"}[combine]
    sets = f"Candidate sets hold {taken}."
    if agreement is None:
        return f"No instance has answers of two annotators. {sets}"
    return (
        f"All annotators agree on {agreement.unanimous:.1%} of the instances; two answers to an instance agree in "
        f"{agreement.pairwise:.1%} of the cases. {sets}"
    )


def remarks(source: Source) -> tuple[str, ...]:
    """Signs in the candidate sets that a user should know about."""
    if source.candidates is None:
        return ()
    notes = []
    sets = CandidateSets.pack(source.candidates)
    present = torch.stack([part.any(dim=0) for _, part in sets.chunks()]).any(dim=0).tolist()
    absent = [name for name, is_present in zip(source.class_names, present, strict=True) if not is_present]
    if absent:
        notes.append(f"No candidate set holds {shortened(absent)}: such a class cannot be learned.")
    if source.labels is not None:
        parts = [part.gather(1, source.labels[rows, None]) for rows, part in sets.chunks()]
        total, lacking = len(source.labels), int((~torch.cat(parts)).sum())
        if lacking:
            notes.append(f"{lacking} of {total} candidate sets ({lacking / total:.1%}) lack the true label.")
    return tuple(notes)
