"""What a caller asks of the readers, and what it gets for predictions."""

from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from plsp_train.data.annotations import COMBINATIONS


@dataclass(frozen=True)
class ReadOptions:
    """How to read a file of training data. An option that does not apply to the file is an error."""

    annotators: str | None = None
    """How several annotators' answers become a candidate set: "union" (the default) or "vote"."""
    image_size: int = 0
    """Side in pixels of the images of a folder; 0: from their sizes."""
    workers: int | None = None
    """Processes that decode images; 0: this process; None: as many as cores if there is enough to do."""
    progress: bool = False

    def __post_init__(self) -> None:
        if self.annotators not in (None, *COMBINATIONS):
            raise ValueError(f"annotators must be one of {', '.join(COMBINATIONS)}, got {self.annotators!r}")
        if self.image_size < 0 or (self.workers or 0) < 0:
            raise ValueError(f"image_size and workers must not be negative, got {self.image_size} and {self.workers}")


@dataclass(frozen=True)
class InputSpec:
    """The inputs that a trained network expects."""

    input_shape: tuple[int, ...]
    """(C, H, W) of an image, (d,) of a vector."""
    feature_names: tuple[str, ...] | None = None
    """Columns of a table, in the order of the features."""
    workers: int | None = None
    progress: bool = False

    @property
    def is_image(self) -> bool:
        return len(self.input_shape) == 3


class Inputs(NamedTuple):
    """Inputs to predict, uint8 images (n, C, H, W) or float32 vectors (n, d), and the names of their rows."""

    inputs: Tensor
    row_names: tuple[str, ...] | None = None
    unused: tuple[str, ...] = ()
    """What the file holds besides, such as labels."""
