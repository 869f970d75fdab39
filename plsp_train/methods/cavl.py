"""CAVL (Zhang et al. 2022): the candidate of highest class activation value is the label."""

import torch.nn.functional as F
from torch import Tensor

from plsp_kernels import class_activation_labels
from plsp_train.methods.single_stage import RefinedAfterStep


class CAVL(RefinedAfterStep):
    """Uniform confidences until an instance is first seen, one label with confidence 1 from then on."""

    name, label = "cavl", "CAVL"
    help = "the candidate of highest class activation value is the label (Zhang et al. 2022)"
    defaults = {"lr": 0.1}

    def refined(self, logits: Tensor, candidates: Tensor) -> Tensor:
        return F.one_hot(class_activation_labels(logits, candidates), self.task.num_classes).float()
