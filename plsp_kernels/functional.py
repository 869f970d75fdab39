"""Public functions. Each checks its arguments, resolves the implementation and calls the operators.

Every function takes `impl`: "auto", "triton" (GPU kernels), "native" (small steps in C), "torch" (the closed form in
ATen operators) or "reference" (the paper, literally). Results agree up to rounding; `dispatch.py` resolves "auto".

Half-precision inputs are computed in float32. Losses are returned in float32, per-class results in the dtype of the
logits, gradients in the dtype of their inputs. Σ is a statistic: no gradient flows into `covariance`. Only the
reference supports second derivatives.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from plsp_kernels import checks, dispatch, ops, reference
from plsp_kernels.batch import LabeledBatch
from plsp_kernels.batch import replace as batch_replace
from plsp_kernels.ops.registration import without_autocast
from plsp_kernels.rows import Rows, class_slots
from plsp_kernels.semantic_loss import SemanticLoss
from plsp_kernels.step import Step, replace

PAPER_BETA = math.pi**2 / 8
"""Scale of the probit in the paper. The usual logistic approximation has sqrt(π/8); see docs/math.md."""


def semantic_upper_bound_loss(
    labeled_logits: Tensor,
    weak_logits: Tensor,
    strong_logits: Tensor,
    weight: Tensor,
    covariance: Tensor,
    labels: Tensor,
    candidates: Tensor,
    *,
    strength: float | Tensor,
    thresholds: float | Sequence[float] | Tensor,
    ss_weight: float | Tensor = 1.0,
    beta: float = PAPER_BETA,
    pseudo_labels: Tensor | None = None,
    labeled_candidates: Tensor | None = None,
    argmax_in_candidates: bool = True,
    impl: str = "auto",
) -> SemanticLoss:
    """Compute the loss of one PLSP step, equation (16): γ (L_l + R_u) + L_cl.

    Parameters
    ----------
    labeled_logits : Tensor of shape (Bl, l)
        Logits z = W a + b of the labelled batch.
    weak_logits : Tensor of shape (Bu, l)
        Logits of the weak view of the unlabelled batch.
    strong_logits : Tensor of shape (Bu, l)
        Logits of the strong view of the unlabelled batch.
    weight : Tensor of shape (l, d)
        Weight W of the classifier that produced the logits.
    covariance : Tensor of shape (l, d, d) or (l, d)
        Feature covariance Σ of every class, or only its diagonal.
    labels : Tensor of shape (Bl,), int64
        Labels of the labelled batch.
    candidates : Tensor of shape (Bu, l), bool
        Candidate sets of the unlabelled batch; no row may be empty.
    strength : float or Tensor of shape ()
        Strength λ of the semantic transformation. 0 disables it.
    thresholds : float, or Tensor of shape () or (l,)
        Confidence τ from which an instance enters the consistency term: one value, or one per class.
    ss_weight : float or Tensor of shape ()
        Weight γ of the semi-supervised terms.
    beta : float
        Scale β of the probit approximation.
    pseudo_labels : Tensor of shape (Bu,), int64, optional
        Class whose covariance applies to each unlabelled instance. Defaults to the candidate with the highest class
        activation value on the weak view.
    labeled_candidates : Tensor of shape (Bl, l), bool, optional
        Candidate sets of the labelled batch. If given, the complementary term is the mean over all Bl + Bu samples.
    argmax_in_candidates : bool
        Whether the most probable class must be a candidate for an instance to enter the consistency term.
    impl : {'auto', 'triton', 'native', 'torch', 'reference'}
        Implementation to use.

    Returns
    -------
    SemanticLoss
        The total, its three terms, and the decisions made for the unlabelled batch.

    Notes
    -----
    An empty labelled or unlabelled batch contributes zero.

    The forward pass also computes the gradients of `total`. Each term can be differentiated on its own too, and holds
    the intermediate results this needs for as long as it is alive: detach terms that are kept for reporting.

    Examples
    --------
    >>> import torch
    >>> from plsp_kernels import semantic_upper_bound_loss
    >>> _ = torch.manual_seed(0)
    >>> classifier = torch.nn.Linear(5, 3)
    >>> loss = semantic_upper_bound_loss(
    ...     classifier(torch.randn(2, 5)),
    ...     classifier(torch.randn(4, 5)),
    ...     classifier(torch.randn(4, 5)),
    ...     classifier.weight,
    ...     covariance=torch.ones(3, 5),
    ...     labels=torch.tensor([0, 2]),
    ...     candidates=torch.tensor([[1, 1, 0], [0, 1, 1], [1, 0, 0], [1, 0, 1]]).bool(),
    ...     strength=0.5,
    ...     thresholds=0.75,
    ... )
    >>> loss.total.backward()
    >>> classifier.weight.grad.shape, loss.mask.shape
    (torch.Size([3, 5]), torch.Size([4]))
    """
    step = Step(
        labeled_logits,
        weak_logits,
        strong_logits,
        weight,
        covariance,
        labels,
        candidates,
        pseudo_labels,
        labeled_candidates,
        checks.thresholds("thresholds", thresholds, weight),
        checks.scalar("strength", strength, weight, 0),
        checks.scalar("ss_weight", ss_weight, weight),
        beta,
        argmax_in_candidates,
    )
    return step_loss(checks.step(step), impl)


def step_loss(step: Step, impl: str) -> SemanticLoss:
    """Compute the loss of a step that has been checked."""
    impl = dispatch.for_step(impl, step)
    if impl != "reference":
        return ops.upper_bound(replace(step, covariance=step.covariance.detach()), impl)
    labeled, weak, strong, weight = _compute_dtype(
        step.labeled_logits, step.weak_logits, step.strong_logits, step.weight
    )
    step = replace(step, labeled_logits=labeled, weak_logits=weak, strong_logits=strong, weight=weight)
    return without_autocast(weight.device.type, reference.semantic_upper_bound_loss, step)


def semantic_log_softmax(
    logits: Tensor, weight: Tensor, covariance: Tensor, classes: Tensor, *, strength: float | Tensor, impl: str = "auto"
) -> Tensor:
    """Compute the upper-bounded log-probabilities of equation (12).

    Parameters
    ----------
    logits : Tensor of shape (N, l)
        Logits z = W a + b.
    weight : Tensor of shape (l, d)
        Weight W of the classifier.
    covariance : Tensor of shape (l, d, d) or (l, d)
        Feature covariance Σ of every class, or only its diagonal.
    classes : Tensor of shape (N,), int64
        Class whose covariance applies to each row.
    strength : float or Tensor of shape ()
        Strength λ of the semantic transformation. At 0 this is `log_softmax`.
    impl : {'auto', 'triton', 'native', 'torch', 'reference'}
        Implementation to use.

    Returns
    -------
    Tensor of shape (N, l)
        log p_ij under the covariance of `classes[i]`, differentiable with respect to logits and weight.

    Notes
    -----
    The exponentials of a row need not sum to one.

    Examples
    --------
    >>> import torch
    >>> from plsp_kernels import semantic_log_softmax
    >>> _ = torch.manual_seed(0)
    >>> logits, weight, covariance = torch.randn(2, 3), torch.randn(3, 5), torch.ones(3, 5)
    >>> classes = torch.tensor([0, 2])
    >>> plain = semantic_log_softmax(logits, weight, covariance, classes, strength=0.0)
    >>> torch.allclose(plain, logits.log_softmax(1), atol=1e-6)
    True
    >>> bool((semantic_log_softmax(logits, weight, covariance, classes, strength=1.0) < plain).all())
    True
    """
    classes = _check_samples(logits, weight, covariance, "classes", classes)
    scale, impl = checks.scalar("strength", strength, weight, 0), dispatch.for_rows(impl, weight)
    if impl == "reference":
        result = _reference(reference.semantic_log_softmax, logits, weight, covariance, classes, strength=strength)
        return result.to(logits.dtype)
    rows = _rows(logits, weight, covariance, classes, scale, impl)
    return F.logsigmoid(ops.LogOdds.apply(*rows, impl)).to(logits.dtype)


def semantic_cross_entropy(
    logits: Tensor,
    weight: Tensor,
    covariance: Tensor,
    labels: Tensor,
    *,
    strength: float | Tensor,
    class_weight: Tensor | None = None,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    reduction: str = "mean",
    impl: str = "auto",
) -> Tensor:
    """Compute the upper bound of the cross-entropy under the semantic transformation, equation (14).

    This is the loss of implicit semantic data augmentation (ISDA). The options are those of
    `torch.nn.functional.cross_entropy`.

    Parameters
    ----------
    logits : Tensor of shape (N, l)
        Logits z = W a + b. A bias needs no further treatment: the transformation does not change it.
    weight : Tensor of shape (l, d)
        Weight W of the classifier.
    covariance : Tensor of shape (l, d, d) or (l, d)
        Feature covariance Σ of every class, or only its diagonal.
    labels : Tensor of shape (N,), int64
        Labels. Each row uses the covariance of its label.
    strength : float or Tensor of shape ()
        Strength λ of the semantic transformation. At 0 this is `cross_entropy`.
    class_weight : Tensor of shape (l,), optional
        Weight of every class, the argument `weight` of `cross_entropy`. It carries no gradient.
    ignore_index : int
        Rows with this label have no loss and no gradient.
    label_smoothing : float
        Share in [0, 1] of the target that is spread evenly over all classes.
    reduction : {'mean', 'sum', 'none'}
        The mean is weighted by `class_weight`. Unlike that of `cross_entropy`, the mean of no rows is zero.
    impl : {'auto', 'triton', 'native', 'torch', 'reference'}
        Implementation to use.

    Returns
    -------
    Tensor of shape () or (N,)
        The loss, differentiable with respect to logits and weight.

    Notes
    -----
    With label smoothing, too, the result is an upper bound of the expected loss. Only the sum over classes is bounded:
    the expectation of the logits in the targets is known. `cross_entropy` of ISDA's augmented logits would use these in
    the targets as well and is not a bound.

    The forward pass also computes the gradients. Without reduction they depend on the upstream gradient, and the
    backward computes the batch again.

    Examples
    --------
    >>> import torch
    >>> from plsp_kernels import semantic_cross_entropy
    >>> _ = torch.manual_seed(0)
    >>> logits, weight, covariance = torch.randn(2, 3), torch.randn(3, 5), torch.ones(3, 5)
    >>> labels = torch.tensor([0, 2])
    >>> bound = semantic_cross_entropy(logits, weight, covariance, labels, strength=1.0)
    >>> bool(bound > torch.nn.functional.cross_entropy(logits, labels))
    True
    >>> semantic_cross_entropy(logits, weight, covariance, labels, strength=1.0, reduction="none").shape
    torch.Size([2])
    """
    batch = LabeledBatch(
        logits,
        weight,
        covariance,
        labels,
        class_weight,
        checks.scalar("strength", strength, weight, 0),
        label_smoothing,
        ignore_index,
        reduction,
    )
    return batch_loss(checks.labeled_batch(batch), impl)


def batch_loss(batch: LabeledBatch, impl: str) -> Tensor:
    """Compute the semantic cross-entropy of a batch that has been checked."""
    impl = dispatch.for_batch(impl, batch)
    class_weight = None if batch.class_weight is None else batch.class_weight.detach()
    batch = batch_replace(batch, covariance=batch.covariance.detach(), class_weight=class_weight)
    if impl != "reference":
        return ops.cross_entropy(batch, impl)
    logits, weight = _compute_dtype(batch.logits, batch.weight)
    batch = batch_replace(batch, logits=logits, weight=weight)
    return without_autocast(weight.device.type, reference.labeled_batch_loss, batch)


@torch.no_grad()
def probit_probabilities(
    logits: Tensor,
    weight: Tensor,
    covariance: Tensor,
    classes: Tensor,
    *,
    strength: float | Tensor,
    beta: float = PAPER_BETA,
    impl: str = "auto",
) -> Tensor:
    """Approximate the expected softmax under the semantic transformation by probits: p̂w of equation (12).

    Parameters
    ----------
    logits : Tensor of shape (N, l)
        Logits z = W a + b.
    weight : Tensor of shape (l, d)
        Weight W of the classifier.
    covariance : Tensor of shape (l, d, d) or (l, d)
        Feature covariance Σ of every class, or only its diagonal.
    classes : Tensor of shape (N,), int64
        Class whose covariance applies to each row.
    strength : float or Tensor of shape ()
        Strength λ of the semantic transformation.
    beta : float
        Scale β of the probit approximation.
    impl : {'auto', 'triton', 'native', 'torch', 'reference'}
        Implementation to use.

    Returns
    -------
    Tensor of shape (N, l)
        Probabilities p̂w_ij. They serve as pseudo-targets and carry no gradient.

    Notes
    -----
    A row need not sum to one.

    Examples
    --------
    >>> import torch
    >>> from plsp_kernels import probit_probabilities
    >>> logits, weight, covariance = torch.tensor([[0.0, 0.0], [0.0, 50.0]]), torch.eye(2), torch.ones(2, 2)
    >>> probabilities = probit_probabilities(logits, weight, covariance, torch.tensor([0, 1]), strength=0.1)
    >>> (100 * probabilities).round().int().tolist()
    [[50, 50], [0, 100]]
    """
    beta = checks.positive("beta", beta)
    classes = _check_samples(logits, weight, covariance, "classes", classes)
    scale, impl = checks.scalar("strength", strength, weight, 0), dispatch.for_rows(impl, weight)
    if impl == "reference":
        result = _reference(
            reference.probit_probabilities, logits, weight, covariance, classes, strength=strength, beta=beta
        )
        return result.to(logits.dtype)
    rows = _rows(logits, weight, covariance, classes, scale, impl)
    return ops.probit_probabilities(*rows, beta, impl).to(logits.dtype)


def pairwise_quadratic_form(
    weight: Tensor, covariance: Tensor, classes: Tensor | None = None, *, impl: str = "auto"
) -> Tensor:
    """Compute (w_j - w_j')ᵀ Σ_y (w_j - w_j') for all class pairs (j, j').

    Parameters
    ----------
    weight : Tensor of shape (l, d)
        Weight W of the classifier.
    covariance : Tensor of shape (l, d, d) or (l, d)
        Feature covariance Σ of every class, or only its diagonal.
    classes : Tensor of shape (U,), int64, optional
        Classes y to use. Defaults to all l classes.
    impl : {'auto', 'triton', 'native', 'torch', 'reference'}
        Implementation to use.

    Returns
    -------
    Tensor of shape (U, l, l)
        One symmetric matrix per class, differentiable with respect to the weight.

    Examples
    --------
    With the identity as covariance, these are the squared distances between the rows of the weight:

    >>> import torch
    >>> from plsp_kernels import pairwise_quadratic_form
    >>> weight = torch.tensor([[0.0, 0.0], [3.0, 0.0], [0.0, 4.0]])
    >>> pairwise_quadratic_form(weight, torch.ones(3, 2), torch.tensor([1])).round().int().tolist()
    [[[0, 9, 16], [9, 0, 25], [16, 25, 0]]]
    """
    checks.classifier(weight, covariance, checks.tensor("weight", weight).shape[0])
    if classes is not None:
        classes = checks.class_numbers("classes", classes, ("U",), weight.shape[0], weight)
    impl = dispatch.for_rows(impl, weight)
    if impl == "reference":
        return _reference(reference.pairwise_quadratic_form, weight, covariance, classes).to(weight.dtype)
    if classes is None:
        classes = torch.arange(weight.shape[0], device=weight.device)
    (computed,) = _compute_dtype(weight)
    return ops.PairQuadratic.apply(_class_gram(computed, covariance, classes, impl)).to(weight.dtype)


def class_activation_labels(logits: Tensor, candidates: Tensor, *, impl: str = "auto") -> Tensor:
    """Choose for each instance the candidate with the highest class activation value z |z - 1|.

    Parameters
    ----------
    logits : Tensor of shape (N, l)
        Logits z.
    candidates : Tensor of shape (N, l), bool
        Candidate sets; no row may be empty.
    impl : {'auto', 'triton', 'native', 'torch', 'reference'}
        Implementation to use.

    Returns
    -------
    Tensor of shape (N,), int64
        The chosen class of each instance; ties go to the lowest class.

    Examples
    --------
    >>> import torch
    >>> from plsp_kernels import class_activation_labels
    >>> logits = torch.tensor([[2.0, -1.0, 0.5], [2.0, -1.0, 0.5]])
    >>> candidates = torch.tensor([[True, True, True], [False, True, True]])
    >>> class_activation_labels(logits, candidates)
    tensor([0, 2])
    """
    checks.floating("logits", logits, ("N", "l"), checks.tensor("logits", logits))
    checks.candidate_sets("candidates", candidates, logits.shape, logits)
    (logits,) = _compute_dtype(logits.detach())  # the square of a half-precision logit can overflow
    impl = dispatch.for_labels(impl, logits)
    if impl == "reference":
        return reference.class_activation_labels(logits, candidates)
    return ops.class_activation_labels(logits, candidates, impl)


def _check_samples(logits: Tensor, weight: Tensor, covariance: Tensor, name: str, classes: Tensor) -> Tensor:
    """Check samples and return their classes as int64."""
    checks.floating("logits", logits, ("N", "l"), checks.tensor("weight", weight))
    checks.classifier(weight, covariance, logits.shape[1])
    return checks.class_numbers(name, classes, (logits.shape[0],), logits.shape[1], weight)


def _compute_dtype(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Cast to float64 if any of the tensors is float64, to float32 otherwise."""
    double = any(tensor.dtype == torch.float64 for tensor in tensors)
    return tuple(tensor.to(torch.float64 if double else torch.float32) for tensor in tensors)


def _class_gram(weight: Tensor, covariance: Tensor, classes: Tensor, impl: str) -> Tensor:
    needs_grad = torch.is_grad_enabled() and weight.requires_grad
    return ops.ClassGram.apply(weight, covariance.detach(), classes, needs_grad, impl)


def _rows(logits: Tensor, weight: Tensor, covariance: Tensor, classes: Tensor, strength: Tensor, impl: str) -> Rows:
    """Cast the logits to the compute dtype and assign each row the Gram matrix of its class."""
    logits, weight = _compute_dtype(logits, weight)
    distinct, slots = class_slots(classes, weight.shape[0])
    return Rows(logits, _class_gram(weight, covariance, distinct, impl), slots, strength)


def _reference(function: Callable[..., Any], *args: Any, **options: Any) -> Any:
    """Call the reference in the same compute dtype as the other implementations."""
    floats = [arg for arg in args if isinstance(arg, Tensor) and arg.is_floating_point()]
    computed = iter(_compute_dtype(*floats))
    args = tuple(next(computed) if isinstance(arg, Tensor) and arg.is_floating_point() else arg for arg in args)
    return without_autocast(args[0].device.type, function, *args, **options)
