"""Joins the collectives of all ranks: clock offsets, waiting and transferring.

A collective cannot end anywhere before its last rank arrived, and ends nearly at once on all.
So ends give the hosts' clock offsets, and on aligned clocks the last arrival parts each rank's
duration into wait (before) and transfer (after).
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import numpy as np

from paro_advise.advisor.ranks.clocks.clock_names import ENDING_APART, clock_names, parted_ranks
from paro_advise.advisor.ranks.constants import (
    ALIGNMENT_ROUNDS,
    DRIFT_LEFT_SHARE,
    DRIFT_ROUNDS,
    LEAST_DRIFT_ENDS,
    LEAST_DRIFT_US,
    MARKED_STEP,
    MOST_DRIFT,
    SAME_CLOCK_US,
)
from paro_advise.advisor.ranks.topology import find_topology, span_columns
from paro_advise.core.collective import Op

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import polars as pl
    from numpy.typing import NDArray

    from paro_advise.advisor.facts.capture_log import Captured
    from paro_advise.advisor.ranks.run import Run
    from paro_advise.advisor.ranks.source import Source
    from paro_advise.advisor.ranks.topology import Topology

# Of which ranks may be done before others are, or that need be none of all ranks.
# Kernels that send and receive at once may be an all-to-all of all ranks, too.
TRANSFERS = [op.value for op in (Op.SEND, Op.RECV)]
# Ranks may pass different sizes to these, so sizes cannot tell a wrong join.
_UNEVEN = [op.value for op in (Op.ALL_TO_ALL, Op.SEND, Op.RECV, Op.SEND_RECV, Op.GATHER, Op.SCATTER)]


@dataclass(frozen=True, slots=True, kw_only=True)
class AlignedRun:
    """All timed collectives of all ranks.

    Attributes:
        table: the columns of RankFacts' table, span ("" when unknown) and rank (i64), match (i64, null when alone),
            arrival_us and finish_us (aligned clock), transfer_us and wait_us (null when alone), way ("0>4" of what
            rank 0 sends to rank 4, null of other collectives and where the other end is not known).
        offset_us: each rank's host clock minus that of the lowest rank, at ``middle_us``.
        drift: by how much each rank's host clock runs faster than most do, us per us; 0.0 where none shows.
        middle_us: of the time in which collectives ended, on the aligned clock.
        clock_error_us: spread of collective ends that the offsets leave, None when not estimated.
        num_alone: collectives that no other rank's trace shows.
        num_unequal: joins refused because the ranks disagree on the bytes.
        partial_groups: share of joined collectives of which some rank has no trace.
        parted: ranks that name one host although their clocks differ; each has a clock of its own here.
    """

    table: pl.DataFrame
    offset_us: dict[int, float]
    clock_error_us: float | None
    num_alone: int
    num_unequal: int
    partial_groups: float
    parted: tuple[int, ...] = ()
    drift: Mapping[int, float] = field(default_factory=dict)
    middle_us: float = 0.0

    def aligned_us(self, rank: int, at_us: float) -> float:
        """Return a time of a rank's host clock on the aligned clock (us after the origin of all ranks)."""
        after_us = at_us - self.offset_us.get(rank, 0.0)
        return after_us - self.drift.get(rank, 0.0) * (after_us - self.middle_us)

    @property
    def knows_spans(self) -> bool:
        """Tell whether it is known of any collective if it crosses nodes."""
        return len(self.table) > 0 and bool((self.table["span"] != "").any())


def align_clocks(run: Run, topology: Topology, machines: Sequence[Sequence[int]] = ()) -> AlignedRun | None:
    """Join the collectives of all ranks on one clock; None without ranks that time steps.

    Args:
        run: of which all ranks.
        topology: which ranks share a node.
        machines: the ranks under each kernel, which has one clock; () where step logs do not tell.
    """
    if not run.timed:
        return None
    clock_of = clock_names(run, topology, machines)
    aligned = match_ranks(run.timed, clock_of)
    # On CPUs a rank that waits for a core ends late, each in its turn; and one kernel has one clock.
    if parted := () if run.is_on_cpu or machines else parted_ranks(aligned.table, clock_of):
        clock_of |= {rank: f"rank {rank}" for rank in parted}
        aligned = replace(match_ranks(run.timed, clock_of), parted=parted)
    return replace(aligned, table=aligned.table.with_columns(span_columns(aligned.table, topology, run.world_size)))


def align_as_logged(run: Run, captured: Captured | None) -> AlignedRun | None:
    """Join the collectives of all ranks on one clock by what the inputs alone tell of nodes and machines.

    Args:
        run: of which all ranks.
        captured: what step logs beside the traces say; None without any.
    """
    if captured is None:
        return align_clocks(run, find_topology(run, None))
    return align_clocks(run, find_topology(run, None, captured.local_world_size), captured.machines)


def match_ranks(ranks: Sequence[tuple[int, Source]], clock_of: Mapping[int, str]) -> AlignedRun:
    """Join the ranks of one run.

    Args:
        ranks: (rank, source), by rank, timed sources only.
        clock_of: rank to the name of the clock it uses (its host).
    """
    import polars as pl

    origin_ns = min((item.header.origin_ns for _, item in ranks), default=0)
    frames = []
    for rank, item in ranks:
        shift = (item.header.origin_ns - origin_ns) / 1000.0
        labels = [step.label for step in item.steps]
        step = item.collectives["step"].to_list()
        frames.append(
            item.collectives.with_columns(
                pl.lit(rank, dtype=pl.Int64).alias("rank"),
                pl.Series("step_label", [labels[i] if 0 <= i < len(labels) else "" for i in step], pl.String),
                (pl.col("start_us") + shift).alias("arrival_us"),
                (pl.col("end_us") + shift).alias("finish_us"),
            )
        )
    table = pl.concat(frames).filter(pl.col("start_us").is_not_null() & (pl.col("step") >= 0))
    table, num_unequal = _with_match(table)
    return _align(table, [rank for rank, _ in ranks], clock_of, num_unequal)


def _with_match(table: pl.DataFrame) -> tuple[pl.DataFrame, int]:
    """Add ``match``: equal for the rows of one collective on its ranks."""
    import polars as pl

    group = (
        pl.when(pl.col("group_ranks") != "")
        .then(pl.col("group_ranks"))
        .otherwise(
            pl.concat_str(pl.lit("?"), "group_name", "group_desc", pl.col("group_size").fill_null(-1), separator="|")
        )
    )
    table = table.with_columns(group.alias("group_key"))
    use_seq = pl.col("seq").is_not_null().all().over("group_key")
    order = pl.col("issue_us").fill_null(pl.col("start_us")).rank("ordinal")
    table = table.with_columns(_way().alias("way"))
    table = table.with_columns(
        # Transfers of two stages share numbers; between two ranks they meet in the order of their issue.
        pl.when(pl.col("way").is_not_null())
        .then(pl.concat_str("way", "step_label", "group_name", separator="|"))
        .when(use_seq)
        .then(pl.concat_str(pl.lit("seq"), pl.col("seq").fill_null(-1), separator="|"))
        .otherwise(
            pl.concat_str("step_label", "op", order.over("rank", "group_key", "step_label", "op"), separator="|")
        )
        .alias("position")
    )
    # A sequence number may cover several kernels of one call on one rank.
    own = ("rank", "group_key", "position")
    table = table.with_columns(
        pl.col("start_us").rank("ordinal").over(own).alias("part"), pl.len().over(own).alias("of")
    )
    key = ("group_key", "position", "part")
    num_sizes = pl.col("bytes").drop_nulls().n_unique()  # one that was not recorded is no other one
    is_paired, is_transfer = pl.col("way").is_not_null(), pl.col("op").is_in(TRANSFERS)
    table = table.with_columns(
        pl.col("rank").n_unique().over(key).alias("joined_ranks"),
        ((num_sizes.over(key) > 1) & (is_paired | ~pl.col("op").is_in(_UNEVEN))).alias("is_unequal"),
        # Of a step that is cut, or in which one stage runs ahead, the first one here need not be the first one there.
        (is_paired & (pl.col("of").n_unique().over("group_key", "position") > 1)).alias("is_uneven"),
        pl.struct(key).rank("dense").cast(pl.Int64).alias("match"),
    )
    num_unequal = table.filter("is_unequal")["match"].n_unique()
    alone = (pl.col("joined_ranks") < 2) | pl.col("is_unequal") | pl.col("is_uneven") | (is_transfer & ~is_paired)
    table = table.with_columns(pl.when(alone).then(None).otherwise(pl.col("match")).alias("match"))
    return table.drop("position", "part", "of", "is_unequal", "is_uneven"), num_unequal


def _way() -> pl.Expr:
    """Return from which rank to which a transfer goes ("0>4"), null where its other end is not known.

    Of a group of two that is the other one; the ranks of ``group_key`` that are traced tell which.
    """
    import polars as pl

    ranks = pl.col("rank")
    is_of_two = (pl.col("group_size") == 2) & (ranks.n_unique().over("group_key") == 2)
    other = pl.when(is_of_two).then(ranks.min().over("group_key") + ranks.max().over("group_key") - ranks)
    # Steps without marks begin wherever a rank's trace does: the first here may be the second there.
    peer = pl.when(pl.col("step_label").str.starts_with(MARKED_STEP)).then(pl.coalesce("peer", other))
    ends = {Op.SEND.value: (ranks, peer), Op.RECV.value: (peer, ranks)}
    way = pl.lit(None, dtype=pl.String)
    for op, (source, target) in ends.items():
        way = pl.when(pl.col("op") == op).then(pl.concat_str(source, target, separator=">")).otherwise(way)
    return way


def _align(table: pl.DataFrame, ranks: Sequence[int], clock_of: Mapping[int, str], num_unequal: int) -> AlignedRun:
    import polars as pl

    joined = table.filter(pl.col("match").is_not_null())
    clocks = list(dict.fromkeys(clock_of[rank] for rank in ranks))  # by the lowest rank
    index_of = {clock: index for index, clock in enumerate(clocks)}
    found = _Clocks.equal(len(clocks), 0.0 if len(clocks) == 1 else None)
    if len(joined) and len(clocks) > 1:
        found = _find_clocks(_ends_of(joined, clock_of, index_of), len(clocks))
    offset_us = {rank: float(found.offset_us[index_of[clock_of[rank]]]) for rank in ranks}
    drift = {rank: float(found.drift[index_of[clock_of[rank]]]) for rank in ranks}
    table = table.with_columns(
        _aligned_us(column, offset_us, drift, found.middle_us) for column in ("arrival_us", "finish_us")
    )
    table = table.with_columns(pl.when(~_are_of_any()).then(pl.col("match")).alias("match"))
    has_match = pl.col("match").is_not_null()
    last = pl.col("arrival_us").max().over("match")
    duration = pl.col("end_us") - pl.col("start_us")
    transfer = (pl.col("finish_us") - last).clip(0.0, duration)
    table = table.with_columns(pl.when(has_match).then(transfer).alias("transfer_us"))
    table = table.with_columns((duration - pl.col("transfer_us")).alias("wait_us"))
    is_partial = pl.col("joined_ranks") < ranks_taking_part()
    partial = joined.filter(pl.col("group_size").is_not_null()).select(is_partial.mean())
    return AlignedRun(
        table=table,
        offset_us=offset_us,
        clock_error_us=found.error_us,
        num_alone=int((table["joined_ranks"] < 2).sum()),
        num_unequal=num_unequal,
        partial_groups=float(partial.item() or 0.0),
        drift=drift,
        middle_us=found.middle_us,
    )


def _aligned_us(column: str, offset_us: Mapping[int, float], drift: Mapping[int, float], middle_us: float) -> pl.Expr:
    """Return the expression of ``AlignedRun.aligned_us`` for a column of times."""
    import polars as pl

    after = pl.col(column) - pl.col("rank").replace_strict(dict(offset_us), return_dtype=pl.Float64)
    if not any(drift.values()):
        return after.alias(column)
    rate = pl.col("rank").replace_strict(dict(drift), return_dtype=pl.Float64)
    return (after - rate * (after - middle_us)).alias(column)


def _are_of_any() -> pl.Expr:
    """Return the expression that marks, on aligned clocks, kernels of transfers that are no collective of all ranks.

    Those of no recorded call, which send and receive, may be an all-to-all, which ends everywhere at once.
    """
    import polars as pl

    is_unnamed = (pl.col("op") == Op.SEND_RECV.value) & (pl.col("group_name") == "") & (pl.col("group_ranks") == "")
    apart_us = pl.col("finish_us").max().over("match") - pl.col("finish_us").min().over("match")
    return is_unnamed & (apart_us.quantile(0.75).over("group_key", "op") > SAME_CLOCK_US)


def ranks_taking_part() -> pl.Expr:
    """Return the expression of how many ranks a collective of an aligned table has: of a transfer two."""
    import polars as pl

    return pl.when(pl.col("way").is_not_null()).then(2).otherwise(pl.col("group_size"))


def unpaired_transfers() -> pl.Expr:
    """Return the expression that marks transfers of an aligned table whose other end is not known."""
    import polars as pl

    return pl.col("op").is_in(TRANSFERS) & pl.col("match").is_null()


@dataclass(frozen=True, slots=True, kw_only=True)
class _Ends:
    """When collectives ended, by the clocks that saw them; one entry a collective and clock, by collective.

    Attributes:
        match: number of the collective, from 0 on.
        clock: number of the clock.
        end_us: the median over the clock's ranks, on that clock.
    """

    match: NDArray[np.int64]
    clock: NDArray[np.int64]
    end_us: NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Clocks:
    """How hosts' clocks differ; one entry a clock.

    Attributes:
        offset_us: each clock minus the first one, at ``middle_us``.
        drift: by how much it runs faster than most, us per us.
        middle_us: of the time in which collectives ended.
        error_us: spread of collective ends that is left, None when not estimated.
    """

    offset_us: NDArray[np.float64]
    drift: NDArray[np.float64]
    middle_us: float
    error_us: float | None

    @classmethod
    def equal(cls, num_clocks: int, error_us: float | None) -> _Clocks:
        """Return clocks that do not differ."""
        return cls(offset_us=np.zeros(num_clocks), drift=np.zeros(num_clocks), middle_us=0.0, error_us=error_us)


def _find_clocks(ends: _Ends, num_clocks: int) -> _Clocks:
    """Estimate clock offsets by alternating medians of collective ends, and drifts from what these leave."""
    if not len(ends.end_us):
        return _Clocks.equal(num_clocks, None)
    num_matches = int(ends.match[-1]) + 1
    offsets = _chained_offsets(ends, num_clocks)
    seen = np.zeros(num_clocks, dtype=bool)
    seen[ends.clock] = True
    for _ in range(ALIGNMENT_ROUNDS):
        centre = _medians(ends.end_us - offsets[ends.clock], ends.match, num_matches)
        offsets[seen] = _medians(ends.end_us - centre[ends.match], ends.clock, num_clocks)[seen]
    offsets -= offsets[0] if seen[0] else 0.0
    on_one_clock = ends.end_us - offsets[ends.clock]
    middle_us = float(np.median(on_one_clock))
    drift = _drifts(ends, on_one_clock - middle_us, num_clocks)
    on_one_clock = on_one_clock - drift[ends.clock] * (on_one_clock - middle_us)
    residual = on_one_clock - _medians(on_one_clock, ends.match, num_matches)[ends.match]
    error_us = float(1.4826 * np.median(np.abs(residual)))
    return _Clocks(offset_us=offsets, drift=drift, middle_us=middle_us, error_us=error_us)


def _drifts(ends: _Ends, after_us: NDArray[np.float64], num_clocks: int) -> NDArray[np.float64]:
    """Return by how much clocks run faster than most, where that is what parts collectives' ends on them; else 0.

    Ends in the first third of the time and in the last tell it by their medians.

    Args:
        ends: of collectives.
        after_us: the same after the middle of all, with offsets taken off.
        num_clocks: of all ends.
    """
    num_matches, drift = int(ends.match[-1]) + 1, np.zeros(num_clocks)
    third = float(np.ptp(after_us)) / 3
    first, last = after_us < after_us.min() + third, after_us > after_us.max() - third

    def apart_us() -> NDArray[np.float64]:
        on_one_clock = after_us * (1 - drift[ends.clock])
        return on_one_clock - _medians(on_one_clock, ends.match, num_matches)[ends.match]

    def spread_us() -> NDArray[np.float64]:
        own = apart_us()
        return _medians(np.abs(own - _medians(own, ends.clock, num_clocks)[ends.clock]), ends.clock, num_clocks)

    spread_before_us = spread_us()
    for _ in range(DRIFT_ROUNDS):
        own = apart_us()
        rise, run = (
            _medians(values[last], ends.clock[last], num_clocks)
            - _medians(values[first], ends.clock[first], num_clocks)
            for values in (own, after_us)
        )
        drift += np.divide(rise, run, out=np.zeros(num_clocks), where=run > 0)
    seen = np.minimum(
        np.bincount(ends.clock[first], minlength=num_clocks), np.bincount(ends.clock[last], minlength=num_clocks)
    )
    is_clocks = (seen >= LEAST_DRIFT_ENDS) & (np.abs(drift) < MOST_DRIFT)
    is_less = spread_us() < DRIFT_LEFT_SHARE * spread_before_us
    told = np.where(is_clocks & is_less, drift, 0.0)
    return told if float(np.ptp(told) * np.ptp(after_us)) > LEAST_DRIFT_US else np.zeros(num_clocks)


def _ends_of(joined: pl.DataFrame, clock_of: Mapping[int, str], index_of: Mapping[str, int]) -> _Ends:
    """Return the ends of collectives that several clocks saw.

    A root, or who sends, may be done before the others are. What has one counts where nothing else joins clocks.
    """
    import polars as pl

    number_of = {rank: index_of[clock] for rank, clock in clock_of.items() if clock in index_of}
    by_clock = (
        joined.with_columns(pl.col("rank").replace_strict(number_of, return_dtype=pl.Int64).alias("clock"))
        .group_by("match", "clock")
        # Of an even number of ranks the earlier one of the two in the middle.
        .agg(pl.col("finish_us").quantile(0.5, "lower"), pl.col("op").is_in([op.value for op in ENDING_APART]).any())
        .filter(pl.len().over("match") > 1)
        .sort("match", "clock")
    )
    found = _ends(by_clock.filter(~pl.col("op")))
    part = _parts(found, len(index_of))
    across = pl.col("clock").replace_strict(dict(enumerate(part)), return_dtype=pl.Int64).n_unique().over("match") > 1
    return _ends(by_clock.filter(~pl.col("op") | across)) if len(set(part)) > 1 else found


def _ends(by_clock: pl.DataFrame) -> _Ends:
    import polars as pl

    return _Ends(
        match=by_clock["match"].rle_id().cast(pl.Int64).to_numpy(),
        clock=by_clock["clock"].to_numpy(),
        end_us=by_clock["finish_us"].to_numpy(),
    )


def _parts(ends: _Ends, num_clocks: int) -> list[int]:
    """Return for each clock the lowest of those that collectives join it to, through others too."""
    part = np.arange(num_clocks)
    if not len(ends.match):
        return part.tolist()
    while True:
        lowest = np.full(int(ends.match[-1]) + 1, num_clocks)
        np.minimum.at(lowest, ends.match, part[ends.clock])
        joined = part.copy()
        np.minimum.at(joined, ends.clock, lowest[ends.match])
        if (joined == part).all():
            return part.tolist()
        part = joined


def _medians(values: NDArray[np.float64], place: NDArray[np.int64], count: int) -> NDArray[np.float64]:
    """Return the median of the values at each place, NaN where there is none."""
    order = np.lexsort((values, place))
    ordered, size = values[order], np.bincount(place, minlength=count)
    first = np.cumsum(size) - size
    found = np.full(count, np.nan)
    some = size > 0
    low, high = (first + (size - 1) // 2)[some], (first + size // 2)[some]
    found[some] = (ordered[low] + ordered[high]) / 2
    return found


def _chained_offsets(ends: _Ends, num_clocks: int) -> NDArray[np.float64]:
    """Return first offsets: from clock to clock through the pairs that most collectives show.

    Most collectives may run between few clocks; medians over all of them alone would never move
    the others. Clocks that no collective joins to the first one's keep offsets of their own, from 0 on.
    """
    parent = np.arange(num_clocks)
    to_parent = np.zeros(num_clocks)  # its offset minus its parent's

    def root(clock: int) -> tuple[int, float]:
        way, above = 0.0, clock
        while parent[above] != above:
            way, above = way + to_parent[above], parent[above]
        if above != clock:
            parent[clock], to_parent[clock] = above, way  # shorter the next time
        return int(above), float(way)

    for hub, other, gap in _pairs(ends, num_clocks):
        (top, way), (hub_top, hub_way) = root(other), root(hub)
        if top != hub_top:
            low, high = sorted((top, hub_top))
            between = gap + hub_way - way  # offset of the top minus that of the hub's
            parent[high], to_parent[high] = low, between if high == top else -between
    return np.array([root(clock)[1] for clock in range(num_clocks)])


def _pairs(ends: _Ends, num_clocks: int) -> list[tuple[int, int, float]]:
    """Return pairs of clocks with the median gap of their ends (us), those that most collectives show first.

    Each collective pairs its clocks with one of them alone, that which most collectives show: pairs of each with each
    would grow with the square of the clocks.
    """
    seen = np.bincount(ends.clock, minlength=num_clocks)
    order = np.lexsort((ends.clock, -seen[ends.clock], ends.match))
    first = np.flatnonzero(np.diff(ends.match[order], prepend=-1))
    hub, hub_end = ends.clock[order][first], ends.end_us[order][first]  # by match
    other = ends.clock != hub[ends.match]
    of_pair = hub[ends.match[other]] * num_clocks + ends.clock[other]
    pairs, place, count = np.unique(of_pair, return_inverse=True, return_counts=True)
    gaps = _medians(ends.end_us[other] - hub_end[ends.match[other]], place, len(pairs))
    by_count = np.argsort(-count, kind="stable")
    return [(int(pairs[at] // num_clocks), int(pairs[at] % num_clocks), float(gaps[at])) for at in by_count]
