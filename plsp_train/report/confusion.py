"""Confusion matrices: a table of numbers for few classes, a picture for many, and the most frequent confusions."""

import numpy as np

from plsp_train.report.markup import Html, element, fragment, void
from plsp_train.report.png import data_uri
from plsp_train.report.tables import row_head, scrollable
from plsp_train.report.wording import count, percent

MOST_CLASSES_IN_TABLE = 24
_MOST_PAIRS = 8
_COLOUR = (63, 131, 248)  # visible on light and dark pages; shares are opacities


def confusion_matrix(title: str, columns: str, confusion: np.ndarray, names: list[str]) -> Html:
    """`confusion` counts instances by true class and by what `columns` names."""
    shares = confusion / np.maximum(confusion.sum(1, keepdims=True), 1)
    few = len(names) <= MOST_CLASSES_IN_TABLE
    matrix = _table(title, confusion, shares, names) if few else _picture(title, shares)
    note = f"Rows are true classes, columns are {columns}. The colour is the share of its row."
    if not few:
        note += " Classes are in the order of their table."
    return element(
        "section",
        element("h4", title),
        element("p", note, class_="note"),
        matrix,
        _most_frequent(confusion, shares, names),
    )


def _table(title: str, confusion: np.ndarray, shares: np.ndarray, names: list[str]) -> Html:
    heads = [element("th", element("span", name), scope="col") for name in names]
    rows = []
    for name, counts, row in zip(names, confusion, shares, strict=True):
        cells = [
            element("td", count(int(number)), style=f"--share:{share:.3f}")
            if number
            else element("td", "·", class_="none")
            for number, share in zip(counts, row, strict=True)
        ]
        rows.append(element("tr", row_head(name), cells))
    corner = element("td", "true ↓")
    return scrollable(title, element("thead", element("tr", corner, heads)), element("tbody", rows), class_="confusion")


def _picture(title: str, shares: np.ndarray) -> Html:
    pixels = np.empty((*shares.shape, 4), np.uint8)
    pixels[..., :3] = _COLOUR
    pixels[..., 3] = np.round(255 * np.sqrt(shares))  # the root makes rare confusions visible
    alt = f"{title} of {len(shares)} classes; mean share on the diagonal {percent(float(shares.diagonal().mean()))}"
    return void("img", src=data_uri(pixels), alt=alt, class_="heat")


def _most_frequent(confusion: np.ndarray, shares: np.ndarray, names: list[str]) -> Html | None:
    wrong = confusion.copy()
    np.fill_diagonal(wrong, 0)
    order = [place for place in np.argsort(-wrong, axis=None, kind="stable")[:_MOST_PAIRS] if wrong.flat[place]]
    if not order:
        return element("p", "No instance is confused.")
    pairs = [(int(place) // len(names), int(place) % len(names)) for place in order]
    items = [
        element(
            "li",
            fragment(element("b", names[true]), " taken for ", element("b", names[other]), ": "),
            f"{count(int(wrong[true, other]))} ({percent(float(shares[true, other]))} of the class)",
        )
        for true, other in pairs
    ]
    return fragment(element("p", "Most frequent confusions:"), element("ul", items, class_="pairs"))
