"""PRODEN (Lv et al. 2020): progressive identification of the true label."""

from torch import Tensor

from plsp_train.methods.losses import softmax_within
from plsp_train.methods.single_stage import Disambiguation


class PRODEN(Disambiguation):
    """As RC, but the confidences come from the forward pass of the loss and are used in the next epoch."""

    name, label = "proden", "PRODEN"
    help = "progressive identification of the true label (Lv et al. 2020)"
    defaults = {"lr": 0.1}

    def loss(self, logits: Tensor, index: Tensor) -> Tensor:
        loss = super().loss(logits, index)
        self.confidences.index_copy_(0, index, softmax_within(logits.detach(), self.task.candidates[index]))
        return loss
