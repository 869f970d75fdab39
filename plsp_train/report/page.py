"""The page: which parts it has, in which order."""

from collections.abc import Sequence
from importlib.resources import files
from typing import NamedTuple

import numpy as np

from plsp_kernels import __version__
from plsp_train.report.classes import class_table
from plsp_train.report.comparison import comparison_table, setting_text
from plsp_train.report.confusion import confusion_matrix
from plsp_train.report.curves import compared_curves, run_curves
from plsp_train.report.instances import picture_groups, review_list
from plsp_train.report.markup import Html, element, fragment, void
from plsp_train.report.overview import fold_sentences, key_figures, mean_figures, sentences
from plsp_train.report.run import CrossValidation, Run, Subject
from plsp_train.report.signs import warnings_of
from plsp_train.report.wording import count
from plsp_train.runs import settings_that_matter


class Part(NamedTuple):
    link: str
    title: str
    content: Html


def build_page(subjects: Sequence[Subject], num_review: int) -> str:
    """A complete HTML document that loads nothing from elsewhere."""
    parts = [
        Part(f"run{number}", subject.title, _subject(subject, f"run{number}", num_review))
        for number, subject in enumerate(subjects, 1)
    ]
    title = parts[0].title
    if len(parts) > 1:
        title = f"{len(parts)} runs"
        parts.insert(0, Part("comparison", "Comparison", _comparison(subjects, [part.link for part in parts])))
    head = [
        void("meta", charset="utf-8"),
        void("meta", name="viewport", content="width=device-width, initial-scale=1"),
        void("meta", name="color-scheme", content="light dark"),
        element("title", f"{title} – partial-label training report"),
        element("style", _resource("style.css")),
    ]
    body = [
        element("header", element("h1", "Partial-label training report"), _navigation(parts)),
        element("main", [element("section", element("h2", part.title), part.content, id=part.link) for part in parts]),
        element("footer", element("p", f"Written by plsp {__version__}.")),
        element("script", _resource("script.js")),
    ]
    document = element("html", element("head", head), element("body", body), lang="en")
    return f"<!doctype html>\n{document}\n"


def _resource(name: str) -> Html:
    return Html(files("plsp_train.report").joinpath(name).read_text(encoding="utf-8"))


def _navigation(parts: Sequence[Part]) -> Html | None:
    if len(parts) == 1:
        return None
    items = [element("li", element("a", part.title, href=f"#{part.link}")) for part in parts]
    return element("nav", element("ul", items), aria_label="Contents")


def _comparison(subjects: Sequence[Subject], links: Sequence[str]) -> Html:
    return fragment(comparison_table("Comparison of the runs", subjects, links), compared_curves(subjects))


def _subject(subject: Subject, link: str, num_review: int) -> Html:
    if isinstance(subject, CrossValidation):
        return _cross_validation(subject, link, num_review)
    return _run(subject, link, num_review)


def _cross_validation(validation: CrossValidation, link: str, num_review: int) -> Html:
    links = [f"{link}-fold{number}" for number in range(1, len(validation.folds) + 1)]
    folds = [
        # The anchor is inside, so that following a link to it opens the fold.
        element(
            "details",
            element("summary", _fold_title(fold)),
            element("div", _run(fold, place, num_review), id=place),
            class_="fold",
        )
        for fold, place in zip(validation.folds, links, strict=True)
    ]
    return fragment(
        element("p", fold_sentences(validation), class_="lead"),
        mean_figures(validation),
        comparison_table(f"Folds of {validation.title}", validation.folds, links),
        compared_curves(validation.folds),
        folds,
    )


def _fold_title(fold: Run) -> str:
    """Folds are closed at first, so their warnings are counted here."""
    number = len(warnings_of(fold))
    return f"{fold.title} – {count(number, 'warning')}" if number else fold.title


def _run(run: Run, link: str, num_review: int) -> Html:
    results = run.results
    found = {
        "Warnings": _warnings(run),
        "Curves": run_curves(run),
        "Classes": class_table(run),
        "Confusion": _confusion(run),
        "Instances": None if results is None else picture_groups(results),
        "Review first": None if results is None else review_list(results, num_review),
        "Settings": _settings(run),
    }
    parts = [Part(f"{link}-{title.split()[0].lower()}", title, content) for title, content in found.items() if content]
    return fragment(
        element("p", sentences(run), class_="lead"),
        key_figures(run),
        _navigation(parts),
        [element("section", element("h3", part.title), part.content, id=part.link) for part in parts],
    )


def _warnings(run: Run) -> Html:
    found = warnings_of(run)
    if not found:
        return element("p", "None: no sign of trouble was found.")
    return element("ul", [element("li", sentence) for sentence in found], class_="warnings")


def _confusion(run: Run) -> Html | None:
    results = run.results
    if results is None:
        return None
    matrices = []
    if results.test_confusion is not None:
        matrices.append(confusion_matrix("Test set", "predicted classes", results.test_confusion, run.class_names))
    if results.true_label is not None:
        classes = len(run.class_names)
        counts = np.bincount(results.true_label * classes + results.label, minlength=classes * classes)
        chosen = counts.reshape(classes, classes)
        matrices.append(confusion_matrix("Training set", "chosen labels", chosen, run.class_names))
    return element("div", matrices, class_="matrices") if matrices else None


def _settings(run: Run) -> Html:
    versions = (run.summary or {}).get("versions", {})
    rows = [
        *settings_that_matter(run.config).items(),
        *((f"version of {name}", version) for name, version in versions.items()),
    ]
    cells = [
        element("tr", element("th", name.replace("_", " "), scope="row"), element("td", setting_text(value)))
        for name, value in rows
    ]
    summary = element("summary", f"{len(rows)} settings and versions")
    return element("details", summary, element("div", element("table", element("tbody", cells)), class_="scroll"))
