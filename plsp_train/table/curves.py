"""Learning curves: the test score over the epochs, with a band over seeds."""

import io
import json
import math
from collections.abc import Sequence
from typing import Any

from plsp_train.methods import PLSP
from plsp_train.table.finished import FinishedRun
from plsp_train.table.rows import ambiguities_of, ambiguity_label, rows_of

METRIC, LABEL = "micro_f1", "micro-F1"
NUM_COLOURS = 10  # of matplotlib's cycle; further rows differ by their line style
HIDDEN = 0.05  # the share of scores below the axis: first epochs and lost runs would leave no room for the rest


def curve_figures(runs: Sequence[FinishedRun]) -> dict[str, bytes]:
    """PNG files by name, one for each data set and ambiguity."""
    figures = {}
    for dataset in dict.fromkeys(run.dataset for run in runs):
        own = [run for run in runs if run.dataset == dataset]
        for ambiguity in ambiguities_of(own):
            shown = [run for run in own if run.ambiguity == ambiguity]
            title = f"{dataset}, {ambiguity_label(ambiguity)}"
            name = f"{dataset}-{ambiguity}-curves" if str(ambiguity) else f"{dataset}-curves"
            figures[name] = _draw(shown, title)
    return figures


def _scores(run: FinishedRun) -> list[float]:
    """Of every epoch; not a number where an epoch was not evaluated."""
    lines = (run.directory / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line).get(METRIC, float("nan")) for line in lines]


def _draw(runs: Sequence[FinishedRun], title: str) -> bytes:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 4), layout="constrained")
    axes: Any = figure.subplots()
    shown: list[float] = []
    for number, (row, group) in enumerate(rows_of(runs).items()):
        curves = [_scores(run) for run in group]
        columns = list(zip(*curves, strict=False))  # up to the end of the shortest run
        epochs = range(1, len(columns) + 1)
        count = f" ({len(group)} runs)" if len(group) > 1 else ""
        means = [sum(column) / len(column) for column in columns]
        style = ("-", "--", ":")[number // NUM_COLOURS % 3]
        (line,) = axes.plot(epochs, means, style, label=f"{row}{count}", linewidth=1.2)
        shown += [mean for mean in means if math.isfinite(mean)]
        low, high = [min(column) for column in columns], [max(column) for column in columns]
        axes.fill_between(epochs, low, high, color=line.get_color(), alpha=0.15, linewidth=0)
    pretraining = {run.config.pretrain_epochs for run in runs if run.config.method == PLSP.name}
    if len(pretraining) == 1:
        (end,) = pretraining
        axes.axvline(end + 0.5, color="grey", linestyle=":", linewidth=1)
        axes.annotate("PLSP: end of pre-training", (end + 1, 0.02), xycoords=("data", "axes fraction"), fontsize=8)
    axes.set_xlabel("epoch")
    axes.set_ylabel(f"test {LABEL}")
    axes.set_title(f"{title}; mean and range, without the lowest {HIDDEN:.0%} of all scores", fontsize=10)
    if shown:
        axes.set_ylim(bottom=sorted(shown)[int(HIDDEN * len(shown))])
    axes.spines[["top", "right"]].set_visible(False)
    figure.legend(loc="outside right upper", frameon=False, fontsize="small")
    buffer = io.BytesIO()
    figure.savefig(buffer, dpi=110, format="png")
    return buffer.getvalue()
