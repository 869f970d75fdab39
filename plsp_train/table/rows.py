"""Rows and columns of a table."""

from collections.abc import Collection, Iterable
from typing import NamedTuple

from plsp_train.data import BUILT_IN_GENERATORS, Ambiguity
from plsp_train.table.finished import FinishedRun, Settings, method_labels


class Row(NamedTuple):
    method: str
    settings: Settings = ()
    """Those that differ between the rows of this method. A recipe stands for the settings that it implies."""

    def __str__(self) -> str:
        return f"{self.method} ({settings_label(self.settings)})" if self.settings else self.method


def rows_of(runs: Iterable[FinishedRun], one_per_method: bool = False) -> dict[Row, list[FinishedRun]]:
    """In the paper's order: one row per method, or one per combination of the settings that differ."""
    runs = list(runs)
    by_method: dict[str, list[FinishedRun]] = {label: [] for label in method_labels(runs)}
    for run in sorted(runs, key=lambda run: run.settings):
        by_method[run.method].append(run)
    rows: dict[Row, list[FinishedRun]] = {}
    for method, group in by_method.items():
        varying = () if one_per_method else varying_settings(group)
        for run in group:
            settings = only(varying, run.settings)
            if "recipe" in varying:
                settings = tuple(setting for setting in settings if setting not in run.implied)
            rows.setdefault(Row(method, settings), []).append(run)
    return rows


def varying_settings(runs: Iterable[FinishedRun]) -> set[str]:
    names = [name for name, _ in {setting for run in runs for setting in run.settings}]
    return {name for name in names if names.count(name) > 1}


def only(names: Collection[str], settings: Settings) -> Settings:
    return tuple((name, value) for name, value in settings if name in names)


def settings_label(settings: Settings) -> str:
    return ", ".join(f"{name} {value}" for name, value in settings)


def ambiguities_of(runs: Iterable[FinishedRun]) -> list[Ambiguity]:
    """By generator, then from least to most ambiguous."""

    def order(ambiguity: Ambiguity) -> tuple[int, str, float, float]:
        name = ambiguity.candidates or ""
        known = ("", *BUILT_IN_GENERATORS)  # own candidate sets first, other people's generators last
        place = known.index(name) if name in known else len(known)
        return place, name, ambiguity.flip_probability or 0.0, ambiguity.noise_rate or 0.0

    return sorted({run.ambiguity for run in runs}, key=order)


def ambiguity_label(ambiguity: Ambiguity) -> str:
    if ambiguity.candidates is None:
        return "own candidates"
    name = ambiguity.candidates.upper() if ambiguity.candidates in ("uss", "fps") else ambiguity.candidates
    flip = "" if ambiguity.flip_probability is None else f" {ambiguity.flip_probability}"
    noise = "" if ambiguity.noise_rate is None else f", noise {ambiguity.noise_rate}"
    return name + flip + noise
