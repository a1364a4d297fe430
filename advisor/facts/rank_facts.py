"""Reduces one rank's trace to facts: time split per step, attributed collectives, when it computed."""

from __future__ import annotations

import itertools
import re
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from paro_advise.advisor.facts.attribution import Attribution, Call, RunContext, attribute
from paro_advise.advisor.facts.constants import COMPUTE_GAPS, COMPUTE_SPANS, DRAWN_STEPS, OPTIMIZER_STEP, QUEUE_ROOM
from paro_advise.advisor.facts.frames import table_bytes
from paro_advise.advisor.facts.groups import with_default_group, with_mesh_groups
from paro_advise.advisor.facts.intervals import EMPTY, Intervals, exposed_lengths
from paro_advise.advisor.facts.model import REPLAYED_CODE, RankFacts, StepFacts
from paro_advise.advisor.facts.passes import computing_passes
from paro_advise.advisor.facts.work import holding_copies, update_kernels, work_of
from paro_advise.core.collective import Op
from paro_advise.core.framework import Framework
from paro_advise.core.model_state import STATES
from paro_advise.policies.frameworks.registry import OBSERVED
from paro_advise.trace_parsers.kernel_kinds import KernelKind
from paro_advise.trace_parsers.notice import Notice, Severity

if TYPE_CHECKING:
    from collections.abc import Sequence

    import polars as pl
    from numpy.typing import NDArray

    from paro_advise.trace_parsers.tables import EventTables, HostSpan, ParsedSource, SourceHeader

# Kernels of backward passes and optimizers, as torch, FlashAttention, cuDNN and Apex name them. Neither dgrad nor
# MIOpen's igemm_bwd is one: transposed convolutions consist of them in forward.
_TRAINING_KERNEL = re.compile(
    r"backward|(?<!igemm_)bwd|wgrad|_grad_(?:input|weight)|adam|lambstage|sgd_", re.IGNORECASE
)
# What FSDP2 copies on compute's stream (torch/distributed/fsdp/_fully_shard/_fsdp_collectives.py, torch 2.13): gathered
# parameters to where the model computes with them, and gradients into the input of their reduction.
_COPIES = ("split_with_sizes_copy", "chunk_cat")
_LOADER = ("enumerate(DataLoader)", "dataloader_iter")


def rank_facts(parsed: ParsedSource) -> RankFacts:
    """Reduce what was read from one source to facts (pure)."""
    context_text = _context_text(parsed)
    windows = [] if parsed.events is None else _windows(parsed)
    collectives, notices = with_default_group(parsed.collectives, parsed.header, windows)
    table, assumed = with_mesh_groups(_attribute(collectives, context_text), parsed.header)
    notices += assumed
    steps: tuple[StepFacts, ...] = ()
    compute_spans: dict[int, bytes] = {}
    work = None
    if parsed.events is not None:
        table = _with_steps(table, windows, parsed.events.steps)
        compute = _compute_union(parsed.events)
        blocking = compute.join(holding_copies(parsed.events, compute))
        table = _with_exposure(table, blocking)
        updates = update_kernels(parsed.events)
        steps = tuple(_step_facts(parsed.events, table, compute, blocking, windows, updates))
        work = work_of(parsed.events, [(low, high) for _, low, high in windows], updates)
        compute_spans = {index: _spans(steps[index], compute) for index in _drawn_steps(steps)}
    else:
        table = _with_steps(table, [], ())
        table = _with_exposure(table, EMPTY)
    framework, guesses = _framework(context_text, table)
    if framework == Framework.UNKNOWN:
        framework = parsed.header.framework
    return RankFacts(
        source=parsed.source,
        header=_without_members(parsed.header),
        is_gpu=parsed.events.is_gpu if parsed.events else False,
        has_events=parsed.events is not None,
        framework=framework,
        steps=steps,
        num_micro_batches=parsed.num_micro_batches,
        num_forwards=parsed.num_forwards,
        num_updates=parsed.num_updates,
        collectives_ipc=table_bytes(table),
        link_samples_ipc=table_bytes(parsed.link_samples),
        typical_step=_typical_step(steps),
        compute_spans=compute_spans,
        notices=(*parsed.notices, *notices, *guesses),
        num_events=parsed.num_events,
        trains=_trains(parsed, table),
        lag_us=_lag_us(parsed.events) if parsed.events else 0.0,
        work=work,
    )


def _without_members(header: SourceHeader) -> SourceHeader:
    """Leave out which ranks a group holds: each collective names them, and of 10,000 ranks each would list all."""
    return replace(header, groups=tuple(replace(group, ranks=()) for group in header.groups))


def _trains(parsed: ParsedSource, table: pl.DataFrame) -> bool | None:
    """Tell whether a trace shows training: on the host, by what devices run, or by a reduction of gradients.

    The host's rows of what a CUDA graph replays were left where it was captured.
    """
    events = parsed.events
    if events is None:
        return None
    ran = events.device["name"].unique().to_list()
    if events.trains or any(_TRAINING_KERNEL.search(events.names[code]) for code in ran):
        return True
    if events.trains is None:
        return None
    if (table["op"] == Op.REDUCE_SCATTER.value).any():
        return True
    return None if any(notice.code == REPLAYED_CODE for notice in parsed.notices) else False


def _lag_us(events: EventTables) -> float:
    pairs = zip(events.device_steps, events.steps, strict=False)
    return float(np.median([device.start_us - host.start_us for device, host in pairs] or [0.0]))


def _context_text(parsed: ParsedSource) -> str:
    owners = parsed.collectives["owner"].unique(maintain_order=True).to_list()
    names = {span.name.partition(" ")[0] for span in parsed.events.spans} if parsed.events else set()
    groups = [group.description for group in parsed.header.groups]
    return "\n".join([*owners, *sorted(names), *groups, *parsed.header.autograd_marks])


def _framework(text: str, table: pl.DataFrame) -> tuple[Framework, tuple[Notice, ...]]:
    """Return the framework as annotations name it, else as its collectives look, which is said."""
    import polars as pl

    named = next((made.observed_as for made in OBSERVED if any(mark in text for mark in made.trace_marks)), None)
    if named is not None:
        return named, ()
    # DeepSpeed's ZeRO-1/2 leave no name, but gather after the optimizer's step, outside of it.
    gathers = table.filter(
        (pl.col("op") == Op.ALL_GATHER.value)
        & (pl.col("phase") == "update")
        & ~pl.col("owner").str.contains("Optimizer.step#", literal=True)
    )
    if not len(gathers):
        return Framework.UNKNOWN, ()
    notice = Notice(
        code="Q322",
        severity=Severity.INFO,
        message="no annotation names a framework; DeepSpeed is guessed, whose ZeRO-1 and ZeRO-2 gather parameters "
        "after the optimizer's step, as this run does",
        help="other distributed optimizers do so too; what is exported for DeepSpeed is of no use to them",
    )
    return Framework.DEEPSPEED, (notice,)


def _windows(parsed: ParsedSource) -> list[tuple[str, float, float]]:
    events = parsed.events
    assert events is not None
    if steps := events.device_steps or events.steps:
        return [(step.name, step.start_us, step.end_us) for step in steps]
    starts = [frame["start_us"].min() for frame in (events.device, parsed.collectives) if len(frame)]
    ends = [frame["end_us"].max() for frame in (events.device, parsed.collectives) if len(frame)]
    low = min((float(value) for value in starts if value is not None), default=0.0)  # type: ignore[arg-type]
    high = max((float(value) for value in ends if value is not None), default=0.0)  # type: ignore[arg-type]
    return [("whole trace", low, high)] if high > low else []


def reattributed(table: pl.DataFrame, framework: Framework) -> pl.DataFrame:
    """Attribute a table anew after its owners changed."""
    names = "\n".join([*table["owner"].unique(maintain_order=True).to_list(), framework])
    return _attribute(table.drop("state", "detail", "evidence"), names)


def _attribute(table: pl.DataFrame, context_text: str) -> pl.DataFrame:
    import polars as pl

    columns = ("op", "bytes", "dtype", "group_size", "group_ranks", "group_name", "group_desc", "owner", "phase")
    distinct = table.select(columns).unique(maintain_order=True)
    calls = [
        Call(
            op=Op(row["op"]),
            bytes=row["bytes"],
            dtype=row["dtype"] or "",
            group=row["group_ranks"] or row["group_name"] or row["group_desc"] or "",
            group_desc=row["group_desc"] or "",
            owner=row["owner"] or "",
            phase=row["phase"] or "",
            group_size=row["group_size"],
        )
        for row in distinct.iter_rows(named=True)
    ]
    context = RunContext.of(calls, context_text)
    found: list[Attribution] = [attribute(call, context) for call in calls]
    labels = distinct.with_columns(
        pl.Series("state", [item.state.value for item in found], dtype=pl.String),
        pl.Series("detail", [item.detail for item in found], dtype=pl.String),
        pl.Series("evidence", [item.evidence.value for item in found], dtype=pl.String),
    )
    return table.join(labels, on=list(columns), how="left", nulls_equal=True, maintain_order="left")


def _with_steps(
    table: pl.DataFrame, windows: list[tuple[str, float, float]], host_steps: Sequence[HostSpan]
) -> pl.DataFrame:
    """Add the step of each collective: that in which it was issued, else that in which it ran."""
    import polars as pl

    def within(times_us: NDArray[np.float64], bounds: Sequence[tuple[float, float]]) -> NDArray[np.int64]:
        if not bounds:
            return np.full(len(times_us), -1, dtype=np.int64)
        lows, highs = np.array(bounds).T
        index = np.searchsorted(lows, times_us, side="right") - 1
        return np.where((index >= 0) & (times_us < highs[np.maximum(index, 0)]), index, -1)

    ran = within(table["start_us"].to_numpy(), [(low, high) for _, low, high in windows])
    if len(host_steps) == len(windows):
        issue_us = table["issue_us"].cast(pl.Float64).fill_null(float("nan")).to_numpy()
        issued = within(issue_us, [(step.start_us, step.end_us) for step in host_steps])
        ran = np.where(np.isfinite(issue_us), issued, ran)
    return table.with_columns(pl.Series("step", ran))


def _compute_union(events: EventTables) -> Intervals:
    device = events.device
    compute = _of_kind(device, KernelKind.COMPUTE)
    if events.is_gpu:
        return compute
    # On a CPU run an operator may contain a collective it waits for.
    return compute.minus(_of_kind(device, KernelKind.SYNC))


def _of_kind(device: pl.DataFrame, kind: KernelKind) -> Intervals:
    mask = device["kind"].to_numpy() == kind
    return Intervals.union_of(device["start_us"].to_numpy()[mask], device["end_us"].to_numpy()[mask])


def _with_exposure(table: pl.DataFrame, compute: Intervals) -> pl.DataFrame:
    import polars as pl

    start, end = table["start_us"].to_numpy(), table["end_us"].to_numpy()
    exposed = exposed_lengths(start, end, compute) if len(start) else np.empty(0)
    return table.with_columns(pl.Series("exposed_us", exposed, dtype=pl.Float64))


def _step_facts(
    events: EventTables,
    table: pl.DataFrame,
    compute: Intervals,
    blocking: Intervals,
    windows: list[tuple[str, float, float]],
    updates: tuple[NDArray[np.float64], NDArray[np.float64]],
) -> list[StepFacts]:
    start, end = table["start_us"].to_numpy(), table["end_us"].to_numpy()
    timed = np.isfinite(start) & np.isfinite(end)
    rows_of = _rows_of_steps(table, timed, len(windows))
    state_of = table["state"].to_numpy()
    communication = Intervals.union_of(start[timed], end[timed])
    other = _of_kind(events.device, KernelKind.MEMORY if events.is_gpu else KernelKind.SYNC)
    gaps = _queued_gaps(events) if events.is_gpu else None
    passes, (laid_out, laid_in) = computing_passes(events, compute), [_named(events, mark) for mark in _COPIES]
    loading, stepping = (
        Intervals.of_pairs([(span.start_us, span.end_us) for span in events.spans if span.name.startswith(mark)])
        for mark in (_LOADER, OPTIMIZER_STEP)
    )
    blocked = Intervals.of_pairs(events.blocking_calls)
    host = [(step.start_us, step.end_us) for step in events.steps]
    works = _host_works_us(events, table, blocked) if len(host) == len(windows) else [None] * len(windows)
    # What a step issued may run in the next one, but what runs after the last belongs to none of them.
    first_us, last_us = windows[0][1] if windows else 0.0, max((high for _, _, high in windows), default=0.0)
    out = []
    for index, (label, low, high) in enumerate(windows):
        busy = compute.clip(low, high)
        updating = (updates[0] >= low) & (updates[0] < high)
        talk = communication.clip(low, high)
        exposed = talk.minus(blocking.clip(low, high))
        rest = other.clip(low, high).minus(busy.join(exposed))
        computed_us, exposed_us, rest_us = busy.length_us, exposed.length_us, rest.length_us
        worked = busy.join(talk).join(rest)
        totals, free = {}, {}
        for state in STATES:
            mine = rows_of[index][state_of[rows_of[index]] == state.value]
            union = Intervals.union_of(start[mine], end[mine]).clip(first_us, last_us)
            totals[state.value] = union.length_us
            free[state.value] = union.minus(blocking.clip(*union.bounds_us)).length_us
        on_host = host[index] if len(host) == len(windows) else (low, high)
        out.append(
            StepFacts(
                label=label,
                start_us=low,
                wall_us=high - low,
                compute_us=computed_us,
                exposed_communication_us=exposed_us,
                other_us=rest_us,
                idle_us=max(0.0, high - low - (computed_us + exposed_us + rest_us)),
                communication_us=talk.length_us,
                state_total_us=totals,
                state_exposed_us=free,
                queued_us=gaps.clip(low, high).length_us if gaps is not None else None,
                loading_us=loading.clip(*on_host).length_us,
                idle_loading_us=loading.clip(low, high).minus(worked).length_us,
                idle_updating_us=stepping.clip(low, high).minus(worked).length_us,
                blocked_us=blocked.clip(*on_host).length_us,
                host_work_us=works[index],
                update_us=Intervals.union_of(*(times[updating] for times in updates)).clip(low, high).length_us,
                num_update_kernels=int(updating.sum()),
                forward_us=passes.forward.clip(low, high).length_us if passes else None,
                backward_us=passes.backward.clip(low, high).length_us if passes else None,
                copied_out_us=laid_out.clip(low, high).length_us,
                copied_in_us=laid_in.clip(low, high).length_us,
                queue_length=_queue_length(events, low, high),
                memory_peaks=dict(events.memory_peaks.get(index, {})) if len(host) == len(windows) else {},
            )
        )
    return out


def _host_works_us(events: EventTables, table: pl.DataFrame, blocked: Intervals) -> list[float | None]:
    """Return how long the host works in each of its steps: what it does not wait for the device.

    It also waits in a launch for which the device's queue has no room, which no call tells apart from work: None for
    steps in which so much was queued when a collective was issued, and where no collective tells.
    """
    import polars as pl

    if not events.is_gpu or not events.records_calls:
        return [None] * len(events.steps)
    issue_us = table["issue_us"].cast(pl.Float64).fill_null(float("nan")).to_numpy()
    start_us = table["start_us"].to_numpy()
    known = np.isfinite(issue_us) & np.isfinite(start_us)
    issue_us, start_us = issue_us[known], start_us[known]
    rows_us = np.sort(events.device["start_us"].to_numpy())
    queued = np.searchsorted(rows_us, start_us) - np.searchsorted(rows_us, issue_us)
    found: list[float | None] = []
    for step in events.steps:
        mine = queued[(issue_us >= step.start_us) & (issue_us < step.end_us)]
        tells = len(mine) > 0 and int(mine.max()) < QUEUE_ROOM
        waited_us = blocked.clip(step.start_us, step.end_us).length_us
        found.append(step.end_us - step.start_us - waited_us if tells else None)
    return found


def _queue_length(events: EventTables, low_us: float, high_us: float) -> float | None:
    """Return how many device rows waited on average: their waits in the window over its length (Little's law)."""
    start, launch = events.device["start_us"].to_numpy(), events.device["launch_us"].to_numpy()
    known = np.isfinite(launch) & (launch < high_us) & (start > low_us)
    if not events.is_gpu or not known.any() or high_us <= low_us:
        return None
    waits = np.minimum(start[known], high_us) - np.maximum(launch[known], low_us)
    return float(np.maximum(waits, 0.0).sum() / (high_us - low_us))


def _named(events: EventTables, mark: str) -> Intervals:
    """Return when kernels run on devices whose names hold a mark."""
    named = np.array([mark in name for name in events.names], dtype=np.bool_)
    if not events.is_gpu or not named.any():
        return EMPTY
    mine = named[events.device["name"].to_numpy()]
    return Intervals.union_of(events.device["start_us"].to_numpy()[mine], events.device["end_us"].to_numpy()[mine])


def _rows_of_steps(table: pl.DataFrame, timed: NDArray[np.bool_], num_steps: int) -> list[NDArray[np.intp]]:
    """Return the places of the timed rows of each step, in order."""
    places = np.flatnonzero(timed)
    step_of = table["step"].to_numpy()[places]
    order = np.argsort(step_of, kind="stable")
    cuts = np.searchsorted(step_of[order], np.arange(num_steps + 1))
    return [places[order[low:high]] for low, high in itertools.pairwise(cuts.tolist())]


def _queued_gaps(events: EventTables) -> Intervals | None:
    """Return when a device ran nothing although the row that came next had been launched; None without launches."""
    start = events.device["start_us"].to_numpy()
    # A launch that takes long (loading code, a full queue) holds the host, not the queue.
    column = "launch_end_us" if "launch_end_us" in events.device.columns else "launch_us"
    launch = events.device[column].to_numpy()
    if not len(start) or not np.isfinite(launch).any():
        return None
    busy = Intervals.union_of(start, events.device["end_us"].to_numpy())
    low, high = busy.end_us[:-1], busy.start_us[1:]
    following = launch[np.searchsorted(start, high, side="left")]
    begin = np.where(np.isfinite(following), np.maximum(low, following), high)
    return Intervals.union_of(begin, np.maximum(begin, high))


def _typical_step(steps: tuple[StepFacts, ...]) -> int:
    """Return the index of the step of median length, -1 without steps."""
    return sorted(range(len(steps)), key=lambda index: steps[index].wall_us)[len(steps) // 2] if steps else -1


def _drawn_steps(steps: tuple[StepFacts, ...]) -> list[int]:
    """Return the steps that can be drawn: all, or the typical, longest and shortest one and some between."""
    if len(steps) <= DRAWN_STEPS:
        return list(range(len(steps)))
    order = sorted(range(len(steps)), key=lambda index: steps[index].wall_us)
    spread = np.linspace(0, len(steps) - 1, DRAWN_STEPS - 3).astype(int).tolist()
    return sorted({order[0], order[len(order) // 2], order[-1], *spread})


def _spans(step: StepFacts, compute: Intervals) -> bytes:
    """Return when a step computed, as RankFacts keeps it."""
    busy = compute.clip(step.start_us, step.start_us + step.wall_us)
    pairs = busy.coarse(step.wall_us / COMPUTE_GAPS, at_most=COMPUTE_SPANS) - step.start_us
    return pairs.astype("<f4").tobytes()
