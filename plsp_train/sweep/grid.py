"""The runs of a grid: their settings, the names of their folders, and what is left to do of each."""

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from plsp_train.config import FREE_ON_RESUME, Config, build_config
from plsp_train.runs import Ambiguity, ambiguity_of, read_config, settings_that_matter

# Where the paper searches the learning rate and the weight decay of every method.
PAPER_GRID: dict[str, Sequence[Any]] = {
    "lr": (1e-4, 1e-3, 0.01, 0.05, 0.1, 0.5),
    "weight_decay": (1e-6, 1e-5, 1e-4, 1e-3, 0.01, 0.1),
}
_ALWAYS_NAMED = ("method", "dataset", *Ambiguity._fields, "seed")


@dataclass(frozen=True, eq=False)
class GridRun:
    """One point of the grid."""

    folder: Path
    given: Mapping[str, Any]
    state: str
    """new, broken or finished"""

    @property
    def name(self) -> str:
        return self.folder.name

    def arguments(self) -> list[str]:
        """The command line of `python -m plsp_train`."""
        flags = [_flag(name, value) for name, value in self.given.items()]
        return [*flags, f"--out={self.folder}", *(["--resume"] if self.state == "broken" else [])]


def expand(grid: Mapping[str, Sequence[Any]], common: Mapping[str, Any], out: Path) -> list[GridRun]:
    """Every combination of the grid's values on top of the common settings.

    Combinations that differ only in settings without effect, such as k for another method than PLSP, are one run.
    """
    runs: dict[Path, GridRun] = {}
    for values in itertools.product(*grid.values()):
        given = {**common, **dict(zip(grid, values, strict=True))}
        matter = settings_that_matter(build_config(given))
        given = {name: value for name, value in given.items() if name in matter or name in FREE_ON_RESUME}
        config = build_config(given)
        folder = out / _name(config, [name for name in matter if name in grid])
        if folder not in runs:
            runs[folder] = GridRun(folder, given, _state(folder, config))
    return list(runs.values())


def _name(config: Config, settings: Sequence[str]) -> str:
    """Tells every setting of the grid, also one of a single value: it keeps its name when the grid grows."""
    others = [_setting_in_name(name, getattr(config, name)) for name in settings if name not in _ALWAYS_NAMED]
    drawn = str(ambiguity_of(config))
    return "-".join([config.method, config.dataset, *([drawn] if drawn else []), *others, f"seed{config.seed}"])


def _setting_in_name(name: str, value: Any) -> str:
    if isinstance(value, bool):
        return name if value else f"no_{name}"
    return f"{name}{value}"


def _state(folder: Path, config: Config) -> str:
    if not (folder / "config.json").exists():
        return "new"
    stored, wanted = settings_that_matter(read_config(folder)), settings_that_matter(config)
    changed = [
        f"{name} was {stored.get(name)!r}, now {wanted.get(name)!r}"
        for name in sorted({*stored, *wanted})
        if stored.get(name) != wanted.get(name)
    ]
    if changed:
        raise ValueError(f"{folder} holds a run with other settings: {'; '.join(changed)}; choose another --out")
    if (folder / "summary.json").exists():
        return "finished"
    return "broken" if (folder / "checkpoint.pt").exists() else "new"


def _flag(name: str, value: Any) -> str:
    flag = name.replace("_", "-")
    if isinstance(value, bool):
        return f"--{flag}" if value else f"--no-{flag}"
    return f"--{flag}={value}"
