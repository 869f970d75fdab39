"""Finished runs, and the numbers that tables take from them."""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from plsp_train import validation
from plsp_train.config import Config
from plsp_train.runs import Ambiguity, ambiguity_of, read_config, read_json, settings_that_matter

# As the paper writes them, in the order of its tables.
METHOD_LABELS = {
    "cc": "CC",
    "rc": "RC",
    "proden": "PRODEN",
    "lws": "LWS",
    "cavl": "CAVL",
    "pico": "PiCO",
    "df": "DF",
    "plsp w/o st": "PLSP w/o ST",
    "plsp": "PLSP",
}

# Which epochs' scores of a run count. The criteria need a validation split, but no clean label of it.
CRITERIA = {name.replace("_", "-"): name for name in validation.CRITERIA}
SELECTIONS = {
    "last10": "mean of the last ten epochs",
    "last": "last epoch",
    **{option: f"epoch of the highest {name.replace('_', ' ')}" for option, name in CRITERIA.items()},
}

Settings = tuple[tuple[str, Any], ...]


class FinishedRun(NamedTuple):
    folder: Path
    config: Config
    summary: dict[str, Any]

    @property
    def method(self) -> str:
        without_st = self.config.method == "plsp" and not self.config.semantic
        return METHOD_LABELS["plsp w/o st" if without_st else self.config.method]

    @property
    def ambiguity(self) -> Ambiguity:
        return ambiguity_of(self.config)

    @property
    def settings(self) -> Settings:
        """All that a row of a table has to tell besides the method."""
        told = ("method", "dataset", "semantic", "seed", *Ambiguity._fields)
        return tuple((name, value) for name, value in settings_that_matter(self.config).items() if name not in told)

    def score(self, metric: str, select: str) -> float:
        if select in CRITERIA:
            return self._selected(select)[metric]
        return self._entry(metric + {"last10": "_last10", "last": ""}[select])

    def criterion(self, select: str) -> float:
        """How good the run is by a criterion that needs no clean labels."""
        return self._selected(select)["value"]

    def seconds(self, stage: str) -> float | None:
        """Spent in the stage; None if the method has no such stage."""
        ends, start = self._entry("seconds_at_end_of"), 0.0
        for name, end in ends.items():
            if name == stage:
                return end - start
            start = end
        return None

    def _selected(self, select: str) -> dict[str, Any]:
        selected = self.summary.get(f"selected_by_{CRITERIA[select]}")
        if selected is None:
            raise ValueError(
                f"{self.folder} was trained without a validation split, which --select {select} needs: "
                f"train with --validation-fraction, or take --select last10"
            )
        return selected

    def _entry(self, name: str) -> Any:
        if name not in self.summary:
            raise ValueError(f"{self.folder / 'summary.json'} has no {name}: another version of plsp_train wrote it")
        return self.summary[name]


def read_runs(paths: Sequence[str]) -> tuple[list[FinishedRun], int]:
    """The finished runs in and below the folders, and how many others have begun there."""
    for path in paths:
        if not Path(path).is_dir():
            raise ValueError(f"there is no folder {path}")
    finished = _folders_with("summary.json", paths)
    if not finished:
        raise ValueError(f"no finished run (summary.json) in {', '.join(paths)}")
    runs = [FinishedRun(folder, read_config(folder), read_json(folder / "summary.json")) for folder in finished]
    _refuse_twins(runs)
    return runs, len(_folders_with("config.json", paths)) - len(runs)


def _folders_with(name: str, paths: Sequence[str]) -> list[Path]:
    """Each once, even if the paths overlap."""
    found = {file.parent.resolve(): file.parent for path in paths for file in Path(path).rglob(name)}
    return sorted(found.values())


def _refuse_twins(runs: Iterable[FinishedRun]) -> None:
    """A run that counts twice makes a mean look surer than it is."""
    seen: dict[Settings, Path] = {}
    for run in runs:
        settings = tuple(settings_that_matter(run.config).items())
        if settings in seen:
            raise ValueError(f"{seen[settings]} and {run.folder} are the same run: leave one of them out")
        seen[settings] = run.folder
