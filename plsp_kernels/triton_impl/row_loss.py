"""The loss of every row, its gradient with respect to the log-odds, and the decisions for the unlabelled batch.

Each term is a weighted sum of -logsigmoid(±o), + for classes to raise and - for classes to suppress:

    labelled rows   supervised: the label, 1/Bl          and, with candidate sets, complementary as below
    strong rows     consistency: h_i p̂_ij / Bu, with the pseudo-targets p̂ and the mask h of the weak view
    weak rows       complementary: classes outside the candidate set, 1/Bu, or 1/(Bl + Bu) with labelled candidates

The gradient is multiplied by the weight of the term in the scalar that is differentiated: upstream (3,), or (γ, γ, 1)
for the total. A row without a class has the loss NaN.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from plsp_kernels.step import Step
from plsp_kernels.triton_impl import tiles
from plsp_kernels.triton_impl.pair import Chunk, PairResults
from plsp_kernels.triton_impl.preparation import Groups
from plsp_kernels.triton_impl.scalars import scalar, scalar_arguments


class RowLosses(NamedTuple):
    """Results of the row losses."""

    losses: Tensor  # (N,), or (N + Bl,): the complementary losses of labelled rows come last
    confidence: Tensor  # (Bu,)
    prediction: Tensor  # (Bu,)
    mask: Tensor  # (Bu,) bool


@triton.jit
def _log1p(u):
    """log(1 + u) for 0 ≤ u ≤ 1, accurate for small u: the series of 2 artanh(s) with s = u / (2 + u) ≤ 1/3."""
    s = u / (2.0 + u)
    square = s * s
    series = tl.zeros_like(u)
    if u.dtype == tl.float64:
        for n in tl.static_range(17):
            series = series * square + 2.0 / (33 - 2 * n)
    else:
        for n in tl.static_range(8):
            series = series * square + 2.0 / (15 - 2 * n)
    return s * series


@triton.jit
def weighted_loss(signed, weights):
    """-w logsigmoid(x) and its negative derivative w sigmoid(-x), exact in both tails; no loss without weight."""
    small = tl.exp(-tl.abs(signed))
    losses = tl.where(weights != 0, weights * (_log1p(small) - tl.minimum(signed, 0.0)), 0.0)
    slopes = weights * (tl.where(signed >= 0, small, 1.0) / (1.0 + small))
    return losses, slopes


@triton.jit
def _complementary_loss(log_odds, candidates_ptr, j, num_classes, count):
    """Loss and slopes of the classes outside the candidate set at the pointer, one of `count` sets."""
    candidate = tl.load(candidates_ptr + j, mask=j < num_classes, other=1) != 0
    weights = tl.where(candidate, 0.0, 1.0).to(log_odds.dtype) / count
    return weighted_loss(-log_odds, weights)


@triton.jit
def _labeled_row(
    row,
    slopes_ptr,  # (l,)
    label,
    labeled_candidates_ptr,  # (Bl, l) uint8, or None
    losses_ptr,  # (N,), or (N + Bl,)
    supervised_weight,
    complementary_weight,
    num_rows,
    num_labeled,
    num_unlabeled,
    num_classes,
    stride_labeled_candidates,
    BLOCK_L: tl.constexpr,
):
    DTYPE: tl.constexpr = slopes_ptr.dtype.element_ty
    supervised = tl.zeros((BLOCK_L,), DTYPE)
    complementary = tl.zeros((BLOCK_L,), DTYPE)
    for start in range(0, num_classes, BLOCK_L):
        j = start + tl.arange(0, BLOCK_L)
        log_odds = tl.load(slopes_ptr + j, mask=j < num_classes, other=0.0)
        weights = tl.where(j == label, 1.0, 0.0).to(DTYPE) / num_labeled
        losses, slopes = weighted_loss(log_odds, weights)
        supervised += losses
        gradient = -supervised_weight * slopes
        if labeled_candidates_ptr is not None:
            set_ptr = labeled_candidates_ptr + row * stride_labeled_candidates
            losses, slopes = _complementary_loss(log_odds, set_ptr, j, num_classes, num_labeled + num_unlabeled)
            complementary += losses
            gradient += complementary_weight * slopes
        tl.store(slopes_ptr + j, gradient, mask=j < num_classes)
    tl.store(losses_ptr + row, tl.sum(supervised, 0))
    if labeled_candidates_ptr is not None:
        tl.store(losses_ptr + num_rows + row, tl.sum(complementary, 0))


@triton.jit
def _candidate_softmax_terms(z, largest, candidate):
    """exp(z - largest) of the candidates, zero elsewhere. Candidates of equal value, even -inf, share the mass."""
    return tl.where(candidate, tl.exp(tl.where(z == largest, 0.0, z - largest)), 0.0)


@triton.jit
def _strong_row(
    row,
    instance,
    slopes_ptr,  # (l,)
    probabilities_ptr,  # (l,)
    weak_ptr,  # (l,)
    candidates_ptr,  # (l,) uint8
    thresholds_ptr,  # (l,), or None
    losses_ptr,  # (N,), or (N + Bl,)
    confidence_ptr,  # (Bu,)
    prediction_ptr,  # (Bu,)
    mask_ptr,  # (Bu,) uint8
    threshold,
    consistency_weight,
    num_unlabeled,
    num_classes,
    stride_thresholds,
    ARGMAX_IN_CANDIDATES: tl.constexpr,
    TINY: tl.constexpr,
    BLOCK_L: tl.constexpr,
):
    DTYPE: tl.constexpr = slopes_ptr.dtype.element_ty
    confidence = tl.full((), -1.0, DTYPE)
    prediction = tl.full((), 0, tl.int32)
    mass = tl.full((), 0.0, DTYPE)
    largest = tl.full((), float("-inf"), DTYPE)  # largest candidate logit
    for start in range(0, num_classes, BLOCK_L):
        j = start + tl.arange(0, BLOCK_L)
        probability = tl.load(probabilities_ptr + j, mask=j < num_classes, other=-1.0)
        candidate = tl.load(candidates_ptr + j, mask=j < num_classes, other=0) != 0
        z = tl.load(weak_ptr + j, mask=j < num_classes, other=float("-inf")).to(DTYPE)
        tile_confidence = tl.max(probability, 0)
        tile_prediction = start + tl.argmax(probability, 0)
        prediction = tl.where(tile_confidence > confidence, tile_prediction, prediction)  # ties: lowest class
        confidence = tl.maximum(confidence, tile_confidence)
        mass += tl.sum(tl.where(candidate, probability, 0.0), 0)
        largest = tl.maximum(largest, tl.max(tl.where(candidate, z, float("-inf")), 0))
    prediction = tl.minimum(prediction, num_classes - 1)  # the argmax of a tile with NaN may lie beyond the classes
    lost = mass < TINY  # all candidates underflow: fall back to the softmax of the candidate logits
    if lost:
        mass = tl.full((), 0.0, DTYPE)
        for start in range(0, num_classes, BLOCK_L):
            j = start + tl.arange(0, BLOCK_L)
            candidate = tl.load(candidates_ptr + j, mask=j < num_classes, other=0) != 0
            z = tl.load(weak_ptr + j, mask=candidate, other=0.0).to(DTYPE)
            mass += tl.sum(_candidate_softmax_terms(z, largest, candidate), 0)
    if thresholds_ptr is not None:
        threshold = tl.load(thresholds_ptr + prediction * stride_thresholds).to(DTYPE)
    chosen = confidence >= threshold
    if ARGMAX_IN_CANDIDATES:
        chosen = chosen & (tl.load(candidates_ptr + prediction) != 0)
    tl.store(confidence_ptr + instance, confidence)
    tl.store(prediction_ptr + instance, prediction.to(tl.int64))
    tl.store(mask_ptr + instance, chosen.to(tl.uint8))
    total = tl.zeros((BLOCK_L,), DTYPE)
    for start in range(0, num_classes, BLOCK_L):
        j = start + tl.arange(0, BLOCK_L)
        candidate = tl.load(candidates_ptr + j, mask=j < num_classes, other=0) != 0
        probability = tl.load(probabilities_ptr + j, mask=j < num_classes, other=0.0)
        z = tl.load(weak_ptr + j, mask=j < num_classes, other=0.0).to(DTYPE)
        targets = tl.where(lost, _candidate_softmax_terms(z, largest, candidate), probability) / mass
        weights = tl.where(candidate, tl.where(chosen, targets / num_unlabeled, 0.0), 0.0)
        log_odds = tl.load(slopes_ptr + j, mask=j < num_classes, other=0.0)
        losses, slopes = weighted_loss(log_odds, weights)
        total += losses
        tl.store(slopes_ptr + j, -consistency_weight * slopes, mask=j < num_classes)
    tl.store(losses_ptr + row, tl.sum(total, 0))


@triton.jit
def _weak_row(
    row,
    slopes_ptr,  # (l,)
    candidates_ptr,  # (l,) uint8
    losses_ptr,  # (N,), or (N + Bl,)
    complementary_weight,
    num_sets,
    num_classes,
    BLOCK_L: tl.constexpr,
):
    total = tl.zeros((BLOCK_L,), slopes_ptr.dtype.element_ty)
    for start in range(0, num_classes, BLOCK_L):
        j = start + tl.arange(0, BLOCK_L)
        log_odds = tl.load(slopes_ptr + j, mask=j < num_classes, other=0.0)
        losses, slopes = _complementary_loss(log_odds, candidates_ptr, j, num_classes, num_sets)
        total += losses
        tl.store(slopes_ptr + j, complementary_weight * slopes, mask=j < num_classes)
    tl.store(losses_ptr + row, tl.sum(total, 0))


@triton.jit(do_not_specialize=["first_slot", "num_slots", "num_labeled", "num_unlabeled"])
def _row_loss_kernel(
    slopes_ptr,  # (N, l): in, the log-odds; out, their gradient
    probabilities_ptr,  # (Bu, l)
    weak_ptr,  # (Bu, l)
    labels_ptr,  # (Bl,)
    candidates_ptr,  # (Bu, l) uint8
    labeled_candidates_ptr,  # (Bl, l) uint8, or None
    slots_ptr,  # (S,)
    upstream_ptr,  # (3,), or None
    losses_ptr,  # (N,), or (N + Bl,)
    confidence_ptr,  # (Bu,)
    prediction_ptr,  # (Bu,)
    mask_ptr,  # (Bu,) uint8
    first_slot,
    num_slots,
    num_labeled,
    num_unlabeled,
    num_classes,
    stride_weak,
    stride_candidates,
    stride_labeled_candidates,
    stride_upstream,
    threshold: tl.float64,
    thresholds_ptr,  # (l,), or None
    stride_thresholds,
    ss_weight: tl.float64,
    ss_weight_ptr,  # (), or None
    ARGMAX_IN_CANDIDATES: tl.constexpr,
    TINY: tl.constexpr,
    BLOCK_L: tl.constexpr,
):
    DTYPE: tl.constexpr = slopes_ptr.dtype.element_ty
    row = tl.program_id(0).to(tl.int64)
    num_rows = num_labeled + 2 * num_unlabeled
    weak = num_labeled + num_unlabeled
    slot = tl.load(slots_ptr + tl.where(row < weak, row, row - num_unlabeled))
    slopes_ptr += row * num_classes
    instance = tl.where(row < weak, row, row - num_unlabeled) - num_labeled
    if upstream_ptr is not None:
        supervised_weight = tl.load(upstream_ptr).to(DTYPE)
        consistency_weight = tl.load(upstream_ptr + stride_upstream).to(DTYPE)
        complementary_weight = tl.load(upstream_ptr + 2 * stride_upstream).to(DTYPE)
    else:
        supervised_weight = scalar(ss_weight, ss_weight_ptr).to(DTYPE)
        consistency_weight = supervised_weight
        complementary_weight = tl.full((), 1.0, DTYPE)
    num_sets = num_unlabeled
    if labeled_candidates_ptr is not None:
        num_sets += num_labeled
    if (slot >= first_slot) & (slot < first_slot + num_slots):
        if row < num_labeled:
            _labeled_row(
                row,
                slopes_ptr,
                tl.load(labels_ptr + row),
                labeled_candidates_ptr,
                losses_ptr,
                supervised_weight,
                complementary_weight,
                num_rows,
                num_labeled,
                num_unlabeled,
                num_classes,
                stride_labeled_candidates,
                BLOCK_L,
            )
        elif row < weak:
            _strong_row(
                row,
                instance,
                slopes_ptr,
                probabilities_ptr + instance * num_classes,
                weak_ptr + instance * stride_weak,
                candidates_ptr + instance * stride_candidates,
                thresholds_ptr,
                losses_ptr,
                confidence_ptr,
                prediction_ptr,
                mask_ptr,
                tl.full((), threshold, DTYPE),
                consistency_weight,
                num_unlabeled,
                num_classes,
                stride_thresholds,
                ARGMAX_IN_CANDIDATES,
                TINY,
                BLOCK_L,
            )
        else:
            _weak_row(
                row,
                slopes_ptr,
                candidates_ptr + instance * stride_candidates,
                losses_ptr,
                complementary_weight,
                num_sets,
                num_classes,
                BLOCK_L,
            )
    elif (slot < 0) & (first_slot == 0):  # no class
        tl.store(losses_ptr + row, float("nan"))
        if row < num_labeled:
            if labeled_candidates_ptr is not None:
                tl.store(losses_ptr + num_rows + row, float("nan"))
        elif row < weak:
            tl.store(confidence_ptr + instance, float("nan"))
            tl.store(prediction_ptr + instance, 0)
            tl.store(mask_ptr + instance, 0)


def new_row_losses(step: Step, like: Tensor) -> RowLosses:
    """Allocate the results in the dtype of `like`."""
    num_labeled, num_unlabeled = step.labels.shape[0], step.candidates.shape[0]
    num_rows = num_labeled + 2 * num_unlabeled
    return RowLosses(
        losses=like.new_empty(num_rows if step.labeled_candidates is None else num_rows + num_labeled),
        confidence=like.new_empty(num_unlabeled),
        prediction=step.labels.new_empty(num_unlabeled),
        mask=step.candidates.new_empty(num_unlabeled),
    )


def row_losses(
    step: Step, upstream: Tensor | None, groups: Groups, chunk: Chunk, pairs: PairResults, results: RowLosses
) -> None:
    """Write the results of the rows whose slot is in the chunk, and replace their log-odds by the gradient.

    The chunk of the first slot also serves rows without a class.
    """
    num_classes = pairs.log_odds.shape[1]
    weak, candidates = tiles.dense_rows(step.weak_logits), tiles.dense_rows(step.candidates).view(torch.uint8)
    labeled_candidates = step.labeled_candidates
    if labeled_candidates is not None:
        labeled_candidates = tiles.dense_rows(labeled_candidates).view(torch.uint8)
    if step.thresholds.dim() == 0:
        thresholds = *scalar_arguments(step.thresholds), 0
    else:
        thresholds = 0.0, step.thresholds, step.thresholds.stride(0)
    tiles.launch(
        _row_loss_kernel,
        (pairs.log_odds.shape[0],),
        pairs.log_odds,
        pairs.probabilities,
        weak,
        step.labels.contiguous(),
        candidates,
        labeled_candidates,
        groups.slots,
        upstream,
        *results[:3],
        results.mask.view(torch.uint8),
        chunk.first_slot,
        chunk.gram.shape[0],
        step.labels.shape[0],
        step.candidates.shape[0],
        num_classes,
        weak.stride(0),
        candidates.stride(0),
        labeled_candidates.stride(0) if labeled_candidates is not None else 0,
        upstream.stride(0) if upstream is not None else 0,
        *thresholds,
        *scalar_arguments(step.ss_weight),
        ARGMAX_IN_CANDIDATES=step.argmax_in_candidates,
        TINY=torch.finfo(pairs.log_odds.dtype).tiny,
        **tiles.row_blocks(num_classes),
    )
