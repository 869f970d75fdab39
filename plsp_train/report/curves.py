"""Which metrics are drawn together, for one run and for several."""

from collections.abc import Sequence
from statistics import fmean

from plsp_train.report.charts import NUM_COLOURS, Chart, Series, is_finite, line_chart, series_of
from plsp_train.report.markup import Html, element, fragment
from plsp_train.report.run import Run, Subject
from plsp_train.report.wording import MEASURES, Unit, enumeration

# Titles, units, and the metrics with their names in the legend.
_CHARTS: tuple[tuple[str, Unit, dict[str, str]], ...] = (
    ("F1 on the test set", "score", {"micro_f1": "micro-F1", "macro_f1": "macro-F1"}),
    (
        "Signs without true labels",
        "share",
        {
            "covering_rate": "covering rate",
            "approximated_accuracy": "approximated accuracy",
            "label_agreement": "labels unchanged",
        },
    ),
    (
        "Labels used in training",
        "share",
        {
            "mask_rate": "pseudo-labels in use",
            "pseudo_label_purity": "of these correct",
            "labeled_purity": "labels correct",
        },
    ),
    (
        "Loss and its terms",
        "score",
        {
            "loss": "loss",
            "supervised": "supervised",
            "consistency": "consistency",
            "complementary": "complementary",
        },
    ),
)
_CLASS_CHARTS: tuple[tuple[str, Unit, str], ...] = (
    ("Confidence threshold of each class", "score", "thresholds"),
    ("Labelled set of each class", "count", "labeled_per_class"),
)
_COMPARED = {measure.name: (measure.label, measure.unit) for measure in MEASURES} | {
    "mask_rate": ("pseudo-labels in use", "share"),
}


def run_curves(run: Run) -> Html | None:
    charts = [
        Chart(title, [series_of(run.history, key, name) for key, name in metrics.items()], unit, run.stages)
        for title, unit, metrics in _CHARTS
    ]
    charts += [
        Chart(title, _class_series(run, key), unit, run.stages, NUM_COLOURS) for title, unit, key in _CLASS_CHARTS
    ]
    later = [f"{name} from epoch {epoch}" for epoch, name in run.stages[1:]]
    note = (
        element("p", f"Dotted lines mark the start of a stage: {enumeration(later)}.", class_="note") if later else None
    )
    return fragment(note, _grid(charts)) if run.history else None


def compared_curves(subjects: Sequence[Subject]) -> Html | None:
    """One chart per metric, one line per run or, as the mean over folds, per cross-validation."""
    return _grid(
        [
            Chart(label, [_series(subject, key) for subject in subjects], unit)
            for key, (label, unit) in _COMPARED.items()
        ]
    )


def _grid(charts: list[Chart]) -> Html | None:
    drawn = [figure for figure in map(line_chart, charts) if figure is not None]
    return element("div", drawn, class_="charts") if drawn else None


def _class_series(run: Run, key: str) -> list[Series]:
    if run.per_class(key) is None:
        return []
    lines = [line for line in run.history if isinstance(line.get(key), list)]
    series = [
        Series(name, [(line["epoch"], line[key][place]) for line in lines if is_finite(line[key][place])])
        for place, name in enumerate(run.class_names)
    ]
    if all(other.points == series[0].points for other in series):
        return [series[0]._replace(name="every class")]
    return series


def _series(subject: Subject, key: str) -> Series:
    if isinstance(subject, Run):
        return series_of(subject.history, key, subject.title)
    values: dict[int, list[float]] = {}
    for fold in subject.folds:
        for epoch, value in series_of(fold.history, key, "").points:
            values.setdefault(epoch, []).append(value)
    # Epochs that only some folds have reached would make the mean jump.
    complete = [(epoch, fmean(found)) for epoch, found in values.items() if len(found) == len(subject.folds)]
    return Series(f"{subject.title} (mean of {len(subject.folds)} folds)", complete)
