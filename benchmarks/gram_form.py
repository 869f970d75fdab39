"""The rival: what a competent user writes without this library, in eager PyTorch with autograd.

No pair differences: the quadratic forms of class pairs come from G = W Σ_y Wᵀ, once for every class of the batch.
Everything else is plain PyTorch: a logsumexp over class pairs, and no hand-written backward.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from plsp_kernels.functional import PAPER_BETA
from plsp_kernels.step import Step


def pairwise_quadratic_form(weight: Tensor, covariance: Tensor, classes: Tensor) -> Tensor:
    """Q[j, j'] = G[j, j] + G[j', j'] - 2 G[j, j']: (U, l, l)."""
    selected = covariance[classes]
    product = weight * selected[:, None, :] if covariance.dim() == 2 else weight @ selected
    gram = product @ weight.T
    diagonal = gram.diagonal(dim1=1, dim2=2)
    return (diagonal[:, :, None] + diagonal[:, None, :] - 2 * gram).clamp(min=0)


def semantic_log_softmax(
    logits: Tensor, weight: Tensor, covariance: Tensor, classes: Tensor, *, strength: float
) -> Tensor:
    """log p_ij: (N, l)."""
    distinct, slots = classes.unique(return_inverse=True)
    pairs = (strength / 2 * pairwise_quadratic_form(weight, covariance, distinct))[slots]
    return logits - (logits[:, None, :] + pairs).logsumexp(-1)


def semantic_cross_entropy(
    logits: Tensor, weight: Tensor, covariance: Tensor, labels: Tensor, *, strength: float
) -> Tensor:
    """-log p_{i,y_i}: only the column of the label, Q[k, y] = w_kᵀΣw_k - 2 w_kᵀΣw_y + w_yᵀΣw_y."""
    if covariance.dim() == 2:
        variance, own = covariance[labels], weight[labels]
        quadratic = variance @ weight.square().T - 2 * (variance * own) @ weight.T
        quadratic = quadratic + (variance * own.square()).sum(1, keepdim=True)
    else:
        distinct, slots = labels.unique(return_inverse=True)
        product = weight @ covariance[distinct]
        cross = (product @ weight[distinct][:, :, None])[:, :, 0]
        column = (product * weight).sum(-1) - 2 * cross + cross.gather(1, distinct[:, None])
        quadratic = column[slots]
    return F.cross_entropy(logits + strength / 2 * quadratic, labels)


def probit_probabilities(
    logits: Tensor, weight: Tensor, covariance: Tensor, classes: Tensor, *, strength: float, beta: float = PAPER_BETA
) -> Tensor:
    """p̂_ij: (N, l)."""
    distinct, slots = classes.unique(return_inverse=True)
    return _probit(logits, pairwise_quadratic_form(weight, covariance, distinct), slots, strength, beta)


def _probit(logits: Tensor, quadratic: Tensor, slots: Tensor, strength: float | Tensor, beta: float) -> Tensor:
    scale = beta / math.sqrt(2) * (1 + strength * beta**2 * quadratic).rsqrt()
    margin = (logits[:, :, None] - logits[:, None, :]) * scale[slots]
    return 1 / ((2 / torch.erfc(-margin)).sum(-1) - logits.shape[1])


def semantic_upper_bound_loss(step: Step) -> Tensor:
    """The total of one step with pseudo-labels and without candidate sets of the labelled batch."""
    assert step.pseudo_labels is not None
    assert step.labeled_candidates is None
    classes, slots = torch.cat([step.labels, step.pseudo_labels]).unique(return_inverse=True)
    quadratic = pairwise_quadratic_form(step.weight, step.covariance, classes)
    labeled, unlabeled = slots.tensor_split((step.labels.shape[0],))
    halved = step.strength / 2 * quadratic
    supervised = F.cross_entropy(step.labeled_logits + halved[labeled, step.labels], step.labels)

    with torch.no_grad():
        probabilities = _probit(step.weak_logits, quadratic, unlabeled, step.strength, step.beta)
        confidence, prediction = probabilities.max(1)
        mask = (confidence >= step.thresholds[prediction]) & step.candidates.gather(1, prediction[:, None])[:, 0]
        targets = probabilities * step.candidates
        targets = mask[:, None] * targets / targets.sum(1, keepdim=True).clamp(min=1e-30)

    # Log-odds, without the own class in the sum: log(1 - p) stays finite where p rounds to one.
    own = torch.eye(quadratic.shape[1], dtype=torch.bool, device=quadratic.device)
    pairs = halved.masked_fill(own, -math.inf)[unlabeled]
    strong, weak = (z - (z[:, None, :] + pairs).logsumexp(-1) for z in (step.strong_logits, step.weak_logits))
    consistency = -(targets * F.logsigmoid(strong)).sum(-1).mean()
    complementary = -(F.logsigmoid(-weak) * ~step.candidates).sum(-1).mean()
    return step.ss_weight * (supervised + consistency) + complementary
