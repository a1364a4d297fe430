"""The hosts of a large run: the slowest first, and the ranks of each."""

from __future__ import annotations

from dataclasses import dataclass
from statistics import fmean, median
from typing import TYPE_CHECKING

from paro_advise.advisor.rendering.constants import LEAST_MAPPED_RANKS, OPENED_HOSTS, SHOWN_HOSTS
from paro_advise.advisor.rendering.page import Cell, Row, Table, make_table, number
from paro_advise.advisor.rendering.ranks.rank_parts import ranks_as_table
from paro_advise.advisor.wording.quantities import number_ranges, time_text

if TYPE_CHECKING:
    from collections.abc import Sequence

    from paro_advise.advisor.analysis.model import RankEntry


@dataclass(frozen=True, slots=True, kw_only=True)
class _Host:
    name: str
    ranks: tuple[RankEntry, ...]

    @property
    def slowest(self) -> RankEntry:
        return max(self.ranks, key=lambda entry: (entry.compute_us, -entry.rank))


def host_table(ranks: Sequence[RankEntry]) -> Table | None:
    """Return the hosts, or nodes of unnamed hosts, whose slowest ranks compute longest; None for a small run."""
    hosts = _hosts(ranks)
    if not hosts:
        return None
    typical = median(entry.compute_us for entry in ranks)
    rows = [
        Row(
            cells=(
                Cell(text=host.name),
                Cell(text=number_ranges(sorted(entry.rank for entry in host.ranks))),
                number(mean := fmean(entry.compute_us for entry in host.ranks), time_text(mean)),
                number(slowest := host.slowest.compute_us, time_text(slowest)),
                number(float(host.slowest.rank), str(host.slowest.rank)),
                number(beyond := slowest - typical, f"{'-' if beyond < 0 else '+'}{time_text(abs(beyond))}"),
            )
        )
        for host in hosts[:SHOWN_HOSTS]
    ]
    caption = f"The {len(rows)} of {len(hosts)} whose slowest rank computes longest; means over steps"
    names = ("host", "ranks", "mean compute #", "slowest compute #", "its rank #", "against the median rank #")
    return make_table("table-hosts", caption, names, rows)


def host_ranks(ranks: Sequence[RankEntry]) -> list[tuple[str, Table]]:
    """Return the ranks of the slowest hosts, a table each."""
    return [
        (host.name, ranks_as_table(f"table-host-{number}", host.ranks))
        for number, host in enumerate(_hosts(ranks)[:OPENED_HOSTS])
    ]


def _hosts(ranks: Sequence[RankEntry]) -> list[_Host]:
    """Return the hosts of a large run, the slowest first; [] of a small one, and where nothing names them."""
    if len(ranks) < LEAST_MAPPED_RANKS:
        return []
    by_name: dict[str, list[RankEntry]] = {}
    for entry in ranks:
        name = entry.host or (f"node {entry.node}" if entry.node is not None else "")
        if not name:
            return []
        by_name.setdefault(name, []).append(entry)
    hosts = [_Host(name=name, ranks=tuple(items)) for name, items in by_name.items()]
    return sorted(hosts, key=lambda host: (-host.slowest.compute_us, host.slowest.rank))
