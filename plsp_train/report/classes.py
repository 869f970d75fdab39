"""What became of each class: the table of classes."""

from typing import NamedTuple

import numpy as np

from plsp_train.report.markup import Html, element, fragment
from plsp_train.report.run import Run
from plsp_train.report.tables import Column, data_table
from plsp_train.report.wording import count, percent, score
from plsp_train.results import Results


class PerClass(NamedTuple):
    """Counts of training instances, (l,) each."""

    candidate: np.ndarray
    """Instances that have the class among their candidates."""
    chosen: np.ndarray
    """Instances whose label it is."""
    predicted: np.ndarray
    """Instances whose prediction it is, candidate or not."""
    contradicted: np.ndarray
    """Instances whose label it is, while the prediction is not a candidate."""
    correct: np.ndarray | None
    """Instances whose label it is, rightly; None if true labels are unknown."""


def count_per_class(results: Results) -> PerClass:
    classes = len(results.class_names)

    def of(labels: np.ndarray) -> np.ndarray:
        return np.bincount(labels, minlength=classes)

    label, true_label = results.label, results.true_label
    return PerClass(
        candidate=of(results.classes),
        chosen=of(label),
        predicted=of(results.prediction),
        contradicted=of(label[results.contradictions()]),
        correct=None if true_label is None else of(label[label == true_label]),
    )


def class_table(run: Run) -> Html | None:
    """One row per class; only the columns that the run's data allow."""
    if not run.class_names:
        return None
    columns = [*_instance_columns(run.results), *_labeled_set_columns(run), *_test_columns(run.results)]
    if not columns:
        return None
    meanings = [fragment(element("dt", column.label), element("dd", column.meaning)) for column in columns]
    return fragment(
        data_table("Classes", "class", run.class_names, columns),
        element("details", element("summary", "What the columns mean"), element("dl", meanings)),
    )


def _instance_columns(results: Results | None) -> list[Column]:
    if results is None:
        return []
    counts = count_per_class(results)
    confidence = np.bincount(results.label, results.confidence, len(results.class_names))
    columns = [
        Column("candidate", "Training instances that have the class among their candidates.", counts.candidate, count),
        Column("chosen", "Training instances whose chosen label it is.", counts.chosen, count),
        Column("confidence", "Mean confidence of these choices.", ratio(confidence, counts.chosen), percent, bar=True),
        Column(
            "contradicted",
            "Of the instances with this label, those whose predicted class is not one of their candidates.",
            ratio(counts.contradicted, counts.chosen),
            percent,
        ),
    ]
    if counts.correct is not None:
        meaning = "Of the instances with this label, those whose true label it is."
        columns.append(Column("correct", meaning, ratio(counts.correct, counts.chosen), percent, bar=True))
    return columns


def _labeled_set_columns(run: Run) -> list[Column]:
    """Only for methods with a labelled set."""
    columns = []
    sizes, thresholds = run.per_class("labeled_per_class"), run.per_class("thresholds")
    if sizes is not None:
        columns.append(Column("labelled", "Instances of the class in the labelled set, last epoch.", sizes, count))
    purity = run.per_class("labeled_purity_per_class")
    if purity is not None:
        meaning = "Share of them whose label is the true one."
        columns.append(Column("purity", meaning, purity, percent, bar=True))
    elif sizes is not None and run.results is not None and run.results.labeled.any():
        columns += _label_free_columns(run.results)
    if thresholds is not None:
        meaning = "τ, the confidence from which a prediction of the class is used, last epoch."
        columns.append(Column("threshold", meaning, thresholds, score))
    return columns


def _label_free_columns(results: Results) -> list[Column]:
    """Signs of the quality of the labelled set where true labels are unknown."""
    classes, chosen = len(results.class_names), results.label[results.labeled]
    size = np.bincount(chosen, minlength=classes)
    confidence = np.bincount(chosen, results.confidence[results.labeled], classes)
    stable = np.bincount(chosen, results.changes[results.labeled] == 0, classes)
    return [
        Column(
            "labelled confidence", "Mean confidence in the labelled set.", ratio(confidence, size), percent, bar=True
        ),
        Column("labelled stable", "Labelled instances whose label never changed.", ratio(stable, size), percent),
    ]


def _test_columns(results: Results | None) -> list[Column]:
    if results is None or results.test_confusion is None:
        return []
    confusion = results.test_confusion
    right, true, predicted = confusion.diagonal(), confusion.sum(1), confusion.sum(0)
    return [
        Column("test", "Test instances of the class.", true, count),
        Column("precision", "Test instances predicted as the class that are of it.", ratio(right, predicted), percent),
        Column("recall", "Test instances of the class that are predicted as it.", ratio(right, true), percent),
        Column("F1", "Harmonic mean of precision and recall.", ratio(2 * right, true + predicted), score, bar=True),
    ]


def ratio(part: np.ndarray, whole: np.ndarray) -> list[float | None]:
    """None where there is nothing to take a share of."""
    return [float(a / b) if b else None for a, b in zip(part, whole, strict=True)]
