"""The public functions: check the arguments, call the operators, return.

Every function takes `impl`: "auto" (Triton kernels for CUDA and ROCm tensors, the closed form elsewhere), "triton",
"torch" (the closed form, in C where a step is small) or "reference" (the paper, literally). All give the same results.
Half-precision inputs are computed in float32; losses come back in float32, per-class results in the dtype of the
logits, gradients in the dtype of their inputs. Σ is a statistic: no gradient flows into `covariance`. Second
derivatives are not offered by any implementation but the reference.
"""

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from plsp_kernels import checks, native, ops, reference
from plsp_kernels.ops.registration import without_autocast
from plsp_kernels.semantic_loss import SemanticLoss
from plsp_kernels.slots import class_slots

PAPER_BETA = math.pi**2 / 8
"""The paper's scale of the probit. The usual match of the logistic function is sqrt(π/8); see docs/math.md."""


def semantic_upper_bound_loss(
    labeled_logits: Tensor,
    weak_logits: Tensor,
    strong_logits: Tensor,
    weight: Tensor,
    covariance: Tensor,
    labels: Tensor,
    candidates: Tensor,
    *,
    strength: float,
    thresholds: float | Tensor,
    ss_weight: float = 1.0,
    beta: float = PAPER_BETA,
    pseudo_labels: Tensor | None = None,
    labeled_candidates: Tensor | None = None,
    argmax_in_candidates: bool = True,
    impl: str = "auto",
) -> SemanticLoss:
    """The loss of one PLSP step, equation (16): γ (L_l + R_u) + L_cl.

    Args:
        labeled_logits: (Bl, l) logits z = W a + b of the labelled batch.
        weak_logits: (Bu, l) logits of the weak view of the unlabelled batch.
        strong_logits: (Bu, l) logits of its strong view.
        weight: (l, d) weight W of the classifier that made the logits.
        covariance: (l, d, d) class-wise feature covariances Σ, or (l, d) their diagonals.
        labels: (Bl,) int64 labels of the labelled batch.
        candidates: (Bu, l) bool candidate sets of the unlabelled batch.
        strength: λ, the strength of the semantic transformation; 0 is the plain softmax loss.
        thresholds: τ, the confidence from which an instance takes part in the consistency term: one number, or (l,)
            one per class.
        ss_weight: γ, the weight of the semi-supervised terms.
        beta: β, the scale of the probit approximation.
        pseudo_labels: (Bu,) int64 classes for the covariance of unlabelled instances; by default each instance's
            candidate of highest class activation value on the weak view.
        labeled_candidates: (Bl, l) bool; if given, the labelled batch joins the complementary term, which then is the
            mean over Bl + Bu.
        argmax_in_candidates: whether an instance also needs its most probable class among its candidates to take part
            in the consistency term.
        impl: which implementation to use.

    An empty labelled or unlabelled batch contributes zero.

    Gradients of `total` are computed along with it; each term by itself can be differentiated too, and keeps what that
    needs in memory as long as it lives: detach terms that are kept for reporting.
    """
    arguments = (labeled_logits, weak_logits, strong_logits, weight, covariance, labels, candidates)
    options: dict[str, Any] = {
        "strength": strength,
        "thresholds": thresholds,
        "ss_weight": ss_weight,
        "beta": beta,
        "pseudo_labels": pseudo_labels,
        "labeled_candidates": labeled_candidates,
    }
    impl = check_step(*arguments, **options, impl=impl)
    if pseudo_labels is None:
        pseudo_labels = _class_activation_labels(weak_logits, candidates)
    if impl == "reference":
        options |= {"pseudo_labels": pseudo_labels, "argmax_in_candidates": argmax_in_candidates}
        return _reference(reference.semantic_upper_bound_loss, *arguments, **options)

    # Converted one by one: the labelled logits may serve twice, and their gradients are added before they are rounded.
    labeled, strong, weak, weight = _compute_dtype(labeled_logits, strong_logits, weak_logits, weight)
    if not isinstance(thresholds, Tensor):
        thresholds = weight.new_full((weight.shape[0],), thresholds)
    total, supervised, consistency, complementary, confidence, prediction, mask = ops.upper_bound(
        labeled,
        strong,
        weak,
        weight,
        covariance.detach(),
        labels,
        pseudo_labels,
        candidates,
        labeled_candidates,
        thresholds,
        _as_tensor(strength),
        _as_tensor(ss_weight),
        beta,
        argmax_in_candidates,
        impl,
    )
    return SemanticLoss(total, supervised, consistency, complementary, pseudo_labels, confidence, prediction, mask)


def semantic_log_softmax(
    logits: Tensor, weight: Tensor, covariance: Tensor, classes: Tensor, *, strength: float, impl: str = "auto"
) -> Tensor:
    """Upper-bounded log-probabilities of equation (12), (N, l): log p_ij under the covariance of classes[i].

    exp of a row need not sum to one. Differentiable with respect to logits and weight. strength = 0 is log_softmax.
    """
    impl = _check_samples(logits, weight, covariance, "classes", classes, strength, impl)
    if impl == "reference":
        result = _reference(reference.semantic_log_softmax, logits, weight, covariance, classes, strength=strength)
        return result.to(logits.dtype)
    rows, gram, slots = _prepare(logits, weight, covariance, classes, impl)
    return F.logsigmoid(ops.LogOdds.apply(rows, gram, slots, _as_tensor(strength), impl)).to(logits.dtype)


def semantic_cross_entropy(
    logits: Tensor,
    weight: Tensor,
    covariance: Tensor,
    labels: Tensor,
    *,
    strength: float,
    reduction: str = "mean",
    impl: str = "auto",
) -> Tensor:
    """Upper bound of the cross-entropy under semantic transformation, equation (14).

    reduction is "mean" (zero for an empty batch), "sum" or "none". Differentiable with respect to logits and weight.
    """
    if reduction not in ("mean", "sum", "none"):
        raise ValueError(f"reduction must be 'mean', 'sum' or 'none', got {reduction!r}")
    impl = _check_samples(logits, weight, covariance, "labels", labels, strength, impl)
    if impl == "reference":
        return _reference(
            reference.semantic_cross_entropy,
            logits,
            weight,
            covariance,
            labels,
            strength=strength,
            reduction=reduction,
        )
    rows, gram, slots = _prepare(logits, weight, covariance, labels, impl)
    losses = -F.logsigmoid(ops.TargetLogOdds.apply(rows, gram, slots, labels, _as_tensor(strength), impl))
    if reduction == "none":
        return losses
    return losses.sum() if reduction == "sum" else losses.sum() / max(losses.shape[0], 1)


@torch.no_grad()
def probit_probabilities(
    logits: Tensor,
    weight: Tensor,
    covariance: Tensor,
    classes: Tensor,
    *,
    strength: float,
    beta: float = PAPER_BETA,
    impl: str = "auto",
) -> Tensor:
    """Probabilities p̂w of equation (12), (N, l): the expected softmax under semantic transformation, by probits.

    They are pseudo-targets: no gradient flows through them. exp(log p) of a row need not sum to one.
    """
    checks.positive("beta", beta)
    impl = _check_samples(logits, weight, covariance, "classes", classes, strength, impl)
    if impl == "reference":
        result = _reference(
            reference.probit_probabilities, logits, weight, covariance, classes, strength=strength, beta=beta
        )
        return result.to(logits.dtype)
    rows, gram, slots = _prepare(logits, weight, covariance, classes, impl)
    return ops.probit_probabilities(rows, gram, slots, _as_tensor(strength), beta, impl).to(logits.dtype)


def pairwise_quadratic_form(
    weight: Tensor, covariance: Tensor, classes: Tensor | None = None, *, impl: str = "auto"
) -> Tensor:
    """(w_j - w_j')ᵀ Σ_y (w_j - w_j') for all class pairs and each y in classes (all classes by default): (U, l, l)."""
    _check_classifier(weight, covariance, checks.tensor("weight", weight).shape[0])
    if classes is not None:
        checks.class_numbers("classes", classes, ("U",), weight.shape[0], weight)
    impl = checks.resolve_impl(impl, weight)
    if impl == "reference":
        return _reference(reference.pairwise_quadratic_form, weight, covariance, classes).to(weight.dtype)
    if classes is None:
        classes = torch.arange(weight.shape[0], device=weight.device)
    (computed,) = _compute_dtype(weight)
    return ops.PairQuadratic.apply(_class_gram(computed, covariance, classes, impl)).to(weight.dtype)


def class_activation_labels(logits: Tensor, candidates: Tensor) -> Tensor:
    """Each instance's candidate of highest class activation value z |z - 1|: (N,) int64."""
    checks.floating("logits", logits, ("N", "l"), checks.tensor("logits", logits))
    checks.candidate_sets("candidates", candidates, logits.shape, logits)
    return _class_activation_labels(logits, candidates)


def _class_activation_labels(logits: Tensor, candidates: Tensor) -> Tensor:
    (logits,) = _compute_dtype(logits.detach())  # the square of a half-precision logit may overflow
    if native.takes(logits) and not torch.compiler.is_compiling():
        return native.class_activation_labels(logits, candidates)
    return reference.class_activation_labels(logits, candidates)


def check_step(
    labeled_logits: Tensor,
    weak_logits: Tensor,
    strong_logits: Tensor,
    weight: Tensor,
    covariance: Tensor,
    labels: Tensor,
    candidates: Tensor,
    *,
    strength: float,
    thresholds: float | Tensor,
    ss_weight: float,
    beta: float,
    impl: str,
    pseudo_labels: Tensor | None = None,
    labeled_candidates: Tensor | None = None,
) -> str:
    """Check the arguments of semantic_upper_bound_loss; returns the implementation that `impl` means for them."""
    checks.floating("labeled_logits", labeled_logits, ("Bl", "l"), checks.tensor("weight", weight))
    num_labeled, num_classes = labeled_logits.shape
    _check_classifier(weight, covariance, num_classes)
    checks.floating("weak_logits", weak_logits, ("Bu", num_classes), weight)
    num_unlabeled = weak_logits.shape[0]
    checks.floating("strong_logits", strong_logits, (num_unlabeled, num_classes), weight)
    checks.class_numbers("labels", labels, (num_labeled,), num_classes, weight)
    checks.candidate_sets("candidates", candidates, (num_unlabeled, num_classes), weight)
    checks.number("strength", strength, 0)
    checks.thresholds("thresholds", thresholds, num_classes, weight)
    checks.number("ss_weight", ss_weight)
    checks.positive("beta", beta)
    if pseudo_labels is not None:
        checks.class_numbers("pseudo_labels", pseudo_labels, (num_unlabeled,), num_classes, weight)
    if labeled_candidates is not None:
        checks.candidate_sets("labeled_candidates", labeled_candidates, (num_labeled, num_classes), weight)
    return checks.resolve_impl(impl, weight)


def _check_classifier(weight: Tensor, covariance: Tensor, num_classes: int) -> None:
    checks.floating("weight", weight, (num_classes, "d"), weight)
    if num_classes < 2:
        raise ValueError(f"weight must have at least 2 rows, one per class, got {num_classes}")
    checks.covariance("covariance", covariance, num_classes, weight.shape[1], weight)


def _check_samples(
    logits: Tensor, weight: Tensor, covariance: Tensor, name: str, classes: Tensor, strength: float, impl: str
) -> str:
    checks.floating("logits", logits, ("N", "l"), checks.tensor("weight", weight))
    _check_classifier(weight, covariance, logits.shape[1])
    checks.class_numbers(name, classes, (logits.shape[0],), logits.shape[1], weight)
    checks.number("strength", strength, 0)
    return checks.resolve_impl(impl, weight)


def _compute_dtype(*tensors: Tensor) -> tuple[Tensor, ...]:
    """The tensors in float64 if one of them is, in float32 otherwise."""
    double = any(tensor.dtype == torch.float64 for tensor in tensors)
    return tuple(tensor.to(torch.float64 if double else torch.float32) for tensor in tensors)


def _as_tensor(number: float) -> Tensor:
    """How the operators take it, see ops/registration.py. On the CPU, where reading it makes no device wait.

    A product, because that is what torch.compile can keep for any value of a Python number.
    """
    return torch.ones((), dtype=torch.float64, device="cpu") * number


def _class_gram(weight: Tensor, covariance: Tensor, classes: Tensor, impl: str) -> Tensor:
    needs_grad = torch.is_grad_enabled() and weight.requires_grad
    return ops.ClassGram.apply(weight, covariance.detach(), classes, needs_grad, impl)


def _prepare(
    logits: Tensor, weight: Tensor, covariance: Tensor, classes: Tensor, impl: str
) -> tuple[Tensor, Tensor, Tensor]:
    """Logits in the computing dtype, Gram matrices of the classes that occur, and the slot of each sample."""
    rows, weight = _compute_dtype(logits, weight)
    distinct, slots = class_slots(classes, weight.shape[0])
    return rows, _class_gram(weight, covariance, distinct, impl), slots


def _reference(function: Callable[..., Any], *args: Any, **options: Any) -> Any:
    """The reference, computing in the same dtype as the other implementations."""
    floats = [arg for arg in args if isinstance(arg, Tensor) and arg.is_floating_point()]
    computed = iter(_compute_dtype(*floats))
    args = tuple(next(computed) if isinstance(arg, Tensor) and arg.is_floating_point() else arg for arg in args)
    return without_autocast(function, *args, **options)
