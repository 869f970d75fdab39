"""CAVL (Zhang et al. 2022): the candidate of highest class activation value is the label."""

import torch.nn.functional as F
from torch import Tensor

from plsp_kernels import class_activation_labels
from plsp_train.methods.base import Iteration
from plsp_train.methods.single_stage import RefinedAfterStep


class CAVL(RefinedAfterStep):
    """Uniform confidences in the first epochs, one label with confidence 1 from then on."""

    name, label = "cavl", "CAVL"
    help = "the candidate of highest class activation value is the label (Zhang et al. 2022)"
    defaults = {"lr": 0.05}

    def step(self, stage: str, epoch: int) -> Iteration:
        config = self.task.config
        self._is_warm_up = epoch <= config.cavl_warm_up * config.epochs
        return super().step(stage, epoch)

    def after_step(self, stage: str) -> None:
        if not self._is_warm_up:
            super().after_step(stage)

    def refined(self, logits: Tensor, candidates: Tensor) -> Tensor:
        return F.one_hot(class_activation_labels(logits, candidates), self.task.num_classes).float()
