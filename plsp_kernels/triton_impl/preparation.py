"""What the other kernels of a step share: the samples grouped by class, and the centred weight W - mean_j w_j.

The S = Bl + Bu samples are the labelled batch, of class labels[n], and the unlabelled batch, of class
pseudo_labels[n - Bl]. The distinct classes of a step take the first of its U = min(S, l) slots, in ascending order. A
counting sort orders the samples by class: the samples of slot u are order[bounds[u]:bounds[u + 1]]. A class number
outside 0 … l - 1 is no class: its sample has slot -1 and comes last.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from plsp_kernels.step import Step, compute_dtype
from plsp_kernels.triton_impl import tiles


class Groups(NamedTuple):
    """Samples grouped by slot."""

    slots: Tensor  # (S,): slot of each sample, or -1
    order: Tensor  # (S,): samples sorted by slot, stably
    bounds: Tensor  # (U + 1,): offset of each slot's samples in this order


class Prepared(NamedTuple):
    """What the kernels of a step share. Integers are int32."""

    groups: Groups
    classes: Tensor  # (U,): class of each slot, -1 in unused slots, which come last
    used: Tensor  # (1,): number of distinct classes
    centred: Tensor  # (l, d): W - mean_j w_j


@triton.jit
def _sample_classes(labels_ptr, pseudo_labels_ptr, n, num_labeled, num_samples, num_classes):
    """Class of each sample, -1 for those without one and beyond the samples."""
    label = tl.load(labels_ptr + n, mask=n < num_labeled, other=-1)
    unlabeled = (n >= num_labeled) & (n < num_samples)
    pseudo_label = tl.load(pseudo_labels_ptr + (n - num_labeled), mask=unlabeled, other=-1)
    y = tl.where(unlabeled, pseudo_label, label)
    return tl.where((y >= 0) & (y < num_classes), y, -1).to(tl.int32)


@triton.jit
def group_samples(
    labels_ptr,  # (Bl,)
    pseudo_labels_ptr,  # (Bu,)
    slots_ptr,  # (S,)
    order_ptr,  # (S,)
    bounds_ptr,  # (U + 1,)
    classes_ptr,  # (U,)
    used_ptr,  # (1,)
    num_labeled,
    num_samples,
    num_slots,
    num_classes,
    BLOCK_N: tl.constexpr,
    BLOCK_L: tl.constexpr,
):
    """The counting sort, by one program: `Groups`, the classes of the slots and their number."""
    used = tl.full((), 0, tl.int32)  # slots so far
    placed = tl.full((), 0, tl.int32)  # samples so far
    for first in range(0, num_classes, BLOCK_L):
        c = first + tl.arange(0, BLOCK_L)
        count = tl.zeros((BLOCK_L,), tl.int32)
        for start in range(0, num_samples, BLOCK_N):
            n = start + tl.arange(0, BLOCK_N)
            y = _sample_classes(labels_ptr, pseudo_labels_ptr, n, num_labeled, num_samples, num_classes)
            count += tl.sum((c[:, None] == y[None, :]).to(tl.int32), 1)
        present = (count > 0).to(tl.int32)
        if tl.sum(present, 0) > 0:
            slot = used + tl.cumsum(present, 0) - present
            place = placed + tl.cumsum(count, 0) - count
            tl.store(classes_ptr + slot, c, mask=count > 0)
            tl.store(bounds_ptr + slot, place, mask=count > 0)
            for start in range(0, num_samples, BLOCK_N):
                n = start + tl.arange(0, BLOCK_N)
                y = _sample_classes(labels_ptr, pseudo_labels_ptr, n, num_labeled, num_samples, num_classes)
                member = c[:, None] == y[None, :]  # at most one class per sample
                earlier = tl.cumsum(member.to(tl.int32), 1) - member.to(tl.int32)
                tl.store(order_ptr + (place[:, None] + earlier), n[None, :] + 0 * earlier, mask=member)
                tl.store(slots_ptr + (n[None, :] + 0 * earlier), slot[:, None] + 0 * earlier, mask=member)
                place += tl.sum(member.to(tl.int32), 1)
            used += tl.sum(present, 0)
            placed += tl.sum(count, 0)
    tl.store(used_ptr, used)
    for start in range(0, num_slots + 1, BLOCK_N):
        u = start + tl.arange(0, BLOCK_N)
        tl.store(classes_ptr + u, -1, mask=(u >= used) & (u < num_slots))
        tl.store(bounds_ptr + u, placed, mask=(u >= used) & (u <= num_slots))
    for start in range(0, num_samples, BLOCK_N):
        n = start + tl.arange(0, BLOCK_N)
        y = _sample_classes(labels_ptr, pseudo_labels_ptr, n, num_labeled, num_samples, num_classes)
        lost = (y < 0) & (n < num_samples)
        tl.store(order_ptr + (placed + tl.cumsum(lost.to(tl.int32), 0) - 1), n, mask=lost)
        tl.store(slots_ptr + n, -1, mask=lost)
        placed += tl.sum(lost.to(tl.int32), 0)


@triton.jit
def _centre_columns(
    weight_ptr, centred_ptr, d, num_classes, num_features, stride_weight, BLOCK_L: tl.constexpr, BLOCK_D: tl.constexpr
):
    """Columns d of W - mean_j w_j."""
    DTYPE: tl.constexpr = centred_ptr.dtype.element_ty
    total = tl.zeros((BLOCK_D,), DTYPE)
    for start in range(0, num_classes, BLOCK_L):
        j = start + tl.arange(0, BLOCK_L)
        inside = (j[:, None] < num_classes) & (d[None, :] < num_features)
        weight = tl.load(weight_ptr + j[:, None] * stride_weight + d[None, :], mask=inside, other=0.0)
        total += tl.sum(weight.to(DTYPE), 0)
    mean = total / num_classes
    for start in range(0, num_classes, BLOCK_L):
        j = start + tl.arange(0, BLOCK_L)
        inside = (j[:, None] < num_classes) & (d[None, :] < num_features)
        weight = tl.load(weight_ptr + j[:, None] * stride_weight + d[None, :], mask=inside, other=0.0)
        tl.store(centred_ptr + j[:, None] * num_features + d[None, :], weight.to(DTYPE) - mean[None, :], mask=inside)


@triton.jit(do_not_specialize=["num_labeled", "num_samples", "num_slots"])
def _preparation_kernel(
    labels_ptr,  # (Bl,)
    pseudo_labels_ptr,  # (Bu,)
    weight_ptr,  # (l, d)
    slots_ptr,  # (S,)
    order_ptr,  # (S,)
    bounds_ptr,  # (U + 1,)
    classes_ptr,  # (U,)
    used_ptr,  # (1,)
    centred_ptr,  # (l, d)
    num_labeled,
    num_samples,
    num_slots,
    num_classes,
    num_features,
    stride_weight,
    BLOCK_N: tl.constexpr,
    BLOCK_L: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    # The first program groups the samples; every other one centres a few columns of the weight.
    if tl.program_id(0) == 0:
        group_samples(
            labels_ptr,
            pseudo_labels_ptr,
            slots_ptr,
            order_ptr,
            bounds_ptr,
            classes_ptr,
            used_ptr,
            num_labeled,
            num_samples,
            num_slots,
            num_classes,
            BLOCK_N,
            BLOCK_L,
        )
    else:
        d = (tl.program_id(0) - 1) * BLOCK_D + tl.arange(0, BLOCK_D)
        _centre_columns(weight_ptr, centred_ptr, d, num_classes, num_features, stride_weight, BLOCK_L, BLOCK_D)


def prepare(step: Step, pseudo_labels: Tensor) -> Prepared:
    """Group the samples by class and centre the weight."""
    (num_classes, num_features), weight = step.weight.shape, tiles.dense_rows(step.weight)
    num_labeled = step.labels.shape[0]
    num_samples = num_labeled + pseudo_labels.shape[0]
    num_slots = min(num_samples, num_classes)
    sizes = num_samples, num_samples, num_slots + 1, num_slots, 1
    slots, order, bounds, classes, used = (step.labels.new_empty(size, dtype=torch.int32) for size in sizes)
    centred = weight.new_empty(num_classes, num_features, dtype=compute_dtype(step))
    blocks = tiles.preparation_blocks(num_classes)
    tiles.launch(
        _preparation_kernel,
        (1 + triton.cdiv(num_features, blocks["BLOCK_D"]),),
        step.labels.contiguous(),
        pseudo_labels.contiguous(),
        weight,
        slots,
        order,
        bounds,
        classes,
        used,
        centred,
        num_labeled,
        num_samples,
        num_slots,
        num_classes,
        num_features,
        weight.stride(0),
        **blocks,
    )
    return Prepared(Groups(slots, order, bounds), classes, used, centred)
