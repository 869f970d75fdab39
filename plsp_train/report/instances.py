"""Single instances: pictures of the most telling ones, and those that a person should look at first."""

from typing import NamedTuple

import numpy as np

from plsp_train.report.markup import Html, element, fragment, void
from plsp_train.report.png import data_uri, thumbnail
from plsp_train.report.wording import count, percent
from plsp_train.results import Results
from plsp_train.review import reasons, review_order

_MOST_PICTURES = 8  # of a group
_MOST_CANDIDATES = 4  # shown of an instance


class Group(NamedTuple):
    title: str
    note: str
    instances: np.ndarray
    """Most telling first."""


def picture_groups(results: Results) -> Html | None:
    places = _places(results)
    sections = []
    for group in _groups(results):
        figures = [_figure(results, places[instance]) for instance in group.instances.tolist() if instance in places]
        if figures:
            heading, note = element("h4", group.title), element("p", group.note + _mark(results), class_="note")
            sections.append(element("section", heading, note, element("div", figures, class_="pictures")))
    return fragment(sections) if sections else None


def _places(results: Results) -> dict[int, int]:
    """Of the instances that have a picture, the place of that picture."""
    return {} if results.picture_index is None else {int(row): place for place, row in enumerate(results.picture_index)}


def _groups(results: Results) -> list[Group]:
    contradicts = results.contradictions()
    # An instance with a single candidate is confident by definition, and says nothing.
    decided = ~contradicts & (np.diff(results.offsets) > 1)
    by_confidence = np.argsort(results.confidence, kind="stable")
    by_confidence = by_confidence[decided[by_confidence]]
    most = min(_MOST_PICTURES, len(by_confidence) // 2)
    surest = np.argsort(-results.prediction_probability, kind="stable")
    return [
        Group(
            "Most confident",
            "The model is sure of one candidate. These should be right: if they are not, look for a systematic error.",
            by_confidence[::-1][:most],
        ),
        Group(
            "Most ambiguous",
            "Several candidates are about equally probable. A person decides these best.",
            by_confidence[:most],
        ),
        Group(
            "Contradictions",
            "The model prefers a class that is not a candidate. Either it is wrong, or the candidate set is.",
            surest[contradicts[surest]][:_MOST_PICTURES],
        ),
    ]


def _figure(results: Results, place: int) -> Html:
    assert results.picture_index is not None
    instance = int(results.picture_index[place])
    name, bars = element("b", instance_name(results, instance)), candidate_bars(results, instance)
    return element(
        "figure", picture(results, place), element("figcaption", name, bars, _contradiction(results, instance))
    )


def picture(results: Results, place: int) -> Html:
    assert results.picture_index is not None
    assert results.pictures is not None
    instance = int(results.picture_index[place])
    label = str(results.class_names[results.label[instance]])
    alt = f"{instance_name(results, instance)}, labelled {label}"
    return void("img", src=data_uri(thumbnail(results.pictures[place])), alt=alt)


def instance_name(results: Results, instance: int) -> str:
    if results.names is not None and results.names[instance]:
        return str(results.names[instance])
    return f"row {results.row[instance]}"


def candidate_bars(results: Results, instance: int) -> Html:
    """The most probable candidates with their probabilities; the true label is marked where it is known."""
    classes, probabilities = results.candidates(instance)
    true = None if results.true_label is None else int(results.true_label[instance])
    rows = [
        element(
            "li",
            element("span", str(results.class_names[number]) + (" ✓" if number == true else "")),
            element("span", percent(float(share))),
            style=f"--share:{share:.3f}",
            title="true label" if number == true else None,
        )
        for number, share in list(zip(classes, probabilities, strict=True))[:_MOST_CANDIDATES]
    ]
    if len(classes) > _MOST_CANDIDATES:
        rows.append(element("li", f"{len(classes) - _MOST_CANDIDATES} more", class_="more"))
    return element("ul", rows, class_="candidates")


def _mark(results: Results) -> str:
    return "" if results.true_label is None else " ✓ marks the true label."


def _contradiction(results: Results, instance: int) -> Html | None:
    prediction = results.prediction[instance]
    if prediction in results.candidates(instance)[0]:
        return None
    share = percent(float(results.prediction_probability[instance]))
    return element("p", "model: ", element("b", str(results.class_names[prediction])), f" {share}", class_="against")


def review_list(results: Results, most: int) -> Html | None:
    """The instances that a person should look at first, most urgent first."""
    order = review_order(results)[:most]
    if not len(order):
        return None
    places, items = _places(results), []
    for instance, reason in zip(order.tolist(), reasons(results, order), strict=True):
        shown = picture(results, places[instance]) if instance in places else None
        name = element("div", element("b", instance_name(results, instance)), shown)
        items.append(element("li", name, candidate_bars(results, instance), element("p", reason)))
    note = f"{count(len(order), 'instance')} of {count(len(results))}, most urgent first." + _mark(results)
    return fragment(element("p", note, class_="note"), element("ol", items, class_="review"))
