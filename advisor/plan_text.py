"""A plan on the terminal."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from paro_advise.policies.plan import Choice, Plan

_SHOWN = 8


def plan_text(plan: Plan) -> str:
    """Return a plan for people: verdict, alternatives, what it rests on."""
    lines = [plan.text, "", plan.confidence.text.capitalize() + "."]
    lines += ["", _head(), _row("now", plan.baseline)]
    fitting = [choice for choice in plan.candidates if choice.feasible]
    lines += [_row("*" if _is_same(choice, plan.chosen) else "", choice) for choice in fitting[:_SHOWN]]
    if len(fitting) > _SHOWN:
        lines.append(f"  ... and {len(fitting) - _SHOWN} more that fit")
    rejected = [choice for choice in plan.candidates if not choice.feasible]
    if rejected:
        lines += ["", f"{len(rejected)} do not fit; the fastest of them: {_name(rejected[0])}: {rejected[0].reason}"]
    if plan.switch_on_today and not _is_same(plan.switch_on_today, plan.chosen):
        today = plan.switch_on_today
        names = ", ".join(name for name, fidelity in today.exports.items() if fidelity == "exact")
        lines += [
            "",
            f"With a framework's own settings: {_name(today)}, {today.predicted.speedup.p50:.2f}x ({names})",
        ]
    if plan.probes:
        lines += ["", "Measure:", *(f"  - {probe}" for probe in plan.probes)]
    if plan.assumptions:
        lines += ["", "Assumed:", *(f"  - {assumption}" for assumption in plan.assumptions)]
    return "\n".join(lines)


def _head() -> str:
    return f"{'':<4}{'strategy':<26}{'step ms':>9}{'10..90 %':>18}{'speed-up':>10}{'best in':>9}{'states':>12}"


def _row(mark: str, choice: Choice) -> str:
    step = choice.predicted.step_time_us
    span = f"{step.p10 / 1e3:.0f}..{step.p90 / 1e3:.0f}"
    states = sum(value for name, value in choice.predicted.terms.items() if name != "transient")
    return (
        f"{mark:<4}{_name(choice):<26}{step.p50 / 1e3:>9.0f}{span:>18}{choice.predicted.speedup.p50:>9.2f}x"
        f"{choice.probability_best:>9.0%}{_bytes(states):>12}"
    )


def _name(choice: Choice) -> str:
    groups = f"/{choice.group_size}" if choice.group_size else ""
    return f"{choice.triple}{groups}" + (" HO-Ring" if choice.collectives == "ho_ring" else " native")


def _is_same(first: Choice, second: Choice) -> bool:
    return (first.triple, first.group_size, first.collectives) == (second.triple, second.group_size, second.collectives)


def _bytes(value: float) -> str:
    return f"{value / (1 << 20):.0f} MiB" if value < 10 * (1 << 30) else f"{value / (1 << 30):.1f} GiB"
