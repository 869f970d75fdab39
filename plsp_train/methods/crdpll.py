"""CR-DPLL (Wu, Wang and Zhang 2022): the views of an instance agree on one target, which keeps to the candidates."""

import torch.nn.functional as F

from plsp_train.methods.base import Iteration
from plsp_train.methods.losses import complementary_loss, softmax_within
from plsp_train.methods.schedules import divided_by_ten
from plsp_train.methods.single_stage import Disambiguation

CONSISTENCY_WEIGHT = 1.0  # λ of the published settings
RAMP = 0.5  # share of the epochs in which the weight grows: 100 of the published 200
DECAYS = (0.5, 0.75)  # epochs 100 and 150 of 200


class CRDPLL(Disambiguation):
    """One weak and two strong views. The confidences are the geometric mean of their predictions in the last epoch."""

    name, label = "crdpll", "CR-DPLL"
    help = "consistency of one weak and two strong views (Wu et al. 2022)"
    defaults = {"lr": 0.1, "augment_weak": True}

    def learning_rate(self, stage: str, epoch: int) -> float:
        config = self.task.config
        return divided_by_ten(config.lr, epoch, config.epochs, DECAYS)

    def consistency_weight(self, epoch: int) -> float:
        """Zero in the first epoch, then linear."""
        return CONSISTENCY_WEIGHT * min((epoch - 1) / (RAMP * self.task.config.epochs), 1)

    def step(self, stage: str, epoch: int) -> Iteration:
        batch, weak = self.draw()
        index, candidates = batch.index, self.task.candidates[batch.index]
        # (3, N, l): the weak view first
        logits = self.task.logits(weak, batch.strong(), batch.strong()).float().unflatten(0, (3, len(batch)))
        complementary = complementary_loss(logits[0], candidates)
        targets = self.confidences[index].expand_as(logits)
        # Summed over the views, averaged over instances.
        consistency = F.kl_div(logits.log_softmax(2), targets, reduction="sum") / len(batch)
        loss = complementary + self.consistency_weight(epoch) * consistency
        # Normalised, the geometric mean of softmaxes is the softmax of the mean logits.
        mean_logits = logits.detach().mean(0)
        self.confidences.index_copy_(0, index, softmax_within(mean_logits, candidates))
        self.record_labels(mean_logits, index)
        terms = {"loss": loss, "complementary": complementary, "consistency": consistency}
        return Iteration(loss, terms, 3 * len(batch))
