"""Epoch selection without clean labels: held-out instances are scored by their candidate sets alone.

The criteria are those of PLENCH (Wang et al. 2025, Realistic Evaluation of Deep Partial-Label Learning Algorithms).
"""

from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from plsp_train.data.candidate_sets import AnyCandidates
from plsp_train.data.mapped import Inputs
from plsp_train.data.splits import TrainTestData, rows_of

CRITERIA = ("covering_rate", "approximated_accuracy")


class HeldOut(NamedTuple):
    """Training instances held out for validation, without their true labels."""

    inputs: Inputs
    candidates: AnyCandidates
    rows: Tensor
    """Their positions in the source."""


def hold_out(
    data: TrainTestData, candidates: AnyCandidates, fraction: float, seed: int
) -> tuple[TrainTestData, AnyCandidates, HeldOut | None]:
    """Data and candidate sets to train on, and the instances held out, which depend only on the seed."""
    if fraction == 0:
        return data, candidates, None
    total = len(candidates)
    count = round(fraction * total)
    if not 0 < count < total:
        part = "validation" if count == 0 else "training"
        raise ValueError(
            f"validation_fraction {fraction} of {total} instances leaves none for {part}: give another, or 0 for none"
        )
    order = torch.randperm(total, generator=torch.Generator().manual_seed(seed + 2))
    held_out, kept = (part.sort().values for part in order.split([count, total - count]))
    rows = data.train_rows if data.train_rows is not None else torch.arange(total)
    rest = replace(
        data,
        train_inputs=rows_of(data.train_inputs, kept),
        train_labels=rows_of(data.train_labels, kept),
        train_candidates=rows_of(candidates, kept),
        train_rows=rows[kept],
    )
    inputs, sets = (rows_of(table, held_out) for table in (data.train_inputs, candidates))
    return rest, rows_of(candidates, kept), HeldOut(inputs, sets, rows[held_out])


def criteria(logits: Tensor, candidates: Tensor) -> dict[str, float]:
    """Of predictions ŷ: the share inside the candidate set C, and the mean of p_ŷ / Σ_{j∈C} p_j, 0 where ŷ ∉ C.

    The latter is the expected accuracy if the true label is drawn from C with the network's own probabilities.
    """
    return mean_criteria(*criteria_of_instances(logits, candidates))


def criteria_of_instances(logits: Tensor, candidates: Tensor) -> tuple[Tensor, Tensor]:
    """(n,) bool and float64: what the criteria are the means of."""
    highest, prediction = logits.double().max(1, keepdim=True)
    covered = candidates.gather(1, prediction)[:, 0]
    # Relative to p_ŷ, whose own term is 1 where ŷ is in C: neither overflow nor division by zero.
    mass = (logits - highest).exp().masked_fill(~candidates, 0).sum(1)
    return covered, mass.reciprocal().where(covered, 0)


def mean_criteria(covered: Tensor, accuracy: Tensor) -> dict[str, float]:
    return {"covering_rate": covered.double().mean().item(), "approximated_accuracy": accuracy.mean().item()}


def selected_epochs(history: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """For each criterion measured, the epoch that maximises it; the latest of ties."""
    selected = {}
    for name in CRITERIA:
        if name in history[-1]:
            best = max(reversed(history), key=lambda line: line[name])
            scores = {score: best[score] for score in ("micro_f1", "macro_f1") if score in best}
            selected[f"selected_by_{name}"] = {"epoch": best["epoch"], "value": best[name], **scores}
    return selected
