"""Charts as SVG, one function each: from values to markup.

No colour stands in the markup, only classes; every mark that carries a number also stands in the
table under the chart. Marks below a pixel are merged, and a chart holds at most 5,000 marks.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from markupsafe import Markup, escape

from paro_advise.advisor.rendering.constants import (
    CHARACTER_WIDTH,
    CHART_WIDTH,
    LABEL_HEIGHT,
    LABEL_WIDTH,
    LEAST_DRAWN,
    NARROW_LABEL,
    SHOWN_LIMIT,
)
from paro_advise.advisor.wording.quantities import bytes_text, time_text

if TYPE_CHECKING:
    from collections.abc import Sequence


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """A part of a bar: CSS class, length (us), and the name shown in its tooltip."""

    kind: str
    value_us: float
    name: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Bar:
    """A bar of segments with its label."""

    label: str
    segments: tuple[Segment, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """A mark of a scatter chart.

    Attributes:
        kind: CSS class; "now", "chosen" and "today" have a shape of their own.
        num_bytes, time_us: where it stands.
        low_us, high_us: drawn as a line through marks that have a label.
        name: shown in its tooltip.
        label: written beside it, "" for none.
    """

    kind: str
    num_bytes: float
    time_us: float
    low_us: float
    high_us: float
    name: str
    label: str = ""


def nice_ticks(high: float, count: int = 6) -> list[float]:
    """Return round tick values from 0 to at most ``high``."""
    if high < LEAST_DRAWN:
        return [0.0]
    raw = high / count
    scale = 10.0 ** len(str(int(raw))) / 10 if raw >= 1 else 10.0 ** -len(str(int(1 / raw)))
    step = next(scale * factor for factor in (1, 2, 5, 10, 20, 50) if scale * factor >= raw)
    return [step * index for index in range(int(high / step) + 1)]


def time_axis(
    high_us: float, top: float, bottom: float, *, left: float = LABEL_WIDTH, right: float = 10.0
) -> list[Markup]:
    """Return lines and texts of an axis from 0 to ``high_us``, between margins (px) for labels and for figures."""
    parts = []
    scale = (CHART_WIDTH - left - right) / high_us
    for tick in nice_ticks(high_us):
        x = left + tick * scale
        parts.append(
            Markup('<line class="grid" x1="{0:.1f}" x2="{0:.1f}" y1="{1:.1f}" y2="{2:.1f}"/>').format(x, top, bottom)
        )
        text = "0" if tick == 0 else time_text(tick)
        parts.append(
            Markup('<text class="tick" x="{:.1f}" y="{:.1f}" text-anchor="middle">{}</text>').format(
                x, bottom + 14, text
            )
        )
    return parts


def stacked_bars(chart_id: str, title: str, description: str, bars: Sequence[Bar]) -> Markup:
    """Draw horizontal stacked bars on one time scale.

    Args:
        chart_id: unique id in the page.
        title: states the finding, for screen readers.
        description: what is drawn.
        bars: top to bottom; up to 24 carry tooltips, more are drawn as one path per kind.
    """
    high = max((sum(segment.value_us for segment in bar.segments) for bar in bars), default=0.0)
    if high < LEAST_DRAWN:
        return Markup("")
    row = 26.0 if len(bars) <= 24 else (12.0 if len(bars) <= 64 else 5.0)
    height = 12 + row * len(bars) + 24
    scale = (CHART_WIDTH - LABEL_WIDTH - 10) / high
    parts = time_axis(high, 6, 8 + row * len(bars))
    rich = len(bars) <= 24
    paths: dict[str, list[str]] = {}
    label_every = max(1, round(NARROW_LABEL / row))
    for index, bar in enumerate(bars):
        y = 8 + index * row
        if index % label_every == 0:
            parts.append(
                Markup('<text class="label" x="{:.0f}" y="{:.1f}" text-anchor="end">{}</text>').format(
                    LABEL_WIDTH - 6, y + row / 2 + 4, bar.label
                )
            )
        x = LABEL_WIDTH
        for segment in bar.segments:
            width = segment.value_us * scale
            if width >= 0.3 and rich:
                parts.append(
                    Markup(
                        '<rect class="{}" x="{:.1f}" y="{:.1f}" width="{:.1f}" height="{:.1f}">'
                        "<title>{}: {} {}</title></rect>"
                    ).format(
                        segment.kind,
                        x,
                        y + 2,
                        width,
                        row - 4,
                        bar.label,
                        segment.name,
                        time_text(segment.value_us),
                    )
                )
            elif width >= 0.3:
                paths.setdefault(segment.kind, []).append(f"M{x:.1f} {y:.1f}h{width:.1f}v{row - 1:.1f}h-{width:.1f}z")
            x += width
    parts += [Markup('<path class="{}" d="{}"/>').format(kind, "".join(path)) for kind, path in paths.items()]
    return chart(chart_id, title, description, height, parts)


def lines(
    chart_id: str,
    title: str,
    description: str,
    steps: Sequence[int],
    series: Sequence[tuple[str, Sequence[float]]],
    ends: tuple[str, str] | None = None,
) -> Markup:
    """Draw lines over steps.

    Args:
        chart_id: unique id in the page.
        title: states the finding.
        description: what is drawn.
        steps: rising.
        series: CSS class and one finite value a step, each; the first is drawn widest.
        ends: what stands below the first and the last step, None for their numbers.
    """
    values = [value for _, row in series for value in row]
    if len(steps) < 2 or not values:
        return Markup("")
    low, high = min(values), max(values)
    spread = high - low or abs(high) or 1.0
    top, bottom, left, right = 10.0, 190.0, LABEL_WIDTH, CHART_WIDTH - 10
    across = (right - left) / (steps[-1] - steps[0])
    parts = []
    for tick in range(5):
        value = low + spread * tick / 4
        y = bottom - (bottom - top) * tick / 4
        parts.append(
            Markup('<line class="grid" x1="{:.0f}" x2="{:.0f}" y1="{y:.1f}" y2="{y:.1f}"/>').format(left, right, y=y)
        )
        parts.append(
            Markup('<text class="tick" x="{:.0f}" y="{:.1f}" text-anchor="end">{:.4g}</text>').format(
                left - 6, y + 4, value
            )
        )
    for step, text in zip((steps[0], steps[-1]), ends or (f"step {steps[0]}", f"step {steps[-1]}"), strict=True):
        x = left + (step - steps[0]) * across
        parts.append(
            Markup('<text class="tick" x="{:.1f}" y="{:.0f}" text-anchor="{}">{}</text>').format(
                x, bottom + 16, "start" if step == steps[0] else "end", text
            )
        )
    for kind, row in series:
        points = " ".join(
            f"{left + (step - steps[0]) * across:.1f},{bottom - (value - low) / spread * (bottom - top):.1f}"
            for step, value in zip(steps, row, strict=True)
        )
        parts.append(Markup('<polyline class="{}" points="{}"/>').format(kind, points))
    return chart(chart_id, title, description, bottom + 26, parts)


def scatter(
    chart_id: str,
    title: str,
    description: str,
    points: Sequence[Point],
    *,
    memory: str,
    limit_bytes: float | None = None,
) -> Markup:
    """Draw time against memory.

    Args:
        chart_id: unique id in the page.
        title: states the finding.
        description: what is drawn.
        points: the last ones lie on top.
        memory: what the horizontal axis shows.
        limit_bytes: a line at what may be used; None for no line.
    """
    wide = max((point.num_bytes for point in points), default=0.0)
    high = max((point.high_us if point.label else point.time_us for point in points), default=0.0)
    if min(wide, high) < LEAST_DRAWN:
        return Markup("")
    if limit_bytes is not None and limit_bytes < SHOWN_LIMIT * wide:
        wide = max(wide, limit_bytes)
    top, bottom, left, right = 12.0, 280.0, LABEL_WIDTH, CHART_WIDTH - 16.0
    across, down = (right - left) / (1.04 * wide), (bottom - top) / (1.04 * high)
    parts = _scatter_axes(wide, high, (left, right, top, bottom), (across, down))
    parts.append(
        Markup('<text class="tick" x="{:.0f}" y="{:.0f}" text-anchor="end">{}</text>').format(
            right, bottom + 32, memory
        )
    )
    parts.append(Markup('<text class="tick" x="0" y="{:.0f}">step time</text>').format(top + 4))
    if limit_bytes is not None and limit_bytes <= wide:
        x = left + limit_bytes * across
        parts.append(
            Markup(
                '<line class="limit" x1="{x:.1f}" x2="{x:.1f}" y1="{:.0f}" y2="{:.0f}"/>'
                '<text class="tick" x="{:.1f}" y="{:.0f}" text-anchor="end">may be used: {}</text>'
            ).format(top, bottom, x - 4, bottom - 6, bytes_text(limit_bytes), x=x)
        )
    places = [(left + point.num_bytes * across, bottom - point.time_us * down) for point in points]
    taken: list[float] = []
    for point, (x, y) in zip(points, places, strict=True):
        if point.label:
            parts.append(
                Markup('<line class="range" x1="{x:.1f}" x2="{x:.1f}" y1="{:.1f}" y2="{:.1f}"/>').format(
                    bottom - point.low_us * down, bottom - point.high_us * down, x=x
                )
            )
            side = -1 if x > (left + right) / 2 else 1
            at = _free_row((x, y), side * CHARACTER_WIDTH * len(point.label), places, taken, (top, bottom))
            taken.append(at)
            parts.append(
                Markup(
                    '<line class="grid" x1="{:.1f}" x2="{:.1f}" y1="{:.1f}" y2="{:.1f}"/>'
                    '<text class="over" x="{:.1f}" y="{:.1f}" text-anchor="{}">{}</text>'
                ).format(x, x + 10 * side, y, at - 4, x + 10 * side, at, "end" if side < 0 else "start", point.label)
            )
        parts.append(
            Markup('<path class="mark {}" d="{}"><title>{}</title></path>').format(
                point.kind, _shape(point.kind, x, y), point.name
            )
        )
    return chart(chart_id, title, description, bottom + 40, parts)


def _free_row(
    mark: tuple[float, float],
    width: float,
    places: Sequence[tuple[float, float]],
    taken: Sequence[float],
    bounds: tuple[float, float],
) -> float:
    """Return the baseline (px) nearest to a mark on which its label covers no other mark; beside it where none is free.

    Args:
        mark: where it lies.
        width: of the label; below 0 it stands left of its mark.
        places: of all marks.
        taken: baselines of the labels before.
        bounds: top and bottom of the drawing.
    """
    x, y = mark
    first, last = sorted((x + math.copysign(8, width), x + width))
    rows = [y + 4 + sign * count * LABEL_HEIGHT for count in range(len(places) + 1) for sign in (1, -1)]
    unlabelled = [at for at in rows if all(abs(at - other) >= LABEL_HEIGHT for other in taken)]
    for at in unlabelled:
        covered = any(first - 6 <= px <= last + 6 and at - LABEL_HEIGHT <= py <= at + 6 for px, py in places)
        if bounds[0] + 10 <= at <= bounds[1] and not covered:
            return at
    return next(iter(unlabelled), y + 4)


def _scatter_axes(
    wide: float, high: float, frame: tuple[float, float, float, float], scales: tuple[float, float]
) -> list[Markup]:
    (left, right, top, bottom), (across, down) = frame, scales
    unit = 1024.0 ** min(4, max(0, int(math.log(max(wide, 1.0), 1024))))
    parts = []
    for tick in nice_ticks(wide / unit):
        x = left + tick * unit * across
        parts.append(
            Markup(
                '<line class="grid" x1="{x:.1f}" x2="{x:.1f}" y1="{:.0f}" y2="{:.0f}"/>'
                '<text class="tick" x="{x:.1f}" y="{:.0f}" text-anchor="middle">{}</text>'
            ).format(top, bottom, bottom + 16, "0" if not tick else bytes_text(tick * unit), x=x)
        )
    for tick in nice_ticks(high, 5):
        y = bottom - tick * down
        parts.append(
            Markup(
                '<line class="grid" x1="{:.0f}" x2="{:.0f}" y1="{y:.1f}" y2="{y:.1f}"/>'
                '<text class="tick" x="{:.0f}" y="{:.1f}" text-anchor="end">{}</text>'
            ).format(left, right, left - 6, y + 4, "0" if not tick else time_text(tick), y=y)
        )
    return parts


def _shape(kind: str, x: float, y: float) -> str:
    """Return the outline of a mark: a square, a diamond, a triangle, or a disc."""
    match kind:
        case "now":
            return f"M{x - 6:.1f} {y - 6:.1f}h12v12h-12z"
        case "chosen":
            return f"M{x:.1f} {y - 9:.1f}l9 9l-9 9l-9 -9z"
        case "today":
            return f"M{x:.1f} {y - 8:.1f}l8 14h-16z"
        case _:
            return f"M{x - 4:.1f} {y:.1f}a4 4 0 1 0 8 0a4 4 0 1 0 -8 0z"


def chart(chart_id: str, title: str, description: str, height: float, parts: Sequence[Markup]) -> Markup:
    """Return a drawing of this height (px) with its title and description for those who do not see it."""
    body = Markup("").join(parts)
    return Markup(
        '<div class="chart" role="region" tabindex="0" aria-labelledby="{id}-t">'
        '<svg role="img" viewBox="0 0 {:.0f} {:.0f}" aria-labelledby="{id}-t {id}-d">'
        '<title id="{id}-t">{}</title><desc id="{id}-d">{}</desc>{}</svg></div>'
    ).format(CHART_WIDTH, height, escape(title), escape(description), body, id=chart_id)
