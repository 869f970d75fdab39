"""Line charts over epochs as inline SVG. Colours come from the page's style sheet."""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

from plsp_train.report.markup import Html, element, fragment
from plsp_train.report.wording import Unit, enumeration, number

Points = list[tuple[int, float]]  # (epoch, value)

NUM_COLOURS = 6  # of the style sheet; a palette that colour-blind readers can tell apart
_MOST_LINES = 24  # more are drawn as the area that they cover
_MOST_POINTS = 240  # of a line, about one per pixel

# In units of the view box, which is shown at about its own size.
_WIDTH, _HEIGHT = 380, 220
_LEFT, _RIGHT, _TOP, _BOTTOM = 42, 372, 10, 192


class Series(NamedTuple):
    name: str
    points: Points
    colour: str = ""
    """Classes of the style sheet."""


class Chart(NamedTuple):
    title: str
    series: list[Series]
    unit: Unit = "share"
    stages: Sequence[tuple[int, str]] = ()
    """The first epoch of each stage and its name."""
    most_coloured: int = 2 * NUM_COLOURS
    """Of more lines, only the two that end highest and lowest have a colour and an entry in the legend."""


class Axes(NamedTuple):
    """Ranges of the data, and where a point of them lies."""

    first: float
    last: float
    low: float
    high: float

    def x(self, epoch: float) -> float:
        return _LEFT + (epoch - self.first) / (self.last - self.first) * (_RIGHT - _LEFT)

    def y(self, value: float) -> float:
        return _BOTTOM - (value - self.low) / (self.high - self.low) * (_BOTTOM - _TOP)


def series_of(history: Sequence[dict[str, Any]], key: str, name: str) -> Series:
    """One metric over the epochs that measured it."""
    return Series(name, [(line["epoch"], line[key]) for line in history if is_finite(line.get(key))])


def is_finite(value: object) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)


def line_chart(chart: Chart) -> Html | None:
    """The chart and its legend with the last values; None if nothing was measured."""
    # A line keeps the colour of its place even if others have no points, so that a run looks the same in all charts.
    drawn = [series._replace(colour=_colour(place)) for place, series in enumerate(chart.series) if series.points]
    if not drawn:
        return None
    values = [value for series in drawn for _, value in series.points]
    epochs = [epoch for series in drawn for epoch, _ in series.points]
    ticks = _ticks(min(values), max(values))
    axes = Axes(min(epochs), max(max(epochs), min(epochs) + 1), ticks[0], ticks[-1])
    coloured, muted = (drawn, []) if len(drawn) <= chart.most_coloured else _emphasise_ends(drawn)
    picture = element(
        "svg",
        element("title", chart.title),
        element("desc", _description(coloured, chart.unit)),
        _grid(axes, ticks, chart.unit),
        _stage_marks(axes, chart.stages),
        _muted_lines(axes, muted),
        [_line(axes, series) for series in reversed(coloured)],
        element("line", class_="cursor", y1=_TOP, y2=_BOTTOM, x1=_LEFT, x2=_LEFT, visibility="hidden"),
        viewBox=f"0 0 {_WIDTH} {_HEIGHT}",
        role="img",
        data_epochs=f"{axes.first:g} {axes.last:g} {_LEFT} {_RIGHT}",
        data_values=f"{axes.low:g} {axes.high:g} {_BOTTOM} {_TOP}",
        data_unit=chart.unit,
    )
    caption = element("figcaption", element("strong", chart.title), element("span", class_="at"))
    return element("figure", caption, picture, _legend(coloured, chart.unit), class_="chart")


def _emphasise_ends(drawn: list[Series]) -> tuple[list[Series], list[Series]]:
    """The lines that end highest and lowest, and the others."""
    by_end = sorted(drawn, key=lambda series: series.points[-1][1])
    lowest, highest = by_end[0], by_end[-1]
    coloured = [
        highest._replace(name=f"highest ({highest.name})", colour=_colour(0)),
        lowest._replace(name=f"lowest ({lowest.name})", colour=_colour(1)),
    ]
    return coloured, [series._replace(colour="muted") for series in by_end[1:-1]]


def _ticks(low: float, high: float) -> list[float]:
    """Round values that enclose the range, about four steps apart."""
    if high - low < 1e-9 * max(abs(low), abs(high), 1):
        room = max(abs(low) * 0.1, 0.05)
        low, high = (low - room, high) if high > 0 else (low, high + room)
    rough = (high - low) / 4
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(power * factor for factor in (1, 2, 5, 10) if power * factor >= rough * 0.999)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [place * step for place in range(first, last + 1)]


def _grid(axes: Axes, ticks: Sequence[float], unit: Unit) -> Html:
    scale, sign = (100, "%") if unit == "share" else (1, "")
    digits = max(0, -math.floor(math.log10(scale * (ticks[1] - ticks[0])) + 1e-9))
    parts = []
    for tick in ticks:
        y, label = f"{axes.y(tick):.1f}", f"{scale * tick:,.{digits}f}{sign}"
        parts.append(element("line", x1=_LEFT, x2=_RIGHT, y1=y, y2=y))
        parts.append(element("text", label, x=_LEFT - 6, y=y, dy="0.35em", text_anchor="end"))
    for epoch in _epoch_ticks(int(axes.first), int(axes.last)):
        parts.append(element("text", str(epoch), x=f"{axes.x(epoch):.1f}", y=_BOTTOM + 16, text_anchor="middle"))
    parts.append(element("text", "epoch", x=_RIGHT, y=_HEIGHT - 1, text_anchor="end"))
    return element("g", parts, class_="grid")


def _epoch_ticks(first: int, last: int) -> list[int]:
    step = max(1, round(_ticks(first, last)[1] - _ticks(first, last)[0]))
    inner = [
        epoch for epoch in range(step, last, step) if first < epoch and step / 3 < min(epoch - first, last - epoch)
    ]
    return [first, *inner, last]


def _stage_marks(axes: Axes, stages: Sequence[tuple[int, str]]) -> Html:
    parts = []
    for epoch, name in stages:
        if not axes.first < epoch <= axes.last:
            continue
        x = f"{axes.x(epoch - 0.5):.1f}"
        parts.append(element("line", element("title", f"{name} begins"), x1=x, x2=x, y1=_TOP, y2=_BOTTOM))
    return element("g", parts, class_="stages")


def _muted_lines(axes: Axes, lines: list[Series]) -> Html:
    if len(lines) <= _MOST_LINES:
        return fragment([_line(axes, series) for series in lines])
    by_epoch: dict[int, list[float]] = {}
    for series in lines:
        for epoch, value in series.points:
            by_epoch.setdefault(epoch, []).append(value)
    upper = [(epoch, max(values)) for epoch, values in sorted(by_epoch.items())]
    lower = [(epoch, min(values)) for epoch, values in sorted(by_epoch.items(), reverse=True)]
    return element("polygon", element("title", "all others"), points=_coordinates(axes, upper + lower), class_="area")


def _line(axes: Axes, series: Series) -> Html:
    points = _thin(series.points)
    if len(points) == 1:
        (epoch, value) = points[0]
        place = {"cx": f"{axes.x(epoch):.1f}", "cy": f"{axes.y(value):.1f}"}
        return element("circle", element("title", series.name), r=3, class_=series.colour, **place)
    return element("polyline", element("title", series.name), points=_coordinates(axes, points), class_=series.colour)


def _thin(points: Points) -> Points:
    step = -(-len(points) // _MOST_POINTS)
    return points[::-1][::step][::-1]  # keeps the last


def _coordinates(axes: Axes, points: Points) -> str:
    # Two digits: the page's script reads the values off the line.
    return " ".join(f"{axes.x(epoch):.1f},{axes.y(value):.2f}" for epoch, value in points)


def _colour(place: int) -> str:
    return f"s{place % NUM_COLOURS + 1}" + (" dashed" if place >= NUM_COLOURS else "")


def _legend(series: list[Series], unit: Unit) -> Html:
    entries = []
    for name, points, colour in series:
        value = number(points[-1][1], unit)
        key = element("i", class_=f"key {colour}", aria_hidden="true")
        entries.append(element("li", key, element("span", name), element("b", value, data_last=value)))
    return element("ul", entries, class_="legend")


def _description(series: list[Series], unit: Unit) -> str:
    """What the picture shows, for those who cannot see it."""
    ends = [
        f"{name} goes from {number(points[0][1], unit)} to {number(points[-1][1], unit)}" for name, points, _ in series
    ]
    return enumeration(ends, most=NUM_COLOURS) + "."
