"""Settings chosen by held-out candidate sets: no true label is read.

Each named setting in turn is tried at all its values, with the best values so far for the others. A trial trains the
whole schedule on most of the training instances and is scored by the candidate sets of the rest.
"""

from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Any

from plsp_train.config import Config
from plsp_train.console import Reporter, SilentReporter
from plsp_train.data import NORMALISATIONS, Source
from plsp_train.distributed import is_main
from plsp_train.divergence import NonFiniteLoss
from plsp_train.engine import Engine
from plsp_train.files import write_json
from plsp_train.outcome import LAST_EPOCHS
from plsp_train.preparation import prepare

HELD_OUT = 0.2
CRITERION = "covering_rate"
SELECTABLE: dict[str, tuple[Any, ...]] = {
    "model": ("mlp", "linear"),
    "normalise": NORMALISATIONS,
    "lr": (0.01, 0.05, 0.1, 0.5),
    "weight_decay": (1e-5, 1e-4, 1e-3, 1e-2),
}
_FOR_VECTORS = ("model", "normalise")


def choose_settings(config: Config, source: Source, out: Path, reporter: Reporter) -> Config:
    """The settings with the best values found for those that `config.select` names."""
    names = parse_selection(config.select, source.is_image)
    scores: dict[tuple[Any, ...], float] = {}
    trials = []
    for name in names:
        by_value = {}
        for value in dict.fromkeys((getattr(config, name), *SELECTABLE[name])):
            tried = replace(config, **{name: value})
            key = tuple(getattr(tried, each) for each in names)
            if key not in scores:
                scores[key] = _score(tried, source)
                trials.append({**dict(zip(names, key, strict=True)), CRITERION: scores[key]})
            by_value[value] = scores[key]
        best = max(by_value, key=lambda value: by_value[value])  # the default wins ties
        told = ", ".join(f"{value} {score:.1%}" for value, score in by_value.items())
        reporter.line(f"--select: {name} {best} (covering rate of held-out candidate sets: {told})")
        config = replace(config, **{name: best})
    if is_main():
        write_json(
            out / "selection.json", {"chosen": {name: getattr(config, name) for name in names}, "trials": trials}
        )
    return config


def parse_selection(text: str, is_image: bool) -> list[str]:
    """The names of settings in `--select a,b`."""
    names = [name.strip() for name in text.split(",")]
    for name in names:
        if name not in SELECTABLE:
            raise ValueError(f"--select takes {', '.join(SELECTABLE)}, separated by commas, got {name!r}")
        if is_image and name in _FOR_VECTORS:
            raise ValueError(f"--select {name} is for feature vectors: name the setting itself for images")
    return names


def _score(config: Config, source: Source) -> float:
    """The criterion over the last epochs of a trial; a trial that diverges scores zero."""
    trial = replace(config, validation_fraction=HELD_OUT, select="", tensorboard=False)
    engine = Engine(trial, *prepare(trial, source), None, SilentReporter())
    try:
        engine.run()
    except NonFiniteLoss:
        return 0.0
    return fmean(line[CRITERION] for line in engine.history[-LAST_EPOCHS:])
