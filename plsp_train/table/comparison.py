"""Two rows of a table, compared in words."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from plsp_train.table.finished import FinishedRun
from plsp_train.table.rows import ambiguities_of, ambiguity_label, rows_of
from plsp_train.table.statistics import LEVEL, paired_difference

_METRICS = {"micro_f1": "micro-F1", "macro_f1": "macro-F1"}


def compare(runs: Sequence[FinishedRun], first: str, second: str, *, select: str) -> list[str]:
    """A sentence for each data set, ambiguity and score in which both rows have runs.

    The rows are named as in the tables, such as "PLSP (k 50)".
    """
    sentences, known = [], dict[str, None]()
    for dataset in dict.fromkeys(run.dataset for run in runs):
        rows = {str(row): group for row, group in rows_of(run for run in runs if run.dataset == dataset).items()}
        known |= dict.fromkeys(rows)
        ours, theirs = rows.get(first, []), rows.get(second, [])
        for ambiguity in ambiguities_of([*ours, *theirs]):
            for metric, label in _METRICS.items():
                scores = [
                    {run.repetition: run.score(metric, select) for run in group if run.ambiguity == ambiguity}
                    for group in (ours, theirs)
                ]
                if all(scores):
                    where = f"{dataset}, {ambiguity_label(ambiguity)}, {label}"
                    sentences.append(f"{where}: {_verdict(first, second, *scores)}")
    for name in (first, second):
        if name not in known:
            raise ValueError(f"no row {name!r}; there are {', '.join(map(repr, known))}")
    if not sentences:
        raise ValueError(f"{first!r} and {second!r} have no data set and ambiguity in common")
    return sentences


def _verdict(first: str, second: str, ours: Mapping[Any, float], theirs: Mapping[Any, float]) -> str:
    difference = paired_difference(ours, theirs)
    if difference is None:
        return f"{first} and {second} have no seed in common"
    better, worse = (first, second) if difference.mean >= 0 else (second, first)
    gain = f"{abs(difference.mean):.3f}"
    if difference.low is None or difference.high is None:
        return f"{better} scores {gain} more than {worse} on one common seed, which tells nothing about the noise"
    bounds = sorted((abs(difference.low), abs(difference.high)))
    pairs = f"{difference.num_pairs} common seeds and folds, p = {difference.p_value:.2g}"
    if math.isfinite(difference.p_value) and difference.p_value < LEVEL:
        return f"{better} is better than {worse} by {gain} ({bounds[0]:.3f} to {bounds[1]:.3f} at 95 %; {pairs})"
    return (
        f"no significant difference at level {LEVEL}: {better} scores {gain} more than {worse} "
        f"({difference.low:+.3f} to {difference.high:+.3f} for {first} at 95 %; {pairs})"
    )
