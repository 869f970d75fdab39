"""PLSP: pre-training on all candidates, then semi-supervised training with the semantic upper bound."""

import math
from typing import Any, cast

import torch
from torch import Tensor
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from plsp_kernels import SemanticUpperBoundLoss, semantic_upper_bound_loss
from plsp_train.data import IndexSampler
from plsp_train.data.candidate_sets import CandidateSets
from plsp_train.distributed import from_all_ranks
from plsp_train.methods.base import Iteration, Method, Stage
from plsp_train.methods.losses import candidate_cross_entropy, candidate_likelihood_loss, complementary_loss
from plsp_train.methods.plain_loss import plain_loss
from plsp_train.methods.schedules import PLSP_DECAYS, cosine, divided_by_ten
from plsp_train.methods.selection import (
    Scores,
    alignment,
    score_instances,
    select_reliable,
    soft_sizes,
)
from plsp_train.methods.task import Task
from plsp_train.metrics import own_logits
from plsp_train.models import Network

PRETRAIN, TRAIN = "pretrain", "train"
SCHEDULES = ("step", "cosine")
RELEASED_RAMP_EPOCHS = 50  # the released code reaches γ0 after this many epochs, for any T


class PLSP(Method):
    """The pipeline of the paper, or with recipe "released" that of its released code."""

    name, label = "plsp", "PLSP"
    help = "pre-training, then semi-supervised training with semantic transformation"
    defaults = {"augment_weak": True}  # of the paper and its released code, whatever the preset
    ignores = ("batch_size",)  # each stage has its own
    recipes = {
        "robust": {
            "blend_likelihood": True,
            "schedule": "cosine",
            "average_epochs": 2.0,
            "align_sizes": True,
            "bound_ss_weight": True,
        }
    }
    ablations = {"PLSP w/o ST": {"semantic": False}}

    def __init__(self, task: Task) -> None:
        super().__init__(task)
        config = task.config
        self.released = config.recipe == "released"
        self.loss = SemanticUpperBoundLoss(
            len(task.inputs),
            task.num_classes,
            task.model.num_features,
            covariance=config.covariance,
            threshold=config.threshold,
            mapping="convex" if self.released else "linear",
            beta=config.beta,
            argmax_in_candidates=not self.released,
            impl=config.impl,
        ).to(task.device)
        self.average: AveragedModel | None = None
        if config.average_epochs:
            decay = 1 - 1 / max(1.0, config.average_epochs * config.iterations)
            self.average = AveragedModel(task.model, multi_avg_fn=get_ema_multi_avg_fn(decay), use_buffers=True)
        self.expected = task.candidates.sizes_by_chance() if config.align_sizes else None
        self.sizes: Tensor | None = None  # of the classes, by their probabilities, when they were last scored
        self.max_ss_weight = config.ss_weight
        if config.bound_ss_weight:
            self.max_ss_weight = min(config.ss_weight, largest_ss_weight(task.candidates))
        self.labeled: IndexSampler | None = None
        self.unlabeled = IndexSampler(torch.arange(len(task.inputs)), 1, task.generator)

        if config.impl != "auto" and config.semantic:
            self._try_implementation()

    @torch.no_grad()
    def _try_implementation(self) -> None:
        """Compute the loss of zeros: an implementation that cannot serve is refused before anything is trained."""
        config, weight, candidates = self.task.config, self.task.model.classifier.weight, self.task.candidates
        labels = torch.zeros(config.labeled_batch, dtype=torch.int64, device=weight.device)
        unlabeled = torch.zeros(config.unlabeled_batch, dtype=torch.int64, device=weight.device)
        labeled_logits, views = (
            weight.new_zeros(len(labels), len(weight)),
            weight.new_zeros(len(unlabeled), len(weight)),
        )
        semantic_upper_bound_loss(
            labeled_logits,
            views,
            views,
            weight,
            self.loss.covariance.covariance,
            labels,
            candidates[unlabeled],
            strength=config.strength,
            thresholds=config.threshold,
            impl=config.impl,
        )

    def stages(self) -> list[Stage]:
        return [Stage(PRETRAIN, self.task.config.pretrain_epochs), Stage(TRAIN, self.task.config.epochs)]

    def learning_rate(self, stage: str, epoch: int) -> float:
        """Of the semi-supervised epochs: a cosine, or steps by a tenth after 40 % and 60 %, 100 and 150 of 250."""
        config = self.task.config
        if stage == PRETRAIN:
            return config.lr
        if config.schedule == "cosine":
            return cosine(config.lr, epoch, config.epochs)
        return divided_by_ten(config.lr, epoch, config.epochs, PLSP_DECAYS)

    def num_iterations(self, stage: str) -> int:
        """I; in the paper, an epoch of pre-training is one pass over all instances."""
        config = self.task.config
        if stage == PRETRAIN and not self.released:
            return math.ceil(len(self.task.inputs) / config.pretrain_batch)
        return config.iterations

    def strength(self, epoch: int) -> float:
        """λ_t = λ0 t/T."""
        return self.task.config.strength * min(self._time(epoch) / self.task.config.epochs, 1)

    def ss_weight(self, epoch: int) -> float:
        """γ_t = γ0 t/T, where γ0 may be bounded; the released code has a constant in place of T."""
        ramp = RELEASED_RAMP_EPOCHS if self.released else self.task.config.epochs
        return self.max_ss_weight * min(self._time(epoch) / ramp, 1)

    @property
    def network(self) -> Network:
        """Scores, selects and is evaluated."""
        return self.task.model if self.average is None else cast("Network", self.average.module)

    def after_step(self, stage: str) -> None:
        if self.average is not None:
            self.average.update_parameters(self.task.model)

    def _time(self, epoch: int) -> int:
        """t, from 1: the last epoch reaches λ0 and γ0. The released code counts from 0."""
        return epoch - 1 if self.released else epoch

    def start_epoch(self, stage: str, epoch: int) -> dict[str, Any]:
        task = self.task
        if stage == PRETRAIN:
            self._make_samplers(torch.arange(len(task.inputs)))
            return {}
        if self.expected is not None and self.sizes is None:
            self._scores()  # measures the sizes
        scores = self._scores()
        self.labels = scores.labels
        labeled = select_reliable(scores, task.num_classes, task.config.k, agree_with_best=self.released)
        rest = torch.ones_like(self.labels, dtype=torch.bool).index_fill(0, labeled, False)
        # If all instances are labelled, they are the unlabelled ones too, as in the paper's study of large k.
        unlabeled = rest.nonzero()[:, 0] if len(labeled) < len(rest) else labeled
        self._make_samplers(unlabeled.cpu(), labeled.cpu())
        return self._labeled_metrics(labeled)

    def _scores(self) -> Scores:
        """Of all instances. Logits exist for one batch at a time."""
        task, parts, sizes = self.task, [], []
        shift = torch.zeros(task.num_classes, device=task.device)
        if self.expected is not None and self.sizes is not None:
            shift = alignment(self.sizes, self.expected)
        for rows, logits in own_logits(self.network, task.inputs, task.augmentation):
            candidates = task.candidates[rows]
            parts.append(score_instances(logits + shift, candidates))
            if self.expected is not None:
                sizes.append(soft_sizes(logits, candidates))
        if sizes:
            self.sizes = from_all_ranks(torch.stack(sizes))[0].sum(0)
        return Scores(*from_all_ranks(*(torch.cat(column) for column in zip(*parts, strict=True))))

    def labeled_set(self) -> Tensor | None:
        return None if self.labeled is None else self.labeled.indices

    def _labeled_metrics(self, labeled: Tensor) -> dict[str, Any]:
        """Size of the labelled set, and its purity where the true labels are known."""
        chosen, num_classes = self.labels[labeled], self.task.num_classes
        counts = chosen.bincount(minlength=num_classes)
        metrics: dict[str, Any] = {"num_labeled": len(labeled), "labeled_per_class": counts.tolist()}
        if self.task.true_labels is not None:
            right = chosen == self.task.true_labels[labeled]
            correct = chosen[right].bincount(minlength=num_classes).tolist()
            shares = [count / size if size else None for count, size in zip(correct, counts.tolist(), strict=True)]
            metrics["labeled_purity"] = right.float().mean().item() if len(labeled) else None
            metrics["labeled_purity_per_class"] = shares
        return metrics

    def _make_samplers(self, unlabeled: Tensor, labeled: Tensor | None = None) -> None:
        config, generator = self.task.config, self.task.generator
        batch = config.pretrain_batch if labeled is None else config.unlabeled_batch
        self.unlabeled = IndexSampler(unlabeled, batch, generator)
        self.labeled = None
        if labeled is not None and len(labeled):
            self.labeled = IndexSampler(labeled, config.labeled_batch, generator)

    def step(self, stage: str, epoch: int) -> Iteration:
        return self._pretrain_step(epoch) if stage == PRETRAIN else self._train_step(epoch)

    def _pretrain_step(self, epoch: int) -> Iteration:
        task, config = self.task, self.task.config
        batch = task.draw(self.unlabeled)
        candidates = task.candidates[batch.index]
        logits = task.logits(batch.plain()).float()  # the paper does not augment in pre-training
        loss = candidate_cross_entropy(logits, candidates)
        if config.blend_likelihood:
            share = (epoch - 1) / max(config.pretrain_epochs - 1, 1)
            loss = torch.lerp(loss, candidate_likelihood_loss(logits, candidates), share)
        if self.released:
            loss = loss + complementary_loss(logits, candidates)
        return Iteration(loss, {"loss": loss}, len(batch))

    def _train_step(self, epoch: int) -> Iteration:
        task = self.task
        unlabeled_batch = task.draw(self.unlabeled)
        labeled_batch = task.draw(self.labeled) if self.labeled is not None else task.load(torch.arange(0))
        labeled, unlabeled = labeled_batch.index, unlabeled_batch.index
        views = [labeled_batch.weak(), unlabeled_batch.weak(), unlabeled_batch.strong()]
        features = task.features(*views)
        logits = task.model.classifier(features).split([view.total for view in views])
        labels, candidates = self.labels[labeled], task.candidates[unlabeled]
        labeled_candidates = task.candidates[labeled] if self.released else None
        ss_weight = self.ss_weight(epoch)
        if task.config.semantic:
            loss = self.loss(
                *logits,
                task.model.classifier.weight,
                labels,
                candidates,
                labeled_features=features[: len(labeled)],
                index=unlabeled,
                strength=self.strength(epoch),
                ss_weight=ss_weight,
                labeled_candidates=labeled_candidates,
            )
        else:
            loss = plain_loss(logits, labels, candidates, self.loss, ss_weight, labeled_candidates)
            self.loss.record(unlabeled, loss, candidates)
        terms = {
            "loss": loss.total,
            "supervised": loss.supervised,
            "consistency": loss.consistency,
            "complementary": loss.complementary,
            "mask_rate": loss.mask.float().mean(),
        }
        if task.true_labels is not None:
            right = (loss.prediction == task.true_labels[unlabeled]) & loss.mask
            terms["pseudo_label_right"] = right.float().mean()
        # Detached, so that the graph of a reported term is not kept until the next step.
        reported = {name: value.detach() for name, value in terms.items()}
        return Iteration(loss.total, reported, sum(view.total for view in views))

    def report(self, means: dict[str, float]) -> dict[str, float | None]:
        """Adds the purity: of the pseudo-labels in use, the share that is correct."""
        shown: dict[str, float | None] = dict(means)
        if "pseudo_label_right" in means:
            del shown["pseudo_label_right"]
            used, right = means["mask_rate"], means["pseudo_label_right"]
            shown["pseudo_label_purity"] = right / used if used > 0 else None
        return shown

    def end_epoch(self, stage: str) -> dict[str, Any]:
        if stage == PRETRAIN:
            return {}
        return {"thresholds": [round(value, 6) for value in self.loss.curriculum.thresholds.tolist()]}

    def state_dict(self) -> dict[str, Any]:
        return {
            "covariance": self.loss.covariance.state_dict(),
            "curriculum": self.loss.curriculum.state_dict(),
            "labels": self.labels,
            "average": None if self.average is None else self.average.state_dict(),
            "sizes": self.sizes,
            "unlabeled": self.unlabeled.state_dict() | {"batch_size": self.unlabeled.batch_size},
            "labeled": None if self.labeled is None else self.labeled.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.loss.covariance.load_state_dict(state["covariance"])
        self.loss.curriculum.load_state_dict(state["curriculum"])
        self.labels = state["labels"]
        self.sizes = None if self.expected is None else state["sizes"]
        if self.average is not None:
            self.average.load_state_dict(state["average"])
        generator = self.task.generator
        unlabeled = state["unlabeled"]
        self.unlabeled = IndexSampler(unlabeled["order"].cpu(), unlabeled["batch_size"], generator)
        self.unlabeled.load_state_dict(unlabeled)
        self.labeled = None
        if state["labeled"] is not None:
            order = state["labeled"]["order"].cpu()
            self.labeled = IndexSampler(order, self.task.config.labeled_batch, generator)
            self.labeled.load_state_dict(state["labeled"])


def largest_ss_weight(candidates: CandidateSets) -> float:
    """(1 - q)/q, the γ up to which a group of wrong labels cannot sustain itself.

    q is the mean share of instances that have a given wrong label as a candidate. For a share q of such a group the
    consistency term supports the label with weight γ; for the others the complementary term opposes it.
    """
    num_instances, num_classes = candidates.shape
    wrong = (int(candidates.frequencies().sum()) / num_instances - 1) / max(num_classes - 1, 1)
    return (1 - wrong) / wrong if wrong > 0 else math.inf
