"""What the kernels of a cross-entropy share: the samples grouped by label, and the divisor of the mean.

Groups are those of `preparation.py`. The divisor is Σ_i v_{y_i} over the samples that are not ignored, with class
weights v, by default one. A class number outside 0 … l - 1 is no class.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from plsp_kernels.batch import LabeledBatch, compute_dtype
from plsp_kernels.triton_impl import tiles
from plsp_kernels.triton_impl.preparation import Groups, group_samples


class LabelGroups(NamedTuple):
    """Samples grouped by label. Integers are int32."""

    groups: Groups
    classes: Tensor  # (U,): class of each slot, -1 in unused slots, which come last
    divisor: Tensor  # (1,)


@triton.jit(do_not_specialize=["num_samples", "num_slots", "ignore_index"])
def _label_groups_kernel(
    labels_ptr,  # (N,)
    class_weight_ptr,  # (l,), or None
    slots_ptr,  # (N,)
    order_ptr,  # (N,)
    bounds_ptr,  # (U + 1,)
    classes_ptr,  # (U,)
    used_ptr,  # (1,)
    divisor_ptr,  # (1,)
    num_samples,
    num_slots,
    num_classes,
    ignore_index,
    BLOCK_N: tl.constexpr,
    BLOCK_L: tl.constexpr,
):
    DTYPE: tl.constexpr = divisor_ptr.dtype.element_ty
    # The first program groups the samples, the second one adds their weights.
    if tl.program_id(0) == 0:
        group_samples(
            labels_ptr,
            labels_ptr,  # no pseudo-labels
            slots_ptr,
            order_ptr,
            bounds_ptr,
            classes_ptr,
            used_ptr,
            num_samples,
            num_samples,
            num_slots,
            num_classes,
            BLOCK_N,
            BLOCK_L,
        )
    else:
        total = tl.zeros((BLOCK_N,), DTYPE)
        for start in range(0, num_samples, BLOCK_N):
            n = start + tl.arange(0, BLOCK_N)
            y = tl.load(labels_ptr + n, mask=n < num_samples, other=-1)
            counted = (n < num_samples) & (y != ignore_index) & (y >= 0) & (y < num_classes)
            if class_weight_ptr is None:
                total += counted.to(DTYPE)
            else:
                total += tl.load(class_weight_ptr + y, mask=counted, other=0.0).to(DTYPE)
        tl.store(divisor_ptr, tl.sum(total, 0))


def label_groups(batch: LabeledBatch) -> LabelGroups:
    """Group the samples by label."""
    num_samples, num_classes = batch.labels.shape[0], batch.weight.shape[0]
    num_slots = min(num_samples, num_classes)
    sizes = num_samples, num_samples, num_slots + 1, num_slots, 1
    slots, order, bounds, classes, used = (batch.labels.new_empty(size, dtype=torch.int32) for size in sizes)
    divisor = batch.weight.new_empty(1, dtype=compute_dtype(batch))
    tiles.launch(
        _label_groups_kernel,
        (2,),
        batch.labels.contiguous(),
        None if batch.class_weight is None else batch.class_weight.contiguous(),
        slots,
        order,
        bounds,
        classes,
        used,
        divisor,
        num_samples,
        num_slots,
        num_classes,
        batch.ignore_index,
        **tiles.group_blocks(num_classes),
    )
    return LabelGroups(Groups(slots, order, bounds), classes, divisor)
