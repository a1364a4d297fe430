"""The parts of the analysis that only describe: what ran, its steps, ranks and collectives."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING, TypeVar

import numpy as np

from paro_advise.advisor.analysis.constants import MAX_COLLECTIVE_KINDS, MAX_LOGGED_KINDS, MAX_MODULES, MAX_REMARKS
from paro_advise.advisor.analysis.model import (
    Breakdown,
    CollectiveEntry,
    DeviceUpdate,
    IdleParts,
    InputEntry,
    MemoryPeaks,
    ModuleEntry,
    PassTimes,
    RankEntry,
    RunEntry,
    StepTime,
)
from paro_advise.advisor.analysis.parallel import data_parallel_size
from paro_advise.advisor.analysis.state_summary import covered_us
from paro_advise.advisor.facts.attribution import ROOT_MODULE, with_modules
from paro_advise.advisor.facts.constants import MAX_NAMED_KERNELS
from paro_advise.advisor.facts.model import KernelTime, Work
from paro_advise.advisor.ranks.stalled_steps import busy_times
from paro_advise.core.model_state import State
from paro_advise.core.span import GroupSpan

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from paro_advise.advisor.analysis.observed.training import ObservedTraining
    from paro_advise.advisor.ranks.clocks.clock_alignment import AlignedRun
    from paro_advise.advisor.ranks.run import Run
    from paro_advise.advisor.ranks.source import Source
    from paro_advise.advisor.ranks.topology import Topology

_T = TypeVar("_T")


def step_time(run: Run) -> StepTime:
    """Return step times, means over ranks."""
    walls: dict[str, list[float]] = {}
    for step in run.steps:
        walls.setdefault(step.label, []).append(step.wall_us)
    busy_us = busy_times(run.timed)
    found = StepTime.of([float(np.mean(times)) for times in walls.values()], [busy_us[label] for label in walls])
    return replace(found, left_out=(run.stall.wall_us,)) if run.stall else found


def breakdown(run: Run) -> Breakdown:
    """Split the mean step over ranks and steps."""
    if not run.steps:
        return Breakdown(compute=None, exposed_communication=None, other=None, idle=None)

    def mean(field: str) -> float:
        return float(np.mean([getattr(step, field) for step in run.steps]))

    return Breakdown(
        compute=mean("compute_us"),
        exposed_communication=mean("exposed_communication_us"),
        other=mean("other_us"),
        idle=mean("idle_us"),
    )


def uneven_us(run: Run) -> tuple[float, float]:
    """Return how much longer than ranks on average one computes in each step, and what of that is another's each time.

    The latter is the same of what each rank computes beyond its own mean over S steps, times the root of S / (S - 1):
    that mean holds a part of each step itself.
    """
    of_rank = {rank: {step.label: step.compute_us for step in source.steps} for rank, source in run.timed}
    labels = set.intersection(*map(set, of_rank.values())) if of_rank else set()
    if not labels:
        return 0.0, 0.0
    times = np.array([[steps[label] for label in sorted(labels)] for steps in of_rank.values()])
    beyond = times - times.mean(axis=0)
    whole = float(beyond.max(axis=0).mean())
    if len(labels) < 2:
        return whole, 0.0
    anew = beyond - beyond.mean(axis=1, keepdims=True)
    return whole, min(whole, float(anew.max(axis=0).mean()) * math.sqrt(len(labels) / (len(labels) - 1)))


def idle_parts(run: Run) -> IdleParts | None:
    """Return why devices idle, None without steps."""
    if not run.steps:
        return None
    queues = [step.queue_length for step in run.steps if step.queue_length is not None]
    queued = [step.queued_us for step in run.steps if step.queued_us is not None]
    works = [step.host_work_us for step in run.steps if step.host_work_us is not None]
    return IdleParts(
        queued=float(np.mean(queued)) if len(queued) == len(run.steps) else None,
        data_loading=float(np.mean([step.loading_us for step in run.steps])),
        loading=float(np.mean([step.idle_loading_us for step in run.steps])),
        updating=float(np.mean([step.idle_updating_us for step in run.steps])),
        synchronisation=float(np.mean([step.blocked_us for step in run.steps])),
        queue_length=float(np.mean(queues)) if len(queues) == len(run.steps) else None,
        host_work=float(np.mean(works)) if len(works) == len(run.steps) else None,
    )


def device_update(run: Run) -> DeviceUpdate | None:
    """Return what the optimizer takes of a step's computing on a device, None where none of it was seen."""
    found = [(step.update_us, step.num_update_kernels) for step in run.steps if step.num_update_kernels]
    # A rank whose trace was cut before its update tells nothing.
    return DeviceUpdate(us=_mean_of(found, 0), num_kernels=_mean_of(found, 1)) if found else None


def pass_times(run: Run) -> PassTimes | None:
    """Return what the model's passes take of a step's computing, None where some step does not tell."""
    found = [
        (step.forward_us, step.backward_us)
        for step in run.steps
        if step.forward_us is not None and step.backward_us is not None
    ]
    if not found or len(found) < len(run.steps):
        return None
    return PassTimes(forward=_mean_of(found, 0), backward=_mean_of(found, 1))


def copied_us(run: Run) -> tuple[float, float]:
    """Return what of a step's computing lays gathered parameters out, and gradients for their reduction."""
    copies = [(step.copied_out_us, step.copied_in_us) for step in run.steps]
    return (_mean_of(copies, 0), _mean_of(copies, 1)) if copies else (0.0, 0.0)


def _mean_of(rows: Sequence[tuple[float, ...]], place: int) -> float:
    return float(np.mean([row[place] for row in rows]))


def computing(run: Run) -> Work | None:
    """Return what computes, means over ranks, None where nothing was timed."""
    found = [item.facts.work for _, item in run.timed if item.facts.work is not None]
    if not found:
        return None
    kinds: dict[str, float] = {}
    kernels: dict[tuple[str, str], tuple[float, float]] = {}
    for work in found:
        for kind, time_us in work.kind_us.items():
            kinds[kind] = kinds.get(kind, 0.0) + time_us / len(found)
        for kernel in work.kernels:
            time_us, count = kernels.get((kernel.name, kernel.kind), (0.0, 0.0))
            kernels[kernel.name, kernel.kind] = time_us + kernel.us / len(found), count + kernel.count / len(found)
    longest = sorted(kernels.items(), key=lambda item: (-item[1][0], item[0]))[:MAX_NAMED_KERNELS]
    return Work(
        kind_us=kinds,
        kernels=tuple(
            KernelTime(name=name, kind=kind, us=time_us, count=count) for (name, kind), (time_us, count) in longest
        ),
        product_flops=float(np.mean([work.product_flops for work in found])),
        product_us=float(np.mean([work.product_us for work in found])),
    )


def memory_peaks(run: Run) -> MemoryPeaks | None:
    """Return the most that was allocated in each phase, None where no trace records it."""
    found = [(rank, step.memory_peaks) for rank, item in run.timed for step in item.steps if step.memory_peaks]
    if not found:
        return None
    phases = sorted({phase for _, peaks in found for phase in peaks})
    return MemoryPeaks(
        phase_bytes={phase: max(peaks.get(phase, 0) for _, peaks in found) for phase in phases},
        rank=max(found, key=lambda item: (max(item[1].values()), -item[0]))[0],
    )


def device_lag(run: Run) -> float | None:
    """Return how far devices ran behind their hosts (us, mean over ranks), None without steps."""
    return float(np.mean([item.facts.lag_us for _, item in run.timed])) if run.steps else None


def collective_entries(aligned: AlignedRun | None, run: Run) -> tuple[CollectiveEntry, ...]:
    """Return the kinds of collectives, those with most exposed time first."""
    import polars as pl

    if aligned is None or not len(aligned.table):
        return _logged_collectives(run)
    rank_steps = max(1, len(run.steps))
    keys = ["state", "detail", "op", "bytes", "group_size", "span", "evidence", "dtype"]
    duration = (pl.col("end_us") - pl.col("start_us")).alias("duration_us")
    grouped = (
        aligned.table.with_columns(duration)
        .group_by(keys)
        .agg(
            pl.len().alias("count"),
            *[
                pl.col("duration_us").quantile(share, "linear").alias(name)
                for name, share in (("p50", 0.5), ("p95", 0.95), ("p99", 0.99))
            ],
            pl.col("exposed_us").sum(),
        )
        .sort(["exposed_us", *keys], descending=[True] + [False] * len(keys), nulls_last=True)
        .head(MAX_COLLECTIVE_KINDS)
    )
    return tuple(
        CollectiveEntry(
            state=row["state"],
            detail=row["detail"],
            op=row["op"],
            bytes=row["bytes"],
            group_size=row["group_size"],
            span=GroupSpan(row["span"] or GroupSpan.UNKNOWN),
            count=row["count"] / rank_steps,
            p50_us=row["p50"],
            p95_us=row["p95"],
            p99_us=row["p99"],
            exposed_us=row["exposed_us"] / rank_steps,
            evidence=row["evidence"],
            dtype=row["dtype"] or "",
        )
        for row in grouped.iter_rows(named=True)
    )


def module_entries(aligned: AlignedRun | None, run: Run) -> tuple[ModuleEntry, ...]:
    """Return the modules whose collectives are exposed longest, () where no trace names them."""
    import polars as pl

    if aligned is None:
        return ()
    named = with_modules(aligned.table).filter(pl.col("module").is_not_null())
    if set(named["module"].to_list()) <= {ROOT_MODULE}:
        return ()
    rank_steps = max(1, len(run.steps))
    exposed: dict[str, dict[str, float]] = {}
    sums = named.group_by("module", "state", maintain_order=True).agg(pl.col("exposed_us").sum())
    for module, state, time_us in sums.iter_rows():
        exposed.setdefault(module, {})[state] = time_us / rank_steps
    totals = named.group_by("module").agg(
        pl.len().alias("count"), pl.col("bytes").sum(), pl.col("bytes").null_count().alias("unknown")
    )
    entries = [
        ModuleEntry(
            module=module,
            count=count / rank_steps,
            bytes=None if unknown else num_bytes / rank_steps,
            exposed_us=sum(exposed[module].values()),
            state_exposed_us=exposed[module],
        )
        for module, count, num_bytes, unknown in totals.iter_rows()
    ]
    return tuple(sorted(entries, key=lambda entry: (-entry.exposed_us, entry.module))[:MAX_MODULES])


def _logged_collectives(run: Run) -> tuple[CollectiveEntry, ...]:
    """Return the kinds of collectives in logs and dumps with their counts; times are unknown."""
    import polars as pl

    tables = [item.collectives for item in run.untimed]
    if not tables:
        return ()
    keys = ["state", "detail", "op", "bytes", "group_size", "evidence", "dtype"]
    grouped = pl.concat(tables).group_by(keys).agg(pl.len().alias("count"))
    order = ["count", *keys]
    grouped = grouped.sort(order, descending=[True] + [False] * len(keys), nulls_last=True).head(MAX_LOGGED_KINDS)
    return tuple(
        CollectiveEntry(
            state=row["state"],
            detail=row["detail"],
            op=row["op"],
            bytes=row["bytes"],
            group_size=row["group_size"],
            span=GroupSpan.UNKNOWN,
            count=float(row["count"]),
            p50_us=None,
            p95_us=None,
            p99_us=None,
            exposed_us=None,
            evidence=row["evidence"],
            dtype=row["dtype"] or "",
        )
        for row in grouped.iter_rows(named=True)
    )


def rank_entries(aligned: AlignedRun | None, run: Run, topology: Topology) -> tuple[RankEntry, ...]:
    """Return each rank's means over its steps."""
    waits: dict[int, float] = {}
    if aligned is not None:
        known = aligned.table.drop_nulls("transfer_us").partition_by("rank", as_dict=True)
        for (rank,), rows in known.items():
            whole, transfers = covered_us(rows)
            waits[int(str(rank))] = whole - transfers
    entries = []
    for rank, item in run.timed:
        steps = item.steps
        if not steps:
            continue

        def mean(field: str, steps: tuple[object, ...] = steps) -> float:
            return float(np.mean([getattr(step, field) for step in steps]))

        entries.append(
            RankEntry(
                rank=rank,
                node=topology.node_of.get(rank),
                host=item.header.host,
                num_steps=len(steps),
                step_time_us=mean("wall_us"),
                compute_us=mean("compute_us"),
                exposed_communication_us=mean("exposed_communication_us"),
                other_us=mean("other_us"),
                idle_us=mean("idle_us"),
                state_exposed_us={
                    state.value: float(np.mean([step.state_exposed_us.get(state.value, 0.0) for step in steps]))
                    for state in State
                },
                wait_us=waits[rank] / len(steps) if rank in waits else None,
            )
        )
    return tuple(entries)


def run_entry(
    sources: Sequence[Source],
    run: Run,
    topology: Topology,
    training: ObservedTraining,
    collectives: Sequence[CollectiveEntry],
) -> RunEntry:
    """Describe what ran."""
    # What timed the steps speaks first: a benchmark beside it may have run on another backend.
    headers = [item.header for _, item in run.timed] + [item.header for item in run.untimed]

    used = {item.facts.source.path for _, item in run.timed} | {item.facts.source.path for item in run.untimed}

    def first(values: Iterable[_T | None]) -> _T | None:
        return next((value for value in values if value), None)

    return RunEntry(
        world_size=run.world_size,
        ranks=tuple(rank for rank, _ in run.timed) or run.untimed_ranks,
        ranks_missing=run.missing,
        gpus_per_node=topology.gpus_per_node,
        gpus_per_node_source=topology.source,
        ranks_follow=topology.ranks_follow,
        data_parallel_ranks=(
            data_parallel_size(collectives, run.world_size, training.strategy.source) if run.world_size else None
        ),
        num_nodes=len(set(topology.node_of.values())) or first(header.num_nodes for header in headers),
        backend=first(header.backend for header in headers),
        framework=run.framework,
        strategy=training.strategy,
        num_steps=max((len(item.steps) for _, item in run.timed), default=0),
        micro_batches=training.micro_batches,
        parameter_count=training.parameter_count,
        total_parameter_count=training.total_parameter_count,
        unit_bytes=training.unit_bytes,
        device_name=first(header.device_name for header in headers),
        device_memory_bytes=first(header.device_memory_bytes for header in headers),
        nccl_version=first(header.nccl_version for header in headers),
        metadata=_remarks(run),
        framework_is_guessed=_is_guessed(run),
        steps_left_out=run.left_out,
        copies_buckets=any(header.copies_buckets for header in headers),
        computes_16_bit=next(
            (item for item in (header.computes_16_bit for header in headers) if item is not None), None
        ),
        inputs=tuple(
            InputEntry(path=file.path, bytes=file.bytes, sha256=file.sha256, kind=file.kind.value)
            for file in (item.facts.source for item in sources)
            if file.path in used or not used
        ),
    )


def _is_guessed(run: Run) -> bool:
    """Tell whether no trace holds a mark of the framework that the run is taken for."""
    said = [item.facts.notices for _, item in run.timed if item.facts.framework == run.framework]
    return bool(said) and all(any(notice.code == "Q322" for notice in notices) for notices in said)


def _remarks(run: Run) -> dict[str, str]:
    """Merge what the inputs say about themselves; the first to speak wins."""
    merged: dict[str, str] = {}
    for item in (*(item for _, item in run.timed), *run.untimed):
        header = item.header
        stated = header.stated
        said = header.remarks | ({"autograd_marks": ",".join(header.autograd_marks)} if header.autograd_marks else {})
        if stated is not None:
            said = said | {
                "strategy": stated.triple,
                "group_size": str(stated.group_size or ""),
                "parameters": str(stated.parameters),
            }
        merged = said | merged
    return dict(sorted(merged.items())[:MAX_REMARKS])
