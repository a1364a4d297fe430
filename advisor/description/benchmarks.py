"""Link rates of a description from benchmarks: nccl-tests, our probe, NCCL Inspector."""

from __future__ import annotations

from typing import TYPE_CHECKING

from msgspec.structs import replace

from paro_advise.advisor.description.model import RatesByNodes
from paro_advise.core.span import GroupSpan
from paro_advise.errors import InputError
from paro_advise.policies.link_rates import RATED

if TYPE_CHECKING:
    from collections.abc import Sequence

    from paro_advise.advisor.description.model import Description
    from paro_advise.advisor.ranks.links.link import Link

# Fitted rates hold no latency: as of a message so large that latency does not count.
_WITHOUT_LATENCY = "1TB"


def with_benchmarks(description: Description, links: Sequence[Link]) -> tuple[Description, tuple[str, ...]]:
    """Return a description with the rates that benchmarks of whole nodes show, and what of them is not used.

    Args:
        description: of the run.
        links: as fitted from the benchmarks.

    Raises:
        InputError: none of them used all ranks of some nodes.
    """
    per_node = description.cluster.gpus_per_node
    rates: dict[str, dict[int, float]] = {}
    unused = []
    for link in links:
        # One rank on each of many nodes is no whole node.
        if link.op in RATED and link.busbw_gbps and link.group_size % per_node == 0 and link.span != GroupSpan.INTER:
            rates.setdefault(link.op, {})[link.group_size // per_node] = link.busbw_gbps
        else:
            unused.append(f"{link.op} of {link.group_size} ranks ({link.span})")
    if not rates:
        sizes = ", ".join(sorted(set(unused))) or "none"
        raise InputError(
            f"benchmarks beside a description must use all {per_node} ranks of their nodes, got {sizes}",
            hint="cluster.gpus_per_node says how many ranks a node has",
        )
    listed = RatesByNodes(**rates, message=_WITHOUT_LATENCY)
    return replace(description, cluster=replace(description.cluster, links=listed)), tuple(sorted(set(unused)))
