"""Warnings: those of the run itself, and what else in its files deserves a second look."""

import numpy as np

from plsp_train.report.classes import count_per_class
from plsp_train.report.run import Run
from plsp_train.report.wording import count, enumeration, percent, score

_UNSTABLE = 0.05  # share of labels that still change in the last epoch
_FALLEN = 0.05  # F1 lost since the best epoch


def warnings_of(run: Run) -> list[str]:
    """A sentence each."""
    if run.summary is None:
        found = [_unfinished(run), _lost_labeled_set(run), *map(_sentence, _alarms(run))]
    else:
        found = [*map(_sentence, run.summary.get("warnings", [])), *_classes_left_out(run), _missing_results(run)]
    return [sentence for sentence in [*found, _unstable(run), _fallen(run)] if sentence]


def _sentence(warning: object) -> str:
    """Runs write their warnings for the middle of a line."""
    text = str(warning)
    return text[:1].upper() + text[1:] + ("" if text.endswith((".", "!", "?")) else ".")


def _alarms(run: Run) -> list[str]:
    """Those of a finished run are among its warnings."""
    return [alarm for line in run.history for alarm in line.get("alarms", [])]


def _unfinished(run: Run) -> str:
    if not run.history:
        return "This run is not finished: no epoch is complete yet."
    return f"This run is not finished: the figures are those of epoch {run.history[-1]['epoch']}."


def _missing_results(run: Run) -> str | None:
    if run.results is not None:
        return None
    return "This run has no results.npz, so the parts of this report about single instances are missing."


def _lost_labeled_set(run: Run) -> str | None:
    """A finished run says so itself."""
    sizes = run.per_class("labeled_per_class")
    empty = [name for name, size in zip(run.class_names, sizes or [], strict=False) if not size]
    return f"{_classes(empty)} without instances in the labelled set in the latest epoch." if empty else None


def _classes_left_out(run: Run) -> list[str]:
    if run.results is None:
        return []
    counts, names = count_per_class(run.results), np.array(run.class_names)
    never_candidate = counts.candidate == 0
    # A class that is nobody's label, although it is a candidate, is among the run's own warnings.
    never_predicted = (counts.predicted == 0) & (counts.chosen > 0)
    never_in_test = np.zeros_like(never_predicted)
    confusion = run.results.test_confusion
    if confusion is not None:
        never_in_test = (confusion.sum(0) == 0) & (confusion.sum(1) > 0)
    sentences = {
        "that no training instance has as a candidate, so it cannot be learned.": never_candidate,
        "that the model predicts for no training instance.": never_predicted,
        "that the model predicts for no test instance.": never_in_test,
    }
    return [f"{_classes(list(names[which]))} {text}" for text, which in sentences.items() if which.any()]


def _unstable(run: Run) -> str | None:
    agreement = run.measure("label_agreement")
    if agreement is None or 1 - agreement < _UNSTABLE:
        return None
    return (
        f"{percent(1 - agreement)} of the chosen labels still changed in the last epoch. "
        "More epochs or a smaller learning rate may settle them."
    )


def _fallen(run: Run) -> str | None:
    scores = [line["micro_f1"] for line in run.history if isinstance(line.get("micro_f1"), float)]
    if not scores or max(scores) - scores[-1] < _FALLEN:
        return None
    return f"micro-F1 on the test set fell from {score(max(scores))} at best to {score(scores[-1])} in the last epoch."


def _classes(names: list[str]) -> str:
    """1 class (cat); 3 classes (cat, dog and bird)"""
    return f"{count(len(names), 'class')} ({enumeration(names)})"
