"""LWS and LWC (Wen et al. 2021): the leveraged weighted loss with the sigmoid and with the cross-entropy."""

import torch
from torch import Tensor

from plsp_train.methods.losses import leveraged_weighted_loss, log_surrogates, sigmoid_surrogates, softmax_within
from plsp_train.methods.single_stage import RefinedAfterStep
from plsp_train.methods.task import Task

HALVING_EPOCHS = 50
LWS_SURROGATES = {"cross-entropy": log_surrogates, "sigmoid": sigmoid_surrogates}


class LWS(RefinedAfterStep):
    """Labels outside the candidate set have weights too, normalised separately."""

    name, label = "lws", "LWC"
    help = "leveraged weighted loss (Wen et al. 2021)"
    defaults = {"lr": 0.1}
    ablations = {"LWS": {"lws_surrogate": "sigmoid"}}

    def __init__(self, task: Task) -> None:
        super().__init__(task)
        self.confidences = torch.full_like(self.confidences, 1 / task.num_classes)

    def learning_rate(self, stage: str, epoch: int) -> float:
        """Decays smoothly to a half every 50 epochs."""
        return self.task.config.lr * 0.5 ** ((epoch - 1) / HALVING_EPOCHS)

    def loss(self, logits: Tensor, index: Tensor) -> Tensor:
        candidates, weights, config = self.task.candidates[index], self.confidences[index], self.task.config
        surrogates = LWS_SURROGATES[config.lws_surrogate](logits)
        return leveraged_weighted_loss(surrogates, candidates, weights, config.lws_leverage)

    def refined(self, logits: Tensor, candidates: Tensor) -> Tensor:
        return softmax_within(logits, candidates) + softmax_within(logits, ~candidates)
