"""Folders of runs: who works in them, their settings, and which of these tell two runs apart."""

import json
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import fields
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from plsp_train.config import FREE_ON_RESUME, Config, build_config
from plsp_train.data import REAL_PARTIAL_LABEL_SETS

_GENERATORS_THAT_FLIP = ("fps", "pair", "hierarchical", "noisy")


class Ambiguity(NamedTuple):
    """How candidate sets came about; what does not apply is None."""

    candidates: str | None
    flip_probability: float | None
    noise_rate: float | None

    def __str__(self) -> str:
        """fps0.3, uss, noisy0.3-noise0.1; nothing for data that came with its candidate sets."""
        noise = "" if self.noise_rate is None else f"-noise{self.noise_rate}"
        return f"{self.candidates or ''}{'' if self.flip_probability is None else self.flip_probability}{noise}"


def settings_that_matter(config: Config) -> dict[str, Any]:
    """The settings on which the numbers of a run depend: two runs that share them are the same run."""
    has_own_candidates = config.dataset in REAL_PARTIAL_LABEL_SETS
    matters = {
        "candidates": not has_own_candidates,
        "flip_probability": not has_own_candidates and config.candidates in _GENERATORS_THAT_FLIP,
        "noise_rate": not has_own_candidates and config.candidates == "noisy",
        "lws_leverage": config.method == "lws",
        **{setting.name: config.method == "plsp" for setting in fields(config) if setting.metadata["group"] == "plsp"},
        **dict.fromkeys(FREE_ON_RESUME, False),
    }
    return {name: value for name, value in config.to_json().items() if matters.get(name, True)}


def ambiguity_of(config: Config) -> Ambiguity:
    settings = settings_that_matter(config)
    return Ambiguity(*(settings.get(name) for name in Ambiguity._fields))


@contextmanager
def sole_use(folder: Path) -> Iterator[None]:
    """Refuse a folder that another process works in. However that process ends, the system then lifts its claim."""
    # A file of its own, open for writing: network file systems claim neither folders nor what is open for reading.
    with open(folder / ".lock", "wb") as file:
        _claim(file, folder)
        yield


def _claim(file: BinaryIO, folder: Path) -> None:
    with suppress(ImportError, OSError):  # Windows, and file systems without locks: there nobody is kept out
        import fcntl

        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ValueError(
                f"another process is at work in {folder}: wait for its end, or choose another --out"
            ) from None


def read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ValueError(f"{path.parent} is not the folder of a run: it has no {path.name}") from None
    except ValueError as error:
        raise ValueError(f"cannot read {path}: {error}") from None
    if not isinstance(content, dict):
        raise ValueError(f"cannot read {path}: it must hold a table of names and values")
    return content


def read_config(folder: Path) -> Config:
    """The settings of the run in the folder; one that its version did not have yet takes its default."""
    stored = read_json(folder / "config.json")
    try:
        return build_config(stored)
    except ValueError as error:
        raise ValueError(f"{folder / 'config.json'}: {error}") from None
