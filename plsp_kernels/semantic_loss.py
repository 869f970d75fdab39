"""What the loss of one step returns, whichever implementation computed it."""

from typing import NamedTuple

from torch import Tensor


class SemanticLoss(NamedTuple):
    """The objective, its terms and what the step learned about the unlabelled batch.

    The four losses are 0-d tensors; any mix of them can be differentiated. The rest carries no gradient.
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
    """(Bu,) int64: the class ŷ whose covariance served each unlabelled instance."""
    confidence: Tensor
    """(Bu,): the largest probit probability of the weak view."""
    prediction: Tensor
    """(Bu,) int64: the class that has it."""
    mask: Tensor
    """(Bu,) bool: h, whether the instance took part in the consistency term."""
