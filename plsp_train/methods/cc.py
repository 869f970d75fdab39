"""CC (Feng et al. 2020), classifier-consistent: the likelihood of the candidate set."""

from torch import Tensor

from plsp_train.methods.losses import candidate_likelihood_loss
from plsp_train.methods.single_stage import SingleStage


class CC(SingleStage):
    """Whichever candidate it is: their probabilities are to sum to one."""

    def loss(self, logits: Tensor, index: Tensor) -> Tensor:
        return candidate_likelihood_loss(logits, self.task.candidates[index])
