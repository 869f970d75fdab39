"""The interface between the engine and a method."""

from abc import ABC, abstractmethod
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from plsp_train.methods.task import Task
from plsp_train.models import Network

if TYPE_CHECKING:  # the configuration takes defaults and help texts from the methods
    from plsp_train.config import Config


class Stage(NamedTuple):
    name: str
    epochs: int


class Iteration(NamedTuple):
    """The forward pass of one iteration."""

    loss: Tensor
    """0-d, to be minimised."""
    terms: dict[str, Tensor]
    """0-d each, reported as means over the epoch; not differentiated."""
    num_images: int


class Method(ABC):
    """Draws its own batches and computes its own loss; the engine optimises, measures, reports and saves.

    The class attributes are all that the command line, sweeps and tables know of a method.
    """

    name: ClassVar[str]  # on the command line; settings of the group of this name belong to the method alone
    label: ClassVar[str]  # in tables
    help: ClassVar[str]  # one line for --help
    # Overrides the presets of the data sets. Learning rates: the best on digits of the paper's grid (docs/methods.md).
    defaults: ClassVar[dict[str, Any]] = {}
    recipes: ClassVar[
        dict[str, dict[str, Any]]
    ] = {}  # names of recipes of its own and their defaults in place of those
    ignores: ClassVar[tuple[str, ...]] = ()  # common settings without effect on this method
    uses_true_labels: ClassVar[bool] = False  # a yardstick: tables neither test it nor call it the best
    ablations: ClassVar[dict[str, dict[str, Any]]] = {}  # labels in tables and the settings that they stand for

    @classmethod
    def label_of(cls, config: "Config") -> str:
        """The label in tables of a run with these settings."""
        given = config.to_json().items()
        return next((label for label, settings in cls.ablations.items() if settings.items() <= given), cls.label)

    def __init__(self, task: Task) -> None:
        self.task = task
        self.labels = torch.full((len(task.inputs),), -1, device=task.device)
        """The present label of each training instance, one of its candidates; -1 as long as it has none."""

    @property
    def network(self) -> Network:
        """The network that is evaluated and saved; a method may average the one that it trains."""
        return self.task.model

    def labeled_set(self) -> Tensor | None:
        """Indices of the instances that are treated as labelled; None for methods without such a set."""
        return None

    @abstractmethod
    def stages(self) -> list[Stage]:
        """The stages of a run, in order."""

    @abstractmethod
    def learning_rate(self, stage: str, epoch: int) -> float:
        """Of an epoch (from 1) of the stage."""

    @abstractmethod
    def start_epoch(self, stage: str, epoch: int) -> dict[str, Any]:
        """Prepare the epoch's batches; returns metrics to report."""

    @abstractmethod
    def num_iterations(self, stage: str) -> int:
        """Iterations of an epoch of this stage."""

    @abstractmethod
    def step(self, stage: str, epoch: int) -> Iteration:
        """Draw the next batch and compute the loss."""

    def after_step(self, stage: str) -> None:
        """Called after the optimiser step."""
        return

    def parameters(self) -> Iterable[nn.Parameter]:
        """Parameters to train besides those of the network."""
        return ()

    def report(self, means: dict[str, float]) -> dict[str, float | None]:
        """The metrics to report, from the means of the steps' terms; None where one is undefined."""
        return dict(means)

    def end_epoch(self, stage: str) -> dict[str, Any]:
        """Further metrics at the end of an epoch."""
        return {}

    @abstractmethod
    def state_dict(self) -> dict[str, Any]:
        """Everything but the network and the task's generator that the next step depends on."""

    @abstractmethod
    def load_state_dict(self, state: dict[str, Any]) -> None: ...
