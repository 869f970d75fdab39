"""Modules that hold the state of the training loop in buffers. Updates cost O(batch)."""

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from plsp_kernels import checks, dispatch, ops
from plsp_kernels.batch import REDUCTIONS, LabeledBatch
from plsp_kernels.curriculum import CurriculumBatch
from plsp_kernels.functional import PAPER_BETA, batch_loss, step_loss
from plsp_kernels.gathering import gather_rows
from plsp_kernels.semantic_loss import SemanticLoss
from plsp_kernels.step import Step

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


def _check_choice(name: str, value: str, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ValueError(f"{name} must be one of {', '.join(map(repr, choices))}, got {value!r}")


class SemanticCovariance(nn.Module):
    """Running feature covariance of every class, equation (17).

    Parameters
    ----------
    num_classes : int
        Number of classes l.
    num_features : int
        Number of features d.
    kind : {'full', 'diagonal'}
        Whether to keep whole covariance matrices or only their diagonals.

    Attributes
    ----------
    covariance : Tensor of shape (l, d, d) or (l, d)
        Covariance Σ of every class. A class without samples has zero covariance: no semantic transformation.
    mean : Tensor of shape (l, d)
        Mean of every class.
    count : Tensor of shape (l,), int64
        Number of samples of every class.
    skipped : Tensor of shape (l,), int64
        Number of samples of every class that were left out because a feature was not finite.

    Notes
    -----
    A sample with a NaN or an infinity, as after an overflow in half precision, is left out: one such sample would turn
    the covariance of its class, and every later loss, into NaN.

    The cost of an update is proportional to the size of its batch. Up to rounding, the statistics do not depend on how
    the samples are split into batches.

    Examples
    --------
    >>> import torch
    >>> from plsp_kernels import SemanticCovariance
    >>> statistics = SemanticCovariance(num_classes=2, num_features=2)
    >>> statistics.update(torch.tensor([[0.0, 1.0], [2.0, 1.0]]), torch.tensor([0, 0]))
    >>> statistics.count.tolist(), statistics.mean[0].tolist()
    ([2, 0], [1.0, 1.0])
    >>> statistics.covariance[0].tolist()
    [[1.0, 0.0], [0.0, 0.0]]
    """

    covariance: Tensor
    mean: Tensor
    count: Tensor
    skipped: Tensor

    def __init__(self, num_classes: int, num_features: int, kind: str = "full") -> None:
        super().__init__()
        num_classes = checks.size("num_classes", num_classes, 2)
        num_features = checks.size("num_features", num_features, 1)
        _check_choice("kind", kind, ("full", "diagonal"))
        self.kind = kind
        shape = (num_classes, num_features, num_features) if kind == "full" else (num_classes, num_features)
        self.register_buffer("covariance", torch.zeros(shape))
        self.register_buffer("mean", torch.zeros(num_classes, num_features))
        self.register_buffer("count", torch.zeros(num_classes, dtype=torch.int64))
        self.register_buffer("skipped", torch.zeros(num_classes, dtype=torch.int64))

    @torch.no_grad()
    def update(self, features: Tensor, labels: Tensor, *, group: "ProcessGroup | None" = None) -> None:
        """Add one labelled batch to the statistics, in place.

        Parameters
        ----------
        features : Tensor of shape (N, d)
            Features of the batch.
        labels : Tensor of shape (N,), int64
            Labels of the batch.
        group : torch.distributed.ProcessGroup, optional
            Ranks that train together, such as `torch.distributed.group.WORLD`. Every rank passes its own batch, of any
            size, and all of them take in the batches of all, in the order of ranks: their statistics stay the same bit
            for bit, and equal those of one process that was given the whole batch. Without a group, ranks do not
            communicate.
        """
        num_classes, num_features = self.mean.shape
        checks.floating("features", features, ("N", num_features), self.mean)
        labels = checks.class_numbers("labels", labels, (features.shape[0],), num_classes, self.mean)
        if group is not None:
            features, labels = gather_rows(group, features, labels)
        self._take_in(features, labels)

    @torch.no_grad()
    def _take_in(self, features: Tensor, labels: Tensor, impl: str = "auto") -> None:
        """Update the statistics with a batch that has been checked. Rows with label -1 are left out."""
        state = self.covariance, self.mean, self.count, self.skipped
        ops.covariance_update(*state, features, labels, dispatch.for_update(impl, state, features))

    def reset(self) -> None:
        """Reset all statistics to zero."""
        for buffer in self.buffers():
            buffer.zero_()

    def extra_repr(self) -> str:
        num_classes, num_features = self.mean.shape
        return f"num_classes={num_classes}, num_features={num_features}, kind={self.kind!r}"


class CurriculumThreshold(nn.Module):
    """Confidence thresholds that grow with the learning progress of each class.

    Parameters
    ----------
    num_instances : int
        Size of the training set.
    num_classes : int
        Number of classes l.
    threshold : float
        Largest threshold τ0.
    mapping : {'linear', 'convex'}
        τ0 η as in the paper, or τ0 η / (2 - η) as in the released code.

    Notes
    -----
    Every instance keeps the last class it was assigned with confidence. σ(j) counts the instances of class j, and
    η(j) = σ(j) / max σ is the progress of the class. All thresholds are zero until the first assignment.

    Examples
    --------
    >>> import torch
    >>> from plsp_kernels import CurriculumThreshold
    >>> curriculum = CurriculumThreshold(num_instances=4, num_classes=2, threshold=0.5)
    >>> index, prediction = torch.tensor([0, 1, 3]), torch.tensor([0, 0, 1])
    >>> curriculum.update(index, prediction, selected=torch.tensor([True, True, True]))
    >>> curriculum.thresholds.tolist()
    [0.5, 0.25]
    """

    assigned: Tensor
    count: Tensor

    def __init__(self, num_instances: int, num_classes: int, threshold: float = 0.75, mapping: str = "linear") -> None:
        super().__init__()
        num_instances = checks.size("num_instances", num_instances, 1)
        num_classes = checks.size("num_classes", num_classes, 2)
        checks.number("threshold", threshold, 0, 1)
        _check_choice("mapping", mapping, ("linear", "convex"))
        self.threshold, self.mapping = float(threshold), mapping
        # Class l means "not assigned". It is counted too, so that every change moves one instance between two counts.
        count = torch.zeros(num_classes + 1, dtype=torch.int64)
        count[num_classes] = num_instances
        self.register_buffer("assigned", torch.full((num_instances,), num_classes))
        self.register_buffer("count", count)

    @property
    def thresholds(self) -> Tensor:
        """Threshold τ(j) of every class, of shape (l,)."""
        return self._thresholds()

    def _thresholds(self, impl: str = "auto") -> Tensor:
        impl = dispatch.for_curriculum(impl, self.count)
        return ops.curriculum_thresholds(self.count, self.threshold, self.mapping == "convex", impl)

    def update(
        self, index: Tensor, prediction: Tensor, selected: Tensor, *, group: "ProcessGroup | None" = None
    ) -> None:
        """Assign `prediction[i]` to the instance `index[i]` wherever `selected[i]`, in O(N).

        Parameters
        ----------
        index : Tensor of shape (N,), int64
            Indices of the instances in the training set. If one occurs repeatedly, its last selected entry counts.
        prediction : Tensor of shape (N,), int64
            Predicted classes.
        selected : Tensor of shape (N,), bool
            Whether to assign the class.
        group : torch.distributed.ProcessGroup, optional
            Ranks that train together. All of them take in the assignments of all, in the order of ranks, as in
            `SemanticCovariance.update`.
        """
        num_instances, num_classes = self.assigned.shape[0], self.count.shape[0] - 1
        prediction = checks.class_numbers("prediction", prediction, ("N",), num_classes, self.count)
        checks.boolean("selected", selected, prediction.shape, self.count)
        index = checks.instance_numbers("index", index, prediction.shape, num_instances, self.count)
        if group is not None:
            index, prediction, selected = gather_rows(group, index, prediction, selected)
        self._assign(CurriculumBatch(self.assigned, self.count, index, prediction, selected, None, 1.0))

    @torch.no_grad()
    def _assign(self, batch: CurriculumBatch, impl: str = "auto") -> None:
        """Update the assignments with a batch that has been checked."""
        ops.curriculum_update(*batch, dispatch.for_curriculum(impl, self.count))

    def reset(self) -> None:
        """Clear all assignments."""
        self.assigned.fill_(self.count.shape[0] - 1)
        self.count.zero_()[-1] = self.assigned.shape[0]

    def extra_repr(self) -> str:
        return (
            f"num_instances={self.assigned.shape[0]}, num_classes={self.count.shape[0] - 1}, "
            f"threshold={self.threshold}, mapping={self.mapping!r}"
        )


class SemanticCrossEntropyLoss(nn.Module):
    """Cross-entropy under the semantic transformation together with its class covariances: the loss of ISDA.

    Parameters
    ----------
    num_classes : int
        Number of classes l.
    num_features : int
        Number of features d, the input size of the classifier.
    covariance : {'full', 'diagonal'}
        Kind of the class covariances; see `SemanticCovariance`.
    class_weight : Tensor of shape (l,), optional
        Weight of every class, the argument `weight` of `torch.nn.CrossEntropyLoss`.
    ignore_index : int
        Rows with this label have no loss and do not enter the covariances.
    label_smoothing : float
        Share in [0, 1] of the target that is spread evenly over all classes.
    reduction : {'mean', 'sum', 'none'}
        As in `semantic_cross_entropy`.
    impl : {'auto', 'triton', 'native', 'torch', 'reference'}
        Implementation to use.

    Notes
    -----
    In training mode, a call updates the class covariances with the features, then computes the loss. In evaluation mode
    it changes no state. The caller schedules `strength`: the authors of ISDA raise it linearly from 0.

    Examples
    --------
    >>> import torch
    >>> from plsp_kernels import SemanticCrossEntropyLoss
    >>> _ = torch.manual_seed(0)
    >>> backbone, classifier = torch.nn.Linear(8, 5), torch.nn.Linear(5, 3)
    >>> criterion = SemanticCrossEntropyLoss(num_classes=3, num_features=5)
    >>> features, labels = backbone(torch.randn(4, 8)), torch.tensor([0, 2, 2, 0])
    >>> loss = criterion(classifier(features), classifier.weight, labels, features=features, strength=0.5)
    >>> loss.backward()
    >>> criterion.covariance.count.tolist()
    [2, 0, 2]
    """

    class_weight: Tensor | None

    def __init__(
        self,
        num_classes: int,
        num_features: int,
        covariance: str = "full",
        *,
        class_weight: Tensor | None = None,
        ignore_index: int = -100,
        label_smoothing: float = 0.0,
        reduction: str = "mean",
        impl: str = "auto",
    ) -> None:
        super().__init__()
        checks.number("label_smoothing", label_smoothing, 0, 1)
        _check_choice("reduction", reduction, REDUCTIONS)
        _check_choice("impl", impl, dispatch.IMPLEMENTATIONS)
        self.covariance = SemanticCovariance(num_classes, num_features, covariance)
        if class_weight is not None:
            checks.floating("class_weight", class_weight, (num_classes,), checks.tensor("class_weight", class_weight))
        self.register_buffer("class_weight", class_weight)
        self.ignore_index, self.label_smoothing = ignore_index, label_smoothing
        self.reduction, self.impl = reduction, impl

    def forward(
        self,
        logits: Tensor,
        weight: Tensor,
        labels: Tensor,
        *,
        features: Tensor,
        strength: float | Tensor,
        group: "ProcessGroup | None" = None,
    ) -> Tensor:
        """Compute the loss of one batch and, in training mode, update the class covariances first.

        Parameters
        ----------
        logits : Tensor of shape (N, l)
            Logits of the batch.
        weight : Tensor of shape (l, d)
            Weight of the classifier.
        labels : Tensor of shape (N,), int64
            Labels of the batch.
        features : Tensor of shape (N, d)
            Features of the batch, the input of the classifier. No gradient flows through them here.
        strength : float or Tensor of shape ()
            Strength λ of the semantic transformation.
        group : torch.distributed.ProcessGroup, optional
            Ranks that train together. The loss is that of the rank's own rows; the covariances are updated with the
            rows of all ranks, as in `SemanticCovariance.update`.

        Returns
        -------
        Tensor of shape () or (N,)
            As returned by `semantic_cross_entropy`.
        """
        batch = LabeledBatch(
            logits,
            weight,
            self.covariance.covariance,
            labels,
            self.class_weight,
            checks.scalar("strength", strength, weight, 0),
            self.label_smoothing,
            self.ignore_index,
            self.reduction,
        )
        # All checks come before the state update: a rejected batch changes nothing.
        batch = checks.labeled_batch(batch)
        if self.training:
            checks.floating("features", features, (labels.shape[0], weight.shape[1]), weight)
            counted = batch.labels.masked_fill(batch.labels == self.ignore_index, -1)
            if group is not None:
                features, counted = gather_rows(group, features, counted)
            self.covariance._take_in(features, counted, self.impl)
        return batch_loss(batch, self.impl)

    def extra_repr(self) -> str:
        return f"ignore_index={self.ignore_index}, label_smoothing={self.label_smoothing}, reduction={self.reduction!r}"


class SemanticUpperBoundLoss(nn.Module):
    """Loss of one PLSP step together with its state, for custom training loops.

    Parameters
    ----------
    num_instances : int
        Size of the training set, to which `index` refers.
    num_classes : int
        Number of classes l.
    num_features : int
        Number of features d, the input size of the classifier.
    covariance : {'full', 'diagonal'}
        Kind of the class covariances; see `SemanticCovariance`.
    threshold : float
        Largest confidence threshold τ0.
    mapping : {'linear', 'convex'}
        Mapping from progress to threshold; see `CurriculumThreshold`.
    beta : float
        Scale β of the probit approximation.
    argmax_in_candidates : bool
        Whether the most probable class must be a candidate for an instance to enter the consistency term and to count
        for the curriculum.
    impl : {'auto', 'triton', 'native', 'torch', 'reference'}
        Implementation to use.

    Notes
    -----
    In training mode, a call updates the class covariances with the labelled features, computes the loss with the
    current thresholds, and records the confident unlabelled instances for the curriculum. In evaluation mode it changes
    no state.

    Examples
    --------
    >>> import torch
    >>> from plsp_kernels import SemanticUpperBoundLoss
    >>> _ = torch.manual_seed(0)
    >>> classifier = torch.nn.Linear(5, 3)
    >>> criterion = SemanticUpperBoundLoss(num_instances=100, num_classes=3, num_features=5)
    >>> features = torch.randn(2, 5)
    >>> loss = criterion(
    ...     classifier(features),
    ...     classifier(torch.randn(4, 5)),
    ...     classifier(torch.randn(4, 5)),
    ...     classifier.weight,
    ...     labels=torch.tensor([0, 2]),
    ...     candidates=torch.tensor([[1, 1, 0], [0, 1, 1], [1, 0, 0], [1, 0, 1]]).bool(),
    ...     labeled_features=features,
    ...     index=torch.tensor([7, 14, 30, 99]),
    ...     strength=0.5,
    ... )
    >>> loss.total.backward()
    >>> criterion.covariance.count.tolist()
    [1, 0, 1]
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
        beta = checks.positive("beta", beta)
        _check_choice("impl", impl, dispatch.IMPLEMENTATIONS)
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
        strength: float | Tensor,
        ss_weight: float | Tensor = 1.0,
        labeled_candidates: Tensor | None = None,
        group: "ProcessGroup | None" = None,
    ) -> SemanticLoss:
        """Compute the loss of one step and, in training mode, update the state.

        Parameters
        ----------
        labeled_logits : Tensor of shape (Bl, l)
            Logits of the labelled batch.
        weak_logits, strong_logits : Tensor of shape (Bu, l)
            Logits of the two views of the unlabelled batch.
        weight : Tensor of shape (l, d)
            Weight of the classifier.
        labels : Tensor of shape (Bl,), int64
            Labels of the labelled batch.
        candidates : Tensor of shape (Bu, l), bool
            Candidate sets of the unlabelled batch.
        labeled_features : Tensor of shape (Bl, d)
            Features of the labelled batch.
        index : Tensor of shape (Bu,), int64
            Indices of the unlabelled instances in the training set.
        strength : float or Tensor of shape ()
            Strength λ of the semantic transformation.
        ss_weight : float or Tensor of shape ()
            Weight γ of the semi-supervised terms.
        labeled_candidates : Tensor of shape (Bl, l), bool, optional
            Candidate sets of the labelled batch, to include it in the complementary term.
        group : torch.distributed.ProcessGroup, optional
            Ranks that train together. The loss is that of the rank's own rows; the state is updated with the rows of
            all ranks. If all ranks have batches of the same sizes, the mean of their losses is the loss of the whole
            batch, and averaged gradients, as `DistributedDataParallel` makes them, are its gradients.

        Returns
        -------
        SemanticLoss
            As returned by `semantic_upper_bound_loss`.
        """
        step = Step(
            labeled_logits,
            weak_logits,
            strong_logits,
            weight,
            self.covariance.covariance,
            labels,
            candidates,
            None,
            labeled_candidates,
            self.curriculum._thresholds(self.impl),
            checks.scalar("strength", strength, weight, 0),
            checks.scalar("ss_weight", ss_weight, weight),
            self.beta,
            self.argmax_in_candidates,
        )
        step = checks.step(step)
        checks.instance_numbers("index", index, candidates.shape[:1], self.curriculum.assigned.shape[0], weight)
        if not self.training:
            return step_loss(step, self.impl)
        # All checks come before the first state update: a rejected step changes nothing.
        checks.floating("labeled_features", labeled_features, (labels.shape[0], weight.shape[1]), weight)
        labels = step.labels
        if group is not None:
            labeled_features, labels = gather_rows(group, labeled_features, labels)
        self.covariance._take_in(labeled_features, labels, self.impl)
        loss = step_loss(step, self.impl)
        self.record(index, loss, candidates, group=group)
        return loss

    def record(
        self, index: Tensor, loss: SemanticLoss, candidates: Tensor, *, group: "ProcessGroup | None" = None
    ) -> None:
        """Record the unlabelled instances that were classified with confidence; `forward` calls this in training mode.

        An instance is confident if its confidence reaches τ0 and, with `argmax_in_candidates`, its prediction is a
        candidate.

        Parameters
        ----------
        index : Tensor of shape (Bu,), int64
            Indices of the unlabelled instances in the training set.
        loss : SemanticLoss
            Result of the step.
        candidates : Tensor of shape (Bu, l), bool
            Candidate sets of the unlabelled batch.
        group : torch.distributed.ProcessGroup, optional
            Ranks that train together. All of them record the instances of all.
        """
        assigned, count, threshold = self.curriculum.assigned, self.curriculum.count, self.curriculum.threshold
        num_classes, shape = count.shape[0] - 1, loss.prediction.shape
        checks.class_numbers("loss.prediction", loss.prediction, ("Bu",), num_classes, count)
        index = checks.instance_numbers("index", index, shape, assigned.shape[0], count)
        checks.boolean("candidates", candidates, (*shape, num_classes), count)
        prediction, confidence = loss.prediction, loss.confidence
        if group is not None:
            index, prediction, confidence, candidates = gather_rows(group, index, prediction, confidence, candidates)
        allowed = candidates if self.argmax_in_candidates else None
        batch = CurriculumBatch(assigned, count, index, prediction, confidence, allowed, threshold)
        self.curriculum._assign(batch, self.impl)
