"""What the engine knows of a method."""

from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from plsp_train.config import Config
from plsp_train.data import Augmentation
from plsp_train.models import Network


@dataclass
class Task:
    """What a method learns from: inputs and candidate sets on the training device, the network, random numbers."""

    config: Config
    model: Network
    inputs: Tensor
    candidates: Tensor
    true_labels: Tensor
    """Known for benchmark data only; used for reporting purity, never for training."""
    augmentation: Augmentation
    generator: torch.Generator

    @property
    def num_classes(self) -> int:
        return self.candidates.shape[1]


class Stage(NamedTuple):
    name: str
    epochs: int


class Step(NamedTuple):
    """One iteration's forward pass."""

    loss: Tensor
    """What to minimise, 0-d."""
    terms: dict[str, Tensor]
    """Numbers to report as means over the epoch, 0-d each; no gradient is taken of them."""
    num_images: int


class Method(ABC):
    """Draws its own batches and computes its own loss; the engine optimises, measures, reports and saves."""

    def __init__(self, task: Task) -> None:
        self.task = task

    @abstractmethod
    def stages(self) -> list[Stage]:
        """The stages of a run, in order."""

    @abstractmethod
    def learning_rate(self, stage: str, epoch: int) -> float:
        """For the epoch (from 1) of the stage."""

    @abstractmethod
    def start_epoch(self, stage: str, epoch: int) -> dict[str, Any]:
        """Prepare the epoch's batches; returns what to report of it."""

    @abstractmethod
    def num_iterations(self, stage: str) -> int:
        """Iterations of an epoch of this stage."""

    @abstractmethod
    def step(self, stage: str, epoch: int) -> Step:
        """Draw the next batch and compute the loss."""

    def after_step(self, stage: str) -> None:
        """Called when the optimiser has moved the parameters, before the next step."""
        return

    def parameters(self) -> Iterable[nn.Parameter]:
        """What to train besides the network."""
        return ()

    def report(self, means: dict[str, float]) -> dict[str, float | None]:
        """What to show of the means of the steps' terms; None where there is nothing to say."""
        return dict(means)

    def end_epoch(self, stage: str) -> dict[str, Any]:
        """What to report at the end of an epoch besides the terms."""
        return {}

    @abstractmethod
    def state_dict(self) -> dict[str, Any]:
        """Everything but the network and the task's generator that the next step depends on."""

    @abstractmethod
    def load_state_dict(self, state: dict[str, Any]) -> None: ...
