"""Exponents of class pairs, shared by the kernels: o_j = z_j - (λ/2) g_j - logsumexp_{k≠j}( shifted_k - λ G[j, k] )
with g = diag(G) and shifted_k = z_k + (λ/2) g_k. Q is never materialised, and (λ/2) g_j does not depend on k.
"""

import triton
import triton.language as tl


@triton.jit
def diagonal_term(gram_ptr, k, num_classes, strength, DTYPE: tl.constexpr):
    """(λ/2) g_k of the Gram matrix at gram_ptr, zero beyond the classes."""
    diagonal = tl.load(gram_ptr + k * (num_classes + 1), mask=k < num_classes, other=0.0)
    return diagonal.to(DTYPE) * (0.5 * strength)


@triton.jit
def gram_tile(gram_ptr, j, k, num_classes, DTYPE: tl.constexpr):
    """G[j, k], zero beyond the classes: (J, K)."""
    inside = (j[:, None] < num_classes) & (k[None, :] < num_classes)
    return tl.load(gram_ptr + j[:, None] * num_classes + k[None, :], mask=inside, other=0.0).to(DTYPE)


@triton.jit
def add_to_log_sum(largest, total, exponents):
    """One step of the online logsumexp over the columns of exponents (J, K): the new maximum and scaled sum."""
    larger = tl.maximum(largest, tl.max(exponents, 1))
    shift = tl.where(larger == float("-inf"), 0.0, larger)  # a tile may hold only excluded classes, z = -inf
    total = total * tl.exp(largest - shift) + tl.sum(tl.exp(exponents - shift[:, None]), 1)
    return larger, total


@triton.jit
def pair_exponents(shifted, gram, j, k, strength):
    """shifted_k - λ G[j, k] with -inf at k = j: (J, K)."""
    return tl.where(j[:, None] == k[None, :], float("-inf"), shifted[None, :] - strength * gram)


@triton.jit
def log_sum_tile(
    logits_ptr,  # (l,)
    gram_ptr,  # (l, l)
    j,
    num_classes,
    strength,
    DTYPE: tl.constexpr,
    BLOCK_J: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """logsumexp_{k≠j}( shifted_k - λ G[j, k] ) of one row of logits for a tile of j, streamed over tiles of k: (J,)."""
    largest = tl.full((BLOCK_J,), float("-inf"), DTYPE)
    total = tl.zeros((BLOCK_J,), DTYPE)
    for start in range(0, num_classes, BLOCK_K):
        k = start + tl.arange(0, BLOCK_K)
        z_k = tl.load(logits_ptr + k, mask=k < num_classes, other=float("-inf")).to(DTYPE)
        shifted = z_k + diagonal_term(gram_ptr, k, num_classes, strength, DTYPE)
        gram = gram_tile(gram_ptr, j, k, num_classes, DTYPE)
        largest, total = add_to_log_sum(largest, total, pair_exponents(shifted, gram, j, k, strength))
    return largest + tl.log(total)


@triton.jit
def store_row(row, j, z, diagonal, log_sum, shifted_ptr, log_sum_ptr, log_odds_ptr, num_classes):
    """Store shifted, log_sum and the log-odds of one row for a tile of j; diagonal is (λ/2) g_j."""
    index = row * num_classes + j
    tl.store(shifted_ptr + index, z + diagonal, mask=j < num_classes)
    # If all other classes are excluded, P[k|j] shall be zero instead of undefined.
    tl.store(log_sum_ptr + index, tl.where(log_sum == float("-inf"), 0.0, log_sum), mask=j < num_classes)
    tl.store(log_odds_ptr + index, z - (log_sum + diagonal), mask=j < num_classes)
