"""Losses on candidate sets, all in the log domain so that large logits do not overflow."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor


def candidate_cross_entropy(logits: Tensor, candidates: Tensor) -> Tensor:
    """PLSP's pre-training loss, equation (2): the mean of -log p over the candidates of each instance."""
    return confidence_cross_entropy(logits, uniform_confidences(candidates))


def confidence_cross_entropy(logits: Tensor, confidences: Tensor) -> Tensor:
    """Σ_j -c_j log p_j, averaged over instances."""
    return -(F.log_softmax(logits, dim=1) * confidences).sum(1).mean()


def candidate_likelihood_loss(logits: Tensor, candidates: Tensor) -> Tensor:
    """-log Σ_{j∈C} p_j, averaged over instances."""
    within = logits.masked_fill(~candidates, -math.inf).logsumexp(1)
    return (logits.logsumexp(1) - within).mean()


def complementary_loss(logits: Tensor, candidates: Tensor) -> Tensor:
    """Σ_{j∉C} -log(1 - p_j) of a plain softmax, averaged over instances."""
    return -_log_complement(logits).masked_fill(candidates, 0).sum(1).mean()


def _log_complement(logits: Tensor) -> Tensor:
    """log(1 - p_j) of every class.

    1 - p_j = Σ_{k≠j} p_k: with the log-odds o_j = z_j - logsumexp_{k≠j} z_k, log(1 - p_j) = logsigmoid(-o_j).
    """
    own = torch.eye(logits.shape[1], dtype=torch.bool, device=logits.device)
    others = logits[:, None, :].masked_fill(own, -math.inf).logsumexp(-1)
    return F.logsigmoid(others - logits)


def sigmoid_surrogates(logits: Tensor) -> tuple[Tensor, Tensor]:
    """σ(-z_j), what a label inside the candidate set costs, and σ(z_j), what one outside costs."""
    return torch.sigmoid(-logits), torch.sigmoid(logits)


def log_surrogates(logits: Tensor) -> tuple[Tensor, Tensor]:
    """-log p_j and -log(1 - p_j), in place of the sigmoids."""
    return -F.log_softmax(logits, dim=1), -_log_complement(logits)


def leveraged_weighted_loss(
    surrogates: tuple[Tensor, Tensor], candidates: Tensor, weights: Tensor, leverage: float
) -> Tensor:
    """Σ_{j∈C} w_j a_j + β Σ_{j∉C} w_j b_j with the surrogates a and b, averaged over instances."""
    inside, outside = surrogates
    return (weights * torch.where(candidates, inside, leverage * outside)).sum(1).mean()


def softmax_within(logits: Tensor, members: Tensor) -> Tensor:
    """p normalised over the members of each row, zero elsewhere; a row without members is zero.

    Unlike the product p ∘ members, a row cannot underflow as a whole.
    """
    return logits.masked_fill(~members, -math.inf).softmax(1).masked_fill(~members, 0)


def uniform_confidences(candidates: Tensor) -> Tensor:
    """1/|C| for each candidate."""
    return candidates / candidates.sum(1, keepdim=True)
