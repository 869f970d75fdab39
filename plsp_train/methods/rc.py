"""RC (Feng et al. 2020), risk-consistent: cross-entropy weighted with the present probability of each candidate."""

from torch import Tensor

from plsp_train.methods.losses import softmax_within
from plsp_train.methods.single_stage import RefinedAfterStep


class RC(RefinedAfterStep):
    """The confidences are the network's probabilities after the step, normalised over the candidates."""

    def refined(self, logits: Tensor, candidates: Tensor) -> Tensor:
        return softmax_within(logits, candidates)
