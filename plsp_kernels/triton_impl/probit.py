"""Probit probabilities p̂_j = 1 / (1 + Σ_{j'≠j} Φ(-x_jj') / Φ(x_jj')), without cancellation and without erfc."""

import triton
import triton.language as tl
from torch import Tensor

from plsp_kernels.rows import Rows
from plsp_kernels.triton_impl import tiles
from plsp_kernels.triton_impl.exponents import gram_tile
from plsp_kernels.triton_impl.scalars import scalar, scalar_arguments


@triton.jit
def normal_tail(y):
    """Φ(-√2 y) for y ≥ 0, accurate to a few ulp down to underflow.

    Φ(-√2 y) = exp(-y²) erfcx(y) / 2, and (1 + 2y) erfcx(y) is smooth in t = (y - 3) / (y + 3) on all of [0, ∞). The
    coefficients are its Chebyshev interpolant in t at 60 nodes, computed by mpmath with 50 digits, truncated at degree
    11 (float32) or 24 (float64) and converted to powers of t; largest relative error 1.7e-7 and 2.6e-16.
    """
    y = tl.minimum(y, 40.0)  # the tail is zero beyond, even in float64; keeps the steps below finite
    t = (y - 3.0) / (y + 3.0)
    if y.dtype == tl.float64:
        p = t * 8.393734858690877e-10 + 9.862533510345587e-10
        p = p * t - 8.217595058711455e-09
        p = p * t - 1.3312919661038687e-08
        p = p * t + 4.1064013667940355e-08
        p = p * t + 1.0183620603842736e-07
        p = p * t - 1.4047654315428462e-07
        p = p * t - 6.166011460398726e-07
        p = p * t + 3.5576086684080595e-07
        p = p * t + 3.472370944977168e-06
        p = p * t - 7.308281468783614e-07
        p = p * t - 2.0100542268525612e-05
        p = p * t + 4.949196649968345e-06
        p = p * t + 0.0001250993424583729
        p = p * t - 0.00010515971958448065
        p = p * t - 0.0007798322696543306
        p = p * t + 0.0018886903449991718
        p = p * t + 0.0025293918156939696
        p = p * t - 0.02377051491717134
        p = p * t + 0.0683080273440099
        p = p * t - 0.11927366341538638
        p = p * t + 0.1296451587027594
        p = p * t - 0.0475622943534492
        p = p * t - 0.13562110612458117
        p = p * t + 1.2530080582697296
    else:
        p = t * 7.731024224076895e-05 - 9.254516686923966e-05
        p = p * t - 0.0007264536790340485
        p = p * t + 0.001875079123772353
        p = p * t + 0.0024991168696069477
        p = p * t - 0.02376357643949504
        p = p * t + 0.06831656777114085
        p = p * t - 0.1192752752822409
        p = p * t + 0.1296441143440814
        p = p * t - 0.047562156927520076
        p = p * t - 0.1356210694002736
        p = p * t + 1.2530080563677553
    # exp(-y²): rounding y² alone would cost y² ulp. With s = y truncated to multiples of 1/32 the square s² is exact,
    # y² - s² = (y - s)(y + s) is small, and s² = n log 2 + remainder leaves a small argument for exp. log 2 is split
    # into a short part, whose products with n are exact, and the rest.
    s = tl.floor(y * 32.0) * 0.03125
    n = tl.floor(s * s * 1.4426950408889634 + 0.5)
    remainder = (n * 0.693359375 - s * s) - n * 2.1219444005469058e-4 - (y - s) * (y + s)
    return tl.exp2(-n) * tl.exp(remainder) * p / (2.0 + 4.0 * y)


@triton.jit
def probit_ratios(z_j, z_k, gram, diagonal_j, diagonal_k, j, k, num_classes, spread, scale):
    """Φ(-x_jk) / Φ(x_jk), zero at k = j and beyond the classes: (J, K).

    x/√2 = scale (z_j - z_k) / sqrt(1 + spread Q) with spread = λ β² and scale = β/√2.
    """
    quadratic = tl.maximum(diagonal_j[:, None] + diagonal_k[None, :] - 2.0 * gram, 0.0)
    # Excluded classes, z = -inf, are equally improbable: their difference must not be NaN.
    z_j = tl.where(z_j == float("-inf"), -1e30, z_j)
    z_k = tl.where(z_k == float("-inf"), -1e30, z_k)
    margin = (z_j[:, None] - z_k[None, :]) * (tl.rsqrt(1.0 + spread * quadratic) * scale)
    tail = normal_tail(tl.abs(margin))  # at most a half
    # If the tail underflows, its reciprocal is infinite and the probability exactly zero.
    ratios = tl.where(margin >= 0, tail / (1.0 - tail), (1.0 - tail) / tail)
    return tl.where((j[:, None] == k[None, :]) | (k[None, :] >= num_classes), 0.0, ratios)


@triton.jit
def probit_constants(strength, beta, DTYPE: tl.constexpr):
    """spread = λ β² and scale = β/√2, from numbers in float64."""
    beta = tl.full((), beta, tl.float64)
    return (strength * beta * beta).to(DTYPE), (beta * 0.7071067811865476).to(DTYPE)


@triton.jit(do_not_specialize=["num_slots"])
def _probit_kernel(
    logits_ptr,  # (N, l)
    gram_ptr,  # (U, l, l)
    slots_ptr,  # (N,)
    probabilities_ptr,  # (N, l)
    num_slots,
    num_classes,
    stride_logits,
    strength: tl.float64,
    strength_ptr,  # (), or None
    beta: tl.float64,
    BLOCK_J: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    DTYPE: tl.constexpr = probabilities_ptr.dtype.element_ty
    spread, scale = probit_constants(scalar(strength, strength_ptr), beta, DTYPE)
    row = tl.program_id(0).to(tl.int64)
    j = tl.program_id(1) * BLOCK_J + tl.arange(0, BLOCK_J)
    slot = tl.load(slots_ptr + row).to(tl.int64)
    total = tl.full((BLOCK_J,), float("nan"), DTYPE)  # of a row whose slot is out of range
    if (slot >= 0) & (slot < num_slots):
        gram_ptr += slot * num_classes * num_classes
        logits_ptr += row * stride_logits
        z_j = tl.load(logits_ptr + j, mask=j < num_classes, other=0.0).to(DTYPE)
        diagonal_j = tl.load(gram_ptr + j * (num_classes + 1), mask=j < num_classes, other=0.0).to(DTYPE)
        total = tl.full((BLOCK_J,), 1.0, DTYPE)
        for start in range(0, num_classes, BLOCK_K):
            k = start + tl.arange(0, BLOCK_K)
            z_k = tl.load(logits_ptr + k, mask=k < num_classes, other=0.0).to(DTYPE)
            diagonal_k = tl.load(gram_ptr + k * (num_classes + 1), mask=k < num_classes, other=0.0).to(DTYPE)
            gram = gram_tile(gram_ptr, j, k, num_classes, DTYPE)
            ratios = probit_ratios(z_j, z_k, gram, diagonal_j, diagonal_k, j, k, num_classes, spread, scale)
            total += tl.sum(ratios, 1)
    tl.store(probabilities_ptr + row * num_classes + j, 1.0 / total, mask=j < num_classes)


def probit_probabilities(rows: Rows, beta: float) -> Tensor:
    """p̂_ij of each row: (N, l)."""
    (count, num_classes), logits = rows.logits.shape, tiles.dense_rows(rows.logits)
    probabilities = logits.new_empty(count, num_classes, dtype=tiles.compute_dtype(logits))
    blocks = tiles.pair_blocks(num_classes, probabilities.dtype)
    tiles.launch(
        _probit_kernel,
        (count, triton.cdiv(num_classes, blocks["BLOCK_J"])),
        logits,
        rows.gram.contiguous(),
        rows.slots.contiguous(),
        probabilities,
        rows.gram.shape[0],
        num_classes,
        logits.stride(0),
        *scalar_arguments(rows.strength),
        beta,
        **blocks,
    )
    return probabilities
