"""The run that all inputs show: which rank each belongs to, and what is missing or double."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from paro_advise.advisor.facts.model import LEFT_OUT_CODE, SEVERAL_FRAMEWORKS_CODE
from paro_advise.advisor.ranks.jobs import choose_job
from paro_advise.advisor.ranks.stalled_steps import stall_notices, without_stalled_step
from paro_advise.advisor.ranks.usual_steps import without_fuller_steps
from paro_advise.advisor.wording.quantities import number_ranges
from paro_advise.core.framework import Framework
from paro_advise.core.plural import plural
from paro_advise.errors import UsageError
from paro_advise.trace_parsers.notice import Notice, Severity
from paro_advise.trace_parsers.rank_lists import highest_rank, ranks_text
from paro_advise.trace_parsers.tables import SourceKind

if TYPE_CHECKING:
    from collections.abc import Sequence

    from paro_advise.advisor.facts.model import StepFacts
    from paro_advise.advisor.ranks.source import Source
    from paro_advise.advisor.ranks.stalled_steps import Stall


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """The inputs of one run.

    Attributes:
        timed: (rank, source) of inputs that time steps, by rank, one per rank.
        untimed: logs and dumps.
        world_size: None when nothing tells.
        missing: ranks of the world without a timed input.
        untimed_ranks: ranks that logs and dumps name.
        framework: as most ranks say.
        stall: the step that is left out because it stalled, None for none.
        left_out: labels of all steps that are, but for warm-up.
    """

    timed: tuple[tuple[int, Source], ...]
    untimed: tuple[Source, ...]
    world_size: int | None
    missing: tuple[int, ...]
    untimed_ranks: tuple[int, ...]
    framework: Framework
    notices: tuple[Notice, ...]
    stall: Stall | None = None
    left_out: tuple[str, ...] = ()

    @property
    def places(self) -> tuple[tuple[int, str], ...]:
        """Return the ranks and where their traces lie."""
        return tuple((rank, item.facts.source.path) for rank, item in self.timed)

    @property
    def steps(self) -> tuple[StepFacts, ...]:
        """Return the steps of all ranks."""
        return tuple(step for _, item in self.timed for step in item.steps)

    @property
    def trains(self) -> bool | None:
        """Tell whether the traces show training; None where that cannot be told."""
        said = {item.facts.trains for _, item in self.timed}
        return True if True in said else False if said == {False} else None

    @property
    def mean_step_us(self) -> float:
        """Return the mean step time over ranks and steps, 0 without any."""
        return float(np.mean([step.wall_us for step in self.steps])) if self.steps else 0.0

    @property
    def is_cut(self) -> bool:
        """Tell whether the figures are based on traces that end early."""
        return any(item.is_cut for _, item in self.timed)

    @property
    def is_on_cpu(self) -> bool:
        """Tell whether the ranks compute on CPUs."""
        return not any(item.facts.is_gpu for _, item in self.timed)

    @property
    def sees_all(self) -> bool:
        """Tell whether every rank of the world has a trace, so that every wait can be seen."""
        return self.world_size is not None and len(self.timed) >= self.world_size


def assemble_run(sources: Sequence[Source], skip_steps: int = 0, *, keeps_all: bool = False) -> Run:
    """Sort inputs into ranks.

    Args:
        sources: all usable inputs, in order of path.
        skip_steps: warm-up steps to leave out at the start of each rank.
        keeps_all: steps stay that are not usual ones.
    """
    job, job_notices = choose_job(sources)
    notices = [*job_notices]
    untimed = _drop_copies(job.untimed, notices)
    timed = _one_per_rank(_uncut(list(job.timed), notices), notices)
    most_steps = max((len(item.steps) for _, item in timed), default=skip_steps + 1)
    if skip_steps and skip_steps >= most_steps:
        raise UsageError(f"--skip-steps must leave a step, the traces hold {most_steps} at most, got {skip_steps}")
    if skip_steps:
        timed = [(rank, _without_warmup(item, skip_steps)) for rank, item in timed]
    recorded = _labels(timed)
    timed, fuller = (timed, ()) if keeps_all else without_fuller_steps(timed)
    timed, stalled = (timed, None) if keeps_all else without_stalled_step(timed)
    kept = _labels(timed)
    world, assumed = _world_size([item for _, item in timed] or list(untimed), timed)
    notices += (*fuller, *stall_notices(stalled), *assumed)
    missing = tuple(sorted(set(range(world or 0)) - {rank for rank, _ in timed})) if timed else ()
    if missing and world:
        notices.append(
            Notice(
                code="Q303",
                severity=Severity.INFO,
                message=f"{len(timed)} of {world} ranks have a trace; missing: {number_ranges(missing)}",
                help="figures are means over the ranks that are there",
            )
        )
    untimed_ranks = tuple(sorted({item.header.rank for item in untimed if item.header.rank is not None}))
    of = [item for _, item in timed] or untimed
    frameworks = Counter(item.facts.framework for item in of if item.facts.framework != Framework.UNKNOWN)
    notices += _of_several(timed)
    return Run(
        timed=tuple(timed),
        untimed=untimed,
        world_size=world,
        missing=missing,
        untimed_ranks=untimed_ranks,
        framework=min(frameworks, key=lambda name: (-frameworks[name], name), default=Framework.UNKNOWN),
        notices=tuple(notices),
        stall=stalled,
        left_out=tuple(label for label in recorded if label not in kept),
    )


def _labels(timed: Sequence[tuple[int, Source]]) -> dict[str, None]:
    """Return the labels of all steps, in order, without doubles."""
    return dict.fromkeys(step.label for _, item in timed for step in item.steps)


def _drop_copies(untimed: Sequence[Source], notices: list[Notice]) -> tuple[Source, ...]:
    """Leave out logs of NCCL all of whose calls stand in another one: copies, and logs of ranks beside a joint one.

    A communicator's id, a rank in it and a number name a call; without a rank nothing tells two ranks' calls apart.
    """
    calls = {
        index: set(item.collectives.select("group_name", "name", "seq", "op", "bytes").iter_rows())
        for index, item in enumerate(untimed)
        if item.facts.source.kind == SourceKind.NCCL_LOG and item.collectives["name"].str.contains(" rank ").all()
    }
    known: set[tuple[object, ...]] = set()
    doubles = set()
    for index in sorted(calls, key=lambda index: (-len(calls[index]), index)):
        if calls[index] and calls[index] <= known:
            doubles.add(index)
        known |= calls[index]
    if not doubles:
        return tuple(untimed)
    names = ", ".join(untimed[index].file_name for index in sorted(doubles)[:4])
    notices.append(
        Notice(
            code="Q305",
            severity=Severity.INFO,
            message=f"{plural(len(doubles), 'log')} of NCCL whose calls stand in other logs left out: {names}"
            + (", ..." if len(doubles) > 4 else ""),
            help="give each log once",
        )
    )
    return tuple(item for index, item in enumerate(untimed) if index not in doubles)


def _of_several(timed: Sequence[tuple[int, Source]]) -> list[Notice]:
    """Say that ranks were trained by different frameworks, which one job does not do."""
    ranks: dict[str, list[int]] = {}
    for rank, item in timed:
        known = item.facts.framework
        if known != Framework.UNKNOWN:
            ranks.setdefault(Framework.DDP if known.is_ddp else known, []).append(rank)
    if len(ranks) < 2:
        return []
    named = "; ".join(f"{name}: {plural(len(of), 'rank')} ({number_ranges(of)})" for name, of in sorted(ranks.items()))
    return [
        Notice(
            code=SEVERAL_FRAMEWORKS_CODE,
            severity=Severity.WARNING,
            message=f"the ranks name different frameworks ({named}): their traces are of several jobs",
            help="analyse one job at a time: pass its folder or files",
        )
    ]


def _uncut(inputs: list[Source], notices: list[Notice]) -> list[Source]:
    """Leave out traces that end early when whole ones are there."""
    cut = [item for item in inputs if item.is_cut]
    if not cut or len(cut) == len(inputs):
        return inputs
    notices.append(
        Notice(
            code=LEFT_OUT_CODE,
            severity=Severity.WARNING,
            message=plural(
                len(cut), "trace that ends early or lost events is", "traces that end early or lost events are"
            )
            + " left out of all figures: "
            + ", ".join(item.file_name for item in cut[:4])
            + (", ..." if len(cut) > 4 else ""),
            help="what is missing would look like idle time: record them again",
        )
    )
    return [item for item in inputs if not item.is_cut]


def _one_per_rank(inputs: list[Source], notices: list[Notice]) -> list[tuple[int, Source]]:
    by_rank: dict[int, Source] = {}
    unnamed: list[Source] = []
    doubles: list[str] = []
    # How many ranks train like each trace, whichever of a rank's traces does.
    alike = Counter(training for _, training in {(item.header.rank, _training(item)) for item in inputs})
    for item in inputs:
        rank = item.header.rank
        if rank is None:
            unnamed.append(item)
        elif rank in by_rank:
            kept = by_rank[rank]
            if _fitness(item, alike) > _fitness(kept, alike):
                by_rank[rank], item = item, kept
            if item.facts.source.sha256 != by_rank[rank].facts.source.sha256:
                doubles.append(f"{item.file_name} (rank {rank})")
        else:
            by_rank[rank] = item
    if doubles:
        notices.append(
            Notice(
                code="Q305",
                severity=Severity.WARNING,
                message=f"{plural(len(doubles), 'trace')} left out of a rank that has another one: "
                + ", ".join(doubles[:4])
                + (", ..." if len(doubles) > 4 else ""),
                help="analyze one recording of a run at a time",
            )
        )
    free = (number for number in range(len(inputs) + len(by_rank) + 1) if number not in by_rank)
    assumed = {next(free): item for item in unnamed}
    told = [number for number, item in assumed.items() if len(inputs) > 1 or item.header.world_size not in (1, None)]
    if told:
        names = ", ".join(f"{assumed[number].file_name} as rank {number}" for number in told[:4])
        notices.append(
            Notice(
                code="Q306",
                severity=Severity.WARNING,
                message=f"{plural(len(told), 'trace')} of unknown rank: {names}{', ...' if len(told) > 4 else ''}",
                help="name files rank0.json, rank1.json, ... or record after init_process_group",
            )
        )
    by_rank |= assumed
    return sorted(by_rank.items())


def _fitness(item: Source, alike: Counter[tuple[object, ...]]) -> tuple[int, int, int]:
    """Return by what one of two traces of a rank is taken: how many ranks train like it, then its length."""
    return alike[_training(item)], len(item.steps), item.facts.num_events


def _training(item: Source) -> tuple[object, ...]:
    """Return what ranks of one job have alike."""
    sizes = tuple(sorted(group.size for group in item.header.groups))
    return item.facts.num_micro_batches, item.facts.framework, item.header.world_size, item.header.gpus_per_node, sizes


def _without_warmup(item: Source, skip_steps: int) -> Source:
    """Leave out the first steps; the last one always stays."""
    import polars as pl

    skip = min(skip_steps, max(0, len(item.steps) - 1))
    return replace(
        item,
        steps=item.steps[skip:],
        typical_step=max(0, item.typical_step - skip),
        collectives=item.collectives.with_columns((pl.col("step") - skip).clip(-1)),
    )


def _world_size(inputs: Sequence[Source], timed: Sequence[tuple[int, Source]]) -> tuple[int | None, Sequence[Notice]]:
    """Return how many ranks the job has, None when nothing tells, and a notice where that is a guess."""
    said = Counter(item.header.world_size for item in inputs if item.header.world_size)
    if said:
        return max(said, key=lambda size: (said[size], size or 0)), ()
    groups = [group.size for item in inputs for group in item.header.groups]
    if groups:
        return max(groups), ()
    named = timed and all(item.header.rank is not None for _, item in timed)
    highest = max((rank for rank, _ in timed), default=0) + 1 if named else 1
    # Files that do not say their ranks may be several of one rank, and then not all of a small world.
    if (listed := max(map(_largest_group, inputs), default=1)) > max(1, 0 if named else len(timed)):
        return max(listed, highest), ()
    if not named or len(timed) < 2:
        # Traces that say neither their rank nor the world may be of any job.
        return None, ()
    sizes = [item.collectives["group_size"].max() for item in inputs]
    largest = max((size for size in sizes if isinstance(size, int)), default=0)
    if largest == highest:
        return highest, ()
    reason = (
        "as its largest group of collectives has"
        if largest > highest
        else f"for the last one with a trace is {highest - 1}"
    )
    world = max(largest, highest)
    notice = Notice(
        code="Q336",
        severity=Severity.WARNING,
        message=f"no trace says how many ranks the job has: {world} assumed, {reason}",
        help="record after init_process_group with a torch that writes distributedInfo (2.1 or later)",
    )
    return world, (notice,)


def _largest_group(item: Source) -> int:
    """Return how many ranks the job has by a group of all of them in one trace's collectives, 1 where none shows.

    All ranks from 0 on are the world only if no other group has a higher one.
    """
    lists = item.collectives["group_ranks"].drop_nulls().unique().to_list()
    highest = max((rank for rank in map(highest_rank, lists) if rank is not None), default=0)
    everyone = ranks_text(range(highest + 1))
    return highest + 1 if everyone and everyone in lists else 1
