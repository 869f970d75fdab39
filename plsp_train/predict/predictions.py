"""Predictions for many inputs, and the files that hold them."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from plsp_train.data.files import Inputs
from plsp_train.model_file import Outputs, TrainedModel
from plsp_train.output_file import write_csv, write_npz

ENDINGS = (".csv", ".npz")


class Wanted(NamedTuple):
    """What to keep besides labels and their probabilities."""

    probabilities: bool = False
    features: bool = False


class Predictions(NamedTuple):
    """Of n inputs. Arrays that were not asked for are None."""

    label: np.ndarray
    """(n,) int64: the class of highest probability."""
    confidence: np.ndarray
    """(n,) float32: its probability."""
    probabilities: np.ndarray | None
    """(n, l) float32."""
    features: np.ndarray | None
    """(n, d) float32."""


def predict(model: TrainedModel, inputs: Tensor, wanted: Wanted, batch_size: int) -> Predictions:
    """Predict batch by batch, with a progress bar on a terminal."""
    parts = [_keep(part, wanted) for part in _with_progress(model.outputs(inputs, batch_size), len(inputs))]
    arrays: list[Any] = [
        None if tensors[0] is None else torch.cat(tensors).numpy() for tensors in zip(*parts, strict=True)
    ]
    return Predictions(*arrays)


def _keep(part: Outputs, wanted: Wanted) -> tuple[Tensor | None, ...]:
    probabilities = part.logits.softmax(1)
    confidence, label = probabilities.max(1)
    return (
        label,
        confidence,
        probabilities if wanted.probabilities else None,
        part.features if wanted.features else None,
    )


def _with_progress(parts: Iterator[Outputs], total: int) -> Iterator[Outputs]:
    from tqdm import tqdm

    with tqdm(total=total, unit=" rows", leave=False, disable=None) as bar:  # None: only on a terminal
        for part in parts:
            yield part
            bar.update(len(part.logits))


def write_predictions(path: Path, found: Predictions, inputs: Inputs, class_names: tuple[str, ...]) -> None:
    """Write a .csv or an .npz file."""
    if path.suffix.lower() == ".csv":
        _write_csv(path, found, inputs, class_names)
        return
    arrays = {"class_names": np.array(class_names), **found._asdict()}
    if inputs.row_names is not None:
        arrays["names"] = np.array(inputs.row_names)
    write_npz(path, {name: array for name, array in arrays.items() if array is not None})


def _write_csv(path: Path, found: Predictions, inputs: Inputs, class_names: tuple[str, ...]) -> None:
    columns: dict[str, object] = {"row": range(len(found.label))}
    if inputs.row_names is not None:
        columns["name"] = inputs.row_names
    columns["label"] = [class_names[label] for label in found.label]
    columns["confidence"] = _digits(found.confidence)
    if found.probabilities is not None:
        names = [f"probability_{name}" for name in class_names]
        columns |= dict(zip(names, map(_digits, found.probabilities.T), strict=True))
    if found.features is not None:
        columns |= {f"feature_{number}": _digits(column) for number, column in enumerate(found.features.T)}
    write_csv(path, list(columns), zip(*columns.values(), strict=True))


def _digits(column: np.ndarray) -> list[str]:
    return [f"{value:.6g}" for value in column.tolist()]
