"""DF, disambiguation-free: PLSP's pre-training loss and nothing else, an ablation of its paper."""

from torch import Tensor

from plsp_train.methods.losses import candidate_cross_entropy
from plsp_train.methods.single_stage import SingleStage


class DF(SingleStage):
    """All candidates count the same, to the end."""

    def loss(self, logits: Tensor, index: Tensor) -> Tensor:
        return candidate_cross_entropy(logits, self.task.candidates[index])
