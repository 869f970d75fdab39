"""Result type of the loss, shared by all implementations."""

from typing import NamedTuple

from torch import Tensor


class SemanticLoss(NamedTuple):
    """Result of one step: the objective, its terms, and the decisions made for the unlabelled batch.

    Notes
    -----
    The four losses are 0-d tensors, and any combination of them can be differentiated. The other fields carry no
    gradient.

    Examples
    --------
    >>> import torch
    >>> from plsp_kernels import semantic_upper_bound_loss
    >>> _ = torch.manual_seed(0)
    >>> logits, weight, covariance = torch.randn(2, 3), torch.randn(3, 5), torch.zeros(3, 5)
    >>> labels, candidates = torch.tensor([0, 2]), torch.tensor([[True, True, False], [False, True, True]])
    >>> loss = semantic_upper_bound_loss(
    ...     logits, logits, logits, weight, covariance, labels, candidates, strength=0.0, thresholds=0.0, ss_weight=2.0
    ... )
    >>> torch.allclose(loss.total, 2.0 * (loss.supervised + loss.consistency) + loss.complementary)
    True
    >>> loss.pseudo_labels.dtype, loss.mask.dtype
    (torch.int64, torch.bool)
    """

    total: Tensor
    """γ (supervised + consistency) + complementary, equation (16)."""
    supervised: Tensor
    """Upper bound of the loss on the labelled batch, equation (14)."""
    consistency: Tensor
    """Upper bound of the consistency between weak and strong views, equations (11) and (12)."""
    complementary: Tensor
    """Upper bound of the loss on non-candidate labels, equation (15)."""
    pseudo_labels: Tensor
    """(Bu,) int64: the class ŷ whose covariance was used for each unlabelled instance."""
    confidence: Tensor
    """(Bu,): the largest probit probability of the weak view."""
    prediction: Tensor
    """(Bu,) int64: the class with the largest probit probability."""
    mask: Tensor
    """(Bu,) bool: h, whether the instance entered the consistency term."""
