"""Finds process groups whose links are slow: equal collectives take them longer than their peers.

Inside one ring all ranks move at the pace of its slowest link, so a ring alone never tells which link
that is. Groups that do the same at the same time do: those of a node beside other nodes, or the
replica groups of one local rank beside those of the others.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from paro_advise.advisor.ranks.clocks.clock_alignment import ranks_taking_part
from paro_advise.advisor.ranks.constants import (
    SLOW_GROUP_FACTOR,
    SLOW_GROUP_MIN_PEERS,
    SLOW_GROUP_STEP_SHARE,
)
from paro_advise.advisor.wording.quantities import number_ranges, time_text
from paro_advise.core.collective import Op
from paro_advise.core.plural import plural
from paro_advise.core.span import GroupSpan
from paro_advise.trace_parsers.rank_lists import ranks_in

if TYPE_CHECKING:
    from paro_advise.advisor.ranks.clocks.clock_alignment import AlignedRun
    from paro_advise.advisor.ranks.run import Run


@dataclass(frozen=True, slots=True, kw_only=True)
class SlowGroup:
    """A process group that takes longer than its peers.

    Attributes:
        ranks: its global ranks.
        span: as of a Link.
        factor: its transfers' time over that of a typical peer.
        excess_us: what it takes longer per step.
        num_peers: other groups that do the same.
    """

    ranks: tuple[int, ...]
    span: GroupSpan
    factor: float
    excess_us: float
    num_peers: int

    @property
    def text(self) -> str:
        """Return it as a clause."""
        where = {GroupSpan.INTRA: "inside their node", GroupSpan.INTER: "between their nodes"}.get(
            self.span, "among them"
        )
        return (
            f"the links of ranks {number_ranges(self.ranks)} are slow: the same collectives {where} take "
            f"{self.factor:.2f} times as long as those of {plural(self.num_peers, 'other group')}, "
            f"{time_text(self.excess_us)} a step"
        )


def find_slow_groups(aligned: AlignedRun | None, run: Run) -> list[SlowGroup]:
    """Find groups that transfer slower than their peers, those that cost most first.

    A collective's transfer is that of its slowest rank, from the last arrival on; waiting is left out.
    """
    if aligned is None or run.mean_step_us <= 0:
        return []
    import polars as pl

    kind = ("op", "bytes", "span", "group_size")
    # What two ranks send each other is compared with what other two do, whatever group they are of.
    is_sent = pl.col("way").is_not_null()
    table = aligned.table.with_columns(
        pl.when(is_sent).then(pl.lit(Op.SEND.value)).otherwise(pl.col("op")).alias("op"),
        ranks_taking_part().alias("group_size"),
        pl.coalesce(pl.col("way").str.replace(">", ","), "group_ranks").alias("group_ranks"),
    )
    whole = (pl.col("group_ranks") != "") & (pl.col("joined_ranks") == pl.col("group_size"))
    groups = (
        table.filter(pl.col("match").is_not_null() & pl.col("bytes").is_not_null() & whole)
        .group_by("match", "group_ranks", "step_label", *kind)
        .agg(pl.col("transfer_us").max())
        .group_by("group_ranks", *kind)
        .agg(
            pl.col("transfer_us").median(),
            (pl.len() / pl.col("step_label").n_unique()).alias("count"),
        )
        .with_columns(
            pl.col("group_ranks").n_unique().over(kind).alias("num_groups"),
            pl.col("transfer_us").median().over(kind).alias("typical_us"),
        )
        .filter(pl.col("num_groups") > SLOW_GROUP_MIN_PEERS)
        .group_by("group_ranks", "span")
        .agg(
            (pl.col("transfer_us") * pl.col("count")).sum().alias("us"),
            (pl.col("typical_us") * pl.col("count")).sum().alias("typical_us"),
            pl.col("num_groups").max() - 1,
        )
    )
    found = [
        SlowGroup(
            ranks=tuple(ranks_in(text)),
            span=GroupSpan(span),
            factor=us / typical,
            excess_us=us - typical,
            num_peers=num_peers,
        )
        for text, span, us, typical, num_peers in groups.iter_rows()
        if typical > 0
        and us >= SLOW_GROUP_FACTOR * typical
        and us - typical >= SLOW_GROUP_STEP_SHARE * run.mean_step_us
    ]
    return sorted(found, key=lambda item: (-item.excess_us, item.ranks))
