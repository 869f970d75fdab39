"""State of the training loop as modules: buffers, state_dict, updates in O(batch)."""

from typing import Any

import torch
from torch import Tensor, nn

from plsp_kernels import checks, ops
from plsp_kernels.functional import PAPER_BETA, check_step, semantic_upper_bound_loss
from plsp_kernels.semantic_loss import SemanticLoss


def _check_choice(name: str, value: str, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ValueError(f"{name} must be one of {', '.join(map(repr, choices))}, got {value!r}")


def _check_size(name: str, value: int, least: int) -> None:
    if not isinstance(value, int) or value < least:
        raise ValueError(f"{name} must be an integer of at least {least}, got {value!r}")


class SemanticCovariance(nn.Module):
    """Running feature covariance of every class, equation (17).

    kind="full" keeps Σ as (l, d, d), kind="diagonal" only its diagonals, (l, d). An update costs in proportion to the
    samples and the classes of its batch, and any split of the same samples into batches gives the same statistics to
    rounding. Classes not seen yet have zero covariance: no semantic transformation.
    """

    covariance: Tensor
    mean: Tensor
    count: Tensor

    def __init__(self, num_classes: int, num_features: int, kind: str = "full") -> None:
        super().__init__()
        _check_size("num_classes", num_classes, 2)
        _check_size("num_features", num_features, 1)
        _check_choice("kind", kind, ("full", "diagonal"))
        self.kind = kind
        shape = (num_classes, num_features, num_features) if kind == "full" else (num_classes, num_features)
        self.register_buffer("covariance", torch.zeros(shape))
        self.register_buffer("mean", torch.zeros(num_classes, num_features))
        self.register_buffer("count", torch.zeros(num_classes, dtype=torch.int64))

    @torch.no_grad()
    def update(self, features: Tensor, labels: Tensor) -> None:
        """Take in one labelled batch: features (N, d), labels (N,) int64."""
        num_classes, num_features = self.mean.shape
        checks.floating("features", features, ("N", num_features), self.mean)
        checks.class_numbers("labels", labels, (features.shape[0],), num_classes, self.mean)
        ops.covariance_update(self.covariance, self.mean, self.count, features.to(self.mean.dtype), labels)

    def reset(self) -> None:
        """Forget everything."""
        for buffer in self.buffers():
            buffer.zero_()

    def extra_repr(self) -> str:
        num_classes, num_features = self.mean.shape
        return f"num_classes={num_classes}, num_features={num_features}, kind={self.kind!r}"


class CurriculumThreshold(nn.Module):
    """Confidence thresholds that grow with each class's learning progress.

    Every instance remembers the class it was last confidently given; σ(j) counts them and η(j) = σ(j) / max σ. The
    threshold of class j is τ0 η(j) with mapping="linear" (the paper) or τ0 η/(2 - η) with "convex" (the released code).
    While no instance has been given a class, all thresholds are zero.
    """

    assigned: Tensor
    count: Tensor

    def __init__(self, num_instances: int, num_classes: int, threshold: float = 0.75, mapping: str = "linear") -> None:
        super().__init__()
        _check_size("num_instances", num_instances, 1)
        _check_size("num_classes", num_classes, 2)
        checks.number("threshold", threshold, 0, 1)
        _check_choice("mapping", mapping, ("linear", "convex"))
        self.threshold, self.mapping = threshold, mapping
        # Class l stands for "none yet"; its count is kept too, so that every change moves one instance between cells.
        count = torch.zeros(num_classes + 1, dtype=torch.int64)
        count[num_classes] = num_instances
        self.register_buffer("assigned", torch.full((num_instances,), num_classes))
        self.register_buffer("count", count)

    @property
    def thresholds(self) -> Tensor:
        """τ(j) of every class, (l,)."""
        progress = self.count[:-1] / self.count[:-1].max().clamp(min=1)
        if self.mapping == "convex":
            progress = progress / (2 - progress)
        return self.threshold * progress

    @torch.no_grad()
    def update(self, index: Tensor, prediction: Tensor, selected: Tensor) -> None:
        """Remember prediction[i] for the instance index[i] wherever selected[i]; all (N,), O(N).

        If an instance occurs more than once in the batch, its last selected occurrence counts.
        """
        num_instances, num_classes = self.assigned.shape[0], self.count.shape[0] - 1
        checks.class_numbers("prediction", prediction, ("N",), num_classes, self.count)
        checks.boolean("selected", selected, prediction.shape, self.count)
        checks.instance_numbers("index", index, prediction.shape, num_instances, self.count)
        # Sorted by instance, the unselected last: an entry counts if the next one is of another instance.
        ordered, order = torch.where(selected, index, num_instances).sort(stable=True)
        following = torch.cat([ordered[1:], ordered.new_full((1,), num_instances)])[: ordered.shape[0]]
        counts = ordered != following
        index, prediction = index.index_select(0, order), prediction.index_select(0, order)
        before = self.assigned.index_select(0, index)
        after = torch.where(counts, prediction, before)
        # Added differences, not copies: entries that change nothing add zero, whichever instance they name.
        self.assigned.index_add_(0, index, after - before)
        moved = (after != before).long()
        self.count.index_add_(0, before, -moved).index_add_(0, after, moved)

    def reset(self) -> None:
        """Forget everything."""
        self.assigned.fill_(self.count.shape[0] - 1)
        self.count.zero_()[-1] = self.assigned.shape[0]

    def extra_repr(self) -> str:
        return (
            f"num_instances={self.assigned.shape[0]}, num_classes={self.count.shape[0] - 1}, "
            f"threshold={self.threshold}, mapping={self.mapping!r}"
        )


class SemanticUpperBoundLoss(nn.Module):
    """The loss of one step together with its state, for a training loop of your own.

    In training mode a call first takes the labelled features into the class covariances, then computes the loss with
    the current thresholds, then records which unlabelled instances were confidently given a class. In evaluation mode
    it only computes.

    Args:
        num_instances: size of the training set, whose indices `index` refers to.
        num_classes: l.
        num_features: d, the size of the features that the classifier's weight multiplies.
        covariance: "full" or "diagonal".
        threshold: τ0, the largest confidence threshold.
        mapping: "linear" or "convex", see CurriculumThreshold.
        beta: β of the probit.
        argmax_in_candidates: whether the most probable class must be a candidate, for taking part in the consistency
            term and for being counted.
        impl: which implementation to use.
    """

    def __init__(
        self,
        num_instances: int,
        num_classes: int,
        num_features: int,
        *,
        covariance: str = "full",
        threshold: float = 0.75,
        mapping: str = "linear",
        beta: float = PAPER_BETA,
        argmax_in_candidates: bool = True,
        impl: str = "auto",
    ) -> None:
        super().__init__()
        checks.positive("beta", beta)
        _check_choice("impl", impl, checks.IMPLEMENTATIONS)
        self.covariance = SemanticCovariance(num_classes, num_features, covariance)
        self.curriculum = CurriculumThreshold(num_instances, num_classes, threshold, mapping)
        self.beta, self.argmax_in_candidates, self.impl = beta, argmax_in_candidates, impl

    def forward(
        self,
        labeled_logits: Tensor,
        weak_logits: Tensor,
        strong_logits: Tensor,
        weight: Tensor,
        labels: Tensor,
        candidates: Tensor,
        *,
        labeled_features: Tensor,
        index: Tensor,
        strength: float,
        ss_weight: float = 1.0,
        labeled_candidates: Tensor | None = None,
    ) -> SemanticLoss:
        """See semantic_upper_bound_loss; labeled_features (Bl, d) are those of the labelled batch, index (Bu,) the
        numbers of the unlabelled instances in the training set."""
        num_instances = self.curriculum.assigned.shape[0]
        checks.instance_numbers(
            "index", index, (checks.tensor("weak_logits", weak_logits).shape[0],), num_instances, weight
        )
        covariance = self.covariance.covariance
        arguments = (labeled_logits, weak_logits, strong_logits, weight, covariance, labels, candidates)
        options: dict[str, Any] = {
            "strength": strength,
            "thresholds": self.curriculum.thresholds,
            "ss_weight": ss_weight,
            "beta": self.beta,
            "labeled_candidates": labeled_candidates,
            "impl": self.impl,
        }
        if self.training:
            # All of them before the first change of state: a step that is refused leaves no trace.
            check_step(*arguments, **options)
            checks.floating("labeled_features", labeled_features, (labels.shape[0], weight.shape[1]), weight)
            self.covariance.update(labeled_features.detach(), labels)
        loss = semantic_upper_bound_loss(*arguments, argmax_in_candidates=self.argmax_in_candidates, **options)
        if self.training:
            selected = loss.confidence >= self.curriculum.threshold
            if self.argmax_in_candidates:
                selected = selected & candidates.gather(1, loss.prediction[:, None])[:, 0]
            self.curriculum.update(index, loss.prediction, selected)
        return loss
