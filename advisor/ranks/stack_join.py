"""Joins traces with the Python stacks in flight-recorder dumps of the same rank.

A trace without annotations (DeepSpeed, Megatron) says what moved and when; the flight recorder
says which code issued it. Rank, process group and sequence number are the same in both.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from paro_advise.advisor.facts.attribution import Evidence
from paro_advise.advisor.facts.rank_facts import reattributed
from paro_advise.core.plural import plural
from paro_advise.trace_parsers.notice import Notice, Severity
from paro_advise.trace_parsers.tables import SourceKind

if TYPE_CHECKING:
    from collections.abc import Sequence

    import polars as pl

    from paro_advise.advisor.facts.model import StepFacts
    from paro_advise.advisor.ranks.source import Source


_KEY = ["group_name", "seq"]
# Annotations and groups outrank stacks (docs/traces.md, attribution).
_WEAKER = [Evidence.PHASE.value, Evidence.REPETITION.value, Evidence.NONE.value]


def join_stacks(sources: Sequence[Source]) -> tuple[list[Source], list[Notice]]:
    """Explain collectives of traces by the stacks of flight-recorder dumps of the same rank.

    Returns:
        The sources with better attribution where stacks were found, and a notice saying how many.
    """
    stacks = {
        item.header.rank: item.collectives
        for item in sources
        if item.facts.source.kind == SourceKind.FLIGHT_RECORDER and item.header.rank is not None
    }
    if not stacks:
        return list(sources), []
    out, num_joined = [], 0
    for item in sources:
        rank = item.header.rank
        frames = stacks.get(rank) if item.facts.has_events and rank is not None else None
        if frames is None:
            out.append(item)
            continue
        joined, count = _join(item, frames)
        out.append(joined)
        num_joined += count
    notices = []
    if num_joined:
        notices.append(
            Notice(
                code="Q318",
                severity=Severity.INFO,
                message=plural(num_joined, "collective is", "collectives are")
                + " explained by Python stacks of flight-recorder dumps",
            )
        )
    return out, notices


def _join(item: Source, frames: pl.DataFrame) -> tuple[Source, int]:
    import polars as pl

    known = (
        frames.filter((pl.col("owner") != "") & pl.col("seq").is_not_null() & (pl.col("group_name") != ""))
        .select(*_KEY, pl.col("owner").alias("stack"))
        .unique(_KEY, keep="first", maintain_order=True)
    )
    merged = item.collectives.join(known, on=_KEY, how="left", maintain_order="left")
    helps = pl.col("stack").is_not_null() & pl.col("evidence").is_in(_WEAKER)
    count = merged.filter(helps).height
    if not count:
        return item, 0
    owner = pl.when(helps).then(pl.concat_str("owner", "stack", separator=" > ")).otherwise(pl.col("owner"))
    better = reattributed(merged.with_columns(owner.alias("owner")).drop("stack"), item.facts.framework)
    steps = tuple(_with_states(step, better.filter(pl.col("step") == index)) for index, step in enumerate(item.steps))
    return replace(item, steps=steps, collectives=better), count


def _with_states(step: StepFacts, rows: pl.DataFrame) -> StepFacts:
    """Sum up the states of a step anew from its collectives."""
    from paro_advise.advisor.facts.intervals import Intervals
    from paro_advise.core.model_state import STATES

    totals, exposed = {}, {}
    for state in STATES:
        part = rows.filter(rows["state"] == state.value)
        union = Intervals.union_of(part["start_us"].to_numpy(), part["end_us"].to_numpy())
        totals[state.value] = union.length_us
        exposed[state.value] = min(float(part["exposed_us"].sum()), union.length_us)
    return replace(step, state_total_us=totals, state_exposed_us=exposed)
