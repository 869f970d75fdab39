"""MATLAB files of the public partial-label sets: `data`, `partial_target`, and `target` where the truth is known."""

import math
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from plsp_train.data.annotations import checked_candidates, numbered_class_names, shortened
from plsp_train.data.files.checks import feature_tensor, located
from plsp_train.data.files.memory import check_room
from plsp_train.data.files.options import Inputs, InputSpec, ReadOptions
from plsp_train.data.source import Source

VARIABLES = ("data", "partial_target", "target")


def read_mat(path: Path, options: ReadOptions) -> Source:
    """Features n×d, and 0/1 matrices l×n of candidates and true labels; all may be transposed, and sparse."""
    if options.annotators is not None:
        raise ValueError(f"{path} has no annotations: the option annotators={options.annotators} does not apply")
    content, unused = _load(path)
    for name in ("data", "partial_target"):
        if name not in content:
            found = ", ".join((*content, *unused)) or "nothing"
            raise ValueError(f"{path} has no variable {name!r}: it holds {found}")
    features, sets = _oriented(path, content["data"], content["partial_target"])
    with located(f"{path}: data"):
        inputs = feature_tensor(features)
    with located(f"{path}: partial_target", "instance {}".format):
        candidates = checked_candidates(_mask(sets))
    return Source(
        name=path.stem,
        inputs=inputs,
        class_names=numbered_class_names(sets.shape[1]),
        candidates=candidates,
        labels=_labels(path, content["target"], sets.shape) if "target" in content else None,
        notes=(f"Variables of {path.name} that are not used: {shortened(unused)}.",) if unused else (),
    )


def read_mat_inputs(path: Path, wanted: InputSpec) -> Inputs:
    content, unused = _load(path)
    if "data" not in content:
        raise ValueError(f"{path} has no variable 'data': it holds {', '.join((*content, *unused)) or 'nothing'}")
    features, expected = content["data"], wanted.input_shape[0]
    if features.ndim == 2 and features.shape[1] != expected == features.shape[0]:
        features = features.T
    with located(f"{path}: data"):
        return Inputs(feature_tensor(features), unused=tuple(name for name in (*content, *unused) if name != "data"))


def _load(path: Path) -> tuple[dict[str, np.ndarray], list[str]]:
    """The known variables as dense arrays, and the names of the others."""
    from scipy import io, sparse  # type: ignore[import-untyped]

    try:
        variables = io.whosmat(path)
        # Numbers take at most eight bytes each; sparse matrices become dense.
        check_room(path, 8 * sum(math.prod(shape) for name, shape, _ in variables if name in VARIABLES))
        content: dict[str, Any] = io.loadmat(path, variable_names=VARIABLES)
    except NotImplementedError as error:
        raise ValueError(f"{path} is a MATLAB file of version 7.3: save it with save(…, '-v7')") from error
    except Exception as error:  # scipy raises errors of many kinds for a damaged file
        raise ValueError(f"{path} cannot be read as a MATLAB file: {error}") from error
    known = {name: content[name] for name in VARIABLES if name in content}
    dense = {name: np.asarray(value.toarray() if sparse.issparse(value) else value) for name, value in known.items()}
    return dense, [name for name, *_ in variables if name not in VARIABLES]


def _oriented(path: Path, features: np.ndarray, sets: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Features (n, d) and candidate sets (n, l), from the one way in which the two matrices share the length n."""
    if features.ndim != 2 or sets.ndim != 2:
        raise ValueError(f"{path}: data and partial_target must be matrices, got {_size(features)} and {_size(sets)}")
    fits = [(x, y) for x in (features, features.T) for y in (sets, sets.T) if len(x) == len(y)]
    if len(fits) == 1:
        return fits[0]
    found = f"data {_size(features)} and partial_target {_size(sets)}"
    if not fits:
        raise ValueError(f"{path}: {found} have no length in common; need n×d and l×n")
    raise ValueError(f"{path}: the orientation of {found} is ambiguous; save features n×d and candidates n×l as .npz")


def _labels(path: Path, target: np.ndarray, shape: tuple[int, ...]) -> Tensor:
    """Class numbers from a matrix that marks one class of each instance."""
    with located(f"{path}: target"):
        if shape not in (target.shape, target.T.shape):
            raise ValueError(f"must have the shape of partial_target, got {_size(target)}")
        mask = _mask(target if target.shape == shape else target.T)
        wrong = mask.sum(axis=1) != 1
        if wrong.any():
            row = int(wrong.argmax())
            raise ValueError(f"instance {row} has {mask[row].sum()} true labels, but must have one")
    return torch.from_numpy(mask.argmax(axis=1))


def _mask(matrix: np.ndarray) -> np.ndarray:
    if matrix.dtype.kind not in "biuf" or not np.isin(matrix, (0, 1)).all():
        raise ValueError("must be a matrix of 0 and 1")
    return matrix.astype(bool)


def _size(array: np.ndarray) -> str:
    return "×".join(map(str, array.shape))
