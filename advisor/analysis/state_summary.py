"""Sums up each model state over ranks and steps, and names its regime."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from paro_advise.advisor.analysis.constants import (
    ALONE_SHARE,
    EVIDENCE_SHARE,
    LEAST_COMPARED,
    MAJORITY_SHARE,
    OVERLAPPED_SHARE,
)
from paro_advise.advisor.analysis.model import StateEntry
from paro_advise.advisor.analysis.regimes import Regime, ShareRange, StateEvidence, judge_state
from paro_advise.advisor.facts.attribution import EVIDENCE_ORDER, Evidence
from paro_advise.advisor.facts.frames import mean_bytes
from paro_advise.advisor.facts.intervals import union_length
from paro_advise.advisor.ranks.clocks.clock_alignment import unpaired_transfers
from paro_advise.advisor.ranks.devices import device_links_gbps
from paro_advise.advisor.ranks.links.latency import backend_latency, pace_of
from paro_advise.core.collective import bus_factor
from paro_advise.core.model_state import STATES, State
from paro_advise.core.span import CROSSES_NODES, GroupSpan

if TYPE_CHECKING:
    from collections.abc import Sequence

    import polars as pl

    from paro_advise.advisor.ranks.clocks.clock_alignment import AlignedRun
    from paro_advise.advisor.ranks.links.latency import Fabric
    from paro_advise.advisor.ranks.links.link import Link
    from paro_advise.advisor.ranks.run import Run


@dataclass(frozen=True, slots=True, kw_only=True)
class StateSummary:
    """A state's entry in the analysis, its regime, and what limits the step where its collectives do.

    Attributes:
        limits: waiting, where most of what is exposed is that; else the regime.
    """

    entry: StateEntry
    regime: Regime
    limits: Regime


def state_summaries(
    aligned: AlignedRun | None, run: Run, links: Sequence[Link], fabric: Fabric
) -> dict[State, StateSummary]:
    """Sum up all states; means per rank and step.

    Times are unions: collectives of one state that run at the same time count once. Logs only count.
    """
    if aligned is None:
        return _log_states(run)
    import polars as pl

    rank_steps, step_time_us = max(1, len(run.steps)), run.mean_step_us
    out = {}
    for state in STATES:
        rows = aligned.table.filter(pl.col("state") == state.value)
        total = _sum(run, "state_total_us", state) / rank_steps
        exposed = _sum(run, "state_exposed_us", state) / rank_steps
        wait = _wait(rows, total)
        evidence = StateEvidence(
            count=len(rows) / rank_steps,
            total_us=total,
            exposed_us=exposed,
            wait_us=wait,
            latency=_latency_share(rows, links, fabric),
            inter_share=_inter(rows),
            overlapped_slowdown=_slowdown(rows),
            overlapped_share=1 - exposed / total if total > 0 else 0.0,
            sees_all_ranks=run.sees_all,
            are_sizes_known=rows["bytes"].null_count() < len(rows),
            exposed_wait_share=_exposed_wait_share(rows) if wait is not None else None,
            is_sent_unpaired=wait is None and _are_unpaired(rows),
            rate=_rate_inside(rows, links, fabric) if wait is None else None,
        )
        judgement = judge_state(state, evidence, step_time_us)
        out[state] = StateSummary(
            entry=StateEntry(
                count=evidence.count,
                bytes=mean_bytes(rows, rank_steps),
                total_us=total,
                exposed_us=exposed,
                hidden_us=max(0.0, total - exposed),
                transfer_us=total - wait if wait is not None else None,
                wait_us=wait,
                regime=judgement.regime.value,
                evidence=_weakest(rows).value,
                text=judgement.text,
                exposed_wait_us=None if evidence.exposed_wait_share is None else evidence.exposed_wait_share * exposed,
            ),
            regime=judgement.regime,
            limits=_limit(judgement.regime, evidence),
        )
    return out


def _limit(regime: Regime, evidence: StateEvidence) -> Regime:
    small = regime in (Regime.ABSENT, Regime.HIDDEN)
    return Regime.STRAGGLER if evidence.mostly_waits_exposed and not small else regime


def _sum(run: Run, field: str, state: State) -> float:
    return float(sum(getattr(step, field).get(state.value, 0.0) for step in run.steps))


def _wait(rows: pl.DataFrame, total_us: float) -> float | None:
    """Return the mean wait per rank and step, None when most collectives were seen on one rank.

    The union of the transfer parts is taken out of the union of the whole, so that collectives
    that overlap count once; what has no partner is scaled up from what has.
    """
    if not len(rows):
        return 0.0
    known = rows.drop_nulls("transfer_us")
    duration = float((rows["end_us"] - rows["start_us"]).sum())
    covered = float((known["end_us"] - known["start_us"]).sum())
    if covered < MAJORITY_SHARE * duration or not len(known):
        return None
    whole, transfers = covered_us(known)
    return (whole - transfers) / whole * total_us if whole > 0 else 0.0


def _are_unpaired(rows: pl.DataFrame) -> bool:
    """Tell whether most of what is exposed are transfers between two ranks that nothing pairs."""
    sent = rows.filter(unpaired_transfers())["exposed_us"].sum() or 0.0
    return bool(sent > MAJORITY_SHARE * float(rows["exposed_us"].sum() or 0.0))


def _exposed_wait_share(rows: pl.DataFrame) -> float | None:
    """Return which share of the exposed time is waiting at least: what is exposed of each beyond its transfer."""
    import polars as pl

    known = rows.drop_nulls(["transfer_us", "exposed_us"])
    exposed = float(known["exposed_us"].sum())
    waits = (pl.col("exposed_us") - pl.col("transfer_us")).clip(0.0)
    return float(known.select(waits.sum()).item()) / exposed if exposed > 0 else None


def covered_us(known: pl.DataFrame) -> tuple[float, float]:
    """Return how long joined collectives ran and how long they transferred, those that overlap on a rank once (us).

    Args:
        known: rows with rank, step, start_us, end_us and transfer_us, none of them null.
    """
    import polars as pl

    of_a_step = known.select(pl.struct("rank", "step").rank("dense")).to_series().to_numpy()
    end = known["end_us"].to_numpy()
    whole = union_length(of_a_step, known["start_us"].to_numpy(), end)
    return whole, union_length(of_a_step, end - known["transfer_us"].to_numpy(), end)


def _rate_inside(rows: pl.DataFrame, links: Sequence[Link], fabric: Fabric) -> tuple[float, float] | None:
    """Return the best bus bandwidth of a state's operations inside nodes, and that of the device's own links."""
    best = device_links_gbps(fabric.device_name)
    ops = set(rows["op"].to_list())
    found = [
        link.busbw_high_gbps or link.busbw_gbps
        for link in links
        if link.span == GroupSpan.INTRA and link.op in ops and link.busbw_gbps
    ]
    return (max(filter(None, found)), best) if found and best else None


def _latency_share(rows: pl.DataFrame, links: Sequence[Link], fabric: Fabric) -> ShareRange:
    """Return the latency share of the state's transfers, weighted by time.

    A collective whose size or link is not known counts with what its backend may take at most.
    """
    import polars as pl

    low = high = weight = 0.0
    transfer = pl.coalesce("transfer_us", pl.col("end_us") - pl.col("start_us"))
    grouped = rows.group_by("op", "span", "group_size", "bytes", maintain_order=True).agg(
        transfer.sum().alias("time"), transfer.median().alias("typical")
    )
    for op, span, size, bytes_, time, typical in grouped.iter_rows():
        share = latency_share(links, op, span, size, bytes_, fabric) if size and bytes_ else None
        if share is None:
            most = backend_latency(op, span, size or fabric.ranks_per_node or 2, fabric)[1]
            share = ShareRange(low=0.0, high=min(1.0, most / typical) if typical else 1.0)
        low, high, weight = low + share.low * time, high + share.high * time, weight + time
    return ShareRange(low=low / weight, high=high / weight) if weight > 0 else ShareRange(low=0.0, high=1.0)


def latency_share(
    links: Sequence[Link], op: str, span: str, group_size: int, bytes_: int, fabric: Fabric
) -> ShareRange | None:
    """Return the share of a transfer that is latency, None when the link is not known."""
    for link in links:
        if (link.op, link.span, link.group_size) == (op, span or GroupSpan.UNKNOWN, group_size):
            if link.alpha_us is None:
                return None
            if link.busbw_gbps is None:
                return ShareRange(low=1.0, high=1.0)
            moving = bytes_ * bus_factor(op, group_size) / link.busbw_gbps / 1e3
            # More of it is seen where fewer bytes move meanwhile than in messages of the usual size.
            seen = float(pace_of(op, link.span, group_size, fabric).seen_us(link.alpha_us + link.hidden_us, moving))
            more, total = seen - link.alpha_us, seen + moving
            if total <= 0:
                return None
            low, high = link.alpha_low_us or 0.0, link.alpha_high_us if link.alpha_high_us is not None else total
            return ShareRange(low=min(1.0, max(0.0, low + more) / total), high=min(1.0, max(0.0, high + more) / total))
    return None


def _inter(rows: pl.DataFrame) -> float | None:
    """Return the share of time on inter-node links, None when most spans are unknown."""
    import polars as pl

    time = (pl.col("end_us") - pl.col("start_us")).sum()
    known = rows.filter(pl.col("span").is_in([GroupSpan.INTRA.value, *(span.value for span in CROSSES_NODES)]))
    total, known_time = rows.select(time).item() or 0.0, known.select(time).item() or 0.0
    if known_time < MAJORITY_SHARE * total or known_time <= 0:
        return None
    across = known.filter(pl.col("span") != GroupSpan.INTRA.value).select(time).item() or 0.0
    return float(across / known_time)


def _slowdown(rows: pl.DataFrame) -> float | None:
    """Compare transfers of one kind and size that run over compute with those that do not."""
    import polars as pl

    # Of one size are messages whose sizes are known.
    known = rows.filter(pl.col("bytes").is_not_null() & (pl.col("transfer_us") > 0)).with_columns(
        (pl.col("exposed_us") / (pl.col("end_us") - pl.col("start_us"))).alias("free")
    )
    ratios, weights = [], []
    for _, part in known.group_by("op", "bytes", "group_ranks", maintain_order=True):
        over = part.filter(pl.col("free") < OVERLAPPED_SHARE)["transfer_us"]
        alone = part.filter(pl.col("free") > ALONE_SHARE)["transfer_us"]
        if min(len(over), len(alone)) >= LEAST_COMPARED:
            ratios.append(float(np.median(over.to_numpy())) / float(np.median(alone.to_numpy())))
            weights.append(float(over.sum()))
    return float(np.average(ratios, weights=weights)) if ratios else None


def _weakest(rows: pl.DataFrame) -> Evidence:
    """Return the weakest evidence that more than 5 % of the state's time is based on."""
    import polars as pl

    times = dict(rows.group_by("evidence").agg((pl.col("end_us") - pl.col("start_us")).sum().alias("t")).iter_rows())
    total = sum(times.values())
    weakest = Evidence.NONE if not times else EVIDENCE_ORDER[0]
    for evidence in EVIDENCE_ORDER:
        if times.get(evidence.value, 0.0) > EVIDENCE_SHARE * total:
            weakest = evidence
    return weakest


def _log_states(run: Run) -> dict[State, StateSummary]:
    """Count the collectives of logs per state; their times are unknown."""
    import polars as pl

    tables = [item.collectives for item in run.untimed]
    rows = pl.concat(tables) if tables else None
    out = {}
    for state in STATES:
        part = rows.filter(pl.col("state") == state.value) if rows is not None else None
        count = len(part) if part is not None else 0
        out[state] = StateSummary(
            entry=StateEntry(
                count=float(count),
                bytes=float(part["bytes"].sum()) if part is not None and count else None,
                total_us=None,
                exposed_us=None,
                hidden_us=None,
                transfer_us=None,
                wait_us=None,
                regime=(Regime.UNKNOWN if count else Regime.ABSENT).value,
                evidence=Evidence.NONE.value,
                text="the input carries no times" if count else f"no {state} communication was seen",
            ),
            regime=Regime.UNKNOWN if count else Regime.ABSENT,
            limits=Regime.UNKNOWN if count else Regime.ABSENT,
        )
    return out
