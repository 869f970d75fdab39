"""Finished runs and their scores."""

import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from plsp_train import validation
from plsp_train.config import Config
from plsp_train.data import Ambiguity
from plsp_train.methods import METHODS
from plsp_train.rules import preset_for
from plsp_train.runs import ambiguity_of, dataset_name, method_of, read_config, read_json, settings_that_matter

# Epochs to take scores from. The criteria need a validation split, but no clean labels.
CRITERIA = {name.replace("_", "-"): name for name in validation.CRITERIA}
SELECTIONS = {
    "last10": "mean of the last ten epochs",
    "last": "last epoch",
    **{option: f"epoch of the highest {name.replace('_', ' ')}" for option, name in CRITERIA.items()},
}

Settings = tuple[tuple[str, Any], ...]


class FinishedRun(NamedTuple):
    directory: Path
    config: Config
    summary: dict[str, Any]

    @property
    def method(self) -> str:
        method = method_of(self.config)
        return method.label_of(self.config) if method else self.config.method

    @property
    def dataset(self) -> str:
        return dataset_name(self.config)

    @property
    def repetition(self) -> tuple[int, int]:
        """What may differ between runs of one cell: seed and fold."""
        return self.config.seed, self.config.fold

    @property
    def ambiguity(self) -> Ambiguity:
        return ambiguity_of(self.config)

    @property
    def settings(self) -> Settings:
        """The settings that can tell rows of one method apart."""
        method = method_of(self.config)
        ablated = (name for settings in (method.ablations if method else {}).values() for name in settings)
        told = ("method", "dataset", *ablated, "seed", "fold", *Ambiguity._fields)
        return tuple((name, value) for name, value in settings_that_matter(self.config).items() if name not in told)

    @property
    def implied(self) -> Settings:
        """The settings that the recipes of the method differ in, as the recipe of this run has them."""
        method = method_of(self.config)
        if method is None or not method.recipes:
            return ()
        names = {name for recipe in (method.defaults, *method.recipes.values()) for name in recipe}
        chosen = method.recipes.get(self.config.recipe, method.defaults)
        defaults = {**Config().to_json(), **preset_for(self.config.dataset, None), **chosen}
        return tuple((name, defaults[name]) for name in names)

    def score(self, metric: str, select: str) -> float:
        if select in CRITERIA:
            return self._number(self._selected(select), metric)
        name = metric + {"last10": "_last10", "last": ""}[select]
        return self._number({name: self._entry(name)}, name)

    def criterion(self, select: str) -> float:
        """The value of a criterion, which needs no clean labels."""
        return self._number(self._selected(select), "value")

    def seconds(self, stage: str) -> float | None:
        """Duration of the stage; None if the method has no such stage."""
        ends, start = self._entry("seconds_at_end_of"), 0.0
        for name in ends if isinstance(ends, dict) else ():
            end = self._number(ends, name)
            if name == stage:
                return end - start
            start = end
        return None

    def _selected(self, select: str) -> dict[str, Any]:
        selected = self.summary.get(f"selected_by_{CRITERIA[select]}")
        if selected is None:
            raise ValueError(
                f"{self.directory} was trained without a validation split, which --select {select} needs: "
                f"train with --validation-fraction, or use --select last10"
            )
        return selected

    def _number(self, entries: Any, name: str) -> float:
        value = entries.get(name) if isinstance(entries, dict) else None
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            raise ValueError(f"{self.directory / 'summary.json'}: {name} must be a finite number, got {value!r}")
        return value

    def _entry(self, name: str) -> Any:
        if name not in self.summary and "_f1" in name and "versions" in self.summary:
            raise ValueError(f"{self.directory} has no {name}: it was trained without a labelled test set")
        if name not in self.summary:
            raise ValueError(f"{self.directory / 'summary.json'} has no {name}: another version of plsp_train wrote it")
        return self.summary[name]


def method_labels(runs: Iterable[FinishedRun]) -> list[str]:
    """Labels of rows in the order of the paper's tables, then those of other methods."""
    known = [label for method in METHODS.values() for label in (*method.ablations, method.label)]
    return [*known, *sorted({run.method for run in runs} - set(known))]


def read_runs(paths: Sequence[str]) -> tuple[list[FinishedRun], int]:
    """The finished runs in and below the directories, and the number of unfinished ones."""
    for path in paths:
        if not Path(path).is_dir():
            raise ValueError(f"no such directory: {path}")
    finished = _directories_with("summary.json", paths)
    if not finished:
        raise ValueError(f"no finished run (summary.json) in {', '.join(paths)}")
    runs = [FinishedRun(path, read_config(path), read_json(path / "summary.json")) for path in finished]
    _check_distinct(runs)
    return runs, len(_directories_with("config.json", paths)) - len(runs)


def _directories_with(name: str, paths: Sequence[str]) -> list[Path]:
    """Without repetition, even if the paths overlap."""
    found = {file.parent.resolve(): file.parent for path in paths for file in Path(path).rglob(name)}
    return sorted(found.values())


def _check_distinct(runs: Iterable[FinishedRun]) -> None:
    """A run counted twice would make a mean look more certain than it is."""
    seen: dict[Settings, Path] = {}
    for run in runs:
        settings = tuple(settings_that_matter(run.config).items())
        if settings in seen:
            raise ValueError(f"{seen[settings]} and {run.directory} are the same run: remove one of them")
        seen[settings] = run.directory
