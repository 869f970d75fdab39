"""Class Gram matrices G_y = W Σ_y Wᵀ, from which every quadratic form of class pairs follows (`quadratic.py`)."""

import torch
from torch import Tensor

from plsp_kernels.torch_impl.chunks import chunk_slices

_BLOCK_ROWS = 256  # rows of G in one product
_GATHERED_FEATURES = 128  # up to this many, copying Σ_y is cheaper than an operator call for each class


def class_gram(weight: Tensor, covariance: Tensor, classes: Tensor, save_product: bool) -> tuple[Tensor, Tensor]:
    """Compute G_y for each slot of `classes`, and T_y = W Σ_y for the backward.

    weight (l, d) float32 or float64; covariance (l, d, d), or (l, d) for diagonals; classes (U,) int64, where -1 marks
    an unused slot at the end, whose matrices are zero. Returns gram (U, l, l) and product (U, l, d); product is empty
    unless save_product is set and the covariance is full.
    """
    (num_classes, num_features), num_slots = weight.shape, classes.shape[0]
    gram = weight.new_empty(num_slots, num_classes, num_classes)
    if covariance.dim() == 3:
        product = weight.new_empty(num_slots, num_classes, num_features)
        write_class_gram(weight, covariance, classes, gram, product)
        return gram, product if save_product else product.new_empty(0, num_classes, num_features)
    for part in chunk_slices(num_slots, weight.numel(), weight.dtype):
        product = weight.new_empty(part.stop - part.start, num_classes, num_features)
        write_class_gram(weight, covariance, classes[part], gram[part], product)
    return gram, weight.new_empty(0, num_classes, num_features)


def write_class_gram(weight: Tensor, covariance: Tensor, classes: Tensor, gram: Tensor, product: Tensor) -> None:
    """Write G_y to gram (U, l, l) and T_y to product (U, l, d)."""
    if covariance.dim() == 3:
        _weight_times_covariance(weight, covariance, classes, product)
    else:
        torch.mul(weight, _slot_variances(covariance, classes, weight.dtype)[:, None, :], out=product)
    num_slots, num_classes, num_features = product.shape
    if num_classes < 2 * _BLOCK_ROWS:
        torch.mm(product.view(-1, num_features), weight.t(), out=gram.view(-1, num_classes))
        return
    # G is symmetric: a block of rows needs only the columns up to its end, and the others are copied.
    for slot in range(num_slots):
        for start in range(0, num_classes, _BLOCK_ROWS):
            stop = min(start + _BLOCK_ROWS, num_classes)
            torch.mm(product[slot, start:stop], weight[:stop].t(), out=gram[slot, start:stop, :stop])
            gram[slot, :start, start:stop] = gram[slot, start:stop, :start].t()


def _weight_times_covariance(weight: Tensor, covariance: Tensor, classes: Tensor, product: Tensor) -> None:
    num_slots, num_classes, num_features = product.shape
    if weight.device.type != "cpu" or num_features <= _GATHERED_FEATURES:
        # Gather Σ, one chunk at a time. On other devices, reading the class numbers would need a host sync.
        for part in chunk_slices(num_slots, num_features**2, weight.dtype):
            selected = covariance[classes[part].clamp(min=0)].to(weight.dtype)
            torch.bmm(weight.expand(selected.shape[0], num_classes, num_features), selected, out=product[part])
        product.masked_fill_((classes < 0)[:, None, None], 0)
        return
    numbers = classes.tolist()
    if covariance.dtype == weight.dtype and numbers == list(range(num_classes)):
        torch.bmm(weight.expand(num_slots, num_classes, num_features), covariance, out=product)
        return
    # One GEMM per class reads Σ_y in place; gathering the matrices first would cost as much as multiplying them.
    for slot, y in enumerate(numbers):
        if y < 0:
            product[slot:].zero_()
            break
        torch.mm(weight, covariance[y].to(weight.dtype), out=product[slot])


def _slot_variances(covariance: Tensor, classes: Tensor, dtype: torch.dtype) -> Tensor:
    """Diagonal of Σ for every slot, zero for unused slots: (U, d)."""
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
