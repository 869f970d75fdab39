"""State of the curriculum: the class that each instance was last assigned with confidence, and the thresholds τ.

    τ_j = τ0 η_j, or τ0 η_j / (2 - η_j) if convex,       η_j = σ_j / max(1, max_k σ_k)

with σ_j the number of instances assigned to class j.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from plsp_kernels.curriculum import CurriculumBatch
from plsp_kernels.triton_impl import tiles


@triton.jit
def _assignments(
    n,
    instances_ptr,  # (N,)
    prediction_ptr,  # (N,)
    confidence_ptr,  # (N,)
    candidates_ptr,  # (N, l) uint8, used only if HAS_CANDIDATES
    num_samples,
    num_instances,
    num_classes,
    stride_candidates,
    threshold,
    HAS_CANDIDATES: tl.constexpr,
):
    """Instances and predictions of the entries n, and which of these are assignments."""
    instance = tl.load(instances_ptr + n, mask=n < num_samples, other=-1)
    prediction = tl.load(prediction_ptr + n, mask=n < num_samples, other=-1)
    confidence = tl.load(confidence_ptr + n, mask=n < num_samples, other=0)
    valid = (instance >= 0) & (instance < num_instances) & (prediction >= 0) & (prediction < num_classes)
    assigns = valid & (confidence.to(threshold.dtype) >= threshold)
    if HAS_CANDIDATES:
        candidate = tl.load(candidates_ptr + n.to(tl.int64) * stride_candidates + prediction, mask=valid, other=0)
        assigns &= candidate != 0
    return instance, prediction, assigns


@triton.jit(do_not_specialize=["num_samples", "num_instances"])
def _curriculum_update_kernel(
    assigned_ptr,  # (n,)
    counts_ptr,  # (l + 1,)
    instances_ptr,  # (N,)
    prediction_ptr,  # (N,)
    confidence_ptr,  # (N,)
    candidates_ptr,  # (N, l) uint8, used only if HAS_CANDIDATES
    num_samples,
    num_instances,
    num_classes,
    stride_candidates,
    threshold: tl.float64,
    HAS_CANDIDATES: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    # Compare in the dtype of the confidence, as torch does; a bool is exact in either.
    DTYPE: tl.constexpr = tl.float64 if confidence_ptr.dtype.element_ty == tl.float64 else tl.float32
    threshold = tl.full((), threshold, DTYPE)
    first = tl.program_id(0) * BLOCK_N
    n = first + tl.arange(0, BLOCK_N)
    instance, prediction, assigns = _assignments(
        n,
        instances_ptr,
        prediction_ptr,
        confidence_ptr,
        candidates_ptr,
        num_samples,
        num_instances,
        num_classes,
        stride_candidates,
        threshold,
        HAS_CANDIDATES,
    )
    # An assignment is replaced by a later one of the same instance.
    for start in range(first, num_samples, BLOCK_N):
        later = start + tl.arange(0, BLOCK_N)
        later_instance, _, later_assigns = _assignments(
            later,
            instances_ptr,
            prediction_ptr,
            confidence_ptr,
            candidates_ptr,
            num_samples,
            num_instances,
            num_classes,
            stride_candidates,
            threshold,
            HAS_CANDIDATES,
        )
        same = (instance[:, None] == later_instance[None, :]) & later_assigns[None, :]
        assigns &= tl.max((same & (n[:, None] < later[None, :])).to(tl.int32), 1) == 0
    # One entry per instance is left, so no two programs touch the same one.
    before = tl.load(assigned_ptr + instance, mask=assigns, other=num_classes)
    tl.debug_barrier()  # several threads may read an element that one of them overwrites
    tl.store(assigned_ptr + instance, prediction, mask=assigns)
    # Atomics, because several instances may move to one class; sums of integers do not depend on their order.
    moved = assigns & (before != prediction)
    known = (before >= 0) & (before <= num_classes)  # a damaged state must not be counted outside the counts
    tl.atomic_add(counts_ptr + before, -1, mask=moved & known, sem="relaxed")
    tl.atomic_add(counts_ptr + prediction, 1, mask=moved, sem="relaxed")


@triton.jit
def _curriculum_thresholds_kernel(
    counts_ptr,  # (l + 1,)
    thresholds_ptr,  # (l,)
    num_classes,
    threshold,
    CONVEX: tl.constexpr,
    BLOCK_L: tl.constexpr,
):
    largest = tl.full((), 1, tl.int64)
    for start in range(0, num_classes, BLOCK_L):
        j = start + tl.arange(0, BLOCK_L)
        largest = tl.maximum(largest, tl.max(tl.load(counts_ptr + j, mask=j < num_classes, other=0), 0))
    for start in range(0, num_classes, BLOCK_L):
        j = start + tl.arange(0, BLOCK_L)
        count = tl.load(counts_ptr + j, mask=j < num_classes, other=0)
        progress = tl.div_rn(count.to(tl.float32), largest.to(tl.float32))
        if CONVEX:
            progress = tl.div_rn(progress, 2 - progress)
        tl.store(thresholds_ptr + j, threshold * progress, mask=j < num_classes)


def curriculum_update(batch: CurriculumBatch) -> None:
    """Update the assignments and their counts in place. Entries that name no instance or no class are ignored."""
    instances, prediction, confidence = (
        tensor.contiguous() for tensor in (batch.instances, batch.prediction, batch.confidence)
    )
    if confidence.dtype == torch.bool:
        confidence = confidence.view(torch.uint8)
    candidates = batch.candidates
    if candidates is not None:
        candidates = tiles.dense_rows(candidates).view(torch.uint8)
    blocks = tiles.assignment_blocks()
    tiles.launch(
        _curriculum_update_kernel,
        (triton.cdiv(instances.shape[0], blocks["BLOCK_N"]),),
        batch.assigned,
        batch.counts,
        instances,
        prediction,
        confidence,
        batch.counts if candidates is None else candidates,  # unused, but must not be a null pointer
        instances.shape[0],
        batch.assigned.shape[0],
        batch.counts.shape[0] - 1,
        0 if candidates is None else candidates.stride(0),
        batch.threshold,
        HAS_CANDIDATES=candidates is not None,
        **blocks,
    )


def curriculum_thresholds(counts: Tensor, threshold: float, convex: bool) -> Tensor:
    """τ (l,) in float32 from counts (l + 1,), whose last element counts the instances without a class."""
    num_classes = counts.shape[0] - 1
    thresholds = counts.new_empty(num_classes, dtype=torch.float32)
    tiles.launch(
        _curriculum_thresholds_kernel,
        (1,),
        counts,
        thresholds,
        num_classes,
        threshold,
        CONVEX=convex,
        **tiles.row_blocks(num_classes),
    )
    return thresholds
