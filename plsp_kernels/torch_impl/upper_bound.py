"""The three terms of the loss from log-odds and probit probabilities."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from plsp_kernels.torch_impl.log_odds import LogOdds
from plsp_kernels.torch_impl.probit import probit_probabilities


def upper_bound(
    rows: Tensor,
    gram: Tensor,
    slots: Tensor,
    labels: Tensor,
    candidates: Tensor,
    labeled_candidates: Tensor | None,
    thresholds: Tensor,
    strength: float,
    ss_weight: float,
    beta: float,
    argmax_in_candidates: bool,
    need_rows: bool,
    need_gram: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Equations (11), (12), (14), (15) for one step.

    rows (N, l) holds the logits of the labelled batch (Bl), the strong view (Bu), the weak view (Bu) and, where
    labeled_candidates is given, the labelled batch again; slots (N,) says which Gram matrix serves each.

    Returns terms (4,): total, supervised, consistency, complementary; odds (N, l); grad_odds (N, l), the derivative of
    each row's own term with respect to its odds; the gradients of the total with respect to rows (N, l) and to gram
    (U, l, l), empty if unneeded; confidence, prediction and mask of the unlabelled batch.
    """
    num_labeled, num_unlabeled = labels.shape[0], candidates.shape[0]
    strong, weak = num_labeled, num_labeled + num_unlabeled  # where these blocks begin
    log_odds = LogOdds(rows, gram, slots, strength)
    weak_logits = rows[weak : weak + num_unlabeled]
    probabilities = probit_probabilities(weak_logits, gram, slots[weak : weak + num_unlabeled], strength, beta)

    confidence, prediction = probabilities.max(dim=1)
    mask = confidence >= thresholds.index_select(0, prediction)
    if argmax_in_candidates:
        mask = mask & candidates.gather(1, prediction[:, None])[:, 0]

    # Each loss is a weighted sum of -logsigmoid(±odds): + for labels that should win, - for those that should not. With
    # the sign in the weights too, the slope with respect to the odds is sigmoid(∓odds) times the weight.
    outside = ~candidates if labeled_candidates is None else ~torch.cat([candidates, labeled_candidates])
    weights = torch.zeros_like(rows)
    weights[:strong].scatter_(1, labels[:, None], -1 / max(num_labeled, 1))
    _write_targets(weights[strong:weak], probabilities, mask, weak_logits, candidates)
    weights[weak:].copy_(outside).div_(max(outside.shape[0], 1))

    signed = log_odds.odds.clone()
    signed[weak:].neg_()
    supervised, consistency, complementary = (
        block.sum() for block in (F.logsigmoid(signed) * weights).tensor_split((strong, weak))
    )
    total = ss_weight * (supervised + consistency) - complementary
    terms = torch.stack([total, supervised, consistency, -complementary])
    grad_odds = signed.neg_().sigmoid_().mul_(weights)

    grad_rows, grad_gram = rows.new_empty(0), gram.new_empty(0)
    if need_rows or need_gram:
        grad_total = torch.cat([grad_odds[:weak] * ss_weight, grad_odds[weak:]])
        grad_rows, grad_gram = log_odds.backward(grad_total, need_rows, need_gram)
    return terms, log_odds.odds, grad_odds, grad_rows, grad_gram, confidence, prediction, mask


def _write_targets(out: Tensor, probabilities: Tensor, mask: Tensor, logits: Tensor, candidates: Tensor) -> None:
    """Minus the pseudo-targets of the instances in the mask, divided by the batch size.

    They are the probabilities of the candidates, normalised, or where all of these underflow, the candidate softmax
    of the logits.
    """
    inside = probabilities * candidates
    mass = inside.sum(1, keepdim=True)
    lost = mass < torch.finfo(mass.dtype).tiny
    if logits.device.type != "cpu" or lost.any():
        fallback = logits.masked_fill(~candidates, -math.inf).softmax(1)
        inside, mass = torch.where(lost, fallback, inside), torch.where(lost, 1, mass)
    torch.mul(inside, mask[:, None] / mass.mul_(-out.shape[0]), out=out)
