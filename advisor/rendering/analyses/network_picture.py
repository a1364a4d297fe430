"""The nodes of a run with what moves inside and between them, and how fast it was measured to move."""

from __future__ import annotations

from typing import TYPE_CHECKING

from markupsafe import Markup

from paro_advise.advisor.rendering.charts import chart
from paro_advise.advisor.rendering.constants import CHART_WIDTH, PICTURE_NODES, PICTURE_RANKS
from paro_advise.advisor.wording.quantities import bytes_text, count_text
from paro_advise.core.plural import plural
from paro_advise.core.span import CROSSES_NODES, GroupSpan

if TYPE_CHECKING:
    from paro_advise.advisor.analysis.model import Analysis, RankEntry

_RANK = 22.0  # px


def network_picture(analysis: Analysis) -> Markup:
    """Draw nodes, their ranks and both kinds of links; "" where nodes are not known.

    Ranks without a trace are hollow, stragglers are marked. Beside each kind of link stand the collectives of a step
    over it, and the bus bandwidth of each operation as this run measured it.
    """
    run = analysis.run
    per_node, world = run.gpus_per_node, run.world_size
    if not per_node or not world:
        return Markup("")
    entries = {entry.rank: entry for entry in analysis.ranks}
    if not _are_blocks(entries, per_node):
        return Markup("")
    num_nodes = max(1, -(-world // per_node))
    shown = min(num_nodes, PICTURE_NODES)
    across = min(shown, 4)
    width = (CHART_WIDTH - 10.0 * (across - 1)) / across
    per_row = max(1, int((width - 20) // _RANK))
    drawn = min(per_node, PICTURE_RANKS)
    height = 58.0 + _RANK * -(-drawn // per_row)
    late = {rank for item in analysis.stragglers for rank in (item.rank, *item.alike)}
    parts = [
        Markup('<rect class="between" x="0" y="0" width="{:.0f}" height="30" rx="6"/>').format(CHART_WIDTH),
        Markup('<text class="label" x="12" y="20">{}</text>').format(
            _load(analysis, CROSSES_NODES, "between nodes") if num_nodes > 1 else "one node: nothing crosses a network"
        ),
    ]
    for node in range(shown):
        x, y = node % across * (width + 10.0), 44.0 + node // across * (height + 26.0)
        ranks = range(node * per_node, min(world, (node + 1) * per_node))
        parts.append(
            Markup('<line class="cable" x1="{x:.1f}" x2="{x:.1f}" y1="{:.0f}" y2="{:.1f}"/>').format(
                30 if node < across else y - 26, y, x=x + width / 2
            )
        )
        parts.append(
            Markup('<rect class="node" x="{:.1f}" y="{:.1f}" width="{:.1f}" height="{:.1f}" rx="6"/>').format(
                x, y, width, height
            )
        )
        parts.append(
            Markup('<text class="label" x="{:.1f}" y="{:.1f}">{}</text>').format(
                x + 10, y + 20, _node_name(node, ranks, entries)
            )
        )
        for place, rank in enumerate(list(ranks)[:PICTURE_RANKS]):
            parts.append(
                _rank(rank, x + 10 + place % per_row * _RANK, y + 30 + place // per_row * _RANK, entries, late)
            )
        more = len(ranks) - min(len(ranks), PICTURE_RANKS)
        parts.append(
            Markup('<text class="tick" x="{:.1f}" y="{:.1f}">{}</text>').format(
                x + 10, y + height - 8, f"and {plural(more, 'rank')} more" if more > 0 else ""
            )
        )
    bottom = 44.0 + -(-shown // across) * (height + 26.0)
    parts.append(
        Markup('<text class="label" x="12" y="{:.1f}">{}</text>').format(
            bottom, _load(analysis, (GroupSpan.INTRA,), "inside nodes")
        )
    )
    beyond = f"; {num_nodes - shown} more nodes are not drawn" if num_nodes > shown else ""
    title = f"{plural(num_nodes, 'node')} of {plural(per_node, 'rank')} each"
    if world % per_node:
        title = f"{plural(num_nodes, 'node')} of up to {plural(per_node, 'rank')}"
    return chart("chart-network", title, f"Nodes and the links inside and between them{beyond}", bottom + 14, parts)


def _are_blocks(entries: dict[int, RankEntry], per_node: int) -> bool:
    """Tell whether neighbouring ranks share a node, as far as hosts are known; else no picture would be right."""
    hosts: dict[int, set[str]] = {}
    for rank, entry in entries.items():
        if entry.host:
            hosts.setdefault(rank // per_node, set()).add(entry.host)
    return all(len(names) == 1 for names in hosts.values())


def _node_name(node: int, ranks: range, entries: dict[int, RankEntry]) -> str:
    host = next((entry.host for rank in ranks if (entry := entries.get(rank)) is not None and entry.host), None)
    return (f"node {node}: {host}" if host else f"node {node}")[:24]


def _rank(rank: int, x: float, y: float, entries: dict[int, RankEntry], late: set[int]) -> Markup:
    kind = "late-rank" if rank in late else "traced" if rank in entries else "untraced"
    what = {"late-rank": "straggler", "traced": "traced", "untraced": "no trace"}[kind]
    return Markup(
        '<rect class="{}" x="{:.1f}" y="{:.1f}" width="18" height="18" rx="3"><title>rank {}: {}</title></rect>'
        '<text class="in-rank" x="{:.1f}" y="{:.1f}" text-anchor="middle">{}</text>'
    ).format(kind, x, y, rank, what, x + 9, y + 13, "!" if rank in late else str(rank) if rank < 100 else "")


def _load(analysis: Analysis, spans: tuple[str, ...], where: str) -> str:
    """Say what a rank moves over a kind of link in a step, and how fast each operation ran over it."""
    rows = [entry for entry in analysis.collectives if entry.span in spans]
    count = sum(entry.count for entry in rows)
    size = sum(entry.count * entry.bytes for entry in rows if entry.bytes)
    if not rows:
        return f"{where}: no collective seen"
    text = f"{where}: {count_text(count)} collectives with buffers of {bytes_text(size)} a rank and step"
    rates: dict[str, float] = {}
    for link in sorted(analysis.links, key=lambda link: link.num_samples):
        if link.span in spans and link.busbw_gbps:
            rates[link.op] = link.busbw_gbps
    told = ", ".join(f"{op} {rate:.3g} GB/s" for op, rate in sorted(rates.items()))
    return f"{text}; {told}" if told else text
