"""CC (Feng et al. 2020), classifier-consistent: the likelihood of the candidate set."""

from torch import Tensor

from plsp_train.methods.losses import candidate_likelihood_loss
from plsp_train.methods.single_stage import SingleStage


class CC(SingleStage):
    """The probabilities of the candidates should sum to one."""

    name, label = "cc", "CC"
    help = "classifier-consistent: likelihood of the candidate set (Feng et al. 2020)"
    defaults = {"lr": 0.05}

    def loss(self, logits: Tensor, index: Tensor) -> Tensor:
        return candidate_likelihood_loss(logits, self.task.candidates[index])
