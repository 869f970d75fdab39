"""DF, disambiguation-free: the pre-training loss of PLSP alone, an ablation of its paper."""

from torch import Tensor

from plsp_train.methods.losses import candidate_cross_entropy
from plsp_train.methods.single_stage import SingleStage


class DF(SingleStage):
    """All candidates keep the same weight."""

    name, label = "df", "DF"
    help = "disambiguation-free: the pre-training loss of plsp alone, an ablation"
    defaults = {"lr": 0.05}

    def loss(self, logits: Tensor, index: Tensor) -> Tensor:
        return candidate_cross_entropy(logits, self.task.candidates[index])
