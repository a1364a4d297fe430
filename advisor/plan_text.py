"""A plan on the terminal."""

from __future__ import annotations

from typing import TYPE_CHECKING

from paro_advise.policies.plan import as_framework_runs
from paro_advise.policies.variants import plain_name

if TYPE_CHECKING:
    from paro_advise.policies.plan import Choice, Plan

_SHOWN = 8


def plan_text(plan: Plan) -> str:
    """Return a plan for people: verdict, alternatives, what it rests on."""
    lines = [plan.text, "", plan.confidence.text.capitalize() + "."]
    lines += ["", _head(plan.baseline), _row("now", plan.baseline)]
    fitting = [choice for choice in plan.candidates if choice.feasible]
    lines += [_row("*" if _is_same(choice, plan.chosen) else "", choice) for choice in fitting[:_SHOWN]]
    if len(fitting) > _SHOWN:
        lines.append(f"  ... and {len(fitting) - _SHOWN} more that fit")
    rejected = [choice for choice in plan.candidates if not choice.feasible]
    if rejected:
        lines += ["", f"{len(rejected)} are left out; the fastest of them: {_name(rejected[0])}: {rejected[0].reason}"]
    if plan.switch_on_today and not _is_same(plan.switch_on_today, plan.chosen):
        today = plan.switch_on_today
        names = ", ".join(name for name, fidelity in today.exports.items() if fidelity == "exact")
        lines += [
            "",
            f"With a framework's own settings: {_name(today)}, {today.predicted.speedup.p50:.2f}x ({names})",
        ]
    lines += _budget(plan) + _ho_ring(plan) + _outlooks(plan) + _sensitive(plan)
    if plan.probes:
        lines += ["", "Measure:", *(f"  - {probe}" for probe in plan.probes)]
    if plan.assumptions:
        lines += ["", "Assumed:", *(f"  - {assumption}" for assumption in plan.assumptions)]
    return "\n".join(lines)


def as_run(plan: Plan, framework: str) -> list[str]:
    """Say what a framework's own settings make of a plan, and what that should bring."""
    real = as_framework_runs(plan, framework)
    if real is None:
        if plan.chosen.collectives != "ho_ring":
            return []
        return ["without HO-Ring, which `paro-advise run` brings: slower than the plan predicts"]
    if _is_same(real, plan.chosen):
        return []
    one, other = real.predicted.speedup, plan.chosen.predicted.speedup
    ahead = f"{one.p50:.2f}x ({one.p10:.2f} to {one.p90:.2f})"
    return [f"so {framework} runs {_name(real)}: predicted {ahead}, not {other.p50:.2f}x as with `paro-advise run`"]


def _budget(plan: Plan) -> list[str]:
    if len(plan.budget) < 2:
        return []
    lines = ["", "What redundancy buys (held beyond GGG, per rank):"]
    for step in plan.budget:
        groups = f"/{step.group_size}" if step.group_size else ""
        gain = "" if step.saved_us_per_gib is None else f", {step.saved_us_per_gib / 1e3:.3g} ms less per GiB"
        lines.append(
            f"  {_bytes(step.redundancy_bytes):>9}  {step.triple + groups:<7} "
            f"{step.collectives.replace('ho_ring', 'HO-Ring'):<8}{step.step_time_us / 1e3:>9.0f} ms{gain}"
        )
    return lines


def _ho_ring(plan: Plan) -> list[str]:
    gain = plan.ho_ring
    if gain is None:
        return []
    what = (
        f"HO-Ring, in a gather of {_bytes(gain.unit_bytes)} over all ranks: {gain.rounds_before:.0f} -> "
        f"{gain.rounds_after:.0f} rounds between nodes, {_bytes(gain.port_bytes_before)} -> "
        f"{_bytes(gain.port_bytes_after)} through a node's port, {gain.hidden_us / 1e3:.3g} ms inside nodes hidden;"
    )
    return [
        "",
        what,
        f"with the backend's own collectives the same strategy takes {gain.step_us_without / 1e3:.0f} ms a step.",
    ]


def _outlooks(plan: Plan) -> list[str]:
    if not plan.outlooks:
        return []
    lines = ["", "On more nodes, with equal work per rank:"]
    for item in plan.outlooks:
        speed = item.speedup
        lines.append(
            f"  {item.nodes_factor}x ({item.world_size} ranks): {speed.p50:.2f}x ({speed.p10:.2f} to {speed.p90:.2f})"
        )
    return lines


def _sensitive(plan: Plan) -> list[str]:
    """Return what would change the choice; what would not is not worth a line."""
    lines = []
    for item in plan.sensitivities:
        for end, best, speedup in (
            ("half", item.best_if_half, item.speedup_if_half),
            ("double", item.best_if_double, item.speedup_if_double),
        ):
            if best != plan.chosen.triple and plan.verdict != "keep":
                lines.append(f"  {item.what} {end} of {item.value:.3g}: {best} would be best, this plan {speedup:.2f}x")
    return ["", "What would change the choice:", *lines] if lines else []


def _head(baseline: Choice) -> str:
    peak = "" if baseline.predicted.peak_bytes is None else f"{'peak':>12}"
    return f"{'':<4}{'strategy':<26}{'step ms':>9}{'10..90 %':>18}{'speed-up':>10}{'best in':>9}{'states':>12}{peak}"


def _row(mark: str, choice: Choice) -> str:
    step = choice.predicted.step_time_us
    span = f"{step.p10 / 1e3:.0f}..{step.p90 / 1e3:.0f}"
    states = sum(value for name, value in choice.predicted.terms.items() if name != "transient")
    peak = "" if choice.predicted.peak_bytes is None else f"{_bytes(choice.predicted.peak_bytes):>12}"
    return (
        f"{mark:<4}{_name(choice):<26}{step.p50 / 1e3:>9.0f}{span:>18}{choice.predicted.speedup.p50:>9.2f}x"
        f"{choice.probability_best:>9.0%}{_bytes(states):>12}{peak}"
    )


def _name(choice: Choice) -> str:
    groups = f"/{choice.group_size}" if choice.group_size else ""
    return (
        f"{choice.triple}{groups}"
        + (" HO-Ring" if choice.collectives == "ho_ring" else f" {plain_name(choice.variant)}")
        + (" host" if choice.offload else "")
    )


def _is_same(first: Choice, second: Choice) -> bool:
    return _identity(first) == _identity(second)


def _identity(choice: Choice) -> tuple[str, int | None, str, str, str]:
    return choice.triple, choice.group_size, choice.collectives, choice.variant, choice.offload


def _bytes(value: float) -> str:
    return f"{value / (1 << 20):.0f} MiB" if value < 10 * (1 << 30) else f"{value / (1 << 30):.1f} GiB"
