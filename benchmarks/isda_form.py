"""The loss of implicit semantic data augmentation (ISDA) in the formulation of its authors' released code.

It materialises the differences of all classifier rows to that of the label for every sample: (N, l, d). With full
covariances, it multiplies them twice and uses only the diagonals of the (N, l, l) products.
"""

import torch
import torch.nn.functional as F
from torch import Tensor


def semantic_cross_entropy(
    logits: Tensor, weight: Tensor, covariance: Tensor, labels: Tensor, *, strength: float
) -> Tensor:
    difference = weight - weight[labels][:, None, :]
    selected = covariance[labels]
    if covariance.dim() == 2:
        quadratic = (difference.square() * selected[:, None, :]).sum(2)
    else:
        quadratic = torch.bmm(torch.bmm(difference, selected), difference.mT).diagonal(dim1=1, dim2=2)
    return F.cross_entropy(logits + strength / 2 * quadratic, labels)
