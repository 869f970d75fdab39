"""Identities between the Gram matrices G_y = W Σ_y Wᵀ and the quadratic forms of class pairs,

Q_y[j, j'] = (w_j - w_j')ᵀ Σ_y (w_j - w_j') = G_y[j, j] + G_y[j', j'] - 2 G_y[j, j'],

in plain tensor operations shared by all implementations.
"""

import torch
from torch import Tensor


def centred_rows(weight: Tensor) -> Tensor:
    """Subtract the mean row, for functions that depend only on differences of rows.

    Centring leaves all w_j - w_j' unchanged and makes G smaller, which reduces cancellation in
    G[j,j] + G[j',j'] - 2 G[j,j']. For the same reason the rows of ∂L/∂G sum to zero, so the gradient with respect to
    the centred weight equals the gradient with respect to the weight.
    """
    return weight - weight.mean(0)


def quadratic_form(gram: Tensor) -> Tensor:
    """Compute Q from G, both (U, l, l)."""
    diagonal = gram.diagonal(dim1=1, dim2=2)
    quadratic = diagonal[:, :, None] + diagonal[:, None, :] - 2 * gram
    # Exactly zero on the diagonal, and clamped where cancellation would leave a small negative number.
    own = torch.eye(gram.shape[1], dtype=torch.bool, device=gram.device)
    return quadratic.clamp(min=0).masked_fill(own, 0)


def gram_gradient(pair_grad: Tensor) -> Tensor:
    """Map D = ∂L/∂Q (U, l, l) to the symmetric ∂L/∂G = diag(S 1) - S with S = D + Dᵀ, whose rows sum to zero."""
    symmetric = pair_grad + pair_grad.mT
    row_sums = symmetric.sum(-1)
    symmetric.neg_().diagonal(dim1=1, dim2=2).add_(row_sums)
    return symmetric
