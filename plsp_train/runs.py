"""Run directories: settings, and which settings identify a run."""

import json
from collections.abc import Iterable, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

from plsp_train.checkpoint import has_checkpoint
from plsp_train.config import FREE_ON_RESUME, Config, current_settings, stored_config
from plsp_train.data import Ambiguity
from plsp_train.methods import METHODS, Method
from plsp_train.rules import OWN_CANDIDATES


def dataset_name(config: Config) -> str:
    """A benchmark's name, or that of the user's file without its directory and suffix."""
    path = Path(config.dataset)
    is_plugin = ":" in config.dataset and not path.exists()
    return config.dataset.replace(":", ".") if is_plugin else path.stem


def method_of(config: Config) -> type[Method] | None:
    """None for someone else's method: a file must not decide what is imported."""
    return METHODS[config.method] if config.method in METHODS else None  # noqa: SIM401 - get() would import it


def ambiguity_of(config: Config) -> Ambiguity:
    if config.candidates == OWN_CANDIDATES:
        return Ambiguity(None)
    return Ambiguity(config.candidates, config.flip_probability, config.noise_rate).used()


def settings_that_matter(config: Config) -> dict[str, Any]:
    """The settings that determine the numbers of a run: two runs that share them are the same run."""
    others, method = METHODS.keys() - {config.method}, method_of(config)
    ignored = {
        *FREE_ON_RESUME,
        *(method.ignores if method else ()),
        *(name for name, value in ambiguity_of(config)._asdict().items() if value is None),
        *(setting.name for setting in fields(config) if setting.metadata["group"] in others),
    }
    return {name: value for name, value in config.to_json().items() if name not in ignored}


def differences(stored: Mapping[str, Any], wanted: Mapping[str, Any], names: Iterable[str]) -> str:
    """lr was 0.05, now 0.1; k was 50, now 9"""
    changed = [name for name in names if stored.get(name) != wanted.get(name)]
    return "; ".join(f"{name} was {stored.get(name)!r}, now {wanted.get(name)!r}" for name in changed)


def holds_run(directory: Path) -> bool:
    """Whether there is something to resume: a checkpoint, or the first fold of a cross-validation."""
    return has_checkpoint(directory) or (directory / "fold1").exists()


def is_finished(directory: Path) -> bool:
    """Whether the run, or all folds of the cross-validation, have ended."""
    return (directory / "summary.json").exists() or (directory / "folds.json").exists()


def read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ValueError(f"{path.parent} is not the directory of a run: it has no {path.name}") from None
    except (ValueError, RecursionError) as error:  # the latter for brackets that are nested very deeply
        raise ValueError(f"cannot read {path}: {error}") from None
    if not isinstance(content, dict):
        raise ValueError(f"cannot read {path}: it must hold a table of names and values")
    return content


def read_config(directory: Path) -> Config:
    """The settings of a run. Those that its version did not have yet take their defaults."""
    stored = read_json(directory / "config.json")
    try:
        return stored_config(current_settings(stored))
    except ValueError as error:
        raise ValueError(f"{directory / 'config.json'}: {error}") from None
