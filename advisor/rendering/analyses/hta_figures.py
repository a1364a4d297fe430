"""HolisticTraceAnalysis' figures beside ours: lines for a terminal, a table for the report."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from paro_advise.advisor.hta.library import HTA_VERSION, NUMBERS, figure_text, same_figure
from paro_advise.advisor.rendering.constants import HTA_TEXT_ROWS
from paro_advise.advisor.rendering.page import Cell, Row, Table, make_table, number
from paro_advise.advisor.wording.escaping import plain
from paro_advise.advisor.wording.quantities import time_text

if TYPE_CHECKING:
    from paro_advise.advisor.hta.library import HtaFigures
    from paro_advise.advisor.hta.rules import HtaRow


def hta_text(figures: HtaFigures | None) -> str:
    """Return the figures as a few lines for a terminal, "" for None."""
    if figures is None:
        return ""
    lines = [
        "",
        f"by HolisticTraceAnalysis' rules ({HTA_VERSION}: whole microseconds, without what it takes for the last step)",
    ]
    timed = [row for row in figures.rows if row.kernel_time_us is not None]
    if not timed:
        lines.append(f"  they know device rows only; {len(figures.rows)} torch profiler traces, none has any")
    lines += [
        f"  {plain(Path(row.label).name)}: kernel time {time_text(row.kernel_time_us)}, idle "
        f"{_percent(row.idle_time_pctg)}, compute {_percent(row.compute_time_pctg)}, non-compute "
        f"{_percent(row.non_compute_time_pctg)}, {_overlap_text(row)}; HTA itself: {_agreement(row)}"
        for row in timed[:HTA_TEXT_ROWS]
    ]
    if len(timed) > HTA_TEXT_ROWS:
        lines.append(f"  and {len(timed) - HTA_TEXT_ROWS} more, all of them in the report (-o)")
    return "\n".join(lines)


def _overlap_text(row: HtaRow) -> str:
    share = row.comp_comm_overlap_pctg
    return "no communication" if share is None else f"overlap {_percent(share)}"


def hta_table(figures: HtaFigures) -> Table:
    """Return the figures as a table of the report."""
    rows = [
        Row(
            cells=(
                Cell(text=row.label, css="path"),
                number(row.rank, "unknown" if row.rank is None else str(row.rank)),
                number(row.kernel_time_us, time_text(row.kernel_time_us)),
                *(
                    number(share, _percent(share))
                    for share in (
                        row.idle_time_pctg,
                        row.compute_time_pctg,
                        row.non_compute_time_pctg,
                        row.comp_comm_overlap_pctg,
                    )
                ),
                Cell(text=_agreement(row)),
                *(_cause(row, cause) for cause in ("host_wait", "kernel_wait", "other")),
                Cell(text=_path_text(row)),
            )
        )
        for row in figures.rows
    ]
    names = (
        "trace", "rank #", "kernel time #", "idle #", "compute #", "non-compute #", "overlap #", "HTA itself",
        "host wait #", "kernel wait #", "other wait #", "critical path",
    )  # fmt: skip
    caption = (
        f"HolisticTraceAnalysis {HTA_VERSION}'s rules as we compute them, not our breakdown: whole microseconds, "
        "without what HTA takes for the last step, synchronisation counts as busy. Waits (all streams) and critical "
        "path: HTA itself"
    )
    return make_table("table-hta", caption, names, rows)


def _percent(value: float | None) -> str:
    return "unknown" if value is None else f"{value:.2f} %"


def _agreement(row: HtaRow) -> str:
    """Say how HTA's own figures relate to ours."""
    own = row.own
    if own is None or all(getattr(own, name) is None for name in NUMBERS):
        return "no figures"
    differing = [name for name in NUMBERS if not same_figure(getattr(own, name), getattr(row, name))]
    if not differing:
        return "the same"
    return "; ".join(f"{name} {figure_text(getattr(own, name))}" for name in differing)


def _cause(row: HtaRow, cause: str) -> Cell:
    value = row.own.idle_us.get(cause, 0.0) if row.own and row.own.idle_us else None
    return number(value, time_text(value))


def _path_text(row: HtaRow) -> str:
    shares = row.own.critical_path_pctg if row.own else {}
    ordered = sorted(shares.items(), key=lambda item: (-item[1], item[0]))
    return ", ".join(f"{cause.replace('_', ' ')} {share:.1f} %" for cause, share in ordered if share >= 0.05)
