"""Running class statistics, equation (17), for the classes of one batch only."""

import torch
from torch import Tensor

from plsp_kernels import native
from plsp_kernels.slots import class_slots


def covariance_update(covariance: Tensor, mean: Tensor, count: Tensor, features: Tensor, labels: Tensor) -> None:
    """Update Σ (l, d, d) or (l, d), μ (l, d) and m (l,) in place with one batch: features (N, d), labels (N,).

    With m' members of mean μ' and M = m + m', equation (17) is

        Σ ← (m/M) Σ + (1/M) ( Σ_i (f_i - μ')(f_i - μ')ᵀ + (m m'/M) (μ - μ')(μ - μ')ᵀ ),    μ ← μ + (m'/M) (μ' - μ):

    a scaled Σ plus a sum of outer products, one of them of the shift of the mean. Both summands are positive
    semi-definite and symmetric, so Σ stays so to rounding however often it is updated.
    """
    if features.shape[0] == 0:
        return
    if native.serves_update(covariance, mean, count, features):
        native.covariance_update(covariance, mean, count, features, labels)
        return
    classes, slots = class_slots(labels, count.shape[0])
    present = classes.clamp(min=0)  # empty slots point at class 0 and change nothing there
    members = (slots == torch.arange(classes.shape[0], device=slots.device)[:, None]).to(mean.dtype)  # (U, N)
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
        _update_in_place(covariance, present, slots, centred, shift * shift_weight.sqrt()[:, None], old, new)
    else:
        # Static shapes and no look at the class numbers, so that nothing waits for the device.
        scatter = torch.bmm((members[:, :, None] * centred).mT, centred.expand(new.shape[0], -1, -1))
        scatter += shift_weight[:, None, None] * shift[:, :, None] * shift[:, None, :]
        decay = (new / total)[:, None, None] * covariance[present]
        covariance.index_add_(0, present, scatter / total[:, None, None] - decay)


def _update_in_place(
    covariance: Tensor, classes: Tensor, slots: Tensor, centred: Tensor, shift: Tensor, old: Tensor, new: Tensor
) -> None:
    """One GEMM per class of the batch, each passing over its Σ once, where it lies."""
    # Rows sorted by slot, each slot's shift of the mean beside its members.
    order = torch.cat([slots, torch.arange(shift.shape[0])]).argsort()
    rows = torch.cat([centred, shift]).index_select(0, order)
    start = 0
    for y, m, added in zip(classes.tolist(), old.tolist(), new.tolist(), strict=True):
        stop = start + int(added) + 1
        if added:
            members = rows[start:stop]
            covariance[y].addmm_(members.t(), members, beta=m / (m + added), alpha=1 / (m + added))
        start = stop
