"""Charts of the HTML report as inline SVG: bars, stacks and lines. Knows numbers and markup, nothing of reports.

Marks are placed in per cent of a drawing that is as wide as its column, and words stand beside it in HTML: nothing is
scaled, and no label can lie on another, however narrow the page.
"""

from collections.abc import Sequence
from html import escape
from typing import NamedTuple

from eagle3_infer.levels import FEW_ROUNDS, Point
from eagle3_infer.unseen import name_unseen

# series that have a colour and a marker of their own
SERIES = 8
# paths of about the same weight around (0, 0)
MARKERS = (
    "M-4,0a4,4 0 1,0 8,0a4,4 0 1,0 -8,0",
    "M-3.6,-3.6h7.2v7.2h-7.2z",
    "M0,-4.8L4.6,3.6H-4.6z",
    "M0,-5L5,0L0,5L-5,0z",
    "M0,4.8L4.6,-3.6H-4.6z",
    "M-1.5,-5h3v3.5h3.5v3h-3.5v3.5h-3v-3.5h-3.5v-3h3.5z",
    "M-5,-2.5h10v5h-10z",
    "M-2.5,-5h5v10h-5z",
)


class Bar(NamedTuple):
    """One row of a bar chart; `spread` is drawn as a whisker, `quiet` is for what the others are compared with."""

    name: str
    value: float
    told: str
    spread: Sequence[float] | None = None
    quiet: bool = False


class Stack(NamedTuple):
    """One row of stacked bars: parts are (kind, value)."""

    name: str
    parts: list[tuple[str, float]]
    told: str


class Line(NamedTuple):
    """A series, one point per level from 1."""

    name: str
    points: list[Point]


def text(value: object) -> str:
    """As HTML text or attribute; what has no glyph, or would turn the text around, is named."""
    return escape(name_unseen(str(value)))


def bars(rows: Sequence[Bar], alt: str, mark: float | None = None) -> str:
    """Horizontal bars from 0.

    Args:
        alt: what the chart is of; the values are added to it.
        mark: a value with a line at it, in every row.
    """
    most = max((value for row in rows for value in (row.value, *(row.spread or ()))), default=0.0)
    top = 1.04 * max(most, mark or 0.0) or 1.0
    told = "; ".join(f"{row.name} {row.told}" for row in rows)
    drawn = "".join(_row(row.name, row.told, _bar(row, top, mark)) for row in rows)
    return f'<div class="bars" role="img" aria-label="{text(f"{alt}: {told}")}">{drawn}</div>'


def _bar(row: Bar, top: float, mark: float | None) -> str:
    kind = "quiet" if row.quiet else "fill"
    parts = [f'<rect class="{kind}" y="2" height="10" width="{_percent(row.value / top)}"/>']
    if row.spread is not None and row.spread[0] != row.spread[1]:
        low, high = (_percent(value / top) for value in row.spread)
        parts.append(f'<line class="whisker" x1="{low}" x2="{high}" y1="7" y2="7"/>')
        parts += [f'<line class="whisker" x1="{at}" x2="{at}" y1="4" y2="10"/>' for at in (low, high)]
    if mark is not None:
        at = _percent(mark / top)
        parts.append(f'<line class="mark" x1="{at}" x2="{at}" y1="0" y2="14"/>')
    return "".join(parts)


def stacks(rows: Sequence[Stack], kinds: dict[str, str], alt: str) -> str:
    """Stacked horizontal bars with a legend.

    Args:
        kinds: name of each kind of part, in the legend's order; its key is its class.
    """
    top = max((sum(value for _, value in row.parts) for row in rows), default=0.0) or 1.0
    present = {kind for row in rows for kind, value in row.parts if value}
    items = "".join(
        f'<li><span class="swatch {kind}"></span>{text(name)}</li>' for kind, name in kinds.items() if kind in present
    )
    told = "; ".join(f"{row.name} {row.told}" for row in rows)
    drawn = "".join(_row(row.name, row.told, _parts(row, top)) for row in rows)
    return (
        f'<ul class="legend">{items}</ul>'
        f'<div class="bars" role="img" aria-label="{text(f"{alt}: {told}")}">{drawn}</div>'
    )


def _parts(row: Stack, top: float) -> str:
    drawn, start = [], 0.0
    for kind, value in row.parts:
        if value:
            x, width = _percent(start / top), _percent(value / top)
            drawn.append(f'<rect class="part {kind}" y="2" height="12" x="{x}" width="{width}"/>')
        start += value
    return "".join(drawn)


def _row(name: str, told: str, drawn: str) -> str:
    return (
        f'<div class="bar"><span class="name">{text(name)}</span><span class="value">{text(told)}</span>'
        f'<svg width="100%" height="16" aria-hidden="true" focusable="false">{drawn}</svg></div>'
    )


def lines(series: Sequence[Line], alt: str) -> str:
    """Shares by level, from 0 to 100 %, at most SERIES of them; hollow points stand for fewer than FEW_ROUNDS."""
    levels = max((len(line.points) for line in series), default=0)
    grid = "".join(f'<line class="grid" x1="0" x2="100%" y1="{y}%" y2="{y}%"/>' for y in (0, 25, 50, 75, 100))
    drawn = "".join(_line(line.points, number, levels) for number, line in enumerate(series[:SERIES]))
    # every level has a column of its own; of many only some are numbered
    step = -(-levels // 12)
    ticks = "".join(f"<span>{level if (level - 1) % step == 0 else ''}</span>" for level in range(1, levels + 1))
    marks = "".join(f"<span>{share}</span>" for share in ("100%", "75%", "50%", "25%", "0%"))
    told = "; ".join(f"{line.name} {', '.join(map(_told, line.points))}" for line in series[:SERIES])
    return (
        f'<div class="lines" role="img" aria-label="{text(f"{alt}, level 1, 2, ...: {told}")}">'
        f'<div class="y">{marks}</div>'
        f'<svg class="plot" width="100%" height="170" aria-hidden="true" focusable="false">{grid}{drawn}</svg>'
        f'<div class="x">{ticks}</div></div>'
    )


def _line(points: Sequence[Point], number: int, levels: int) -> str:
    placed = [(100 * (i + 0.5) / levels, point) for i, point in enumerate(points) if point.share is not None]
    corners = " ".join(f"{x:.2f},{100 - 100 * (point.share or 0):.2f}" for x, point in placed)
    path = (
        '<svg width="100%" height="100%" viewBox="0 0 100 100" preserveAspectRatio="none" overflow="visible">'
        f'<polyline class="series s{number}" points="{corners}"/></svg>'
    )
    dots = [
        f'<svg x="{x:.2f}%" y="{100 - 100 * (point.share or 0):.2f}%" overflow="visible">'
        f'<path class="dot s{number}{" hollow" if point.rounds < FEW_ROUNDS else ""}" d="{MARKERS[number]}"/></svg>'
        for x, point in placed
    ]
    return path + "".join(dots)


def series_legend(names: Sequence[str]) -> str:
    """Colours and markers of `lines`."""
    items = "".join(
        f'<li><svg class="key" width="26" height="12" aria-hidden="true"><line class="series s{i}" x1="0" x2="26" '
        f'y1="6" y2="6"/><svg x="13" y="6" overflow="visible"><path class="dot s{i}" d="{MARKERS[i]}"/></svg></svg>'
        f"{text(name)}</li>"
        for i, name in enumerate(names[:SERIES])
    )
    return f'<ul class="legend">{items}</ul>'


def _told(point: Point) -> str:
    return "-" if point.share is None else f"{100 * point.share:.0f} %"


def _percent(share: float) -> str:
    return f"{100 * share:.2f}%"
