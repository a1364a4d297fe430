"""The links of a described cluster: listed rates, what is stated of the cards, and priors for the rest."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from paro_advise.advisor.description.constants import BEYOND_SIGMA, LISTED_SIGMA, STATED_SIGMA
from paro_advise.advisor.description.read import stated_bytes
from paro_advise.advisor.prediction.cluster_links import ShapedLinks
from paro_advise.advisor.prediction.sampler import Estimate
from paro_advise.advisor.ranks.devices import device_links_gbps
from paro_advise.core.collective import Op
from paro_advise.errors import InputError
from paro_advise.policies.link_rates import BETWEEN, INSIDE, LinkRates
from paro_advise.policies.plan import EstimateSource

if TYPE_CHECKING:
    from paro_advise.advisor.description.model import Cluster, Description
    from paro_advise.advisor.prediction.network_tiers import NetworkTiers

_LEAST_MESSAGE_BYTES = 1e6  # of a benchmark whose rates say something about bandwidth; assumed
_STATED_BYTES = 1e12  # as of so large a message that latency does not count: what people state of cards


def _list_rates(cluster: Cluster) -> tuple[dict[Op, tuple[tuple[int, float], ...]], float]:
    """Return listed rates by operation, and the bytes of their message."""
    links = cluster.links
    if links is None:
        return {}, _STATED_BYTES
    by_op = {Op.ALL_GATHER: links.all_gather, Op.REDUCE_SCATTER: links.reduce_scatter, Op.ALL_REDUCE: links.all_reduce}
    pairs = {op: tuple(sorted(rates.items())) for op, rates in by_op.items() if rates}
    if not pairs:
        return {}, _STATED_BYTES
    num_bytes = stated_bytes("cluster.links.message", links.message) or 0.0
    if num_bytes < _LEAST_MESSAGE_BYTES:
        raise InputError(f"cluster.links.message must be 1MB or more, got {links.message!r}")
    return pairs, num_bytes


def link_rates(
    description: Description, tiers: NetworkTiers | None = None, *, sums_in_network: bool = True
) -> LinkRates | None:
    """Return rates by group shape; None where nothing is said of the links.

    What is listed counts; beside it, inside nodes and between them, what is stated, failing that the prior.

    Args:
        description: of the run.
        tiers: priors.
        sums_in_network: all-reduces are as fast as listed.

    Raises:
        InputError: the message size is none.
    """
    cluster = description.cluster
    listed, num_bytes = _list_rates(cluster)
    if not listed and cluster.inter_gbps is None and cluster.intra_gbps is None:
        return None
    inside = cluster.intra_gbps or (tiers.intra_gbps.value if tiers else None)
    between = cluster.inter_gbps or (tiers.inter_gbps.value if tiers else None)
    rates, stated = {}, set[tuple[Op, str]]()
    for op, pairs in (listed or {Op.ALL_GATHER: ()}).items():
        first = ((1, inside),) if inside and not any(nodes == 1 for nodes, _ in pairs) else ()
        # Cards move as much between two nodes as between many.
        last = ((2, between),) if between and not any(nodes > 1 for nodes, _ in pairs) else ()
        rates[op] = (*first, *pairs, *last)
        stated |= {(op, where) for where, found in ((INSIDE, first), (BETWEEN, last)) if found}
    return LinkRates(
        ranks_per_node=cluster.gpus_per_node,
        num_bytes=num_bytes,
        gbps=rates,
        sums_in_network=sums_in_network,
        stated=frozenset(stated),
    )


def shaped_links(
    description: Description, rates: LinkRates, tiers: NetworkTiers, nodes: int, local: int
) -> tuple[ShapedLinks, dict[str, Estimate], list[str]]:
    """Return rates by group shape, the tiers that stand for them, and what was assumed.

    Args:
        description: of the run.
        rates: see ``link_rates``.
        tiers: priors.
        nodes, local: of the data-parallel ranks, and how many of them share a node.
    """
    cluster, notes = description.cluster, list[str]()
    listed = [number for pairs in _list_rates(cluster)[0].values() for number, _ in pairs]
    sources = {
        "intra": EstimateSource.BENCHMARK
        if 1 in listed
        else EstimateSource.STATED
        if cluster.intra_gbps
        else EstimateSource.PRIOR,
        "inter": EstimateSource.BENCHMARK
        if max(listed, default=1) > 1
        else EstimateSource.STATED
        if cluster.inter_gbps
        else EstimateSource.PRIOR,
    }
    sigmas = {EstimateSource.BENCHMARK: LISTED_SIGMA, EstimateSource.STATED: STATED_SIGMA}
    if cluster.inter_gbps and sources["inter"] == EstimateSource.BENCHMARK:
        notes.append(f"cluster.inter_gbps of {cluster.inter_gbps:g} is not used: listed rates between nodes count")
    if cluster.intra_gbps and sources["intra"] == EstimateSource.BENCHMARK:
        notes.append(f"cluster.intra_gbps of {cluster.intra_gbps:g} is not used: listed rates of one node count")
    intra_sigma = sigmas.get(sources["intra"], tiers.intra_gbps.sigma)
    inter_sigma = sigmas.get(sources["inter"], tiers.inter_gbps.sigma)
    if sources["intra"] == EstimateSource.PRIOR and local > 1:
        basis = f"what links of {cluster.device} move" if device_links_gbps(cluster.device) else "what is usual"
        notes.append(
            f"intra-node bandwidth: {tiers.intra_gbps.value:.3g} GB/s assumed by {basis}; cluster.intra_gbps states it"
        )
    if sources["inter"] == EstimateSource.PRIOR and nodes > 1:
        notes.append(
            f"inter-node bandwidth: {tiers.inter_gbps.value:.3g} GB/s assumed by what is usual; cluster.inter_gbps "
            "states it"
        )
    if sources["inter"] == EstimateSource.BENCHMARK and nodes > max(listed):
        inter_sigma = math.hypot(inter_sigma, BEYOND_SIGMA * math.log2(nodes / max(listed)))
        notes.append(f"links of {nodes} nodes: as quick as those of {max(listed)}, the most that are listed")
    intra = Estimate(value=rates.busbw_gbps(Op.ALL_GATHER, 1, local), sigma=intra_sigma, source=sources["intra"])
    between = rates.busbw_gbps(Op.ALL_GATHER, max(2, nodes), local)
    inter = Estimate(value=between, sigma=inter_sigma, source=sources["inter"])
    shaped = ShapedLinks(
        rates=rates,
        inter_gbps=inter.value,
        intra_gbps=intra.value,
        inter_alpha_us=tiers.inter_alpha_us.value,
        intra_alpha_us=tiers.intra_alpha_us.value,
    )
    gain = Estimate(value=1.0, sigma=0.0, source=EstimateSource.DERIVED)
    return shaped, {"inter_gbps": inter, "intra_gbps": intra, "pod_gbps": inter, "rail_gain": gain}, notes
