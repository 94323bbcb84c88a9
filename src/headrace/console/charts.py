"""Charts as SVG: a line over time, and the graph of a pipeline. Attributes only, no styles, as the content security policy demands."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

from markupsafe import Markup, escape

from headrace.console.text import cut, number, visible

WIDTH: Final = 320
HEIGHT: Final = 90
_EDGE: Final = 4
_BOX_WIDTH, _BOX_HEIGHT, _GAP_X, _GAP_Y = 220, 44, 60, 16
_LABEL: Final = 30


def line_chart(points: Sequence[tuple[float, float | None]], title: str, *, span_seconds: float, now: float, unit: str = "") -> Markup:
    """Return a line through (time, value) of the last `span_seconds`. A missing value interrupts the line."""
    known = [(at, value) for at, value in points if at >= now - span_seconds]
    values = [value for _, value in known if value is not None]
    top = max(values, default=0) or 1
    lines: list[list[str]] = [[]]
    for at, value in known:
        if value is None:
            lines.append([])
            continue
        x = _EDGE + (WIDTH - 2 * _EDGE) * (1 - (now - at) / span_seconds)
        y = HEIGHT - _EDGE - (HEIGHT - 2 * _EDGE) * value / top
        lines[-1].append(f"{x:.1f},{y:.1f}")
    drawn = "".join(f'<polyline class="line" points="{" ".join(line)}"/>' for line in lines if len(line) > 1)
    last = number(values[-1]) if values else "no data"
    label = f"{title}: now {last}{unit}, at most {number(max(values, default=0))}{unit} in the last {round(span_seconds / 60)} minutes"
    svg = (
        f'<svg class="chart" role="img" aria-label="{escape(label)}" viewBox="0 0 {WIDTH} {HEIGHT}" preserveAspectRatio="none">'
        f'<line class="axis" x1="0" y1="{HEIGHT - _EDGE}" x2="{WIDTH}" y2="{HEIGHT - _EDGE}"/>{drawn}</svg>'
    )
    caption = f"<figcaption><span>{escape(title)}</span> <strong>{escape(last)}{escape(unit if values else '')}</strong></figcaption>"
    return Markup(f'<figure class="chart">{caption}{svg}</figure>')


def graph(columns: Sequence[Sequence[Mapping[str, str]]], edges: Sequence[tuple[str, str]]) -> Markup:
    """Return boxes in columns from left to right, joined by arrows. A box has `id`, `title` and `text`."""
    places: dict[str, tuple[float, float]] = {}
    rows = max((len(column) for column in columns), default=0)
    height = rows * (_BOX_HEIGHT + _GAP_Y) + _GAP_Y
    width = len(columns) * (_BOX_WIDTH + _GAP_X)
    boxes: list[str] = []
    for index, column in enumerate(columns):
        top = (height - len(column) * (_BOX_HEIGHT + _GAP_Y) + _GAP_Y) / 2
        for place, box in enumerate(column):
            x, y = _GAP_X / 2 + index * (_BOX_WIDTH + _GAP_X), top + place * (_BOX_HEIGHT + _GAP_Y)
            places[box["id"]] = x, y
            boxes.append(
                f'<g><rect class="box {escape(box.get("kind", ""))}" x="{x}" y="{y}" width="{_BOX_WIDTH}" height="{_BOX_HEIGHT}" rx="6"/>'
                f'<text class="title" x="{x + 10}" y="{y + 18}">{_label(box["title"])}</text>'
                f'<text class="small" x="{x + 10}" y="{y + 35}">{_label(box["text"])}</text></g>'
            )
    drawn: list[str] = []
    for origin, target in edges:
        if origin in places and target in places:
            (x, y), (to_x, to_y) = places[origin], places[target]
            x, y, to_y = x + _BOX_WIDTH, y + _BOX_HEIGHT / 2, to_y + _BOX_HEIGHT / 2
            middle = (x + to_x) / 2
            drawn.append(f'<path class="edge" d="M{x} {y} C{middle} {y} {middle} {to_y} {to_x - 7} {to_y}" marker-end="url(#arrow)"/>')
    words = "; ".join(f"{origin.partition(':')[2]} to {target.partition(':')[2]}" for origin, target in edges)
    marker = (
        '<defs><marker id="arrow" viewBox="0 0 8 8" refX="1" refY="4" markerWidth="7" markerHeight="7" orient="auto">'
        '<path class="head" d="M0 0 L8 4 L0 8 z"/></marker></defs>'
    )
    return Markup(
        f'<svg class="graph" role="img" aria-label="{escape("Data flow: " + words)}" width="{width}" height="{height}" '
        f'viewBox="0 0 {width} {height}">{marker}{"".join(drawn)}{"".join(boxes)}</svg>'
    )


def _label(text: str) -> Markup:
    # A span inside SVG text would be lost, so escaped characters are plain text here.
    return escape(visible(cut(text, _LABEL)).striptags())
