"""PLSP without semantic transformation: the ablation "w/o ST" of the paper."""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from plsp_kernels import SemanticLoss, SemanticUpperBoundLoss
from plsp_train.methods.losses import complementary_loss, softmax_within


def plain_loss(
    logits: Sequence[Tensor],
    labels: Tensor,
    candidates: Tensor,
    state: SemanticUpperBoundLoss,
    ss_weight: float,
    labeled_candidates: Tensor | None = None,
) -> SemanticLoss:
    """Equations (5), (6) and (13): softmax in place of the upper bound and of the probit.

    `logits` are those of the labelled, weak and strong views; `state` holds the thresholds.
    """
    labeled, weak, strong = (part.float() for part in logits)
    supervised = F.cross_entropy(labeled, labels) if len(labels) else labeled.sum()
    confidence, prediction = weak.detach().softmax(1).max(1)
    mask = confidence >= state.curriculum.thresholds[prediction]
    if state.argmax_in_candidates:
        mask = mask & candidates.gather(1, prediction[:, None])[:, 0]
    targets = softmax_within(weak.detach(), candidates)
    consistency = (mask * -(targets * F.log_softmax(strong, dim=1)).sum(1)).mean()
    if labeled_candidates is None:
        complementary = complementary_loss(weak, candidates)
    else:
        complementary = complementary_loss(torch.cat([weak, labeled]), torch.cat([candidates, labeled_candidates]))
    total = ss_weight * (supervised + consistency) + complementary
    return SemanticLoss(total, supervised, consistency, complementary, prediction, confidence, prediction, mask)
