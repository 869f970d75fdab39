"""Several runs side by side: their different settings and their key figures."""

import json
from collections.abc import Sequence
from typing import Any

from plsp_train.report.markup import Html, element
from plsp_train.report.overview import measure_over_folds
from plsp_train.report.run import Run, Subject
from plsp_train.report.tables import MISSING, row_head, scrollable
from plsp_train.report.wording import MEASURES, Measure, duration, number
from plsp_train.runs import settings_that_matter


def comparison_table(caption: str, subjects: Sequence[Subject], links: Sequence[str]) -> Html:
    settings = [_settings(subject) for subject in subjects]
    names = _different_settings(settings)
    measures = [measure for measure in MEASURES if any(_measure(subject, measure) for subject in subjects)]
    rows = []
    for subject, own, link in zip(subjects, settings, links, strict=True):
        cells = [element("td", setting_text(own.get(name))) for name in names]
        cells += [element("td", _measure(subject, measure) or MISSING, class_="number") for measure in measures]
        cells += [element("td", _epochs(subject), class_="number"), element("td", _time(subject), class_="number")]
        rows.append(element("tr", row_head(element("a", subject.title, href=f"#{link}")), cells))
    heads = [element("th", label, scope="col") for label in ("run", *(name.replace("_", " ") for name in names))]
    numbers = {measure.label: measure.meaning for measure in measures} | {"epochs trained": None, "training time": None}
    heads += [element("th", label, scope="col", class_="number", title=title) for label, title in numbers.items()]
    return scrollable(caption, element("thead", element("tr", heads)), element("tbody", rows))


def setting_text(value: Any) -> str:
    if value is None or value == "":
        return MISSING
    return value if isinstance(value, str) else json.dumps(value)


def _different_settings(settings: Sequence[dict[str, Any]]) -> list[str]:
    """Those that differ between runs that have them: a setting of one method alone says nothing."""
    names = dict.fromkeys(name for own in settings for name in own)
    return [name for name in names if len({json.dumps(own[name]) for own in settings if name in own}) > 1]


def _settings(subject: Subject) -> dict[str, Any]:
    run = subject if isinstance(subject, Run) else subject.folds[0]
    return {name: value for name, value in settings_that_matter(run.config).items() if name != "fold"}


def _measure(subject: Subject, measure: Measure) -> str:
    if not isinstance(subject, Run):
        return " ".join(measure_over_folds(subject, measure) or ())
    value = subject.measure(measure.name)
    return "" if value is None else number(value, measure.unit)


def _epochs(subject: Subject) -> str:
    if not isinstance(subject, Run):
        return f"{len(subject.folds)} × {len(subject.folds[0].history)}"
    return str(len(subject.history)) + ("" if subject.summary is not None else " so far")


def _time(subject: Subject) -> str:
    runs = [subject] if isinstance(subject, Run) else subject.folds
    seconds = [run.history[-1]["seconds"] for run in runs if run.history and "seconds" in run.history[-1]]
    return duration(sum(seconds)) if seconds else MISSING
