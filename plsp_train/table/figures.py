"""Sensitivity of PLSP to k, the number of labelled instances per class."""

import io
from collections.abc import Sequence
from typing import Any

from plsp_train.methods import PLSP
from plsp_train.table.finished import SELECTIONS, FinishedRun
from plsp_train.table.rows import ambiguity_label, only, settings_label, varying_settings
from plsp_train.table.statistics import mean_and_std


def sensitivity_figures(runs: Sequence[FinishedRun], select: str) -> dict[str, bytes]:
    """PNG files by name, one for each data set on which PLSP was trained with several k."""
    figures = {}
    for dataset in dict.fromkeys(run.dataset for run in runs):
        own = [run for run in runs if run.dataset == dataset and run.method == PLSP.label]
        curves = _curves(own)
        if curves:
            figures[f"{dataset}-sensitivity-k"] = _draw(curves, f"PLSP on {dataset}, {SELECTIONS[select]}", select)
    return figures


def _curves(runs: Sequence[FinishedRun]) -> dict[str, dict[int, list[FinishedRun]]]:
    """The runs of each k, by the other settings that differ; only where there are several k."""
    varying = varying_settings(runs) - {"k"}
    curves: dict[str, dict[int, list[FinishedRun]]] = {}
    for run in sorted(runs, key=lambda run: run.config.k):
        told = [ambiguity_label(run.ambiguity), settings_label(only(varying, run.settings))]
        curves.setdefault(", ".join(filter(None, told)), {}).setdefault(run.config.k, []).append(run)
    return {label: by_k for label, by_k in curves.items() if len(by_k) > 1}


def _draw(curves: dict[str, dict[int, list[FinishedRun]]], title: str, select: str) -> bytes:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 4), layout="constrained")
    figure.suptitle(title)
    # Evenly spaced: k ranges from 0 over hundreds to all instances of a class.
    places = {k: place for place, k in enumerate(sorted({k for by_k in curves.values() for k in by_k}))}
    panels: Any = figure.subplots(1, 2)
    for axes, metric, label in zip(panels, ("micro_f1", "macro_f1"), ("micro-F1", "macro-F1"), strict=True):
        for name, by_k in curves.items():
            points = [mean_and_std([run.score(metric, select) for run in group]) for group in by_k.values()]
            means, stds = [mean for mean, _ in points], [std or 0.0 for _, std in points]
            axes.errorbar([places[k] for k in by_k], means, yerr=stds, marker="o", capsize=3, label=name)
        axes.set_xticks(range(len(places)), [str(k) for k in places])
        axes.set_xlabel("k, labelled instances per class")
        axes.set_ylabel(label)
        axes.legend(fontsize="small")
    buffer = io.BytesIO()
    figure.savefig(buffer, dpi=110, format="png")
    return buffer.getvalue()
