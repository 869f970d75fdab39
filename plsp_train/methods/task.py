"""What a method learns from, and the batches that it draws.

With several ranks, each loads and augments its own rows of a batch and runs the network on them; `Task.features`
returns the features of all rows on every rank. A method sees whole batches and need not know about ranks.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from plsp_train.data import Augmentation, IndexSampler
from plsp_train.data.candidate_sets import CandidateSets
from plsp_train.data.mapped import Inputs, MappedImages
from plsp_train.data.transfer import to_device
from plsp_train.distributed import num_ranks, own_shard
from plsp_train.models import Network

if TYPE_CHECKING:  # the configuration takes defaults and help texts from the methods
    from plsp_train.config import Config

READ_AHEAD = 2
"""Batches of a sampler."""


class View(NamedTuple):
    """A view of a batch, ready for the network."""

    inputs: Tensor
    """Of this rank's rows."""
    total: int
    """Rows of the whole batch."""


@dataclass
class Task:
    """Inputs and candidate sets on the training device, the network, a generator. Inputs in a file stay there."""

    config: "Config"
    model: Network
    inputs: Inputs
    candidates: CandidateSets
    true_labels: Tensor | None
    """Used for reporting purity, and for training by the fully supervised yardstick alone; None if unknown."""
    augmentation: Augmentation
    generator: torch.Generator

    @property
    def num_classes(self) -> int:
        return self.candidates.shape[1]

    @property
    def device(self) -> torch.device:
        return self.candidates.device

    def draw(self, sampler: IndexSampler) -> "Batch":
        """The next batch of the sampler. Those after it are read ahead if the inputs are in a file."""
        batch = self.load(next(sampler))
        if isinstance(self.inputs, MappedImages):
            for index in sampler.upcoming(READ_AHEAD):
                self.inputs.prefetch(index[own_shard(len(index)).rows])
        return batch

    def load(self, index: Tensor) -> "Batch":
        """The batch of these instances."""
        return Batch(self, index)

    def features(self, *views: View, network: Network | None = None) -> Tensor:
        """Deep features (N, d) of all rows of the views, one view after the other, in a single pass of the network.

        The network may be another one than the task's, such as a moving average of it.
        """
        own = (network or self.model).features(torch.cat([view.inputs for view in views]))
        if num_ranks() == 1:
            return own
        from plsp_train.sharding import gather_views

        return gather_views(own, [view.total for view in views])

    def logits(self, *views: View) -> Tensor:
        """Logits (N, l) of all rows of the views."""
        return self.model.classifier(self.features(*views))


class Batch:
    """Some of the training instances. Its views draw random numbers for all of them, whoever computes which rows."""

    def __init__(self, task: Task, index: Tensor) -> None:
        self.index = to_device(index, task.device)
        """Positions in the training set, on the training device."""
        self._task, self._shard = task, own_shard(len(index))
        own = (self.index if isinstance(task.inputs, Tensor) else index)[self._shard.rows]
        self._inputs = to_device(task.inputs[own], task.device)

    def __len__(self) -> int:
        return self._shard.total

    def plain(self) -> View:
        """Normalised, not augmented."""
        return View(self._task.augmentation.plain(self._inputs), len(self))

    def weak(self) -> View:
        return View(self._task.augmentation.weak(self._inputs, self._task.generator, self._shard), len(self))

    def strong(self) -> View:
        return View(self._task.augmentation.strong(self._inputs, self._task.generator, self._shard), len(self))
