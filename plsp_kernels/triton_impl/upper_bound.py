"""The loss of one step: all pair work in one kernel, losses and their gradients in a second, sums in a third."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from plsp_kernels.triton_impl import tiles
from plsp_kernels.triton_impl.log_odds import (
    add_to_log_sum,
    gram_tile,
    log_odds_backward,
    log_odds_tile,
    pair_exponents,
)
from plsp_kernels.triton_impl.probit import probit_constants, probit_ratios


@triton.jit
def _pair_kernel(
    rows_ptr,  # (N, l): labelled, strong, weak, labelled again
    gram_ptr,  # (U, l, l)
    slots_ptr,  # (N,)
    odds_ptr,  # (N, l)
    probabilities_ptr,  # (Bu, l)
    num_labeled,
    num_unlabeled,
    num_classes,
    stride_rows,
    strength: tl.float64,
    spread: tl.float64,
    scale: tl.float64,
    BLOCK_J: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    DTYPE: tl.constexpr = odds_ptr.dtype.element_ty
    strength = tl.full((), strength, DTYPE)
    spread = tl.full((), spread, DTYPE)
    scale = tl.full((), scale, DTYPE)
    j = tl.program_id(1) * BLOCK_J + tl.arange(0, BLOCK_J)
    # The first Bu programs take an unlabelled instance each, both views at once; the others one labelled row each.
    program = tl.program_id(0).to(tl.int64)
    if program < num_unlabeled:
        strong = num_labeled + program
        weak = strong + num_unlabeled
        gram_ptr += tl.load(slots_ptr + strong).to(tl.int64) * num_classes * num_classes
        half_strength = 0.5 * strength
        weak_j = tl.load(rows_ptr + weak * stride_rows + j, mask=j < num_classes, other=0.0).to(DTYPE)
        strong_j = tl.load(rows_ptr + strong * stride_rows + j, mask=j < num_classes, other=0.0).to(DTYPE)
        diagonal_j = tl.load(gram_ptr + j * (num_classes + 1), mask=j < num_classes, other=0.0).to(DTYPE)
        weak_largest = tl.full((BLOCK_J,), float("-inf"), DTYPE)
        strong_largest = tl.full((BLOCK_J,), float("-inf"), DTYPE)
        weak_total = tl.zeros((BLOCK_J,), DTYPE)
        strong_total = tl.zeros((BLOCK_J,), DTYPE)
        ratio_total = tl.full((BLOCK_J,), 1.0, DTYPE)
        for start in range(0, num_classes, BLOCK_K):
            k = start + tl.arange(0, BLOCK_K)
            inside = k < num_classes
            weak_k = tl.load(rows_ptr + weak * stride_rows + k, mask=inside, other=float("-inf")).to(DTYPE)
            strong_k = tl.load(rows_ptr + strong * stride_rows + k, mask=inside, other=float("-inf")).to(DTYPE)
            diagonal_k = tl.load(gram_ptr + k * (num_classes + 1), mask=inside, other=0.0).to(DTYPE)
            gram = gram_tile(gram_ptr, j, k, num_classes, DTYPE)
            shifted = weak_k + half_strength * diagonal_k
            exponents = pair_exponents(shifted, gram, j, k, strength)
            weak_largest, weak_total = add_to_log_sum(weak_largest, weak_total, exponents)
            shifted = strong_k + half_strength * diagonal_k
            exponents = pair_exponents(shifted, gram, j, k, strength)
            strong_largest, strong_total = add_to_log_sum(strong_largest, strong_total, exponents)
            ratios = probit_ratios(weak_j, weak_k, gram, diagonal_j, diagonal_k, j, k, num_classes, spread, scale)
            ratio_total += tl.sum(ratios, 1)
        own = half_strength * diagonal_j
        weak_odds = weak_j - (weak_largest + tl.log(weak_total) + own)
        strong_odds = strong_j - (strong_largest + tl.log(strong_total) + own)
        tl.store(odds_ptr + weak * num_classes + j, weak_odds, mask=j < num_classes)
        tl.store(odds_ptr + strong * num_classes + j, strong_odds, mask=j < num_classes)
        tl.store(probabilities_ptr + program * num_classes + j, 1.0 / ratio_total, mask=j < num_classes)
    else:
        labeled = program - num_unlabeled
        row = tl.where(labeled < num_labeled, labeled, labeled + 2 * num_unlabeled)
        gram_ptr += tl.load(slots_ptr + row).to(tl.int64) * num_classes * num_classes
        odds = log_odds_tile(rows_ptr + row * stride_rows, gram_ptr, j, num_classes, strength, DTYPE, BLOCK_J, BLOCK_K)
        tl.store(odds_ptr + row * num_classes + j, odds, mask=j < num_classes)


@triton.jit
def _log1p(u):
    """log(1 + u) for 0 ≤ u ≤ 1, accurate for small u too: 2 artanh(s) with s = u / (2 + u) ≤ 1/3, by its series."""
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
def _weighted_loss(signed, weights):
    """-w logsigmoid(x) and w sigmoid(-x), what the loss decreases by when x grows; exact in both tails."""
    small = tl.exp(-tl.abs(signed))
    losses = weights * (_log1p(small) - tl.minimum(signed, 0.0))
    slopes = weights * (tl.where(signed >= 0, small, 1.0) / (1.0 + small))
    return losses, slopes


@triton.jit
def _row_loss_kernel(
    rows_ptr,  # (N, l)
    odds_ptr,  # (N, l)
    probabilities_ptr,  # (Bu, l)
    labels_ptr,  # (Bl,)
    candidates_ptr,  # (Bu, l) uint8, and (Bl, l) more below if the labelled batch joins the complementary term
    thresholds_ptr,  # (l,)
    losses_ptr,  # (N,)
    grad_odds_ptr,  # (N, l)
    confidence_ptr,  # (Bu,)
    prediction_ptr,  # (Bu,)
    mask_ptr,  # (Bu,) uint8
    num_rows,
    num_labeled,
    num_unlabeled,
    num_classes,
    stride_rows,
    stride_candidates,
    ARGMAX_IN_CANDIDATES: tl.constexpr,
    TINY: tl.constexpr,
    BLOCK_L: tl.constexpr,
):
    DTYPE: tl.constexpr = odds_ptr.dtype.element_ty
    row = tl.program_id(0).to(tl.int64)
    weak = num_labeled + num_unlabeled
    odds_ptr += row * num_classes
    grad_odds_ptr += row * num_classes
    total = tl.zeros((BLOCK_L,), DTYPE)
    if row < num_labeled:  # supervised: the label should win
        label = tl.load(labels_ptr + row)
        for start in range(0, num_classes, BLOCK_L):
            j = start + tl.arange(0, BLOCK_L)
            odds = tl.load(odds_ptr + j, mask=j < num_classes, other=0.0)
            weights = tl.where(j == label, 1.0, 0.0).to(DTYPE) / num_labeled
            losses, slopes = _weighted_loss(odds, weights)
            total += losses
            tl.store(grad_odds_ptr + j, -slopes, mask=j < num_classes)
    elif row < weak:  # consistency: the pseudo-targets of the weak view should win in the strong view
        instance = row - num_labeled
        weak_ptr = rows_ptr + (row + num_unlabeled) * stride_rows
        candidates_ptr += instance * stride_candidates
        probabilities_ptr += instance * num_classes
        confidence = tl.full((), -1.0, DTYPE)
        prediction = tl.full((), 0, tl.int32)
        mass = tl.full((), 0.0, DTYPE)
        largest = tl.full((), float("-inf"), DTYPE)  # candidate logit
        for start in range(0, num_classes, BLOCK_L):
            j = start + tl.arange(0, BLOCK_L)
            probability = tl.load(probabilities_ptr + j, mask=j < num_classes, other=-1.0)
            candidate = tl.load(candidates_ptr + j, mask=j < num_classes, other=0) != 0
            z = tl.load(weak_ptr + j, mask=j < num_classes, other=float("-inf")).to(DTYPE)
            tile_confidence = tl.max(probability, 0)
            tile_prediction = start + tl.argmax(probability, 0)
            prediction = tl.where(tile_confidence > confidence, tile_prediction, prediction)  # ties: the lowest
            confidence = tl.maximum(confidence, tile_confidence)
            mass += tl.sum(tl.where(candidate, probability, 0.0), 0)
            largest = tl.maximum(largest, tl.max(tl.where(candidate, z, float("-inf")), 0))
        lost = mass < TINY  # every candidate's probability underflows: the candidate softmax takes its place
        if lost:
            mass = tl.full((), 0.0, DTYPE)
            for start in range(0, num_classes, BLOCK_L):
                j = start + tl.arange(0, BLOCK_L)
                candidate = tl.load(candidates_ptr + j, mask=j < num_classes, other=0) != 0
                z = tl.load(weak_ptr + j, mask=candidate, other=0.0).to(DTYPE)
                mass += tl.sum(tl.where(candidate, tl.exp(z - largest), 0.0), 0)
        chosen = confidence >= tl.load(thresholds_ptr + prediction)
        if ARGMAX_IN_CANDIDATES:
            chosen = chosen & (tl.load(candidates_ptr + prediction) != 0)
        tl.store(confidence_ptr + instance, confidence)
        tl.store(prediction_ptr + instance, prediction.to(tl.int64))
        tl.store(mask_ptr + instance, chosen.to(tl.uint8))
        share = chosen.to(DTYPE) / num_unlabeled
        for start in range(0, num_classes, BLOCK_L):
            j = start + tl.arange(0, BLOCK_L)
            candidate = tl.load(candidates_ptr + j, mask=j < num_classes, other=0) != 0
            probability = tl.load(probabilities_ptr + j, mask=j < num_classes, other=0.0)
            z = tl.load(weak_ptr + j, mask=j < num_classes, other=0.0).to(DTYPE)
            targets = tl.where(lost, tl.exp(tl.minimum(z - largest, 0.0)), probability) / mass
            weights = tl.where(candidate, targets * share, 0.0)
            odds = tl.load(odds_ptr + j, mask=j < num_classes, other=0.0)
            losses, slopes = _weighted_loss(odds, weights)
            total += losses
            tl.store(grad_odds_ptr + j, -slopes, mask=j < num_classes)
    else:  # complementary: no label outside the candidates should win
        candidates_ptr += (row - weak) * stride_candidates
        for start in range(0, num_classes, BLOCK_L):
            j = start + tl.arange(0, BLOCK_L)
            candidate = tl.load(candidates_ptr + j, mask=j < num_classes, other=1) != 0
            odds = tl.load(odds_ptr + j, mask=j < num_classes, other=0.0)
            weights = tl.where(candidate, 0.0, 1.0).to(DTYPE) / (num_rows - weak)
            losses, slopes = _weighted_loss(-odds, weights)
            total += losses
            tl.store(grad_odds_ptr + j, slopes, mask=j < num_classes)
    tl.store(losses_ptr + row, tl.sum(total, 0))


@triton.jit
def _sum_of_rows(losses_ptr, first, last, BLOCK_N: tl.constexpr):
    total = tl.zeros((BLOCK_N,), losses_ptr.dtype.element_ty)
    for start in range(first, last, BLOCK_N):
        n = start + tl.arange(0, BLOCK_N)
        total += tl.load(losses_ptr + n, mask=n < last, other=0.0)
    return tl.sum(total, 0)


@triton.jit
def _terms_kernel(
    losses_ptr,  # (N,)
    terms_ptr,  # (4,): total, supervised, consistency, complementary
    num_rows,
    num_labeled,
    num_unlabeled,
    ss_weight: tl.float64,
    BLOCK_N: tl.constexpr,
):
    weak = num_labeled + num_unlabeled
    supervised = _sum_of_rows(losses_ptr, 0, num_labeled, BLOCK_N)
    consistency = _sum_of_rows(losses_ptr, num_labeled, weak, BLOCK_N)
    complementary = _sum_of_rows(losses_ptr, weak, num_rows, BLOCK_N)
    weight = tl.full((), ss_weight, terms_ptr.dtype.element_ty)
    tl.store(terms_ptr, weight * (supervised + consistency) + complementary)
    tl.store(terms_ptr + 1, supervised)
    tl.store(terms_ptr + 2, consistency)
    tl.store(terms_ptr + 3, complementary)


def upper_bound(
    rows: Tensor,
    gram: Tensor,
    slots: Tensor,
    labels: Tensor,
    candidates: Tensor,
    labeled_candidates: Tensor | None,
    thresholds: Tensor,
    strength: float,
    ss_weight: float,
    beta: float,
    argmax_in_candidates: bool,
    need_rows: bool,
    need_gram: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Equations (11), (12), (14), (15) for one step, as `plsp_kernels.torch_impl.upper_bound` describes them.

    The two views of an unlabelled instance have one pseudo-label and so one slot: it is read at the strong row.
    """
    (num_rows, num_classes), num_labeled, num_unlabeled = rows.shape, labels.shape[0], candidates.shape[0]
    dtype = tiles.compute_dtype(rows)
    rows = tiles.dense_rows(rows)
    if labeled_candidates is not None:
        candidates = torch.cat([candidates, labeled_candidates])
    candidates = tiles.dense_rows(candidates).view(torch.uint8)
    odds, grad_odds = (rows.new_empty(num_rows, num_classes, dtype=dtype) for _ in range(2))
    probabilities = rows.new_empty(num_unlabeled, num_classes, dtype=dtype)
    losses, terms = rows.new_empty(num_rows, dtype=dtype), rows.new_empty(4, dtype=dtype)
    confidence = rows.new_empty(num_unlabeled, dtype=dtype)
    prediction = labels.new_empty(num_unlabeled)
    mask = rows.new_empty(num_unlabeled, dtype=torch.bool)

    blocks = tiles.pair_blocks(num_classes, dtype)
    tiles.launch(
        _pair_kernel,
        (num_rows - num_unlabeled, triton.cdiv(num_classes, blocks["BLOCK_J"])),
        rows,
        gram.contiguous(),
        slots.contiguous(),
        odds,
        probabilities,
        num_labeled,
        num_unlabeled,
        num_classes,
        rows.stride(0),
        strength,
        *probit_constants(strength, beta),
        **blocks,
    )
    tiles.launch(
        _row_loss_kernel,
        (num_rows,),
        rows,
        odds,
        probabilities,
        labels.contiguous(),
        candidates,
        thresholds.contiguous(),
        losses,
        grad_odds,
        confidence,
        prediction,
        mask.view(torch.uint8),
        num_rows,
        num_labeled,
        num_unlabeled,
        num_classes,
        rows.stride(0),
        candidates.stride(0),
        ARGMAX_IN_CANDIDATES=argmax_in_candidates,
        TINY=torch.finfo(dtype).tiny,
        **tiles.row_blocks(num_classes),
    )
    tiles.launch(
        _terms_kernel, (1,), losses, terms, num_rows, num_labeled, num_unlabeled, ss_weight, **tiles.sum_blocks()
    )
    grad_rows, grad_gram = rows.new_empty(0, dtype=dtype), gram.new_empty(0)
    if need_rows or need_gram:
        weak = num_labeled + num_unlabeled
        grad_total = torch.cat([grad_odds[:weak] * ss_weight, grad_odds[weak:]])
        grad_rows, grad_gram = log_odds_backward(grad_total, rows, odds, gram, slots, strength, need_rows, need_gram)
    return terms, odds, grad_odds, grad_rows, grad_gram, confidence, prediction, mask
