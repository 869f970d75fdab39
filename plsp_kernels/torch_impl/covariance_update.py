"""Running class statistics, equation (17), for the classes of one batch only."""

import torch
from torch import Tensor

from plsp_kernels.rows import class_slots


def covariance_update(
    covariance: Tensor, mean: Tensor, count: Tensor, skipped: Tensor, features: Tensor, labels: Tensor
) -> None:
    """Update Σ (l, d, d) or (l, d), μ (l, d) and m (l,) in place with one batch: features (N, d), labels (N,).

    Samples that are not finite in the dtype of Σ are left out, and counted in `skipped` (l,). So are, without being
    counted, those with label -1.

    With m' members of mean μ' and M = m + m', equation (17) is

        Σ ← (m/M) Σ + (1/M) ( Σ_i (f_i - μ')(f_i - μ')ᵀ + (m m'/M) (μ - μ')(μ - μ')ᵀ ),    μ ← μ + (m'/M) (μ' - μ):

    a scaled Σ plus a sum of outer products, including that of the shift of the mean. Both summands are symmetric
    positive semi-definite, so Σ remains so up to rounding after any number of updates.
    """
    if features.shape[0] == 0:
        return
    features = features.to(mean.dtype)
    finite, labelled = features.isfinite().all(1), labels != -1
    features = features.where(finite[:, None], 0)  # 0 · inf would be NaN
    labels = labels.masked_fill(~labelled, 0)  # without members below
    skipped.index_add_(0, labels, (labelled & ~finite).to(skipped.dtype))
    counted = finite & labelled
    classes, slots = class_slots(labels, count.shape[0])
    present = classes.clamp(min=0)  # unused slots point at class 0 and add zero to it
    num_slots = classes.shape[0]
    in_slot = slots == torch.arange(num_slots, device=slots.device)[:, None]
    members = (in_slot & counted).to(mean.dtype)  # (U, N)
    new = members.sum(1)
    old = count.index_select(0, present).to(mean.dtype)
    total = (old + new).clamp_(min=1)
    batch_mean = members @ features / new.clamp(min=1)[:, None]
    shift = (batch_mean - mean.index_select(0, present)) * (new > 0)[:, None]
    centred = features - batch_mean.index_select(0, slots)
    shift_weight = old * new / total  # (U,)

    mean.index_add_(0, present, shift * (new / total)[:, None])
    count.index_add_(0, present, new.to(count.dtype))
    if covariance.dim() == 2:
        scatter = members @ centred.square() + shift_weight[:, None] * shift.square()
        decay = (new / total)[:, None] * covariance[present]
        covariance.index_add_(0, present, scatter / total[:, None] - decay)
    elif covariance.device.type == "cpu":
        rows = _rows_by_slot(centred, shift * shift_weight.sqrt()[:, None], slots.where(counted, num_slots))
        _update_in_place(covariance, present, rows, old, new)
    else:
        # Static shapes, and class numbers are never read on the host: no host sync.
        scatter = torch.bmm((members[:, :, None] * centred).mT, centred.expand(new.shape[0], -1, -1))
        scatter += shift_weight[:, None, None] * shift[:, :, None] * shift[:, None, :]
        decay = (new / total)[:, None, None] * covariance[present]
        covariance.index_add_(0, present, scatter / total[:, None, None] - decay)


def _rows_by_slot(centred: Tensor, shift: Tensor, slots: Tensor) -> Tensor:
    """Sort the rows by slot, the shift of the mean of each slot next to its members; rows without a slot come last."""
    order = torch.cat([slots, torch.arange(shift.shape[0])]).argsort()
    return torch.cat([centred, shift]).index_select(0, order)


def _update_in_place(covariance: Tensor, classes: Tensor, rows: Tensor, old: Tensor, new: Tensor) -> None:
    """Update Σ in place with one GEMM per class of the batch.

    The change is applied by one addition. A change below the last place of Σ leaves it unaltered, whereas scaling Σ by
    m/M would round every element in every update.
    """
    start, change = 0, torch.empty_like(covariance[0])
    for y, m, added in zip(classes.tolist(), old.tolist(), new.tolist(), strict=True):
        stop = start + int(added) + 1
        if added:
            members = rows[start:stop]
            torch.addmm(covariance[y], members.t(), members, beta=-added, out=change)
            covariance[y].add_(change, alpha=1 / (m + added))
        start = stop
