"""The paper in eager PyTorch, line by line.

Every public function is implemented here exactly as its equation reads: explicit differences of classifier rows, one
quadratic form per sample and class pair, the probit sum as printed. It deliberately materialises N·l²·d tensors. It is
the oracle of the tests and the eager baseline of the benchmarks, and must not be optimised.

Equation numbers are those of "Learning with Partial Labels from Semi-supervised Perspective" (AAAI 2023). Symbols:
W = weight (l, d), Σ_y = covariance[y], λ = strength, β = beta, τ = thresholds, γ = ss_weight, C = candidates.
"""

import math

import torch
from torch import Tensor

from plsp_kernels.batch import LabeledBatch
from plsp_kernels.semantic_loss import SemanticLoss
from plsp_kernels.step import Step


def pairwise_quadratic_form(weight: Tensor, covariance: Tensor, classes: Tensor | None = None) -> Tensor:
    """u_jj'ᵀ Σ_y u_jj' with u_jj' = w_j - w_j', for each y in classes: (U, l, l)."""
    num_classes, num_features = weight.shape
    selected = (covariance if classes is None else covariance[classes]).detach()  # a statistic: no gradient into Σ
    difference = (weight[:, None, :] - weight[None, :, :]).reshape(1, num_classes**2, num_features)
    transformed = difference * selected[:, None, :] if covariance.dim() == 2 else difference @ selected
    return (transformed * difference).sum(-1).reshape(-1, num_classes, num_classes)


def class_activation_labels(logits: Tensor, candidates: Tensor) -> Tensor:
    """ŷ_i = argmax_{j∈C_i} v_ij with the class activation value v_ij = z_ij |z_ij - 1|: (N,)."""
    activation = logits * (logits - 1).abs()
    return torch.where(candidates, activation, -math.inf).argmax(dim=1)


def _adjusted_exponents(
    logits: Tensor, weight: Tensor, covariance: Tensor, classes: Tensor, strength: float | Tensor
) -> Tensor:
    """z_ij' + (λ/2) u_j'jᵀ Σ_y(i) u_j'j, the exponents of Proposition 1, indexed [i, j, j']: (N, l, l)."""
    quadratic = pairwise_quadratic_form(weight, covariance, classes)
    return logits[:, None, :] + strength / 2 * quadratic


def semantic_log_softmax(
    logits: Tensor, weight: Tensor, covariance: Tensor, classes: Tensor, *, strength: float | Tensor
) -> Tensor:
    """log p_ij of Proposition 1, equation (12): z_ij - log Σ_j' exp(z_ij' + (λ/2) u_j'jᵀ Σ_y(i) u_j'j): (N, l)."""
    return logits - _adjusted_exponents(logits, weight, covariance, classes, strength).logsumexp(-1)


def semantic_cross_entropy(
    logits: Tensor, weight: Tensor, covariance: Tensor, labels: Tensor, *, strength: float | Tensor
) -> Tensor:
    """-log p_{i,y_i}, equation (14): the mean over the batch."""
    scale = torch.as_tensor(strength, dtype=logits.dtype, device=logits.device)
    return labeled_batch_loss(LabeledBatch(logits, weight, covariance, labels, None, scale, 0.0, -100, "mean"))


def labeled_batch_loss(batch: LabeledBatch) -> Tensor:
    """Σ_j t_ij (log Σ_j' exp(z_ij' + (λ/2) u_j'yᵀ Σ_y u_j'y) - z_ij) with y = y_i: equation (14) for general targets t.

    With class weights v and label smoothing ε, t_ij = v_j ((1 - ε) [j = y] + ε/l).
    """
    logits, labels, num_classes = batch.logits, batch.labels, batch.weight.shape[0]
    counted = labels != batch.ignore_index
    labels = labels.masked_fill(~counted, 0)
    exponents = _adjusted_exponents(
        logits, batch.weight, batch.covariance.to(logits.dtype), labels, batch.strength.to(logits)
    )
    log_sum = exponents.logsumexp(-1).gather(1, labels[:, None])
    class_weight = logits.new_ones(num_classes) if batch.class_weight is None else batch.class_weight.to(logits.dtype)
    own = torch.nn.functional.one_hot(labels, num_classes).to(logits.dtype)
    targets = class_weight * ((1 - batch.label_smoothing) * own + batch.label_smoothing / num_classes)
    losses = torch.where(targets == 0, 0, targets * (log_sum - logits)).sum(1)
    losses = torch.where(counted, losses, 0)
    if batch.reduction == "none":
        return losses
    if batch.reduction == "sum":
        return losses.sum()
    total = (class_weight[labels] * counted).sum()
    return losses.sum() / torch.where(total == 0, 1, total)


def probit_probabilities(
    logits: Tensor,
    weight: Tensor,
    covariance: Tensor,
    classes: Tensor,
    *,
    strength: float | Tensor,
    beta: float = math.pi**2 / 8,
) -> Tensor:
    """p̂w_ij of Proposition 1, equation (12): 1 / (-l + Σ_j' 1/Φ(β (z_j - z_j') / sqrt(1 + λ β² uᵀΣu))): (N, l)."""
    logits, weight = logits.detach(), weight.detach()
    quadratic = pairwise_quadratic_form(weight, covariance, classes)
    margin = beta * (logits[:, :, None] - logits[:, None, :]) / (1 + strength * beta**2 * quadratic).sqrt()
    normal_cdf = torch.erfc(-margin / math.sqrt(2)) / 2
    return 1 / (-logits.shape[1] + (1 / normal_cdf).sum(-1))


def pseudo_targets(probabilities: Tensor, logits: Tensor, candidates: Tensor) -> Tensor:
    """p̂_ij = 1(j∈C_i) p̂w_ij / Σ_j' 1(j'∈C_i) p̂w_ij', below equation (12): (N, l).

    If the probabilities of all candidates underflow, fall back to the softmax of the candidate logits.
    """
    inside = probabilities * candidates
    mass = inside.sum(-1, keepdim=True)
    fallback = logits.masked_fill(~candidates, -math.inf).softmax(-1)
    return torch.where(mass >= torch.finfo(mass.dtype).tiny, inside / mass, fallback)


def semantic_upper_bound_loss(step: Step) -> SemanticLoss:
    """The objective of one step, equation (16): γ (L_l + R_u) + L_cl."""
    labels, candidates, pseudo_labels = step.labels, step.candidates, step.pseudo_labels
    weight, covariance = step.weight, step.covariance.to(step.weight.dtype)
    strength, ss_weight, weak_logits = step.strength, step.ss_weight.to(weight), step.weak_logits
    if pseudo_labels is None:
        pseudo_labels = class_activation_labels(weak_logits.detach(), candidates)

    # (14): mean of -log p_{i,y_i} over the labelled batch
    supervised = semantic_cross_entropy(step.labeled_logits, weight, covariance, labels, strength=strength)

    # (11), (12): h_i Σ_j -p̂_ij log p^s_ij; the entropy of the target is constant and dropped from the KL divergence
    probabilities = probit_probabilities(
        weak_logits, weight, covariance, pseudo_labels, strength=strength, beta=step.beta
    )
    confidence, prediction = probabilities.max(dim=1)
    mask = confidence >= step.thresholds.to(weight).expand(weight.shape[0])[prediction]
    if step.argmax_in_candidates:
        mask = mask & candidates.gather(1, prediction[:, None])[:, 0]
    targets = pseudo_targets(probabilities, weak_logits.detach(), candidates)
    log_probability = semantic_log_softmax(step.strong_logits, weight, covariance, pseudo_labels, strength=strength)
    consistency = _mean(mask * -(targets * log_probability).sum(-1))

    # (15): Σ_{j∉C_i} -log(1 - p_ij) on the weak view, and on the labelled batch if its candidates are given
    losses = _complementary(weak_logits, weight, covariance, pseudo_labels, candidates, strength)
    if step.labeled_candidates is not None:
        labeled_losses = _complementary(
            step.labeled_logits, weight, covariance, labels, step.labeled_candidates, strength
        )
        losses = torch.cat([losses, labeled_losses])
    complementary = _mean(losses)

    total = ss_weight * (supervised + consistency) + complementary
    return SemanticLoss(total, supervised, consistency, complementary, pseudo_labels, confidence, prediction, mask)


def _complementary(
    logits: Tensor, weight: Tensor, covariance: Tensor, classes: Tensor, candidates: Tensor, strength: float | Tensor
) -> Tensor:
    """Σ_{j∉C_i} -log(1 - p_ij), equation (15): (N,).

    1 - p_ij is the share of the terms j' ≠ j in the sum of equation (12). The quotient of the two sums stays exact
    where p_ij rounds to one.
    """
    exponents = _adjusted_exponents(logits, weight, covariance, classes, strength)
    own = torch.eye(logits.shape[1], dtype=torch.bool, device=logits.device)
    log_complement = exponents.masked_fill(own, -math.inf).logsumexp(-1) - exponents.logsumexp(-1)
    return -log_complement.masked_fill(candidates, 0).sum(-1)


def update_covariance(
    covariance: Tensor, mean: Tensor, count: Tensor, features: Tensor, labels: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Equation (17) for all classes at once: the updated (Σ, μ, m) after one labelled batch."""
    member = torch.nn.functional.one_hot(labels, count.shape[0]).T.to(features.dtype)  # (l, N)
    batch_count = member.sum(1)
    batch_mean = member @ features / batch_count.clamp(min=1)[:, None]
    centred = (features[None] - batch_mean[:, None]) * member[:, :, None]  # (l, N, d)
    shift = mean - batch_mean
    if covariance.dim() == 2:
        batch_covariance, outer = (centred**2).sum(1), shift**2
    else:
        batch_covariance, outer = centred.mT @ centred, shift[:, :, None] * shift[:, None, :]
    broadcast = (-1,) + (1,) * (covariance.dim() - 1)
    batch_covariance = batch_covariance / batch_count.clamp(min=1).view(broadcast)
    old, new = count.to(features.dtype), batch_count
    total = (old + new).clamp(min=1)
    old_share, new_share = (old / total).view(broadcast), (new / total).view(broadcast)
    updated = old_share * covariance + new_share * batch_covariance + old_share * new_share * outer
    updated_mean = (old / total)[:, None] * mean + (new / total)[:, None] * batch_mean
    seen = batch_count > 0
    return (
        torch.where(seen.view(broadcast), updated, covariance),
        torch.where(seen[:, None], updated_mean, mean),
        count + batch_count.to(count.dtype),
    )


def _mean(losses: Tensor) -> Tensor:
    """Mean; zero for an empty batch."""
    return losses.sum() / max(losses.numel(), 1)
