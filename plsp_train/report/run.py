"""Directories of runs and of cross-validations, finished or not."""

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from plsp_train.config import Config
from plsp_train.results import Results, load_results
from plsp_train.runs import method_of, read_config, read_json

_SUMMARY_KINDS: dict[str, type] = {
    "warnings": list,
    "notes": list,
    "versions": dict,
    "seconds_at_end_of": dict,
    "device": str,
}
_LARGEST = 1e100  # of a metric; charts compute with differences and squares


@dataclass(frozen=True, eq=False)
class Run:
    title: str
    directory: Path
    config: Config
    ambiguity: dict[str, Any]
    """What is known of the candidate sets; empty if nothing is."""
    history: list[dict[str, Any]]
    """Metrics of the finished epochs."""
    summary: dict[str, Any] | None
    """None while the run is not finished."""
    results: Results | None

    @property
    def method(self) -> str:
        """Its name in tables, or for someone else's method that on the command line."""
        method = method_of(self.config)
        return method.label_of(self.config) if method is not None else self.config.method

    @property
    def class_names(self) -> list[str]:
        """Of as many classes as are known, named by their numbers if they have no names."""
        if self.results is not None:
            return [str(name) for name in self.results.class_names]
        lists = (line.get(key) for line in reversed(self.history) for key in ("thresholds", "labeled_per_class"))
        return [str(number) for number in range(len(next((found for found in lists if found), [])))]

    def per_class(self, key: str) -> list[float | None] | None:
        """The latest value of every class; None if the run has no such metric."""
        latest = next((line[key] for line in reversed(self.history) if isinstance(line.get(key), list)), None)
        if latest is not None and len(latest) != len(self.class_names):
            place, classes = self.directory / "metrics.jsonl", len(self.class_names)
            raise ValueError(f"{place}: {key} has {len(latest)} entries, but there are {classes} classes")
        return latest

    @property
    def stages(self) -> list[tuple[int, str]]:
        """The first epoch of each stage and its name."""
        first: dict[str, int] = {}
        for line in self.history:
            first.setdefault(str(line.get("stage")), line["epoch"])
        return [(epoch, name) for name, epoch in first.items()]

    def measure(self, name: str) -> float | None:
        """From the summary, or from the last epoch of an unfinished run."""
        last = self.history[-1] if self.history else {}
        value = (last if self.summary is None else self.summary).get(name)
        return value if isinstance(value, int | float) and math.isfinite(value) else None


@dataclass(frozen=True, eq=False)
class CrossValidation:
    title: str
    directory: Path
    folds: list[Run]
    """Those that have begun."""

    @property
    def num_folds(self) -> int:
        """As many as were asked for."""
        return max(len(self.folds), self.folds[0].config.folds)


Subject = Run | CrossValidation


def read_subjects(paths: Sequence[str]) -> list[Subject]:
    directories = [Path(path) for path in paths]
    for directory in directories:
        if not directory.is_dir():
            raise FileNotFoundError(f"no such directory: {directory}")
    seen: dict[Path, Path] = {}
    for directory in directories:
        if directory.resolve() in seen:
            raise ValueError(f"{seen[directory.resolve()]} and {directory} are the same directory: remove one of them")
        seen[directory.resolve()] = directory
    names = [directory.resolve().name for directory in directories]
    return [
        _read_subject(directory, name if names.count(name) == 1 else str(directory))
        for directory, name in zip(directories, names, strict=True)
    ]


def _read_subject(directory: Path, title: str) -> Subject:
    numbers = sorted(
        int(path.parent.name[4:]) for path in directory.glob("fold*/config.json") if path.parent.name[4:].isdigit()
    )
    if not numbers:
        return _read_run(directory, title)
    folds = [_read_run(directory / f"fold{number}", f"fold {number}") for number in numbers]
    return CrossValidation(title, directory, folds)


def _read_run(directory: Path, title: str) -> Run:
    ambiguity, summary, results = (directory / name for name in ("ambiguity.json", "summary.json", "results.npz"))
    return Run(
        title=title,
        directory=directory,
        config=read_config(directory),
        ambiguity=_read_numbers(ambiguity) if ambiguity.exists() else {},
        history=_read_metrics(directory / "metrics.jsonl"),
        summary=_read_summary(summary) if summary.exists() else None,
        # An older file may lie in the directory of a run that was started again.
        results=load_results(results) if results.exists() and summary.exists() else None,
    )


def _read_numbers(path: Path) -> dict[str, float | None]:
    content = read_json(path)
    for name, value in content.items():
        if value is not None and not isinstance(value, int | float):
            raise ValueError(f"cannot read {path}: {name!r} must be a number, got {value!r}")
    return content


def _read_metrics(path: Path) -> list[dict[str, Any]]:
    if not path.exists():
        return []
    try:
        lines = path.read_text(encoding="utf-8").split("\n")
    except UnicodeDecodeError as error:
        raise ValueError(f"cannot read {path}: {error}") from None
    # The last line is empty, or an epoch that is being written.
    history = [_parse_epoch(line, f"{path}, line {number}") for number, line in enumerate(lines[:-1], 1)]
    for name in {name for line in history for name, value in line.items() if isinstance(value, list)}:
        if (
            len(
                {
                    len(line[name]) if isinstance(line[name], list) else 0
                    for line in history
                    if line.get(name) is not None
                }
            )
            > 1
        ):
            raise ValueError(f"cannot read {path}: {name!r} does not always have one entry per class")
    return history


def _parse_epoch(line: str, place: str) -> dict[str, Any]:
    try:
        metrics = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"cannot read {place}: {error}") from None
    if not isinstance(metrics, dict) or not isinstance(metrics.get("epoch"), int):
        raise ValueError(f"cannot read {place}: it must hold the metrics of an epoch")
    for name, value in metrics.items():
        numbers = value if isinstance(value, list) else [value]
        if name != "stage" and not all(number is None or _is_metric(number) for number in numbers):
            raise ValueError(f"cannot read {place}: {name!r} must be a number or one per class")
    return metrics


def _is_metric(value: object) -> bool:
    return isinstance(value, int | float) and not abs(value) > _LARGEST


def _read_summary(path: Path) -> dict[str, Any]:
    summary = read_json(path)
    for name, value in summary.items():
        kind = dict if name.startswith("selected_by_") else _SUMMARY_KINDS.get(name)
        fits = value is None or _is_metric(value) if kind is None else isinstance(value, kind)
        if not fits or (name in ("epochs", "seconds") and (value is None or not math.isfinite(value))):
            raise ValueError(f"cannot read {path}: {name!r} must not be {value!r}")
    return summary
