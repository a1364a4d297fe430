"""What of a step no strategy changes, and what its collectives take."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

from paro_advise.advisor.analysis.constants import HOST_CAUSE_SHARE
from paro_advise.advisor.facts.attribution import OF_OPTIMIZER
from paro_advise.advisor.prediction.constants import (
    HOST_BOUND_SHARE,
    LITTLE_UPDATE_SHARE,
    NOTED_ASIDE_SHARE,
    OVERLAPPED_HOST_SHARE,
    OWN_GATHERS_SHARE,
    SHARED_CORE_THREADS,
)
from paro_advise.advisor.wording.quantities import time_text
from paro_advise.core.model_state import MODEL_STATES, State
from paro_advise.core.span import GroupSpan

if TYPE_CHECKING:
    from collections.abc import Sequence

    from paro_advise.advisor.analysis.model import Analysis


_NORM_KERNEL = "LpNormFunctor"  # in the names of the kernels of torch._foreach_norm (ForeachReduceOp.cu)


class StepParts(NamedTuple):
    """How a step parts into what no strategy changes and what its collectives take."""

    fixed_us: float  # what no strategy changes
    late_us: float  # of it, waiting for ranks that are late by their own doing, and in steps that stalled
    most_late_us: float  # the most that a step would save if no rank was late
    wait_us: float  # of each collective beside its transfer
    transfer_us: float | None  # of all collectives of model states
    host_floor_us: float  # of a run that is bound by its host, what this works in a step; 0 else
    host_idle_us: float  # how long its devices wait for that
    host_rest_us: float  # what a step takes beyond both
    host_work_us: float  # of a run that its host does not bind, what this works in a step; 0 where it is not known
    aside_us: float  # arithmetic that neither the model's passes nor the optimizer launch
    backward_share: float | None  # of the passes' arithmetic; None where no trace tells


def step_parts(analysis: Analysis, finer: float, *, is_gpu: bool, own_way: bool) -> StepParts:
    """Part a step into what no strategy changes and what its collectives take.

    Args:
        analysis: the run.
        finer: reductions that the replay makes of the run's buckets beyond theirs.
        is_gpu: collectives run beside compute.
        own_way: updated parameters come back in the framework's own way, see ``_published_us``.
    """
    parts, states = analysis.breakdown_us, analysis.states
    other = [states[name.value] for name in (State.OTHER, State.UNKNOWN) if name.value in states]
    updating = updates_on_host_us(analysis)
    fixed = (parts.idle or 0.0) - updating + sum(entry.exposed_us or 0.0 for entry in other)
    names = [name for name in MODEL_STATES if not (own_way and name == State.OPTIMIZER.value)]
    moved = [states[name] for name in names if name in states]
    # States that are exposed at the same time delay the step once.
    together = sum(entry.exposed_us or 0.0 for entry in states.values())
    once = min(1.0, (parts.exposed_communication or 0.0) / together) if together else 1.0
    wait = once * sum(min(entry.wait_us or 0.0, entry.exposed_us or 0.0) for entry in moved)
    # A rank that is late by its own doing delays every strategy once a step, however often they wait for each other. On
    # a CPU ranks are late for want of a core, too, of which another strategy takes more or less.
    own = [s.lateness_us for s in analysis.stragglers if is_gpu or "compute" in s.cause]
    # Means over ranks hold those that are late, too, which expose nothing: where many are, the others wait for longer.
    named = max(own, default=0.0) if is_gpu else 0.0
    own += [analysis.late_once_us, _stalled_us(analysis)] if is_gpu else []
    latest = max(named, min(parts.exposed_communication or 0.0, max(own, default=0.0)))
    late = min(wait, max(own, default=0.0))
    fixed, wait = fixed + late, wait - late
    calls = finer + sum(entry.count for entry in moved)
    # On a CPU "other" is the time inside calls of collectives before and after gloo's own work.
    if is_gpu:
        fixed += parts.other or 0.0
    else:
        wait += parts.other or 0.0
    known = [states[name].transfer_us for name in names if name in states and states[name].count]
    many = [_at_once(analysis, name) if is_gpu else 1.0 for name in names if name in states and states[name].count]
    transfer = None
    if all(us is not None for us in known):
        transfer = sum((us or 0.0) * at_once for us, at_once in zip(known, many, strict=True))
        transfer *= _alone_share(analysis, names) if is_gpu else once
    each_us = wait / calls if calls else 0.0
    # On a CPU times of operators hold what they waited for cores, of which passes have unequal parts.
    launched = _launched(analysis) if is_gpu else (0.0, None)
    host = _host_bound(analysis, fixed - late, updating) if is_gpu else (0.0, 0.0, 0.0)
    hidden_us = _hidden_host_us(analysis, fixed, updating) if is_gpu and not host[0] else 0.0
    return StepParts(fixed, late, max(late, latest), each_us, transfer, *host, hidden_us, *launched)


def arithmetic_note(parts: StepParts, analysis: Analysis) -> list[str]:
    """Return what is assumed of the arithmetic, of that which hides no communication, and of the host's work."""
    found = []
    if parts.backward_share is None:
        found.append("one third of the arithmetic is forward, two thirds backward")
    # Without the optimizer's own part it may be that.
    if analysis.update and parts.aside_us >= NOTED_ASIDE_SHARE * analysis.breakdown_us.step_us:
        told = (
            f"{time_text(parts.aside_us)} of a step's arithmetic is not launched by the model's passes or the "
            "optimizer, as that of a frozen encoder before them: it stays, and hides no communication"
        )
        found.append(told)
    if parts.host_work_us:
        low, high = (share * parts.host_work_us for share in OVERLAPPED_HOST_SHARE)
        told = (
            f"beneath communication the host works {time_text(parts.host_work_us)} of a step while a profiler records: "
            f"no other way is taken to be quicker than {time_text(low)} to {time_text(high)}; ways with fewer calls, "
            "as with replicated parameters, may be faster"
        )
        found.append(told)
    if parts.host_floor_us:
        told = (
            f"the host sets the pace: devices wait for launches for {time_text(parts.host_idle_us)} of a step, and no "
            "other way is taken to need less of it; ways with fewer calls, as with replicated parameters, may be faster"
        )
        found.append(told)
    return found


def updates_on_host_us(analysis: Analysis) -> float:
    """Return how long devices idle in a step because the optimizer steps on the host, 0 where devices update."""
    updating_us = analysis.idle_us.updating if analysis.idle_us else 0.0
    on_devices_us = analysis.update.us if analysis.update else 0.0
    is_long = updating_us > HOST_CAUSE_SHARE * analysis.breakdown_us.step_us
    if analysis.run.collectives_use_cores or not is_long or on_devices_us > LITTLE_UPDATE_SHARE * updating_us:
        return 0.0
    return min(updating_us, analysis.breakdown_us.idle or 0.0)


def _host_bound(analysis: Analysis, most_us: float, updating_us: float) -> tuple[float, float, float]:
    """Return what the host works, how long devices wait for it, and what a step takes beyond; zeros where few do.

    Devices that are done early wait for the next launch: what they save by less communication they idle, and what more
    of it takes goes into the time that they idled.

    Args:
        analysis: the run.
        most_us: of a step, that may be such waiting.
        updating_us: of a step, that the optimizer takes on the host, which goes with what a rank holds.
    """
    idle, step_us = analysis.idle_us, analysis.breakdown_us.step_us - updating_us
    if idle is None or idle.queued is None:
        return 0.0, 0.0, 0.0
    waited_us = min(most_us, max(0.0, (analysis.breakdown_us.idle or 0.0) - updating_us - idle.queued))
    if waited_us < HOST_BOUND_SHARE * step_us:
        return 0.0, 0.0, 0.0
    works_us = max(0.0, step_us - idle.synchronisation)
    return works_us, waited_us, step_us - max(works_us, step_us - waited_us)


def _hidden_host_us(analysis: Analysis, fixed_us: float, updating_us: float) -> float:
    """Return what the host works in a step where it is more than the step is without communication, else 0."""
    works_us = analysis.idle_us.host_work if analysis.idle_us else None
    least_us = (analysis.breakdown_us.compute or 0.0) + fixed_us
    return works_us - updating_us if works_us is not None and works_us - updating_us > least_us else 0.0


def _launched(analysis: Analysis) -> tuple[float, float | None]:
    """Return what neither passes nor the optimizer launched (us), and backward's share of the passes'."""
    seen = analysis.passes
    if seen is None or seen.forward + seen.backward <= 0:
        return 0.0, None
    updating = analysis.update.us + norms_us(analysis) if analysis.update else 0.0
    aside = (analysis.breakdown_us.compute or 0.0) - updating - seen.forward - seen.backward
    return max(0.0, aside), seen.backward / (seen.forward + seen.backward)


def norms_us(analysis: Analysis) -> float:
    """Return what norms of gradients take, which read what the optimizer reads: ``torch._foreach_norm``'s kernels.

    Only the longest kernels of a run are known by name: of a rank that holds few gradients they may be missing.
    """
    return sum(one.us for one in analysis.work.kernels if _NORM_KERNEL in one.name) if analysis.work else 0.0


def overlapped_us(analysis: Analysis) -> float:
    """Return the communication of a step that ran beside compute."""
    share, exposed = analysis.efficiency.overlap_share, analysis.breakdown_us.exposed_communication or 0.0
    return exposed * share / (1 - share) if share is not None and share < 1 else 0.0


def gathers_of_optimizer(analysis: Analysis) -> str:
    """Return that the optimizer gathers shards in its step, which takes other times under other strategies; else ""."""
    own = [entry for entry in analysis.collectives if entry.detail == OF_OPTIMIZER]
    if sum(entry.exposed_us or 0.0 for entry in own) < OWN_GATHERS_SHARE * analysis.breakdown_us.step_us:
        return ""
    return "the optimizer gathers shards in its step, and how long that takes under other strategies is not modelled"


def _at_once(analysis: Analysis, state: str) -> float:
    """Return how many collectives of a state ran at once: its time counts once what runs on two tiers of links."""
    entries = [entry for entry in analysis.collectives if entry.state == state]
    if len({entry.span == GroupSpan.INTRA for entry in entries}) == 1:
        return 1.0
    alone = sum(entry.count * (entry.p50_us or 0.0) for entry in entries)
    return max(1.0, alone / (analysis.states[state].total_us or math.inf))


def _alone_share(analysis: Analysis, names: Sequence[str]) -> float:
    """Return what collectives of some states would take alone, as a share of what they took.

    Those that share the links of a tier are each as slow as all of them together (``Efficiency.concurrent``).
    """
    took = alone = 0.0
    for entry in analysis.collectives:
        if entry.state in names:
            tier = "intra" if entry.span == GroupSpan.INTRA else "inter"
            us = entry.count * (entry.p50_us or 0.0)
            took += us
            alone += us / analysis.efficiency.concurrent.get(tier, 1.0)
    return alone / took if took else 1.0


def _stalled_us(analysis: Analysis) -> float:
    """Return how long ranks waited in steps that stalled, a step.

    What all ranks idled is no wait, and no rank waits longer than for all that arrived later: transfers that take
    longer are a link's.
    """
    _, stalled_us = analysis.step_time_us.stalled
    waits = [entry.wait_us for entry in analysis.states.values() if entry.count]
    waited_us = sum(us or 0.0 for us in waits) if waits and all(us is not None for us in waits) else math.inf
    return min(waited_us, max(0.0, stalled_us - min((entry.idle_us for entry in analysis.ranks), default=0.0)))


def gaps_us(analysis: Analysis) -> float:
    """Return the time between operators that the training thread worked; what it slept is none of it.

    A core is assumed to be shared by three threads at most, where the step logs tell how long it was on one;
    without them the whole gap counts as work.
    """
    captured, parts = analysis.captured, analysis.breakdown_us
    idle = parts.idle or 0.0
    if captured is None or not captured.traced_cpu_us:
        return idle
    return min(idle, max(0.0, SHARED_CORE_THREADS * captured.traced_cpu_us - (parts.compute or 0.0)))
