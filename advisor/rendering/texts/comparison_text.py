"""A comparison for the terminal and for a ticket."""

from __future__ import annotations

from typing import TYPE_CHECKING

from paro_advise.advisor.comparison.constants import RANGE_TEXT
from paro_advise.advisor.wording.escaping import plain
from paro_advise.advisor.wording.quantities import bytes_text, share_text, signed_text, time_text
from paro_advise.core.plural import plural

if TYPE_CHECKING:
    from paro_advise.advisor.comparison.model import Comparison, Criterion, Metric

_PASSED = {True: "pass", False: "FAIL", None: "not judged"}


_AS_IT_STANDS = 10_000  # from which four digits would need an exponent


def value_text(value: float | None, unit: str) -> str:
    """Return a metric's value for people."""
    if value is None:
        return "unknown"
    match unit:
        case "us":
            return time_text(value)
        case "bytes":
            return bytes_text(value)
        case "share":
            return share_text(value)
        case _:
            return f"{value:,.0f} {unit}" if abs(value) >= _AS_IT_STANDS else f"{value:.4g} {unit}"


def change_text(metric: Metric) -> str:
    """Return a change with its range."""
    if metric.change_pct is None:
        return ""
    text = f"{signed_text(metric.change_pct)} %"
    if metric.low_pct is not None and metric.high_pct is not None:
        text += f" ({signed_text(metric.low_pct)} to {signed_text(metric.high_pct)})"
    return text


def name_text(metric: Metric) -> str:
    """Return a metric's name for people."""
    # The JSON's names say "hidden" where people say "overlapped".
    return metric.name.replace("_", " ").replace(" hidden", " overlapped")


def threshold_text(item: Criterion) -> str:
    """Return a criterion's limit and measurement."""
    limit = "none" if item.threshold is None else f"{item.threshold:g}"
    measured = "unknown" if item.measured is None else f"{item.measured:.3g}"
    return f"limit {limit}, measured {measured}"


def comparison_text(comparison: Comparison) -> str:
    """Return a comparison for the terminal."""
    lines = [comparison.text, ""]
    known = [metric for metric in comparison.metrics if (metric.before, metric.after) != (None, None)]
    values = [tuple(value_text(value, metric.unit) for value in (metric.before, metric.after)) for metric in known]
    width = max([28, *(2 + len(text) for pair in values for text in pair)])
    lines.append(f"{'':<26}{'before':>{width}}{'after':>{width}}  change ({RANGE_TEXT})")
    for metric, (before, after) in zip(known, values, strict=True):
        columns = f"{name_text(metric):<26}{before:>{width}}{after:>{width}}"
        lines.append(f"{columns}  {change_text(metric):<30}{metric.verdict}".rstrip())
    if comparison.parity:
        parity = comparison.parity
        loss, norm = _pct(parity.loss_max_pct), _pct(parity.gradient_norm_max_pct)
        lines += [
            "",
            f"losses of {plural(parity.num_steps, 'step')} differ by at most {loss}, gradient norms by {norm}",
        ]
    if comparison.parity and (comparison.parity.num_diverged_before or comparison.parity.num_diverged_after):
        parity = comparison.parity
        counts = f"{plural(parity.num_diverged_before, 'step')} before, {parity.num_diverged_after} after"
        lines.append(f"a loss or gradient norm is NaN or infinite in {counts}")
    lines += ["", "acceptance"]
    lines += [
        f"  {_PASSED[item.passed]:<13} {item.criterion}: {threshold_text(item)} ({item.text})"
        for item in comparison.asked_criteria
    ]
    if comparison.unlike:
        lines += ["", f"compared although the runs differ: {comparison.unlike_text}"]
    return "\n".join(plain(line) for line in lines)


def _pct(value: float | None) -> str:
    return "an unknown amount" if value is None else f"{value:.2g} %"


def comparison_markdown(comparison: Comparison) -> str:
    """Return a comparison for a ticket."""
    before, after = comparison.before, comparison.after
    lines = [f"**{_escape(comparison.text)}**", ""]
    if comparison.unlike:
        lines += [f"Compared although the runs differ: {_escape(comparison.unlike_text)}.", ""]
    lines += [f"| metric | before | after | change ({RANGE_TEXT}) | verdict |", "|---|---:|---:|---:|---|"]
    for metric in comparison.metrics:
        if metric.before is None and metric.after is None:
            continue
        cells = (
            name_text(metric),
            value_text(metric.before, metric.unit),
            value_text(metric.after, metric.unit),
            change_text(metric),
            metric.verdict,
        )
        lines.append("| " + " | ".join(map(_escape, cells)) + " |")
    lines += ["", "| acceptance | limit and measurement | |", "|---|---|---|"]
    lines += [
        f"| {_escape(item.criterion)} | {_escape(threshold_text(item))} | {_PASSED[item.passed]} |"
        for item in comparison.asked_criteria
    ]
    lines += [
        "",
        f"Before: {_escape(before.run.framework)}, {_escape(before.run.strategy.triple or 'strategy unknown')}, "
        f"{plural(before.num_steps, f'{before.steps_source} step')}. After: {_escape(after.run.framework)}, "
        f"{_escape(after.run.strategy.triple or 'strategy unknown')}, "
        f"{plural(after.num_steps, f'{after.steps_source} step')}."
        + (f" Plan {comparison.plan.plan_id}." if comparison.plan else ""),
    ]
    warnings = [(name, item) for name, side in comparison.sides for item in side.warnings]
    lines += [""] * bool(warnings)
    lines += [f"- {name}: {_escape(item.severity)} {item.code}: {_escape(item.message)}" for name, item in warnings]
    return "\n".join(lines) + "\n"


def _escape(text: str) -> str:
    return plain(text).replace("\\", "\\\\").replace("|", "\\|").replace("<", "&lt;").replace("\n", " ")
