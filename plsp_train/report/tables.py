"""Tables with scopes and right-aligned numbers."""

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from plsp_train.report.markup import Content, Html, element

MISSING = "–"
_TALL = 30  # rows from which a table scrolls under its head


class Column(NamedTuple):
    label: str
    meaning: str
    values: Iterable[float | None]
    format: Callable[..., str]
    bar: bool = False
    """Draw the value, which is a share, as a bar too."""


def data_table(caption: str, corner: str, names: Sequence[Content], columns: Sequence[Column]) -> Html:
    """A sortable table of numbers: a row per name, a column each."""
    cells = [[_cell(value, column) for value in column.values] for column in columns]
    heads = [element("th", corner, scope="col")]
    heads += [element("th", column.label, scope="col", title=column.meaning, class_="number") for column in columns]
    rows = [element("tr", row_head(name), list(row)) for name, *row in zip(names, *cells, strict=True)]
    parts = element("thead", element("tr", heads)), element("tbody", rows)
    return scrollable(caption, *parts, sortable=True, tall=len(rows) >= _TALL)


def row_head(content: Content) -> Html:
    """The name of a row; the block inside it wraps where the name is long."""
    return element("th", element("div", content), scope="row")


def scrollable(
    caption: str, *parts: Content, sortable: bool = False, tall: bool = False, class_: str | None = None
) -> Html:
    """A table that scrolls in its own frame where the page is too narrow for it."""
    title = element("caption", caption, class_="unseen")
    table = element("table", title, *parts, class_=class_, data_sortable=sortable)
    return element(
        "div", table, class_="scroll tall" if tall else "scroll", tabindex="0", role="region", aria_label=caption
    )


def _cell(value: float | None, column: Column) -> Html:
    if value is None:
        return element("td", MISSING, class_="number", data_value="-1")
    kind, style = ("number bar", f"--share:{value:.3f}") if column.bar else ("number", None)
    return element("td", column.format(value), class_=kind, style=style, data_value=f"{value:.6g}")
