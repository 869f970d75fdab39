"""What a file of data holds, before it is split and normalised."""

from dataclasses import dataclass

import torch
from torch import Tensor

from plsp_train.data.candidate_sets import AnyCandidates, CandidateSets
from plsp_train.data.mapped import Inputs


@dataclass(frozen=True)
class Source:
    """Instances with candidate sets, true labels, or both; readers of every format return this structure.

    Inputs are uint8 images (n, C, H, W), in memory or in a file, or float32 vectors (n, d). `candidates` bool (n, l),
    possibly packed, are None if they are to be drawn from the true labels `labels` int64 (n,), which are None if
    unknown. A test set is optional, with or without labels.
    """

    name: str
    inputs: Inputs
    class_names: tuple[str, ...]
    candidates: AnyCandidates | None = None
    labels: Tensor | None = None
    test_inputs: Inputs | None = None
    test_labels: Tensor | None = None
    row_names: tuple[str, ...] | None = None
    """Of the training instances, as the user knows them: file names, identifiers."""
    rows: Tensor | None = None
    """Positions of the training instances in the file, if test instances stand between them."""
    feature_names: tuple[str, ...] | None = None
    """Of the columns of a table, in the order of the features."""
    notes: tuple[str, ...] = ()
    """Remarks for the user, a sentence each, such as the agreement of annotators."""

    @property
    def is_image(self) -> bool:
        return self.inputs.dim() == 4

    @property
    def num_classes(self) -> int:
        return len(self.class_names)

    @property
    def input_shape(self) -> tuple[int, ...]:
        """(C, H, W) of an image, (d,) of a vector."""
        return tuple(self.inputs.shape[1:])


def check_source(source: Source) -> None:
    """Refuse what no run could train on, naming what was found and where."""
    count, shape = len(source.inputs), tuple(source.inputs.shape)
    if source.inputs.dtype != (torch.uint8 if source.is_image else torch.float32) or source.inputs.dim() not in (2, 4):
        raise ValueError(
            f"{source.name}: inputs must be uint8 images (n, C, H, W) or float32 vectors (n, d), "
            f"got {source.inputs.dtype} {shape}"
        )
    if count == 0 or source.num_classes < 2:
        raise ValueError(
            f"{source.name}: need instances and at least two classes, got {count} and {source.num_classes}"
        )
    if source.candidates is None and source.labels is None:
        raise ValueError(f"{source.name}: there are neither candidate sets nor true labels to draw them from")
    for name, inputs in (("inputs", source.inputs), ("test_inputs", source.test_inputs)):
        if inputs is not None:
            _check_inputs(f"{source.name}: {name}", inputs, shape)
    test_count = 0 if source.test_inputs is None else len(source.test_inputs)
    for name, labels, wanted in (("labels", source.labels, count), ("test_labels", source.test_labels, test_count)):
        if labels is not None:
            _check_labels(f"{source.name}: {name}", labels, wanted, source.num_classes)
    if source.candidates is not None:
        _check_candidates(source.name, source.candidates, (count, source.num_classes))


def _check_inputs(name: str, inputs: Inputs, shape: tuple[int, ...]) -> None:
    if tuple(inputs.shape[1:]) != shape[1:]:
        raise ValueError(f"{name} must have shape (n, {', '.join(map(str, shape[1:]))}), got {tuple(inputs.shape)}")
    if isinstance(inputs, Tensor) and inputs.is_floating_point() and not inputs.isfinite().all():
        row, column = (~inputs.isfinite()).nonzero()[0].tolist()
        raise ValueError(f"{name} must be finite, but row {row}, column {column} is {inputs[row, column].item()}")


def _check_labels(name: str, labels: Tensor, count: int, num_classes: int) -> None:
    if labels.shape != (count,) or labels.dtype != torch.int64:
        raise ValueError(f"{name} must be int64 ({count},), got {labels.dtype} {tuple(labels.shape)}")
    wrong = ((labels < 0) | (labels >= num_classes)).nonzero()
    if len(wrong):
        row = int(wrong[0, 0])
        raise ValueError(f"{name} must lie in 0..{num_classes - 1}, but row {row} is {int(labels[row])}")


def _check_candidates(name: str, candidates: AnyCandidates, shape: tuple[int, int]) -> None:
    dtype = candidates.dtype if isinstance(candidates, Tensor) else torch.bool
    if tuple(candidates.shape) != shape or dtype != torch.bool:
        raise ValueError(f"{name}: candidates must be bool {shape}, got {dtype} {tuple(candidates.shape)}")
    empty = torch.cat([~part.any(1) for _, part in CandidateSets.pack(candidates).chunks()]).nonzero()
    if len(empty):
        raise ValueError(f"{name}: candidates of row {int(empty[0, 0])} are empty: every instance needs at least one")
