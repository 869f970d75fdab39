"""Numbers in words and the names of what is measured, the same everywhere on the page."""

from collections.abc import Sequence
from typing import Literal, NamedTuple

from plsp_train.outcome import SURE

NO_BREAK_SPACE = "\N{NO-BREAK SPACE}"


Unit = Literal["share", "score", "count"]


class Measure(NamedTuple):
    name: str
    """Its key in summary.json and metrics.jsonl."""
    label: str
    meaning: str
    unit: Unit = "share"


# What can be said of a run as a whole, most telling first; a run has those that its data allow.
MEASURES = (
    Measure("micro_f1", "micro-F1", "On the test set, last epoch.", unit="score"),
    Measure("macro_f1", "macro-F1", "On the test set, last epoch; every class counts the same.", unit="score"),
    Measure(
        "disambiguation_accuracy", "chosen labels correct", "Training instances whose chosen label is the true one."
    ),
    Measure("covering_rate", "covering rate", "Held-out instances whose predicted class is one of their candidates."),
    Measure(
        "approximated_accuracy",
        "approximated accuracy",
        "Expected accuracy on held-out instances if the model's probabilities of their candidates are right.",
    ),
    Measure("label_agreement", "labels unchanged", "Instances whose chosen label is that of the previous epoch."),
    Measure(
        "contradiction_share",
        "sure contradictions",
        f"Instances whose predicted class has a probability of {SURE} or more and is not one of their candidates.",
    ),
)


def number(value: float, unit: Unit) -> str:
    return {"share": percent, "score": score, "count": lambda count: f"{count:,.0f}"}[unit](value)


def score(value: float) -> str:
    return f"{value:.3f}"


def percent(value: float) -> str:
    """One decimal. Only all is 100 % and only none is 0 %."""
    if 0 < value < 0.0005:
        shown = "<0.1"
    elif 0.9995 <= value < 1:
        shown = ">99.9"
    else:
        shown = f"{100 * value:.{0 if value in (0, 1) else 1}f}"
    return shown + NO_BREAK_SPACE + "%"


def count(value: int, noun: str = "") -> str:
    """12,000 instances; 1 class"""
    if not noun:
        return f"{value:,}"
    if value != 1:
        noun += "es" if noun.endswith("s") else "s"
    return f"{value:,} {noun}"


def duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours} h {minutes} min"
    return f"{minutes} min {rest} s" if minutes else f"{seconds:.1f} s"


def enumeration(names: Sequence[str], most: int = 5) -> str:
    """a, b and c; or a, b, c and 4 more"""
    if len(names) > most:
        names = [*names[: most - 1], f"{len(names) - most + 1} more"]
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"
