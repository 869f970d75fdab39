"""The runs of a grid: settings, directory names and states."""

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from plsp_train.config import FREE_ON_RESUME, Config, build_config, import_plugins
from plsp_train.data import DATASETS, Ambiguity, Source
from plsp_train.preparation import load_source
from plsp_train.runs import (
    ambiguity_of,
    dataset_name,
    differences,
    holds_run,
    is_finished,
    read_config,
    settings_that_matter,
)

# The paper's search space for every method.
PAPER_GRID: dict[str, Sequence[Any]] = {
    "lr": (1e-4, 1e-3, 0.01, 0.05, 0.1, 0.5),
    "weight_decay": (1e-6, 1e-5, 1e-4, 1e-3, 0.01, 0.1),
}
_ALWAYS_NAMED = ("method", "dataset", *Ambiguity._fields, "seed")


@dataclass(frozen=True, eq=False)
class GridRun:
    """One point of the grid."""

    directory: Path
    given: Mapping[str, Any]
    state: str
    """new, interrupted or finished"""

    @property
    def name(self) -> str:
        return self.directory.name

    def arguments(self) -> list[str]:
        """The command line of `python -m plsp_train`."""
        flags = [_flag(name, value) for name, value in self.given.items()]
        return [*flags, f"--out={self.directory}", *(["--resume"] if self.state == "interrupted" else [])]


def expand(grid: Mapping[str, Sequence[Any]], common: Mapping[str, Any], out: Path) -> list[GridRun]:
    """Every combination of the grid's values on top of the common settings.

    Combinations that differ only in settings without effect, such as k for another method than PLSP, are one run.
    """
    runs: dict[Path, GridRun] = {}
    for values in itertools.product(*grid.values()):
        given = {**common, **dict(zip(grid, values, strict=True))}
        source = _own_data(given)
        matter = settings_that_matter(build_config(given, source))
        given = {name: value for name, value in given.items() if name in matter or name in FREE_ON_RESUME}
        config = build_config(given, source)
        directory = out / _name(config, [name for name in matter if name in grid])
        if directory not in runs:
            runs[directory] = GridRun(directory, given, _state(directory, config))
    return list(runs.values())


def _own_data(given: Mapping[str, Any]) -> Source | None:
    """The user data that the settings name; defaults depend on them."""
    if given.get("dataset", Config.dataset) in DATASETS:
        return None
    names = ("dataset", "data_root", "annotators", "image_size", "plugin")
    return _loaded(tuple((name, given[name]) for name in names if name in given))


@cache
def _loaded(given: tuple[tuple[str, Any], ...]) -> Source:
    import_plugins(dict(given))
    return load_source(dict(given))


def _name(config: Config, settings: Sequence[str]) -> str:
    """Contains every setting of the grid, even with a single value: the name stays the same when the grid grows."""
    others = [_setting_in_name(name, getattr(config, name)) for name in settings if name not in _ALWAYS_NAMED]
    drawn = str(ambiguity_of(config))
    method = config.method.replace(":", ".")
    return "-".join([method, dataset_name(config), *([drawn] if drawn else []), *others, f"seed{config.seed}"])


def _setting_in_name(name: str, value: Any) -> str:
    if isinstance(value, bool):
        return name if value else f"no_{name}"
    return f"{name}{value}"


def _state(directory: Path, config: Config) -> str:
    if not (directory / "config.json").exists():
        return "new"
    stored, wanted = settings_that_matter(read_config(directory)), settings_that_matter(config)
    chosen = {name.strip() for name in stored["select"].split(",")}  # by the run itself
    changed = differences(stored, wanted, sorted({*stored, *wanted} - chosen))
    if changed:
        raise ValueError(f"{directory} holds a run with other settings: {changed}; choose another --out")
    if is_finished(directory):
        return "finished"
    return "interrupted" if holds_run(directory) else "new"


def _flag(name: str, value: Any) -> str:
    flag = name.replace("_", "-")
    if isinstance(value, bool):
        return f"--{flag}" if value else f"--no-{flag}"
    return f"--{flag}={value}"
