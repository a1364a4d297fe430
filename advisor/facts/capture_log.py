"""Steps that ran without the profiler, from the step logs of ``paro-advise capture`` (pure)."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from statistics import fmean, median
from typing import TYPE_CHECKING

from paro_advise.advisor.facts.constants import MAX_CAPTURED_STEPS, RUN_AHEAD_RATIO, WARM_UP_STEPS
from paro_advise.advisor.wording.quantities import number_ranges
from paro_advise.trace_parsers.logs.step_log import folder_of
from paro_advise.trace_parsers.notice import Notice, Severity

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Sequence

    from paro_advise.advisor.facts.model import RankFacts
    from paro_advise.trace_parsers.logs.step_log import LoggedSteps, StepRow


@dataclass(frozen=True, slots=True, kw_only=True)
class CapturedStep:
    """A step of the whole job.

    Attributes:
        step: number, from 0.
        step_us: mean over ranks, of their devices where they have some; None for the first, which has no begin.
        timed: it ran without the profiler and after the warm-up, and its time is known to be that of training.
        micro_batches: of a rank.
        loss: mean over ranks of the sum of a step's losses.
        gradient_norm: of the whole model before clipping; None if any rank's share is unknown.
        diverged: a rank's loss or gradient norm is infinite or not a number; the value is None then.
    """

    step: int
    step_us: float | None
    timed: bool
    micro_batches: int
    loss: float | None
    gradient_norm: float | None
    diverged: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Captured:
    """What a capture saw beside its traces.

    Attributes:
        steps: in order; of more than 5,000 the last ones.
        median_step_us: of the timed steps; None without any.
        profiler_slowdown: mean of the steps in the trace over the median of the timed ones.
        overhead_share: of the timed steps, spent by the capture itself.
        peak_memory_bytes: the largest of all ranks: allocated on GPUs, resident on CPUs.
        inputs: shapes and types of a rank's first micro-batch.
        autocast: type of mixed precision.
        world_size: of the job.
        local_world_size: ranks of a node as the launcher said, None when it did not.
        num_ranks: whose logs there are.
        device_memory_bytes: of one device.
        torch_version: of the job.
        traced_cpu_us: what the training thread was on a core for in a step that is in the trace, on average over
            ranks; None where steps do not tell.
        profiler_cpu_slowdown: that over the same of timed steps.
        cores_per_rank: of the machine that has the fewest for each of its ranks; None where it is not known.
        hosts_ran_ahead: of devices whose own time of steps was not logged, so that no step counts as timed.
        machines: the ranks under each kernel, which has one clock; () where the logs do not tell.
    """

    steps: tuple[CapturedStep, ...]
    median_step_us: float | None
    profiler_slowdown: float | None
    overhead_share: float | None
    peak_memory_bytes: int | None
    inputs: tuple[str, ...]
    autocast: str | None
    world_size: int
    local_world_size: int | None
    num_ranks: int
    device_memory_bytes: int | None
    torch_version: str | None
    traced_cpu_us: float | None = None
    profiler_cpu_slowdown: float | None = None
    cores_per_rank: float | None = None
    hosts_ran_ahead: bool = False
    machines: tuple[tuple[int, ...], ...] = ()


_RAN_AHEAD = Notice(
    code="Q329",
    severity=Severity.WARNING,
    message="hosts ran ahead of their devices while steps were timed: how long one takes unprofiled is unknown",
    help="record it again with this release",
)


@dataclass(frozen=True, slots=True)
class StepLogs:
    """The step logs among the inputs, which may be of several jobs."""

    logs: tuple[LoggedSteps, ...] = ()

    def of_run(
        self, places: Iterable[tuple[int, str]], facts: Sequence[RankFacts]
    ) -> tuple[Captured | None, tuple[Notice, ...]]:
        """Return what the logs of one run say, None where none is its own, and what to tell of them.

        A rank's log lies beside its trace, else beside that of another rank of the run, else where no other run lies:
        ranks without a trace, or logs that were parted from them.

        Args:
            places: ranks and paths of the run's traces.
            facts: of all inputs.
        """
        own = {rank: folder_of(path) for rank, path in places}
        folders = set(own.values())
        others = {folder_of(item.source.path) for item in facts} - folders
        worlds = {log.world_size for log in self.logs if log.folder in folders}
        found, unclear = [], []
        for rank in sorted({log.rank for log in self.logs}):
            mine = [log for log in self.logs if log.rank == rank]
            nearest = (
                [log for log in mine if log.folder == own.get(rank)]
                or [log for log in mine if log.folder in folders]
                or [log for log in mine if log.folder not in others and (not worlds or log.world_size in worlds)]
            )
            if len({log.rows for log in nearest}) > 1:
                unclear.append(rank)
            else:
                found += nearest[:1]
        captured, notices = captured_of(found), []
        if unclear:
            message = f"ranks {number_ranges(unclear)} have several step logs, none beside their traces: none is used"
            notices.append(Notice(code="Q301", severity=Severity.WARNING, message=message))
        if captured is not None and captured.hosts_ran_ahead:
            notices.append(_RAN_AHEAD)
        return captured, tuple(notices)


NO_LOGS = StepLogs()


def captured_of(logs: Sequence[LoggedSteps]) -> Captured | None:
    """Reduce the step logs of a job to what people and plans need; None without logs."""
    if not logs:
        return None
    first = logs[0]
    by_step: dict[int, list[StepRow]] = {}
    for log in logs:
        for row in log.rows:
            by_step.setdefault(row.step, []).append(row)
    whole = [rows for _, rows in sorted(by_step.items()) if len(rows) == len(logs)]
    steps = [_step(rows, complete=len(logs) == first.world_size) for rows in whole]
    hosts_ran_ahead = _hosts_ran_ahead(logs, [step.step for step in steps if step.timed])
    if hosts_ran_ahead:
        steps = [replace(step, timed=False) for step in steps]
    timed = [step.step_us for step in steps if step.timed and step.step_us]
    slowed = [
        step
        for step, rows in zip(steps, whole, strict=True)
        if step.step_us and step.step >= WARM_UP_STEPS and any(row.profiled for row in rows)
    ]
    # The trace may hold other steps than asked for, where the script's own profiler was at work.
    inside = [step for step in slowed if first.traced is not None and step.step in range(*first.traced)]
    profiled = [step.step_us for step in inside or slowed if step.step_us]
    overhead = [
        fmean(row.overhead_us for row in rows) / step.step_us
        for step, rows in zip(steps, whole, strict=True)
        if step.timed and step.step_us
    ]
    traced_cpu, plain_cpu = _cpu_us(steps, whole, first.traced)
    return Captured(
        steps=tuple(steps[-MAX_CAPTURED_STEPS:]),
        median_step_us=median(timed) if timed else None,
        profiler_slowdown=fmean(profiled) / median(timed) if profiled and timed else None,
        overhead_share=median(overhead) if overhead else None,
        peak_memory_bytes=max((row.peak_memory_bytes for rows in whole for row in rows), default=None),
        inputs=first.inputs,
        autocast=first.autocast,
        world_size=first.world_size,
        local_world_size=first.local_world_size,
        num_ranks=len(logs),
        device_memory_bytes=first.device_memory_bytes,
        torch_version=first.torch_version,
        traced_cpu_us=traced_cpu,
        profiler_cpu_slowdown=traced_cpu / plain_cpu if traced_cpu and plain_cpu else None,
        cores_per_rank=_cores_per_rank(logs),
        hosts_ran_ahead=hosts_ran_ahead,
        machines=_machines(logs),
    )


def _hosts_ran_ahead(logs: Sequence[LoggedSteps], timed: Collection[int]) -> bool:
    """Tell whether hosts issued their steps at a pace that is not that of their devices.

    Ranks train at one pace, so hosts that wait for their devices take the same time for the same steps.
    """
    counted = set(timed)
    sums = []
    for log in logs:
        rows = [row for row in log.rows if row.step in counted]
        if log.device_name is None or any(row.device_us is not None for row in rows):
            return False
        sums.append(math.fsum(row.step_us or 0.0 for row in rows))
    return bool(sums) and max(sums) > RUN_AHEAD_RATIO * min(sums)


def _machines(logs: Sequence[LoggedSteps]) -> tuple[tuple[int, ...], ...]:
    ranks_of: dict[str | None, list[int]] = {}
    for log in logs:
        ranks_of.setdefault(log.machine, []).append(log.rank)
    return () if None in ranks_of else tuple(sorted(tuple(sorted(ranks)) for ranks in ranks_of.values()))


def _cores_per_rank(logs: Sequence[LoggedSteps]) -> float | None:
    """Return how many cores a rank has for itself; ranks whose log is missing count by their node's number."""
    shares = []
    for log in logs:
        neighbours = [other for other in logs if other.machine == log.machine]
        if log.machine is None or log.cores is None:
            return None
        shares.append(log.cores / max(len(neighbours), log.local_world_size or 1))
    return min(shares, default=None)


def _cpu_us(
    steps: Sequence[CapturedStep], whole: Sequence[Sequence[StepRow]], traced: tuple[int, int] | None
) -> tuple[float | None, float | None]:
    """Return what the training thread was on a core for, in traced and in timed steps."""
    plain, slowed = [], []
    for step, rows in zip(steps, whole, strict=True):
        known = _all_or_none(row.cpu_us for row in rows)
        if known and traced is not None and traced[0] <= step.step < traced[1]:
            slowed.append(fmean(known))
        elif known and step.timed:
            plain.append(fmean(known))
    return median(slowed) if slowed else None, median(plain) if plain else None


def _step(rows: Sequence[StepRow], *, complete: bool) -> CapturedStep:
    times = _all_or_none(row.pace_us for row in rows)
    shares = _all_or_none(row.gradient_norm_squared for row in rows)
    losses = _all_or_none(row.loss for row in rows)
    diverged = any(math.isnan(value) for value in (*losses, *shares))
    return CapturedStep(
        step=rows[0].step,
        step_us=fmean(times) if times else None,
        timed=bool(times) and rows[0].step >= WARM_UP_STEPS and not any(row.profiled for row in rows),
        micro_batches=rows[0].micro_batches,
        loss=fmean(losses) if losses and not diverged else None,
        gradient_norm=math.sqrt(math.fsum(shares))
        if shares and complete and not diverged and min(shares) >= 0
        else None,
        diverged=diverged,
    )


def _all_or_none(values: Iterable[float | None]) -> list[float]:
    """Return all values, or none if one is unknown."""
    found = list(values)
    return [] if any(value is None for value in found) else [value for value in found if value is not None]
