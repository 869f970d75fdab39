"""State of the curriculum: the class that each instance was last assigned with confidence, and the thresholds τ."""

import torch
from torch import Tensor

from plsp_kernels.curriculum import CurriculumBatch


def curriculum_update(batch: CurriculumBatch) -> None:
    """Update the assignments and their counts in place, in O(N)."""
    assigned, counts, instances, prediction, confidence, candidates, threshold = batch
    selected = confidence >= threshold
    if candidates is not None:
        selected &= candidates.gather(1, prediction[:, None])[:, 0]
    # Sorted by instance, unselected entries last: the last entry of each instance is the one that counts.
    ordered, order = torch.where(selected, instances, assigned.shape[0]).sort(stable=True)
    following = torch.cat([ordered[1:], ordered.new_full((1,), assigned.shape[0])])[: ordered.shape[0]]
    instances, prediction = instances.index_select(0, order), prediction.index_select(0, order)
    before = assigned.index_select(0, instances)
    after = torch.where(ordered != following, prediction, before)
    # Add differences instead of copying: duplicate indices are safe, as all but one entry per instance add zero.
    assigned.index_add_(0, instances, after - before)
    moved = (after != before).long()
    counts.index_add_(0, before, -moved).index_add_(0, after, moved)


def curriculum_thresholds(counts: Tensor, threshold: float, convex: bool) -> Tensor:
    """τ0 η(j), or τ0 η(j) / (2 - η(j)) if convex, with η(j) = σ(j) / max σ, from counts (l + 1,): (l,) float32."""
    progress = counts[:-1] / counts[:-1].max().clamp(min=1)
    if convex:
        progress = progress / (2 - progress)
    return threshold * progress
