"""Running class statistics, equation (17), updated in place.

With m old members of mean μ, m' new members f_i of mean μ', and M = m + m',

    Σ ← Σ + (S - m' Σ) / M,    S = Σ_i (f_i - μ')(f_i - μ')ᵀ + (m m'/M) (μ' - μ)(μ' - μ)ᵀ,    μ ← μ + (m'/M) (μ' - μ).

A slot is a class if the batch has at least l samples, otherwise a sample, whose class it updates unless an earlier
sample has the same. Labels that are no class belong to no slot. The first kernel leaves out samples that are not finite
and updates means and counts, and the variances if the covariance is diagonal. The second updates tiles of full
matrices: each Σ_y is written once, and half of it is read.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from plsp_kernels.triton_impl import tiles


@triton.jit
def _class_of_slot(labels_ptr, slot, num_samples, num_classes, BLOCK_N: tl.constexpr):
    """Class of the slot, and the number of its samples: 0 if the slot has no class to update."""
    per_class = num_samples >= num_classes
    y = tl.where(per_class, slot, tl.load(labels_ptr + slot))
    samples = tl.full((), 0, tl.int32)
    earlier = tl.full((), 0, tl.int32)
    for start in range(0, num_samples, BLOCK_N):
        n = start + tl.arange(0, BLOCK_N)
        of_class = tl.load(labels_ptr + n, mask=n < num_samples, other=-1) == y
        samples += tl.sum(of_class.to(tl.int32), 0)
        earlier += tl.sum((of_class & (n < slot)).to(tl.int32), 0)
    return y, tl.where((y >= 0) & (y < num_classes) & (per_class | (earlier == 0)), samples, 0)


@triton.jit
def _is_member(labels_ptr, finite_ptr, y, n, num_samples):
    """Whether the samples n are finite ones of class y."""
    of_class = tl.load(labels_ptr + n, mask=n < num_samples, other=-1) == y
    return tl.load(finite_ptr + n, mask=of_class, other=0) != 0


@triton.jit(do_not_specialize=["num_samples"])
def _mean_update_kernel(
    variance_ptr,  # (l, d), used only if DIAGONAL
    mean_ptr,  # (l, d)
    count_ptr,  # (l,)
    skipped_ptr,  # (l,)
    batch_mean_ptr,  # (U, d) scratch, unused if DIAGONAL: μ'
    shift_ptr,  # (U, d) scratch, unused if DIAGONAL: μ' - μ
    members_ptr,  # (U,) scratch: m'
    finite_ptr,  # (N,) scratch, written for samples whose label is a class
    features_ptr,  # (N, d)
    labels_ptr,  # (N,)
    num_samples,
    num_classes,
    num_features,
    stride_features,
    DIAGONAL: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    DTYPE: tl.constexpr = mean_ptr.dtype.element_ty
    slot = tl.program_id(0).to(tl.int64)
    y, samples = _class_of_slot(labels_ptr, slot, num_samples, num_classes, BLOCK_N)
    members = tl.full((), 0, tl.int32)
    if samples > 0:
        for start in range(0, num_samples, BLOCK_N):
            n = start + tl.arange(0, BLOCK_N)
            of_class = tl.load(labels_ptr + n, mask=n < num_samples, other=-1) == y
            zero = tl.zeros((BLOCK_N,), DTYPE)
            rows_ptr = features_ptr + n.to(tl.int64)[:, None] * stride_features
            for first in range(0, num_features, BLOCK_D):
                d = first + tl.arange(0, BLOCK_D)
                wanted = of_class[:, None] & (d[None, :] < num_features)
                rows = tl.load(rows_ptr + d[None, :], mask=wanted, other=0.0).to(DTYPE)
                zero += tl.sum(rows - rows, 1)  # NaN if a value is not finite
            finite = (of_class & (zero == 0.0)).to(tl.int32)
            tl.store(finite_ptr + n, finite.to(tl.int64), mask=of_class)
            members += tl.sum(finite, 0)
        skipped = tl.load(skipped_ptr + y)
        tl.debug_barrier()  # threads read what others have written, and all have read what one of them overwrites
        tl.store(skipped_ptr + y, skipped + (samples - members))
    tl.store(members_ptr + slot, members)
    if members == 0:
        return
    count = tl.load(count_ptr + y)
    old = count.to(DTYPE)
    new = members.to(DTYPE)
    total = old + new
    for first in range(0, num_features, BLOCK_D):
        d = first + tl.arange(0, BLOCK_D)
        inside = d < num_features
        batch_mean = tl.zeros((BLOCK_D,), DTYPE)
        for start in range(0, num_samples, BLOCK_N):
            n = start + tl.arange(0, BLOCK_N)
            member = _is_member(labels_ptr, finite_ptr, y, n, num_samples)[:, None]
            rows_ptr = features_ptr + n.to(tl.int64)[:, None] * stride_features
            batch_mean += tl.sum(tl.load(rows_ptr + d[None, :], mask=member & inside[None, :], other=0.0).to(DTYPE), 0)
        batch_mean /= new
        mean = tl.load(mean_ptr + y * num_features + d, mask=inside, other=0.0)
        shift = batch_mean - mean
        if DIAGONAL:
            squares = (old * new / total) * shift * shift
            for start in range(0, num_samples, BLOCK_N):
                n = start + tl.arange(0, BLOCK_N)
                member = _is_member(labels_ptr, finite_ptr, y, n, num_samples)[:, None]
                rows_ptr = features_ptr + n.to(tl.int64)[:, None] * stride_features
                rows = tl.load(rows_ptr + d[None, :], mask=member & inside[None, :], other=0.0).to(DTYPE)
                centred = tl.where(member, rows - batch_mean[None, :], 0.0)
                squares += tl.sum(centred * centred, 0)
            variance = tl.load(variance_ptr + y * num_features + d, mask=inside, other=0.0)
            variance += (squares - new * variance) / total
            tl.debug_barrier()  # several threads may read an element that one of them overwrites
            tl.store(variance_ptr + y * num_features + d, variance, mask=inside)
        else:
            tl.store(batch_mean_ptr + slot * num_features + d, batch_mean, mask=inside)
            tl.store(shift_ptr + slot * num_features + d, shift, mask=inside)
        tl.debug_barrier()
        tl.store(mean_ptr + y * num_features + d, mean + (new / total) * shift, mask=inside)
    tl.debug_barrier()
    tl.store(count_ptr + y, count + members)


@triton.jit(do_not_specialize=["num_samples"])
def _covariance_update_kernel(
    covariance_ptr,  # (l, d, d), symmetric
    count_ptr,  # (l,), with the members of this batch
    batch_mean_ptr,  # (U, d): μ'
    shift_ptr,  # (U, d): μ' - μ
    members_ptr,  # (U,): m'
    finite_ptr,  # (N,)
    features_ptr,  # (N, d)
    labels_ptr,  # (N,)
    num_samples,
    num_classes,
    num_features,
    stride_features,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    DTYPE: tl.constexpr = covariance_ptr.dtype.element_ty
    # Σ is symmetric: compute only tiles on and above the diagonal.
    if tl.program_id(1) > tl.program_id(2):
        return
    slot = tl.program_id(0).to(tl.int64)
    members = tl.load(members_ptr + slot)
    if members == 0:
        return
    y = tl.where(num_samples >= num_classes, slot, tl.load(labels_ptr + slot))
    a = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    b = tl.program_id(2) * BLOCK_D + tl.arange(0, BLOCK_D)
    count = tl.load(count_ptr + y)
    total = count.to(DTYPE)
    old = (count - members).to(DTYPE)
    new = members.to(DTYPE)

    mean_a = tl.load(batch_mean_ptr + slot * num_features + a, mask=a < num_features, other=0.0)
    mean_b = tl.load(batch_mean_ptr + slot * num_features + b, mask=b < num_features, other=0.0)
    shift_a = tl.load(shift_ptr + slot * num_features + a, mask=a < num_features, other=0.0)
    shift_b = tl.load(shift_ptr + slot * num_features + b, mask=b < num_features, other=0.0)
    outer = (old * new / total) * shift_a[:, None] * shift_b[None, :]
    for start in range(0, num_samples, BLOCK_N):
        n = start + tl.arange(0, BLOCK_N)
        is_member = _is_member(labels_ptr, finite_ptr, y, n, num_samples)
        if tl.max(is_member.to(tl.int32), 0) > 0:
            member = is_member[:, None]
            rows_ptr = features_ptr + n.to(tl.int64)[:, None] * stride_features
            rows_a = tl.load(rows_ptr + a[None, :], mask=member & (a[None, :] < num_features), other=0.0).to(DTYPE)
            rows_b = tl.load(rows_ptr + b[None, :], mask=member & (b[None, :] < num_features), other=0.0).to(DTYPE)
            centred_a = tl.where(member, rows_a - mean_a[None, :], 0.0)
            centred_b = tl.where(member, rows_b - mean_b[None, :], 0.0)
            # IEEE: the product is small beside the traffic of Σ, and its rounding would stay in the statistics.
            outer = tl.dot(tl.trans(centred_a), centred_b, outer, input_precision="ieee", out_dtype=DTYPE)

    # Store above the diagonal and mirror it below; every element has one writer.
    covariance_ptr += y * num_features * num_features
    above = (a[:, None] <= b[None, :]) & (b[None, :] < num_features)
    covariance = tl.load(covariance_ptr + a[:, None] * num_features + b[None, :], mask=above, other=0.0)
    covariance += (outer - new * covariance) / total
    tl.store(covariance_ptr + a[:, None] * num_features + b[None, :], covariance, mask=above)
    below = above & (a[:, None] != b[None, :])
    tl.store(covariance_ptr + b[None, :] * num_features + a[:, None], covariance, mask=below)


def covariance_update(
    covariance: Tensor, mean: Tensor, count: Tensor, skipped: Tensor, features: Tensor, labels: Tensor
) -> None:
    """Update Σ (l, d, d) or (l, d), μ (l, d), m (l,) and skipped (l,) in place with features (N, d) and labels (N,)."""
    (num_classes, num_features), num_samples = mean.shape, labels.shape[0]
    state = covariance, mean, count, skipped
    if not all(tensor.is_contiguous() for tensor in state):
        raise ValueError("covariance, mean, count and skipped must be contiguous, because they are updated in place")
    features = tiles.dense_rows(tiles.dot_operand(features, mean.dtype))
    diagonal, num_slots = covariance.dim() == 2, min(num_samples, num_classes)
    batch_mean, shift = mean.new_empty((2, 0 if diagonal else num_slots, num_features))
    members = labels.new_empty(num_slots, dtype=torch.int32)
    # Triton derives the layout of a product's operands from the narrowest load before it: as wide as float64.
    finite = labels.new_empty(num_samples, dtype=torch.int64)
    scratch = batch_mean, shift, members, finite
    batch = features, labels.contiguous(), num_samples, num_classes, num_features, features.stride(0)
    blocks = tiles.mean_blocks(num_features, mean.device)
    tiles.launch(_mean_update_kernel, (num_slots,), *state, *scratch, *batch, DIAGONAL=diagonal, **blocks)
    if not diagonal:
        blocks = tiles.covariance_blocks(num_features, mean.dtype)
        num_tiles = triton.cdiv(num_features, blocks["BLOCK_D"])
        grid = num_slots, num_tiles, num_tiles
        tiles.launch(_covariance_update_kernel, grid, covariance, count, *scratch, *batch, **blocks)
    # Autograd does not see writes of kernels: bump the version counters, which inference tensors do not have.
    torch.autograd.graph.increment_version([tensor for tensor in state if not tensor.is_inference()])
