"""Charts as SVG, one function each: from values to markup.

No colour stands in the markup, only classes; every mark that carries a number also stands in the
table under the chart. Marks below a pixel are merged, and a chart holds at most 5,000 marks.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from markupsafe import Markup, escape

from paro_advise.advisor.rendering.constants import CHART_WIDTH, LABEL_WIDTH, MAX_MARKS
from paro_advise.advisor.wording.quantities import time_text

if TYPE_CHECKING:
    from collections.abc import Sequence

    from paro_advise.advisor.facts.model import TimelineBox


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


def nice_ticks(high: float, count: int = 6) -> list[float]:
    """Return round tick values from 0 to at most ``high``."""
    if high <= 0:
        return [0.0]
    raw = high / count
    scale = 10.0 ** len(str(int(raw))) / 10 if raw >= 1 else 10.0 ** -len(str(int(1 / raw)))
    step = next(scale * factor for factor in (1, 2, 5, 10, 20, 50) if scale * factor >= raw)
    return [step * index for index in range(int(high / step) + 1)]


def _axis(high_us: float, top: float, bottom: float) -> list[Markup]:
    parts = []
    scale = (CHART_WIDTH - LABEL_WIDTH - 10) / high_us
    for tick in nice_ticks(high_us):
        x = LABEL_WIDTH + tick * scale
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
    if high <= 0:
        return Markup("")
    row = 26.0 if len(bars) <= 16 else (12.0 if len(bars) <= 64 else 5.0)
    height = 12 + row * len(bars) + 24
    scale = (CHART_WIDTH - LABEL_WIDTH - 10) / high
    parts = _axis(high, 6, 8 + row * len(bars))
    rich = len(bars) <= 24
    paths: dict[str, list[str]] = {}
    label_every = max(1, round(13 / row))
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
    return _svg(chart_id, title, description, height, parts)


def timeline(
    chart_id: str,
    title: str,
    description: str,
    boxes: Sequence[TimelineBox],
    high_us: float,
    lanes: Sequence[tuple[str, str]],
) -> Markup:
    """Draw one step as lanes of boxes.

    Args:
        chart_id: unique id in the page.
        title: states the finding.
        description: what is drawn.
        boxes: at most 5,000 are drawn.
        high_us: length of the step.
        lanes: (lane, text) top to bottom.
    """
    if high_us <= 0 or not boxes:
        return Markup("")
    row = 30.0
    height = 12 + row * len(lanes) + 24
    scale = (CHART_WIDTH - LABEL_WIDTH - 10) / high_us
    parts = _axis(high_us, 6, 8 + row * len(lanes))
    for index, (lane, text) in enumerate(lanes):
        y = 8 + index * row
        parts.append(
            Markup('<text class="label" x="{:.0f}" y="{:.1f}" text-anchor="end">{}</text>').format(
                LABEL_WIDTH - 6, y + row / 2 + 4, text
            )
        )
        end_px = -1.0
        for box in sorted((box for box in boxes if box.lane == lane), key=lambda box: box.start_us)[:MAX_MARKS]:
            x, width = LABEL_WIDTH + box.start_us * scale, max((box.end_us - box.start_us) * scale, 0.6)
            if x + width <= end_px + 0.5 and width < 1:
                continue
            end_px = max(end_px, x + width)
            parts.append(
                Markup(
                    '<rect class="s-{}" x="{:.1f}" y="{:.1f}" width="{:.1f}" height="{:.1f}">'
                    "<title>{} {}</title></rect>"
                ).format(lane, x, y + 3, width, row - 6, box.label, time_text(box.end_us - box.start_us))
            )
    return _svg(chart_id, title, description, height, parts)


def lines(
    chart_id: str, title: str, description: str, steps: Sequence[int], series: Sequence[tuple[str, Sequence[float]]]
) -> Markup:
    """Draw lines over steps.

    Args:
        chart_id: unique id in the page.
        title: states the finding.
        description: what is drawn.
        steps: rising.
        series: CSS class and one finite value a step, each; the first is drawn widest.
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
    for step in (steps[0], steps[-1]):
        x = left + (step - steps[0]) * across
        parts.append(
            Markup('<text class="tick" x="{:.1f}" y="{:.0f}" text-anchor="{}">step {}</text>').format(
                x, bottom + 16, "start" if step == steps[0] else "end", step
            )
        )
    for kind, row in series:
        points = " ".join(
            f"{left + (step - steps[0]) * across:.1f},{bottom - (value - low) / spread * (bottom - top):.1f}"
            for step, value in zip(steps, row, strict=True)
        )
        parts.append(Markup('<polyline class="{}" points="{}"/>').format(kind, points))
    return _svg(chart_id, title, description, bottom + 26, parts)


def _svg(chart_id: str, title: str, description: str, height: float, parts: Sequence[Markup]) -> Markup:
    body = Markup("").join(parts)
    return Markup(
        '<svg role="img" viewBox="0 0 {:.0f} {:.0f}" aria-labelledby="{id}-t {id}-d">'
        '<title id="{id}-t">{}</title><desc id="{id}-d">{}</desc>{}</svg>'
    ).format(CHART_WIDTH, height, escape(title), escape(description), body, id=chart_id)
