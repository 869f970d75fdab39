"""What the baselines have in common."""

import math
from abc import abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from plsp_train.data import IndexSampler
from plsp_train.methods.base import Iteration, Method, Stage
from plsp_train.methods.losses import confidence_cross_entropy, uniform_confidences
from plsp_train.methods.task import Batch, Task, View

TRAIN = "train"


class SingleStage(Method):
    """One stage of shuffled passes over the weak views of all instances, at a constant learning rate.

    All batches are full and contain no instance twice: the remainder at the end of a pass is dropped.
    """

    def __init__(self, task: Task) -> None:
        super().__init__(task)
        self.sampler = self._new_sampler()

    def _new_sampler(self) -> IndexSampler:
        indices = torch.arange(len(self.task.inputs))
        return IndexSampler(indices, min(self.task.config.batch_size, len(indices)), self.task.generator)

    def stages(self) -> list[Stage]:
        return [Stage(TRAIN, self.task.config.epochs)]

    def learning_rate(self, stage: str, epoch: int) -> float:
        return self.task.config.lr

    def num_iterations(self, stage: str) -> int:
        return len(self.task.inputs) // self.sampler.batch_size

    def start_epoch(self, stage: str, epoch: int) -> dict[str, Any]:
        self.sampler = self._new_sampler()
        return {}

    def step(self, stage: str, epoch: int) -> Iteration:
        batch, view = self.draw()
        logits = self.task.logits(view).float()
        loss = self.loss(logits, batch.index)
        self.record_labels(logits, batch.index)
        return Iteration(loss, {"loss": loss}, len(batch))

    def record_labels(self, logits: Tensor, index: Tensor) -> None:
        """The candidates of highest probability become the labels of the instances `index`."""
        best = logits.detach().masked_fill(~self.task.candidates[index], -math.inf).argmax(1)
        self.labels.index_copy_(0, index, best)

    def draw(self) -> tuple[Batch, View]:
        """The next batch and its weak view."""
        batch = self.task.draw(self.sampler)
        return batch, batch.weak()

    @abstractmethod
    def loss(self, logits: Tensor, index: Tensor) -> Tensor:
        """Of float32 logits of the instances `index`."""

    def state_dict(self) -> dict[str, Any]:
        return {"sampler": self.sampler.state_dict(), "labels": self.labels}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.sampler.load_state_dict(state["sampler"])
        self.labels = state["labels"]


class Disambiguation(SingleStage):
    """Keeps the confidence of every label of every instance, initially uniform over the candidates.

    The candidate sets never change: a confidence that underflows to zero can grow again.
    """

    def __init__(self, task: Task) -> None:
        super().__init__(task)
        self.confidences = torch.cat([uniform_confidences(part) for _, part in task.candidates.chunks()])

    def loss(self, logits: Tensor, index: Tensor) -> Tensor:
        return confidence_cross_entropy(logits, self.confidences[index])

    def end_epoch(self, stage: str) -> dict[str, Any]:
        """Purity: the share of instances whose most confident candidate is the true label."""
        if self.task.true_labels is None:
            return {}
        labels = torch.cat(
            [
                self.confidences[rows].masked_fill(~part, -math.inf).argmax(1)
                for rows, part in self.task.candidates.chunks()
            ]
        )
        return {"labeled_purity": (labels == self.task.true_labels).float().mean().item()}

    def state_dict(self) -> dict[str, Any]:
        return super().state_dict() | {"confidences": self.confidences}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self.confidences = state["confidences"]


class RefinedAfterStep(Disambiguation):
    """Updates the confidences of a batch in a second forward pass, after the optimiser step."""

    def draw(self) -> tuple[Batch, View]:
        self._drawn = super().draw()
        return self._drawn

    @torch.no_grad()
    def after_step(self, stage: str) -> None:
        batch, view = self._drawn
        with frozen_statistics(self.task.model):
            logits = self.task.logits(view).float()
        self.confidences.index_copy_(0, batch.index, self.refined(logits, self.task.candidates[batch.index]))

    @abstractmethod
    def refined(self, logits: Tensor, candidates: Tensor) -> Tensor:
        """The new confidences of a batch."""


@contextmanager
def frozen_statistics(model: nn.Module) -> Iterator[None]:
    """Batch norms in training mode use the statistics of the batch, but do not update their running ones."""
    momenta = {module: module.momentum for module in model.modules() if isinstance(module, _BatchNorm)}
    for norm in momenta:
        norm.momentum = 0.0
    try:
        yield
    finally:
        for norm, momentum in momenta.items():
            norm.momentum = momentum
