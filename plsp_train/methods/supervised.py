"""Training with the true labels: what the network, the augmentation and the schedule of PLSP can reach."""

import torch.nn.functional as F
from torch import Tensor

from plsp_train.methods.base import Iteration
from plsp_train.methods.schedules import PLSP_DECAYS, divided_by_ten
from plsp_train.methods.single_stage import SingleStage
from plsp_train.methods.task import Task


class Supervised(SingleStage):
    """Cross-entropy of the true labels on a weak and a strong view of every instance. Candidate sets are not used."""

    name, label = "supervised", "fully supervised"
    help = "cross-entropy of the true labels: a yardstick, not a method for partial labels"
    defaults = {"augment_weak": True}
    uses_true_labels = True

    def __init__(self, task: Task) -> None:
        super().__init__(task)
        if task.true_labels is None:
            raise ValueError("method supervised trains with true labels, but the data have none: choose another method")
        self.true_labels = task.true_labels

    def learning_rate(self, stage: str, epoch: int) -> float:
        config = self.task.config
        return divided_by_ten(config.lr, epoch, config.epochs, PLSP_DECAYS)

    def step(self, stage: str, epoch: int) -> Iteration:
        batch, weak = self.draw()
        logits = self.task.logits(weak, batch.strong()).float()
        loss = self.loss(logits, batch.index.repeat(2))
        self.record_labels(logits[: len(batch)], batch.index)
        return Iteration(loss, {"loss": loss}, 2 * len(batch))

    def loss(self, logits: Tensor, index: Tensor) -> Tensor:
        return F.cross_entropy(logits, self.true_labels[index])
