"""LWS (Wen et al. 2021): the leveraged weighted loss with the sigmoid."""

import torch
from torch import Tensor

from plsp_train.methods.losses import leveraged_weighted_loss, softmax_within
from plsp_train.methods.single_stage import RefinedAfterStep
from plsp_train.methods.task import Task

HALVING_EPOCHS = 50


class LWS(RefinedAfterStep):
    """Labels outside the candidate set have weights too, normalised separately."""

    name, label = "lws", "LWS"
    help = "leveraged weighted loss with the sigmoid (Wen et al. 2021)"
    defaults = {"lr": 0.1}

    def __init__(self, task: Task) -> None:
        super().__init__(task)
        self.confidences = torch.full_like(self.confidences, 1 / task.num_classes)

    def learning_rate(self, stage: str, epoch: int) -> float:
        """Halved every 50 epochs."""
        return self.task.config.lr * 0.5 ** ((epoch - 1) // HALVING_EPOCHS)

    def loss(self, logits: Tensor, index: Tensor) -> Tensor:
        candidates, weights = self.task.candidates[index], self.confidences[index]
        return leveraged_weighted_loss(logits, candidates, weights, self.task.config.lws_leverage)

    def refined(self, logits: Tensor, candidates: Tensor) -> Tensor:
        return softmax_within(logits, candidates) + softmax_within(logits, ~candidates)
