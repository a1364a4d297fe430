"""Link rates of a description from benchmarks: nccl-tests, our probe, NCCL Inspector."""

from __future__ import annotations

from typing import TYPE_CHECKING

from msgspec.structs import replace

from paro_advise.advisor.description.model import RatesByNodes
from paro_advise.errors import InputError
from paro_advise.policies.link_rates import RATED

if TYPE_CHECKING:
    from collections.abc import Sequence

    from paro_advise.advisor.description.model import Description
    from paro_advise.advisor.ranks.link import Link

# Fitted rates hold no latency: as of a message so large that latency does not count.
_WITHOUT_LATENCY = "1TB"


def with_benchmarks(description: Description, links: Sequence[Link]) -> Description:
    """Return a description with the rates that benchmarks of whole nodes show, instead of listed ones.

    Args:
        description: of the run.
        links: as fitted from the benchmarks.

    Raises:
        InputError: none of them used all ranks of some nodes.
    """
    per_node = description.cluster.gpus_per_node
    rates: dict[str, dict[int, float]] = {}
    for link in links:
        if link.op in RATED and link.busbw_gbps and link.group_size % per_node == 0:
            rates.setdefault(link.op, {})[link.group_size // per_node] = link.busbw_gbps
    if not rates:
        sizes = ", ".join(sorted({f"{link.op} of {link.group_size}" for link in links})) or "none"
        raise InputError(
            f"benchmarks beside a description must use all {per_node} ranks of their nodes, got {sizes}",
            hint="cluster.gpus_per_node says how many ranks a node has",
        )
    listed = RatesByNodes(**rates, message=_WITHOUT_LATENCY)
    return replace(description, cluster=replace(description.cluster, links=listed))
