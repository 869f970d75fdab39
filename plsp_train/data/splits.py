"""From a source to what a run trains and tests on: the split into parts, and the statistics that normalise."""

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from plsp_train.data.candidate_sets import AnyCandidates
from plsp_train.data.datasets import Statistics
from plsp_train.data.mapped import Inputs
from plsp_train.data.source import Source

_CHUNK = 256  # images that are counted at a time
NORMALISATIONS = ("feature", "global", "none")


@dataclass(frozen=True)
class TrainTestData:
    """A data set.

    Inputs are uint8 images (n, C, H, W), in memory or in a file, or float32 vectors (n, d). `mean` and `std` normalise:
    per channel in units of 0..255 for images, per feature for vectors. True labels int64 (n,) are None if unknown, and
    so is the test set. `train_candidates` (n, l) are the candidate sets that came with the data, None if they are to be
    drawn. `test_candidates` are those of a test set without labels.
    """

    name: str
    class_names: tuple[str, ...]
    train_inputs: Inputs
    mean: tuple[float, ...]
    std: tuple[float, ...]
    train_labels: Tensor | None = None
    train_candidates: AnyCandidates | None = None
    test_inputs: Inputs | None = None
    test_labels: Tensor | None = None
    test_candidates: AnyCandidates | None = None
    train_rows: Tensor | None = None
    """Position of each training instance in the source; None: in its order."""
    row_names: tuple[str, ...] | None = None
    """Of all instances of the source."""
    source_labels: Tensor | None = None
    """True labels of all instances of the source."""
    file_rows: Tensor | None = None
    """Positions of all instances of the source in its file; None: in its order."""
    feature_names: tuple[str, ...] | None = None
    notes: tuple[str, ...] = ()
    """Remarks about the source."""

    @property
    def num_classes(self) -> int:
        return len(self.class_names)

    @property
    def is_image(self) -> bool:
        return self.train_inputs.dim() == 4

    @property
    def input_shape(self) -> tuple[int, ...]:
        """(C, H, W) of an image, (d,) of a vector."""
        return tuple(self.train_inputs.shape[1:])


class Split(NamedTuple):
    """Which instances are for testing: a share of them, or one of several folds."""

    test_fraction: float = 0.0
    folds: int = 0
    fold: int = 0
    """From 1."""
    seed: int = 0


def split_source(
    source: Source, split: Split, *, normalise: str = "feature", statistics: Statistics | None = None
) -> TrainTestData:
    """Split the source and compute the statistics of its training part, unless they are given."""
    train, test = _parts(source, split)
    inputs = rows_of(source.inputs, train)
    mean, std = statistics or _statistics(inputs, normalise)
    own_test = test is None
    return TrainTestData(
        name=source.name,
        class_names=source.class_names,
        train_inputs=inputs,
        mean=mean,
        std=std,
        train_labels=rows_of(source.labels, train),
        train_candidates=rows_of(source.candidates, train),
        test_inputs=source.test_inputs if own_test else rows_of(source.inputs, test),
        test_labels=source.test_labels if own_test else rows_of(source.labels, test),
        test_candidates=None if own_test or source.labels is not None else rows_of(source.candidates, test),
        train_rows=train,
        row_names=source.row_names,
        source_labels=source.labels,
        file_rows=source.rows,
        feature_names=source.feature_names,
        notes=source.notes,
    )


def _parts(source: Source, split: Split) -> tuple[Tensor | None, Tensor | None]:
    """Indices of the training and test instances; None and None to keep the source as it is."""
    if not split.folds and not split.test_fraction:
        return None, None
    total, option = len(source.inputs), "folds" if split.folds else "test_fraction"
    if source.test_inputs is not None:
        raise ValueError(
            f"{source.name} has a test set of its own: {option} would split its training instances instead"
        )
    if split.test_fraction and source.labels is None:
        raise ValueError(
            f"test_fraction needs true labels, which {source.name} does not have: use validation_fraction, which "
            "scores held-out instances by their candidate sets"
        )
    order = torch.randperm(total, generator=torch.Generator().manual_seed(split.seed))
    if split.folds:
        if not 1 <= split.fold <= split.folds <= total:
            raise ValueError(f"fold {split.fold} of {split.folds} is impossible for {total} instances")
        parts = list(order.tensor_split(split.folds))
        test = parts.pop(split.fold - 1)
        return torch.cat(parts), test
    test, train = order.tensor_split([round(split.test_fraction * total)])
    if not len(test) or not len(train):
        raise ValueError(f"test_fraction {split.test_fraction} of {total} instances leaves none for one of the parts")
    return train, test


def rows_of(table: Any, index: Tensor | None) -> Any:
    """These rows of inputs, candidate sets or labels, of the same kind; None: all rows."""
    if table is None or index is None:
        return table
    return table[index] if isinstance(table, Tensor) else table.take(index)


def _statistics(inputs: Inputs, normalise: str) -> Statistics:
    """Of images in a file, those of an evenly spaced sample."""
    if inputs.dim() == 2:
        assert isinstance(inputs, Tensor)
        return _vector_statistics(inputs, normalise)
    return _image_statistics(inputs if isinstance(inputs, Tensor) else inputs.sample())


def _image_statistics(images: Inputs) -> Statistics:
    """Per channel, in units of the full range 0..255."""
    counts = torch.zeros(images.shape[1], 256, dtype=torch.float64)
    for part in images.split(_CHUNK):
        counts += torch.stack([channel.flatten().bincount(minlength=256) for channel in part.unbind(1)])
    share, values = counts / counts.sum(1, keepdim=True), torch.arange(256.0, dtype=torch.float64) / 255
    mean = share @ values
    std = (share @ values.square() - mean.square()).clamp(min=0).sqrt()
    return _as_statistics(mean, std)


def _vector_statistics(vectors: Tensor, normalise: str) -> Statistics:
    if normalise == "none":
        return _as_statistics(torch.zeros(vectors.shape[1]), torch.ones(vectors.shape[1]))
    std, mean = torch.std_mean(vectors, dim=0, correction=0)
    if normalise == "global":
        # One scale for all features keeps their relative sizes; the mean of each is still removed.
        std = (vectors - mean).square().mean().sqrt().expand(vectors.shape[1])
    if not std.isfinite().all():
        raise ValueError("the variance of the features overflows in float32: divide them by a constant first")
    return _as_statistics(mean, std)


def _as_statistics(mean: Tensor, std: Tensor) -> Statistics:
    # A constant channel or feature stays at zero.
    return tuple(mean.tolist()), tuple(torch.where(std > 0, std, 1.0).tolist())
