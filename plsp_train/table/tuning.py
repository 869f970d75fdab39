"""The best settings of each method, chosen without clean labels."""

from collections.abc import Sequence
from statistics import fmean

from plsp_train.data import Ambiguity
from plsp_train.table.finished import FinishedRun, Settings
from plsp_train.table.rows import ambiguity_label, only, settings_label, varying_settings


def tuned(runs: Sequence[FinishedRun], criterion: str) -> tuple[list[FinishedRun], str]:
    """For each method and ambiguity, the runs of the settings with the highest mean, and a text that names them.

    Settings with fewer finished seeds than others are not considered.
    """
    by_settings: dict[tuple[str, Ambiguity], dict[Settings, list[FinishedRun]]] = {}
    for run in runs:
        by_settings.setdefault((run.method, run.ambiguity), {}).setdefault(run.settings, []).append(run)
    kept, chosen = [], []
    for (method, ambiguity), groups in by_settings.items():
        num_seeds = max(len(group) for group in groups.values())
        complete = [group for group in groups.values() if len(group) == num_seeds]
        best = max(complete, key=lambda group: fmean(run.criterion(criterion) for run in group))
        kept += best
        varying = varying_settings(run for group in groups.values() for run in group)
        if varying:
            told = settings_label(only(varying, best[0].settings))
            chosen.append(f"{method} at {ambiguity_label(ambiguity)}: {told}")
    return kept, f" Settings chosen by {criterion.replace('-', ' ')}: {'; '.join(chosen)}." if chosen else ""
