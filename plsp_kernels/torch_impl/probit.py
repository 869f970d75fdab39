"""Probit probabilities without cancellation and with one erfc per unordered class pair.

The printed form 1 / (-l + Σ_j' 1/Φ(x_jj')) subtracts l from l numbers near one. Exactly equal is

    p̂_j = 1 / (1 + Σ_{j'≠j} r_jj'),      r_jj' = Φ(-x_jj') / Φ(x_jj'),

and as x is antisymmetric, r_j'j = 1 / r_jj'. Pairs are laid out by their offset s = (j' - j) mod l: offsets up to l/2
meet every unordered pair once (twice at s = l/2, which then needs no reciprocal), in dense (s, j) blocks.
"""

import functools

import torch
from torch import Tensor

from plsp_kernels.torch_impl.chunks import chunk_slices


@functools.lru_cache(maxsize=16)
def _offset_tables(num_classes: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """For offsets s = 1 … l/2 and classes j, flattened: the partner j' = (j + s) mod l; the place of the pair (j, j')
    in a flattened (l, l) matrix; for s < l/2, the place in this list of the pair that has j for its partner."""
    offset = torch.arange(1, num_classes // 2 + 1, device=device)[:, None]
    j = torch.arange(num_classes, device=device)
    partner = (j + offset) % num_classes
    mirrored = (offset - 1) * num_classes + (j - offset) % num_classes
    return partner.flatten(), (j * num_classes + partner).flatten(), mirrored[: (num_classes - 1) // 2].flatten()


def probit_probabilities(logits: Tensor, gram: Tensor, slots: Tensor, strength: float, beta: float) -> Tensor:
    """p̂_ij for the samples of logits (N, l), sample i having the Gram matrix gram[slots[i]]: (N, l)."""
    count, num_classes = logits.shape
    partner, pair, mirrored = _offset_tables(num_classes, logits.device)
    # x / sqrt(2) = (z_j - z_j') / sqrt(2/β² + 2λQ), the root being a property of the class
    diagonal = gram.diagonal(dim1=1, dim2=2)
    quadratic = (diagonal[:, :, None] + diagonal[:, None, :]).sub_(gram, alpha=2).flatten(1).index_select(1, pair)
    constant = 2 / beta**2
    scale = quadratic.mul_(2 * strength).add_(constant).clamp_(min=constant).rsqrt_()  # (U, pairs), Q clamped at 0

    probabilities = []
    for part in chunk_slices(count, partner.shape[0], logits.dtype):
        z = logits[part]
        margin = z[:, None, :] - z.index_select(1, partner).view(z.shape[0], -1, num_classes)
        margin.mul_(scale.index_select(0, slots[part]).view_as(margin))
        # 2Φ(-|x|) is the smaller of 2Φ(-x) and 2Φ(x), and two less it is the larger. As 1 ± sign is 0 or 2, neither sum
        # below rounds the small one away.
        sign = margin.sign()
        tail = margin.abs_().erfc_().mul_(sign)
        ratio = (1 - sign).add_(tail).div_(sign.add_(1).sub_(tail))
        denominator = ratio.sum(1)
        if num_classes > 2:
            reciprocal = ratio.flatten(1).index_select(1, mirrored).reciprocal_()
            denominator += reciprocal.view(z.shape[0], -1, num_classes).sum(1)
        probabilities.append(denominator.add_(1).reciprocal_())
    return torch.cat(probabilities) if probabilities else torch.empty_like(logits)
