"""RC (Feng et al. 2020), risk-consistent: cross-entropy weighted by the current probability of each candidate."""

from torch import Tensor

from plsp_train.methods.losses import softmax_within
from plsp_train.methods.single_stage import RefinedAfterStep


class RC(RefinedAfterStep):
    """The confidences are the network's probabilities after the step, normalised over the candidates."""

    name, label = "rc", "RC"
    help = "risk-consistent: cross-entropy weighted by the current probabilities (Feng et al. 2020)"
    defaults = {"lr": 0.1}

    def refined(self, logits: Tensor, candidates: Tensor) -> Tensor:
        return softmax_within(logits, candidates)
