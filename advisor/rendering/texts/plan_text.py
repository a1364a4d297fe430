"""A plan on the terminal."""

from __future__ import annotations

from typing import TYPE_CHECKING

from paro_advise.advisor.rendering.constants import SHOWN_CANDIDATES, SHOWN_OTHERS
from paro_advise.advisor.wording.quantities import bytes_text, time_text
from paro_advise.policies.plan import Verdict, beside_the_run, same_way
from paro_advise.policies.strategy_name import collectives_name, short_choice_name

if TYPE_CHECKING:
    from paro_advise.policies.plan import Choice, Plan


def plan_text(plan: Plan) -> str:
    """Return a plan for people: verdict, alternatives, what it is based on."""
    lines = [plan.text, "", plan.confidence.text[:1].upper() + plan.confidence.text[1:] + "."]
    lines += ["", _head(plan.baseline), _row("now", plan.baseline)]
    lines += _fitting(plan)
    rejected = [choice for choice in plan.candidates if not choice.feasible]
    if rejected:
        name = short_choice_name(rejected[0])
        lines += ["", f"{len(rejected)} left out; the fastest of them: {name}: {rejected[0].reason}"]
    # A change that such settings express exactly needs no other ones.
    is_own = plan.verdict != Verdict.KEEP and bool(plan.chosen.exact_frameworks)
    if plan.switch_on_today and not is_own and not same_way(plan.switch_on_today, plan.chosen):
        today = plan.switch_on_today
        speedup = f"{today.predicted.speedup.p50:.2f}x ({', '.join(today.exact_frameworks)})"
        own = "With a framework's own settings"
        if today.predicted.speedup.p50 < 1:
            own += " nothing beats the present run; the closest is"
        lines += ["", f"{own}: {short_choice_name(today)}, {speedup}"]
    lines += _levers(plan) + _budget(plan) + _ho_ring(plan) + _outlooks(plan) + _answers(plan) + _sensitive(plan)
    if plan.probes:
        lines += ["", "Measure:", *(f"  - {probe}" for probe in plan.probes)]
    if plan.assumptions:
        lines += ["", "Assumed:", *(f"  - {assumption}" for assumption in plan.assumptions)]
    return "\n".join(lines)


def _fitting(plan: Plan) -> list[str]:
    """Return the rows of what fits: first what the plan may choose, its choice among them, then what it may not."""
    # What runs as the run does stands there already, as measured.
    fitting = [item for item in beside_the_run(plan) if item.feasible]
    eligible = [choice for choice in fitting if choice.eligible]
    others = [choice for choice in fitting if not choice.eligible]
    shown = eligible[:SHOWN_CANDIDATES]
    chosen = [choice for choice in eligible if plan.verdict != Verdict.KEEP and same_way(choice, plan.chosen)]
    if chosen and chosen[0] not in shown:
        shown = [*shown[:-1], chosen[0]]
    lines = [_row("*" if choice in chosen else "", choice) for choice in shown]
    if len(eligible) > len(shown):
        lines.append(f"  ... and {len(eligible) - len(shown)} more that fit")
    if others:
        lines += ["", "Not for this plan to choose:"]
        for place, choice in enumerate(others[:SHOWN_OTHERS]):
            if not place or choice.reason != others[place - 1].reason:
                lines.append(f"  {choice.reason}:")
            lines.append(_row("", choice))
        if len(others) > SHOWN_OTHERS:
            lines.append(f"  ... and {len(others) - SHOWN_OTHERS} more")
    return lines


def _levers(plan: Plan) -> list[str]:
    if not plan.levers:
        return []
    lines = ["", "Beside the strategy, nothing of it in the plan:"]
    for item in plan.levers:
        more = item.more_bytes
        remarks = [
            "memory unknown"
            if more is None
            else f"{bytes_text(abs(more))} {'more' if more > 0 else 'less'} memory"
            if more
            else "same memory",
            *(["does not fit"] if not item.fits else []),
            *(["changes the numbers"] if item.changes_numbers else []),
            *([item.note] if item.note else []),
        ]
        gains = (item.speedup_now, item.speedup_with_plan)
        now, planned = (f"{gain.p50:.2f}x ({gain.p10:.2f} to {gain.p90:.2f})" for gain in gains)
        lines.append(f"  now {now}, with the plan {planned}  {item.what}: {'; '.join(remarks)}")
    return lines


def _budget(plan: Plan) -> list[str]:
    if len(plan.budget) < 2:
        return []
    lines = ["", "Speed against extra memory (beyond GGG per rank, buffers not counted):"]
    for step in plan.budget:
        groups = f"/{step.group_size}" if step.group_size else ""
        gain = "" if step.saved_us_per_gib is None else f", {time_text(step.saved_us_per_gib)} less per GiB"
        lines.append(
            f"  {bytes_text(step.redundancy_bytes):>9}  {step.triple + groups:<7} "
            f"{collectives_name(step):<18}{_ms(step.step_time_us):>9} ms{gain}"
        )
    return lines


def _ho_ring(plan: Plan) -> list[str]:
    gain = plan.ho_ring
    if gain is None:
        return []
    what = (
        f"HO-Ring, in a gather of {bytes_text(gain.unit_bytes)} over all ranks: {gain.rounds_before:.0f} -> "
        f"{gain.rounds_after:.0f} inter-node rounds, {bytes_text(gain.port_bytes_before)} -> "
        f"{bytes_text(gain.port_bytes_after)} through a node's port, "
        f"{time_text(gain.hidden_us)} of intra-node work overlapped;"
    )
    return [
        "",
        what,
        f"with the backend's own collectives the same strategy takes {time_text(gain.step_us_without)} a step.",
    ]


def ranks_name(plan: Plan) -> str:
    """Return what a plan's ranks are: those of the job, or less where several share a model."""
    is_shared = plan.origin is not None and plan.origin.model_parallel_ranks > 1
    return "data-parallel ranks" if is_shared else "ranks"


def _outlooks(plan: Plan) -> list[str]:
    if not plan.outlooks:
        return []
    ranks = ranks_name(plan)
    lines = ["", "On more nodes, with equal work per rank:"]
    for item in plan.outlooks:
        speed = item.speedup
        lines.append(
            f"  {item.nodes_factor}x ({item.world_size} {ranks}): {speed.p50:.2f}x ({speed.p10:.2f} to {speed.p90:.2f})"
        )
    return lines


def _answers(plan: Plan) -> list[str]:
    lines = []
    for item in plan.answers:
        lines += ["", f"What if {item.asked}" + (f": {item.text}" if item.text else "")]
        steps = (
            ("now", item.baseline, item.baseline_step_us),
            ("plan", item.chosen, item.chosen_step_us),
            ("best", item.best, item.best_step_us),
        )
        for place, (mark, name, step) in enumerate(steps):
            if step and name not in [shown for _, shown, _ in steps[:place]]:
                lines.append(f"  {mark:<5}{name:<26}{_ms(step.p50):>9} ms ({_ms(step.p10)} to {_ms(step.p90)})")
    return lines


def _sensitive(plan: Plan) -> list[str]:
    """Return what would change the choice; what would not is not worth a line."""
    lines = []
    for item in plan.sensitivities:
        if item.best_if_half == item.best_if_double:
            continue  # the same one whatever the quantity is
        for end, best, speedup in (
            ("half", item.best_if_half, item.speedup_if_half),
            ("double", item.best_if_double, item.speedup_if_double),
        ):
            # Older plans name the triple alone.
            if best not in (short_choice_name(plan.chosen), plan.chosen.triple) and plan.verdict != Verdict.KEEP:
                value = f"{item.value:,.0f}" if item.value >= 1000 else f"{item.value:.3g}"
                lines.append(f"  {end} the {item.what}, now {value}: {best} would be best, this plan {speedup:.2f}x")
    return ["", "What would change the choice:", *lines] if lines else []


def _head(baseline: Choice) -> str:
    peak = "" if baseline.predicted.peak_bytes is None else f"{'peak':>12}"
    return f"{'':<4}{'strategy':<26}{'step ms':>9}{'10..90 %':>18}{'speed-up':>10}{'best in':>9}{'memory':>12}{peak}"


def _ms(time_us: float) -> str:
    """Return milliseconds with three digits at least, so that short steps can be told apart."""
    return f"{time_us / 1e3:.{max(0, 3 - len(str(int(time_us / 1e3))))}f}"


def _row(mark: str, choice: Choice) -> str:
    step = choice.predicted.step_time_us
    span = f"{_ms(step.p10)}..{_ms(step.p90)}"
    peak = "" if choice.predicted.peak_bytes is None else f"{bytes_text(choice.predicted.peak_bytes):>12}"
    name = f"{short_choice_name(choice):<26} "
    return (
        f"{mark:<4}{name}{_ms(step.p50):>{max(0, 35 - len(name))}}{span:>18}{choice.predicted.speedup.p50:>9.2f}x"
        f"{choice.probability_best:>9.0%}{bytes_text(choice.predicted.memory_bytes):>12}{peak}"
    )
