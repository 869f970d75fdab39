"""PLSP: pre-train on all candidates, then semi-supervised training with the semantic upper bound."""

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from plsp_kernels import CurriculumThreshold, SemanticCovariance, SemanticLoss, semantic_upper_bound_loss
from plsp_train.data import IndexSampler
from plsp_train.methods.base import Method, Stage, Step, Task
from plsp_train.methods.losses import candidate_cross_entropy, complementary_loss, softmax_within
from plsp_train.methods.selection import select_reliable
from plsp_train.metrics import predict

PRETRAIN, TRAIN = "pretrain", "train"
RELEASED_RAMP_EPOCHS = 50  # the released code reaches γ0 after this many epochs, whatever T


def plain_loss(
    labeled_logits: Tensor,
    weak_logits: Tensor,
    strong_logits: Tensor,
    labels: Tensor,
    candidates: Tensor,
    *,
    thresholds: Tensor,
    ss_weight: float,
    labeled_candidates: Tensor | None,
    argmax_in_candidates: bool,
) -> SemanticLoss:
    """The objective without semantic transformation, equations (5), (6), (13): softmax in place of bound and probit."""
    labeled, weak, strong = labeled_logits.float(), weak_logits.float(), strong_logits.float()
    supervised = F.cross_entropy(labeled, labels) if len(labels) else labeled.sum()
    probabilities = weak.detach().softmax(1)
    confidence, prediction = probabilities.max(1)
    mask = confidence >= thresholds[prediction]
    if argmax_in_candidates:
        mask = mask & candidates.gather(1, prediction[:, None])[:, 0]
    targets = softmax_within(weak.detach(), candidates)
    consistency = (mask * -(targets * F.log_softmax(strong, dim=1)).sum(1)).mean()
    if labeled_candidates is None:
        complementary = complementary_loss(weak, candidates)
    else:
        complementary = complementary_loss(torch.cat([weak, labeled]), torch.cat([candidates, labeled_candidates]))
    total = ss_weight * (supervised + consistency) + complementary
    return SemanticLoss(total, supervised, consistency, complementary, prediction, confidence, prediction, mask)


class PLSP(Method):
    """The pipeline of the paper; with recipe "released", the variants of its code."""

    def __init__(self, task: Task) -> None:
        super().__init__(task)
        config, device = task.config, task.inputs.device
        self.released = config.recipe == "released"
        self.covariance = SemanticCovariance(task.num_classes, task.model.num_features, config.covariance).to(device)
        self.curriculum = CurriculumThreshold(
            len(task.inputs), task.num_classes, config.threshold, "convex" if self.released else "linear"
        ).to(device)
        self.labels = torch.zeros(len(task.inputs), dtype=torch.int64, device=device)
        self.labeled: IndexSampler | None = None
        self.unlabeled = IndexSampler(torch.arange(len(task.inputs), device=device), 1, task.generator)

    def stages(self) -> list[Stage]:
        return [Stage(PRETRAIN, self.task.config.pretrain_epochs), Stage(TRAIN, self.task.config.epochs)]

    def learning_rate(self, stage: str, epoch: int) -> float:
        """Divided by ten after 40 % and after 60 % of the semi-supervised epochs: 100 and 150 of the paper's 250."""
        config = self.task.config
        passed = sum(stage == TRAIN and epoch - 1 >= share * config.epochs for share in (0.4, 0.6))
        return config.lr * 0.1**passed

    def num_iterations(self, stage: str) -> int:
        """I; an epoch of pre-training is a pass over all instances, but not in the released code."""
        config = self.task.config
        if stage == PRETRAIN and not self.released:
            return math.ceil(len(self.task.inputs) / config.pretrain_batch)
        return config.iterations

    def strength(self, epoch: int) -> float:
        """λ_t = λ0 t/T."""
        return self.task.config.strength * min(self._time(epoch) / self.task.config.epochs, 1)

    def ss_weight(self, epoch: int) -> float:
        """γ_t = γ0 t/T; the released code divides by a constant."""
        ramp = RELEASED_RAMP_EPOCHS if self.released else self.task.config.epochs
        return self.task.config.ss_weight * min(self._time(epoch) / ramp, 1)

    def _time(self, epoch: int) -> int:
        """t: from 1, so that the last epoch has all of λ0 and γ0; the released code counts from 0."""
        return epoch - 1 if self.released else epoch

    def start_epoch(self, stage: str, epoch: int) -> dict[str, Any]:
        if stage == PRETRAIN:
            self._make_samplers(torch.arange(len(self.task.inputs), device=self.task.inputs.device))
            return {}
        logits = predict(self.task.model, self.task.inputs, self.task.augmentation)
        labeled, self.labels = select_reliable(
            logits, self.task.candidates, self.task.config.k, agree_with_best=self.released
        )
        rest = torch.ones(len(logits), dtype=torch.bool, device=logits.device).index_fill(0, labeled, False)
        # With every instance labelled, all serve as unlabelled too, as in the paper's study of large k.
        unlabeled = rest.nonzero()[:, 0] if len(labeled) < len(logits) else labeled
        self._make_samplers(unlabeled, labeled)
        right = self.labels[labeled] == self.task.true_labels[labeled]
        return {
            "num_labeled": len(labeled),
            "labeled_purity": right.float().mean().item() if len(labeled) else None,
        }

    def _make_samplers(self, unlabeled: Tensor, labeled: Tensor | None = None) -> None:
        config, generator = self.task.config, self.task.generator
        batch = config.pretrain_batch if labeled is None else config.unlabeled_batch
        self.unlabeled = IndexSampler(unlabeled, batch, generator)
        self.labeled = None
        if labeled is not None and len(labeled):
            self.labeled = IndexSampler(labeled, config.labeled_batch, generator)

    def step(self, stage: str, epoch: int) -> Step:
        return self._pretrain_step() if stage == PRETRAIN else self._train_step(epoch)

    def _pretrain_step(self) -> Step:
        task = self.task
        index = next(self.unlabeled)
        candidates = task.candidates[index]
        logits = task.model(task.augmentation.plain(task.inputs[index]))  # the paper augments in later stages only
        loss = candidate_cross_entropy(logits, candidates)
        if self.released:
            loss = loss + complementary_loss(logits, candidates)
        return Step(loss, {"loss": loss}, len(index))

    def _train_step(self, epoch: int) -> Step:
        task, config = self.task, self.task.config
        unlabeled = next(self.unlabeled)
        labeled = next(self.labeled) if self.labeled is not None else unlabeled[:0]
        views = [
            task.augmentation.weak(task.inputs[labeled], task.generator),
            task.augmentation.weak(task.inputs[unlabeled], task.generator),
            task.augmentation.strong(task.inputs[unlabeled], task.generator),
        ]
        features = task.model.features(torch.cat(views))
        logits = task.model.classifier(features)
        labeled_logits, weak_logits, strong_logits = logits.split([len(view) for view in views])
        labels, candidates = self.labels[labeled], task.candidates[unlabeled]
        options: dict[str, Any] = {
            "thresholds": self.curriculum.thresholds,
            "ss_weight": self.ss_weight(epoch),
            "labeled_candidates": task.candidates[labeled] if self.released else None,
            "argmax_in_candidates": not self.released,
        }
        if config.semantic:
            self.covariance.update(features[: len(labeled)].detach(), labels)
            loss = semantic_upper_bound_loss(
                labeled_logits,
                weak_logits,
                strong_logits,
                task.model.classifier.weight,
                self.covariance.covariance,
                labels,
                candidates,
                strength=self.strength(epoch),
                beta=config.beta,
                impl=config.impl,
                **options,
            )
        else:
            loss = plain_loss(labeled_logits, weak_logits, strong_logits, labels, candidates, **options)
        confident = loss.confidence >= config.threshold
        if not self.released:
            confident = confident & candidates.gather(1, loss.prediction[:, None])[:, 0]
        self.curriculum.update(unlabeled, loss.prediction, confident)
        right = (loss.prediction == task.true_labels[unlabeled]) & loss.mask
        terms = {
            "loss": loss.total,
            "supervised": loss.supervised,
            "consistency": loss.consistency,
            "complementary": loss.complementary,
            "mask_rate": loss.mask.float().mean(),
            "pseudo_label_right": right.float().mean(),
        }
        # Detached: a term that is only reported would keep what its own gradient needs until the next step.
        reported = {name: value.detach() for name, value in terms.items()}
        return Step(loss.total, reported, sum(len(view) for view in views))

    def report(self, means: dict[str, float]) -> dict[str, float | None]:
        """Of the pseudo-labels in use, the share that is right."""
        shown: dict[str, float | None] = dict(means)
        if "mask_rate" in means:
            shown["pseudo_label_purity"] = (
                means["pseudo_label_right"] / means["mask_rate"] if means["mask_rate"] > 0 else None
            )
            del shown["pseudo_label_right"]
        return shown

    def end_epoch(self, stage: str) -> dict[str, Any]:
        if stage == PRETRAIN:
            return {}
        return {"thresholds": [round(value, 6) for value in self.curriculum.thresholds.tolist()]}

    def state_dict(self) -> dict[str, Any]:
        return {
            "covariance": self.covariance.state_dict(),
            "curriculum": self.curriculum.state_dict(),
            "labels": self.labels,
            "unlabeled": self.unlabeled.state_dict() | {"batch_size": self.unlabeled.batch_size},
            "labeled": None if self.labeled is None else self.labeled.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.covariance.load_state_dict(state["covariance"])
        self.curriculum.load_state_dict(state["curriculum"])
        self.labels = state["labels"]
        generator = self.task.generator
        unlabeled = state["unlabeled"]
        self.unlabeled = IndexSampler(unlabeled["order"], unlabeled["batch_size"], generator)
        self.unlabeled.load_state_dict(unlabeled)
        self.labeled = None
        if state["labeled"] is not None:
            self.labeled = IndexSampler(state["labeled"]["order"], self.task.config.labeled_batch, generator)
            self.labeled.load_state_dict(state["labeled"])
