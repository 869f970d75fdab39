"""Class Gram matrices G_y = W Σ_y Wᵀ, from which every quadratic form of class pairs follows:

Q_y[j, j'] = (w_j - w_j')ᵀ Σ_y (w_j - w_j') = G_y[j, j] + G_y[j', j'] - 2 G_y[j, j'].
"""

import torch
from torch import Tensor

from plsp_kernels.torch_impl.chunks import chunk_slices


def class_gram(weight: Tensor, covariance: Tensor, classes: Tensor, save_product: bool) -> tuple[Tensor, Tensor]:
    """G_y for each slot of `classes`, and T_y = W Σ_y for the backward.

    weight (l, d) float32 or float64; covariance (l, d, d), or (l, d) for diagonals; classes (U,) int64, where -1 marks
    an empty slot at the end, whose matrices are zero. Returns gram (U, l, l) and product (U, l, d); product is empty
    unless it is asked for and the covariance is full.
    """
    num_classes, num_features = weight.shape
    num_slots = classes.shape[0]
    gram = weight.new_empty(num_slots, num_classes, num_classes)
    if covariance.dim() == 2:
        _diagonal_gram(weight, covariance, classes, gram)
        return gram, weight.new_empty(0, num_classes, num_features)
    product = weight.new_empty(num_slots, num_classes, num_features)
    _weight_times_covariance(weight, covariance, classes, product)
    torch.mm(product.view(-1, num_features), weight.t(), out=gram.view(-1, num_classes))
    return gram, product if save_product else product.new_empty(0, num_classes, num_features)


def _weight_times_covariance(weight: Tensor, covariance: Tensor, classes: Tensor, product: Tensor) -> None:
    num_slots, num_classes, num_features = product.shape
    if weight.device.type != "cpu":
        # Reading the class numbers on the host would wait for the device: gather, a chunk at a time.
        for part in chunk_slices(num_slots, num_features**2, weight.dtype):
            selected = covariance[classes[part].clamp(min=0)].to(weight.dtype)
            torch.bmm(weight.expand(selected.shape[0], num_classes, num_features), selected, out=product[part])
        product.mul_((classes >= 0)[:, None, None])
        return
    numbers = classes.tolist()
    if covariance.dtype == weight.dtype and numbers == list(range(num_classes)):
        torch.bmm(weight.expand(num_slots, num_classes, num_features), covariance, out=product)
        return
    # One GEMM per class reads Σ_y where it lies; gathering the matrices first costs as much as multiplying them.
    for slot, y in enumerate(numbers):
        if y < 0:
            product[slot:].zero_()
            break
        torch.mm(weight, covariance[y].to(weight.dtype), out=product[slot])


def _diagonal_gram(weight: Tensor, covariance: Tensor, classes: Tensor, gram: Tensor) -> None:
    num_classes, num_features = weight.shape
    variances = _slot_variances(covariance, classes, weight.dtype)
    for part in chunk_slices(classes.shape[0], weight.numel(), weight.dtype):
        product = weight * variances[part, None, :]
        torch.mm(product.reshape(-1, num_features), weight.t(), out=gram[part].view(-1, num_classes))


def _slot_variances(covariance: Tensor, classes: Tensor, dtype: torch.dtype) -> Tensor:
    """The diagonal of Σ for every slot, zero for empty slots: (U, d)."""
    return covariance[classes.clamp(min=0)].to(dtype) * (classes >= 0)[:, None]


def class_gram_backward(
    grad_gram: Tensor, weight: Tensor, covariance: Tensor, classes: Tensor, product: Tensor
) -> Tensor:
    """Gradient with respect to the weight: 2 Σ_y H_y T_y, for symmetric H_y = grad_gram (U, l, l)."""
    num_classes, num_features = weight.shape
    if covariance.dim() == 3:
        # H_y is symmetric, so stacking the slots gives the sum over y as one GEMM without a transposing copy.
        return torch.mm(grad_gram.reshape(-1, num_classes).t(), product.view(-1, num_features)).mul_(2)
    variances = _slot_variances(covariance, classes, weight.dtype)
    grad_weight = torch.zeros_like(weight, memory_format=torch.contiguous_format)
    for part in chunk_slices(classes.shape[0], weight.numel(), weight.dtype):
        # weight times H per slot: (chunk, l, d)
        rows = torch.mm(grad_gram[part].reshape(-1, num_classes), weight).view(-1, num_classes, num_features)
        grad_weight += rows.mul_(variances[part, None, :]).sum(0)
    return grad_weight.mul_(2)


def gram_gradient(pair_grad: Tensor) -> Tensor:
    """From D = ∂L/∂Q (U, l, l) to the symmetric ∂L/∂G = diag(S 1) - S with S = D + Dᵀ; its rows sum to zero."""
    symmetric = pair_grad + pair_grad.mT
    row_sums = symmetric.sum(-1)
    symmetric.neg_().diagonal(dim1=1, dim2=2).add_(row_sums)
    return symmetric
