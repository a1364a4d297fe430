"""Draws from facts what a timeline shows: at most eight ranks, at most three steps of each."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from paro_advise.advisor.ranks.source import decode
from paro_advise.advisor.ranks.stack_join import join_stacks
from paro_advise.advisor.ranks.usual_steps import without_labels
from paro_advise.advisor.timelines.constants import EXTREMES, LANE_BOXES, MAX_RANKS, MAX_STEPS, TOLD_WAIT
from paro_advise.advisor.timelines.model import RankStep, Timeline, TimelineBox

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from paro_advise.advisor.analysis.model import Analysis, RankEntry
    from paro_advise.advisor.facts.model import RankFacts, StepFacts
    from paro_advise.advisor.ranks.source import Source


def timeline_of(analysis: Analysis, facts: Sequence[RankFacts]) -> Timeline | None:
    """Return the timeline of an analysed run, None without a step that can be drawn.

    Args:
        analysis: of these facts.
        facts: of all inputs.
    """
    used = {item.path for item in analysis.run.inputs}
    entries = {entry.rank: entry for entry in analysis.ranks}
    timed = [item for item in facts if item.has_events and item.source.path in used]
    # Traces that do not say their rank have what is left, in order, as the analysis takes them.
    named = {item.header.rank for item in timed}
    free = iter([rank for rank in entries if rank not in named])
    of_rank: dict[int, RankFacts] = {}
    for item in timed:
        rank = item.header.rank if item.header.rank is not None else next(free, None)
        if rank is not None and rank in entries and item.compute_spans:
            of_rank.setdefault(rank, item)
    if not of_rank:
        return None
    chosen = _choose_ranks(analysis, [entries[rank] for rank in sorted(of_rank)])
    dumps = [item for item in facts if not item.has_events and item.header.rank in chosen]
    usual = {rank: without_labels(decode(of_rank[rank]), analysis.run.steps_left_out) for rank in chosen}
    traces = [_drop_skipped(source, entries[rank].num_steps) for rank, source in usual.items()]
    joined, _ = join_stacks([*traces, *(decode(item) for item in dumps)])
    sources = dict(zip(chosen, joined, strict=False))
    labels = _labels(sources)
    if not labels:
        return None
    clocks = {rank: value for rank, value in analysis.clock_offsets_us.items() if int(rank) in sources}
    shown = [step for label in labels for step in _on_one_clock(_rank_steps(sources, label), sources, clocks)]
    step = _typical(sources, labels)
    first, beside = _pair(analysis, [entries[rank] for rank in chosen if step in _drawable(sources[rank])])
    return Timeline(
        steps=tuple(labels),
        ranks=tuple(chosen),
        shown=tuple(shown),
        step=step,
        first=first,
        beside=beside,
        num_ranks=len(entries),
        is_aligned=len(clocks) == len(sources),
    )


def _choose_ranks(analysis: Analysis, entries: Sequence[RankEntry]) -> list[int]:
    """Return the ranks to show: all, or those that stand out and the median one."""
    if len(entries) <= MAX_RANKS:
        return [entry.rank for entry in entries]
    by_compute = sorted(entries, key=lambda entry: -entry.compute_us)
    by_wait = sorted(entries, key=lambda entry: -(entry.wait_us or 0.0))
    late = [item.rank for item in analysis.stragglers]
    known = {entry.rank for entry in entries}
    order = [
        *[rank for rank in late if rank in known][:EXTREMES],
        *[entry.rank for entry in by_wait[:EXTREMES]],
        by_compute[len(by_compute) // 2].rank,
        *[entry.rank for entry in by_compute],
    ]
    return sorted(list(dict.fromkeys(order))[:MAX_RANKS])


def _pair(analysis: Analysis, entries: Sequence[RankEntry]) -> tuple[int, int | None]:
    """Return the rank to look at first, and the one that it waits for."""
    waiting = max(entries, key=lambda entry: (entry.wait_us or 0.0, -entry.rank))
    late = next((item.rank for item in analysis.stragglers), None)
    is_told = (waiting.wait_us or 0.0) > TOLD_WAIT * waiting.step_time_us
    if late is None or late == waiting.rank or not is_told or late not in {entry.rank for entry in entries}:
        return entries[0].rank, None
    return waiting.rank, late


def _drop_skipped(source: Source, num_steps: int) -> Source:
    """Leave out the steps at a rank's begin that the analysis left out."""
    return replace(source, steps=source.steps[max(0, len(source.steps) - num_steps) :])


def _drawable(source: Source) -> dict[str, tuple[int, StepFacts]]:
    """Return the steps that can be drawn, by label, with their index in the trace."""
    steps, kept = source.facts.steps, {step.label for step in source.steps}
    return {
        steps[index].label: (index, steps[index])
        for index in sorted(source.facts.compute_spans)
        if steps[index].label in kept
    }


def _labels(sources: Mapping[int, Source]) -> list[str]:
    """Return the steps to show, in order: those of the most ranks, of median length, the longest and the shortest."""
    walls: dict[str, list[float]] = {}
    for source in sources.values():
        for label, (_, step) in _drawable(source).items():
            walls.setdefault(label, []).append(step.wall_us)
    most = max(map(len, walls.values()), default=0)
    common = [label for label in walls if len(walls[label]) == most]
    if len(common) <= MAX_STEPS:
        return common
    order = sorted(common, key=lambda label: sum(walls[label]))
    kept = {order[0], order[len(order) // 2], order[-1]}
    return [label for label in common if label in kept]


def _typical(sources: Mapping[int, Source], labels: Sequence[str]) -> str:
    """Return the label of the step of median length."""
    walls = {
        label: sum(found[1].wall_us for source in sources.values() if (found := _drawable(source).get(label)))
        for label in labels
    }
    return sorted(labels, key=lambda label: walls[label])[len(labels) // 2]


def _rank_steps(sources: Mapping[int, Source], label: str) -> list[RankStep]:
    found = []
    for rank, source in sources.items():
        place = _drawable(source).get(label)
        if place is not None:
            found.append(_rank_step(rank, source, *place))
    return found


def _rank_step(rank: int, source: Source, index: int, step: StepFacts) -> RankStep:
    import polars as pl

    low, high = step.start_us, step.start_us + step.wall_us
    spans = np.frombuffer(source.facts.compute_spans[index], dtype="<f4").reshape(-1, 2).astype(float)
    boxes = [TimelineBox(lane="compute", start_us=begin, end_us=end, label="compute") for begin, end in spans.tolist()]
    rows = source.collectives.filter((pl.col("end_us") > low) & (pl.col("start_us") < high))
    kept = rows.sort(pl.col("start_us") - pl.col("end_us"), maintain_order=True).head(LANE_BOXES).sort("start_us")
    boxes += [
        TimelineBox(
            lane=row["state"],
            start_us=max(0.0, row["start_us"] - low),
            end_us=min(row["end_us"], high) - low,
            label=f"{row['op']} {row['detail']}".strip(),
        )
        for row in kept.iter_rows(named=True)
    ]
    return RankStep(
        rank=rank,
        step=step.label,
        shift_us=step.start_us,
        wall_us=step.wall_us,
        boxes=tuple(boxes),
        num_left_out=len(rows) - len(kept),
    )


def _on_one_clock(
    steps: Sequence[RankStep], sources: Mapping[int, Source], clocks: Mapping[str, float]
) -> list[RankStep]:
    """Shift each rank's step to where it begins after the first one's; to 0 where clocks cannot be compared."""
    if any(str(item.rank) not in clocks for item in steps):
        return [replace(item, shift_us=0.0) for item in steps]
    origin_ns = min(sources[item.rank].header.origin_ns for item in steps)
    begins = [
        item.shift_us + (sources[item.rank].header.origin_ns - origin_ns) / 1000.0 - clocks[str(item.rank)]
        for item in steps
    ]
    return [replace(item, shift_us=begin - min(begins)) for item, begin in zip(steps, begins, strict=True)]
