"""Probit probabilities without cancellation and with one erfc per unordered class pair.

The printed form 1 / (-l + Σ_j' 1/Φ(x_jj')) subtracts l from a sum of l numbers near one. It equals

    p̂_j = 1 / (1 + Σ_{j'≠j} r_jj'),      r_jj' = Φ(-x_jj') / Φ(x_jj'),

and since x is antisymmetric, r_j'j = 1 / r_jj'. A tile of rows j ≥ a therefore spans only the columns j' ≥ a: its row
sums belong to its own classes, and the column sums of its reciprocals to the classes after them.
"""

import torch
from torch import Tensor

from plsp_kernels.rows import Rows, host_number
from plsp_kernels.torch_impl.chunks import chunk_slices

_TILE_ROWS = 50  # more rows repeat more pairs on both sides of the diagonal, fewer mean more operator calls


def probit_probabilities(rows: Rows, beta: float) -> Tensor:
    """p̂_ij of each row: (N, l)."""
    count, num_classes = rows.logits.shape
    # A logit of -inf stands for an excluded class: the difference of two of them must not be NaN.
    logits = rows.logits.clamp(min=torch.finfo(rows.logits.dtype).min)
    sums = torch.zeros_like(logits)
    for start in range(0, num_classes, _TILE_ROWS):
        stop = min(start + _TILE_ROWS, num_classes)
        scale = _margin_scale(rows, beta, start, stop)
        for part in chunk_slices(count, (stop - start) * (num_classes - start), logits.dtype):
            z = logits[part, start:]
            margin = z[:, : stop - start, None] - z[:, None, :]
            ratio = _ratio(margin.mul_(scale.index_select(0, rows.slots[part])))
            ratio.diagonal(dim1=1, dim2=2).zero_()
            sums[part, start:stop] += ratio.sum(2)
            if stop < num_classes:
                sums[part, stop:] += ratio[:, :, stop - start :].reciprocal_().sum(1)
    return sums.add_(1).reciprocal_()


def _margin_scale(rows: Rows, beta: float, start: int, stop: int) -> Tensor:
    """Factor from z_j - z_j' to x_jj'/√2 for start ≤ j < stop and j' ≥ start: (U, stop - start, l - start).

    x/√2 = (z_j - z_j') / sqrt(2/β² + 2λQ), with Q clamped at 0.
    """
    gram, constant = rows.gram, 2 / beta**2
    diagonal = gram.diagonal(dim1=1, dim2=2)
    quadratic = diagonal[:, start:stop, None] + diagonal[:, None, start:]
    quadratic.sub_(gram[:, start:stop, start:], alpha=2).mul_(2 * host_number(rows.strength))
    return quadratic.add_(constant).clamp_(min=constant).rsqrt_()


def _ratio(margin: Tensor) -> Tensor:
    """Φ(-x) / Φ(x) for margin = x/√2, which is overwritten."""
    # 2Φ(-|x|) is the smaller of 2Φ(-x) and 2Φ(x); the larger is 2 minus it. 1 ± sign is 0 or 2, so the sums below keep
    # the full precision of the smaller one.
    sign = margin.sign()
    tail = margin.abs_().erfc_().mul_(sign)
    return (1 - sign).add_(tail).div_(sign.add_(1).sub_(tail))
