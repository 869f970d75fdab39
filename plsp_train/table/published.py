"""The numbers of the paper's tables 1 to 4."""

import csv
from functools import cache
from importlib.resources import files
from typing import NamedTuple

from plsp_train.data import Ambiguity

SEEDS, EPOCHS = 5, 250  # behind each of the paper's scores


class Published(NamedTuple):
    mean: float
    std: float | None
    plsp_better: bool
    """The paper marks the gain of PLSP as significant."""


def published_numbers(dataset: str, ambiguity: Ambiguity, metric: str) -> dict[str, Published]:
    """By method, for those that the paper reports."""
    return {
        row["method"]: Published(float(row["mean"]), _number(row["std"]), row["plsp_significantly_better"] == "yes")
        for row in _rows()
        if (row["dataset"], row["metric"]) == (dataset, metric)
        and ambiguity == Ambiguity(row["candidates"], _number(row["flip_probability"]), None)
    }


@cache
def _rows() -> list[dict[str, str]]:
    with files(__package__).joinpath("published.csv").open(encoding="utf-8") as file:
        return list(csv.DictReader(file))


def _number(text: str) -> float | None:
    return float(text) if text else None
