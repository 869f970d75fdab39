"""What the rows and columns of a table stand for."""

from collections.abc import Collection, Iterable
from typing import NamedTuple

from plsp_train.data import GENERATORS
from plsp_train.runs import Ambiguity
from plsp_train.table.finished import METHOD_LABELS, FinishedRun, Settings


class Row(NamedTuple):
    method: str
    settings: Settings = ()
    """Those by which the rows of this method differ."""

    def __str__(self) -> str:
        return f"{self.method} ({settings_label(self.settings)})" if self.settings else self.method


def rows_of(runs: Iterable[FinishedRun], one_per_method: bool = False) -> dict[Row, list[FinishedRun]]:
    """In the paper's order, one row per method, or several that tell by which settings they differ."""
    by_method: dict[str, list[FinishedRun]] = {label: [] for label in METHOD_LABELS.values()}
    for run in sorted(runs, key=lambda run: run.settings):
        by_method[run.method].append(run)
    rows: dict[Row, list[FinishedRun]] = {}
    for method, group in by_method.items():
        varying = () if one_per_method else varying_settings(group)
        for run in group:
            rows.setdefault(Row(method, only(varying, run.settings)), []).append(run)
    return rows


def varying_settings(runs: Iterable[FinishedRun]) -> set[str]:
    names = [name for name, _ in {setting for run in runs for setting in run.settings}]
    return {name for name in names if names.count(name) > 1}


def only(names: Collection[str], settings: Settings) -> Settings:
    return tuple((name, value) for name, value in settings if name in names)


def settings_label(settings: Settings) -> str:
    return ", ".join(f"{name} {value}" for name, value in settings)


def ambiguities_of(runs: Iterable[FinishedRun]) -> list[Ambiguity]:
    """From the least ambiguous of a generator to the most."""

    def order(ambiguity: Ambiguity) -> tuple[int, float, float]:
        generator = GENERATORS.index(ambiguity.candidates) if ambiguity.candidates else -1
        return generator, ambiguity.flip_probability or 0.0, ambiguity.noise_rate or 0.0

    return sorted({run.ambiguity for run in runs}, key=order)


def ambiguity_label(ambiguity: Ambiguity) -> str:
    if ambiguity.candidates is None:
        return "own candidates"
    name = ambiguity.candidates.upper() if ambiguity.candidates in ("uss", "fps") else ambiguity.candidates
    flip = "" if ambiguity.flip_probability is None else f" {ambiguity.flip_probability}"
    noise = "" if ambiguity.noise_rate is None else f", noise {ambiguity.noise_rate}"
    return name + flip + noise
