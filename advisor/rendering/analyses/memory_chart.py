"""Peak memory by phase of a step, against what a device has."""

from __future__ import annotations

from typing import TYPE_CHECKING

from markupsafe import Markup

from paro_advise.advisor.rendering.charts import chart, nice_ticks
from paro_advise.advisor.rendering.constants import CHART_WIDTH, LABEL_WIDTH, LEAST_DRAWN
from paro_advise.advisor.wording.quantities import bytes_text

if TYPE_CHECKING:
    from collections.abc import Sequence

_ROW = 28.0  # px


def memory_chart(chart_id: str, phases: Sequence[tuple[str, int]], device_bytes: int | None) -> Markup:
    """Draw a bar for each phase, and a line where the device's memory ends.

    Args:
        chart_id: unique id in the page.
        phases: name and most bytes allocated in it, in order of the step.
        device_bytes: of one device, None where it is not known.
    """
    most = max((size for _, size in phases), default=0)
    wide = max(most, device_bytes or 0)
    if most < LEAST_DRAWN:
        return Markup("")
    unit = 1024.0 ** next(power for power in range(5, -1, -1) if wide >= 1024.0**power or power == 0)
    scale = (CHART_WIDTH - LABEL_WIDTH - 30) / wide
    bottom = 22 + _ROW * len(phases)
    parts = []
    for tick in nice_ticks(wide / unit):
        x = LABEL_WIDTH + tick * unit * scale
        parts.append(
            Markup(
                '<line class="grid" x1="{x:.1f}" x2="{x:.1f}" y1="20" y2="{:.0f}"/>'
                '<text class="tick" x="{x:.1f}" y="{:.0f}" text-anchor="middle">{}</text>'
            ).format(bottom, bottom + 14, "0" if not tick else bytes_text(tick * unit), x=x)
        )
    for place, (name, size) in enumerate(phases):
        y = 22 + place * _ROW
        parts.append(
            Markup(
                '<text class="label" x="{:.0f}" y="{:.1f}" text-anchor="end">{}</text>'
                '<rect class="s-parameter" x="{:.0f}" y="{:.1f}" width="{:.1f}" height="{:.0f}">'
                "<title>{} {}</title></rect>"
            ).format(LABEL_WIDTH - 6, y + 18, name, LABEL_WIDTH, y + 3, size * scale, _ROW - 6, name, bytes_text(size))
        )
    if device_bytes:
        x = LABEL_WIDTH + device_bytes * scale
        parts.append(
            Markup(
                '<line class="limit" x1="{x:.1f}" x2="{x:.1f}" y1="14" y2="{:.0f}"/>'
                '<text class="tick" x="{x:.1f}" y="11" text-anchor="end">the device has {}</text>'
            ).format(bottom, bytes_text(device_bytes), x=x)
        )
    highest = max(phases, key=lambda phase: phase[1])
    of = f" of {bytes_text(device_bytes)}" if device_bytes else ""
    title = f"Most memory is allocated in the {highest[0]} phase: {bytes_text(highest[1])}{of}"
    return chart(chart_id, title, "Most memory allocated in each phase of a step", bottom + 22, parts)
