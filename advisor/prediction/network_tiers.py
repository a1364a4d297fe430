"""The tiers of a cluster's network as a run shows them: inside nodes, between nodes, between pods (pure)."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from paro_advise.advisor.prediction.constants import (
    BANDWIDTH_SIGMAS,
    DATA_SHEET_SHARE,
    FASTER_TIER_RATIO,
    GLOO_BANDWIDTH_FACTOR,
    GLOO_PRIOR,
    LATENCY_SIGMA,
    MOST_SUM_RATIO,
    NCCL_PRIOR,
    P90_SIGMAS,
    PCIE_GBPS,
    PRIOR_BANDWIDTH_FACTOR,
    PRIOR_LATENCY_FACTOR,
    RING_SHARE,
    RING_SHARE_FACTOR,
    SUM_RATIO,
    SUM_RATIO_FACTOR,
    TREE_FACTOR,
    UNKNOWN_CORES,
)
from paro_advise.advisor.prediction.sampler import Estimate
from paro_advise.advisor.ranks.devices import device_links_gbps, has_links
from paro_advise.advisor.ranks.links.link import SumAlgorithm, has_unknown_placement
from paro_advise.core.collective import Op
from paro_advise.core.span import GroupSpan
from paro_advise.errors import UsageError
from paro_advise.policies.collective_cost import tree_depth, tree_port_share
from paro_advise.policies.plan import EstimateSource

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from paro_advise.advisor.ranks.links.link import Link

# A value, the standard deviation of its logarithm, and how many collectives tell it.
_Sample = tuple[float, float, int]
_WHERE = {"intra": "inside nodes", "inter": "between nodes", "pod": "between nodes of a pod"}


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkContext:
    """What of a run its links depend on.

    Attributes:
        world_size, ranks_per_node: of the run.
        is_gloo: its backend.
        concurrent_intra, concurrent_inter: collectives that shared the links of a tier at once, on average.
        cores_per_rank: None where it is not known.
        device_name: of the accelerators, None where it is not known.
    """

    world_size: int
    ranks_per_node: int
    is_gloo: bool
    concurrent_intra: float = 1.0
    concurrent_inter: float = 1.0
    cores_per_rank: float | None = None
    device_name: str | None = None

    @property
    def num_nodes(self) -> int:
        """Return the number of nodes."""
        return self.world_size // self.ranks_per_node

    def nodes_of(self, link: Link) -> int:
        """Return over how many nodes a group reaches: it fills them, or has one rank on each of those of all groups."""
        if link.num_nodes:
            return link.num_nodes
        if link.span == GroupSpan.MIXED:
            return max(2, link.group_size // self.ranks_per_node)
        return 1 if link.span == GroupSpan.INTRA else self.num_nodes


@dataclass(frozen=True, slots=True, kw_only=True)
class NetworkTiers:
    """Latency and bandwidth by tier.

    Attributes:
        inter_alpha_us, inter_gbps: between nodes, where there are pods between those of different pods; of rings over
            several ranks of each node.
        intra_alpha_us, intra_gbps: inside nodes.
        pod_alpha_us, pod_gbps: between nodes of a pod.
        sum_ratio: bus bandwidth of an all-reduce to that of a gather or scatter.
        rail_gain: what the rings of all local ranks, each of one rank a node, move between nodes to what one ring
            over all those ranks moves.
        sums_by_trees: all-reduces over several nodes ran as trees, as NCCL's kernels name it.
        nodes_per_pod: None where there are no pods.
        notes: what was assumed, for people.
    """

    inter_alpha_us: Estimate
    inter_gbps: Estimate
    intra_alpha_us: Estimate
    intra_gbps: Estimate
    pod_alpha_us: Estimate
    pod_gbps: Estimate
    sum_ratio: Estimate
    rail_gain: Estimate
    sums_by_trees: bool
    nodes_per_pod: int | None
    notes: tuple[str, ...]


def fit_tiers(links: Sequence[Link], cluster: LinkContext, nodes_per_pod: int | None) -> NetworkTiers:
    """Reduce fitted links to one latency and bandwidth per tier.

    Args:
        links: of all operations, spans and group sizes.
        cluster: that they belong to.
        nodes_per_pod: as the user says, None to see whether the links tell.

    Raises:
        UsageError: the pods that the user states do not divide the nodes.
    """
    known = [link for link in links if link.op in (Op.ALL_GATHER, Op.REDUCE_SCATTER, Op.ALL_REDUCE)]
    # A smaller group whose ranks are not known lies inside nodes or across them: its rate is no tier's.
    known = [
        link
        for link in known
        if not has_unknown_placement(link.span, link.group_size, cluster.world_size, cluster.num_nodes)
    ]
    known, has_trees = [_by_ports(link, cluster) for link in known], _sums_by_trees(known, cluster)
    notes: list[str] = []
    pod = _stated_pods(nodes_per_pod, cluster) if nodes_per_pod else _observed_pods(known, cluster, notes)
    inside = [link for link in known if link.span == GroupSpan.INTRA or cluster.num_nodes == 1]
    near = [link for link in known if link not in inside and cluster.nodes_of(link) <= (pod or 0)]
    far = [link for link in known if link not in inside and link not in near]
    prior = _prior(cluster)
    found: dict[str, Estimate] = {}
    ratio, known_ratio = _sum_ratio(inside, far or near, cluster)
    by_sums = {"inter_gbps": _are_sums(far or near), "pod_gbps": _are_sums(near or far)}
    inside, near, far = (_like_gathers(part, cluster, known_ratio) for part in (inside, near, far))
    gain = _rail_gain(far or near, cluster)
    near, far = (_like_rings(part, cluster, gain.value) for part in (near, far))
    hops = _mean(inside, cluster, _latency)
    shares = _HopShares(inside_us=hops.value if hops else None, ratio=prior["inter_alpha_us"] / prior["intra_alpha_us"])
    for name, sample in (("gbps", _bandwidth), ("alpha_us", shares.between if not cluster.is_gloo else _latency)):
        for tier, chosen in (("inter", far or near), ("intra", inside)):
            key = f"{tier}_{name}"
            known_value = _mean(chosen, cluster, sample)
            if known_value is None and key == "intra_alpha_us" and not cluster.is_gloo:
                known_value = shares.inside(found["inter_alpha_us"])
            found[key] = known_value or _assume(key, prior[key], cluster, notes)
        found[f"pod_{name}"] = _mean(near, cluster, sample) or found[f"inter_{name}"]
    if not cluster.is_gloo and any(link.span == GroupSpan.MIXED for link in far or near):
        found["intra_gbps"] = _at_least(found["intra_gbps"], found["inter_gbps"])
    if ratio.source == EstimateSource.PRIOR and any(by_sums.values()):
        factors = (TREE_FACTOR, TREE_FACTOR) if has_trees else (SUM_RATIO_FACTOR, MOST_SUM_RATIO)
        below, above = (math.log(factor) / P90_SIGMAS for factor in factors)
        ratio = replace(ratio, sigma=below, sigma_above=above)
        found |= {key: replace(found[key], source=EstimateSource.SUMS) for key, are_sums in by_sums.items() if are_sums}
        notes.append(
            f"gathers between nodes: as fast a byte as all-reduces (a prior, {1 / factors[1]:.2f} to {factors[0]:g} "
            f"times), which {'ran as trees' if has_trees else 'trees and switches may speed up'}: the run shows no "
            "gather there"
        )
    if pod and not (near and far):
        missing, other = ("between pods", "inside them") if near else ("inside pods", "between them")
        notes.append(f"links {missing}: as quick as {other}, since no collective of the run measured them alone")
    return NetworkTiers(
        **found, sum_ratio=ratio, rail_gain=gain, sums_by_trees=has_trees, nodes_per_pod=pod, notes=tuple(notes)
    )


def _sums_by_trees(links: Sequence[Link], cluster: LinkContext) -> bool:
    """Tell whether all-reduces over nodes run as trees: most of those that are large enough to show a bandwidth did.

    Where none is, small ones tell of two nodes only, where NCCL takes trees for quicker than rings at any size.
    """
    across = [link for link in links if link.op == Op.ALL_REDUCE and cluster.nodes_of(link) > 1]
    moved = [(_is_tree(link, cluster), link.typical_bytes * link.num_samples) for link in across if link.busbw_gbps]
    if moved:
        return 2 * sum(size for is_tree, size in moved if is_tree) > sum(size for _, size in moved)
    return cluster.num_nodes == 2 and any(_is_tree(link, cluster) for link in across)


def _is_tree(link: Link, cluster: LinkContext) -> bool:
    return link.algorithm == SumAlgorithm.TREE and cluster.nodes_of(link) > 1


def _tree_hops(link: Link, cluster: LinkContext) -> tuple[float, int]:
    """Return the hops on a tree's way from its leaves to its root: between nodes, and inside the fullest of them."""
    nodes = min(link.group_size, cluster.nodes_of(link))
    return tree_depth(nodes), math.ceil(link.group_size / nodes) - 1


def _by_ports(link: Link, cluster: LinkContext) -> Link:
    """Return a link with the bandwidth of its ports, where trees moved fewer bytes through them than rings do."""
    if not _is_tree(link, cluster):
        return link
    return _scale(link, tree_port_share(cluster.nodes_of(link), link.group_size))


def _at_least(inside: Estimate, ring: Estimate) -> Estimate:
    """Return what a rank moves inside its node; if assumed, with its range no less than a ring over nodes has moved."""
    if inside.source != EstimateSource.PRIOR or ring.source == EstimateSource.PRIOR:
        return inside
    value = max(inside.value, ring.value)
    below = min(inside.sigma, max(ring.sigma, math.log(value / ring.value) / P90_SIGMAS))
    return replace(inside, value=value, sigma=below, sigma_above=inside.sigma_above or inside.sigma)


def _sum_ratio(inside: Sequence[Link], across: Sequence[Link], cluster: LinkContext) -> tuple[Estimate, float]:
    """Return the bus bandwidth of all-reduces to that of gathers and scatters: measured on one tier, else assumed.

    A ratio that is known less well than the assumed one is not used. With gloo both are rings of sends between
    processes.
    """
    if cluster.is_gloo:
        return Estimate(value=1.0, sigma=0.0, source=EstimateSource.DERIVED), 1.0
    for part in (across, inside):
        sums = _mean([link for link in part if link.op == Op.ALL_REDUCE], cluster, _bandwidth)
        others = _mean([link for link in part if link.op != Op.ALL_REDUCE], cluster, _bandwidth)
        if sums and others and (sigma := math.hypot(sums.sigma, others.sigma)) < math.log(SUM_RATIO_FACTOR):
            value = sums.value / others.value
            return Estimate(value=value, sigma=sigma, source=EstimateSource.MEASURED), value
    return Estimate(value=SUM_RATIO, sigma=math.log(SUM_RATIO_FACTOR), source=EstimateSource.PRIOR), SUM_RATIO


def _like_gathers(links: Sequence[Link], cluster: LinkContext, ratio: float) -> list[Link]:
    """Return the gathers and scatters of a tier; failing those, its all-reduces as fast as gathers would be there."""
    gathers = [link for link in links if link.op != Op.ALL_REDUCE and link.busbw_gbps]
    if cluster.is_gloo or gathers or not any(link.busbw_gbps for link in links):
        return list(links) if cluster.is_gloo or not gathers else gathers
    return [_scale(link, 1 / ratio) for link in links]


def _are_sums(links: Sequence[Link]) -> bool:
    rated = [link for link in links if link.busbw_gbps]
    return any(link.span == GroupSpan.MIXED for link in rated) and all(link.op == Op.ALL_REDUCE for link in rated)


def _scale(link: Link, factor: float) -> Link:
    """Return a link with its bandwidth, and the range of it, times a factor."""

    def scaled(value: float | None) -> float | None:
        return None if value is None else value * factor

    return replace(
        link,
        busbw_gbps=scaled(link.busbw_gbps),
        busbw_low_gbps=scaled(link.busbw_low_gbps),
        busbw_high_gbps=scaled(link.busbw_high_gbps),
    )


def _rail_gain(across: Sequence[Link], cluster: LinkContext) -> Estimate:
    """Return what rings of one rank a node move through its port, together, to what a ring of many ranks moves.

    Measured where the run has both. Gloo's ranks send through one port either way.
    """
    if cluster.is_gloo or cluster.ranks_per_node == 1:
        return Estimate(value=1.0, sigma=0.0, source=EstimateSource.DERIVED)
    rails = _mean([link for link in across if link.span == GroupSpan.INTER], cluster, _bandwidth)
    rings = _mean([link for link in across if link.span == GroupSpan.MIXED], cluster, _bandwidth)
    if rails and rings:
        return Estimate(
            value=max(1.0, rails.value / rings.value),
            sigma=math.hypot(rails.sigma, rings.sigma),
            source=EstimateSource.MEASURED,
        )
    return Estimate(value=1 / RING_SHARE, sigma=math.log(RING_SHARE_FACTOR) / P90_SIGMAS, source=EstimateSource.PRIOR)


def _like_rings(links: Sequence[Link], cluster: LinkContext, gain: float) -> list[Link]:
    """Return the rings of many ranks a node; failing those, rings of one rank a node as slow as those would be."""
    rings = [link for link in links if link.span == GroupSpan.MIXED and link.busbw_gbps]
    if cluster.is_gloo or rings or not links:
        return list(links) if cluster.is_gloo or not rings else rings
    return [_scale(link, 1 / gain) for link in links]


def _prior(cluster: LinkContext) -> dict[str, float]:
    if cluster.is_gloo:
        # A rank's transfers are one thread's.
        copied = min(1.0, cluster.cores_per_rank or UNKNOWN_CORES) * (1 - 1 / max(2, cluster.ranks_per_node))
        return GLOO_PRIOR | {"intra_gbps": GLOO_PRIOR["intra_gbps"] * copied}
    best = device_links_gbps(cluster.device_name)
    if not has_links(cluster.device_name):
        best = PCIE_GBPS
    return NCCL_PRIOR | ({"intra_gbps": DATA_SHEET_SHARE * best} if best else {})


def _stated_pods(nodes_per_pod: int, cluster: LinkContext) -> int | None:
    if cluster.num_nodes % nodes_per_pod:
        raise UsageError(
            f"--nodes-per-pod must divide the {cluster.num_nodes} nodes of the run, got {nodes_per_pod}",
            hint="leave it out where all nodes are connected the same way",
        )
    return nodes_per_pod if nodes_per_pod < cluster.num_nodes else None


def _observed_pods(links: Sequence[Link], cluster: LinkContext, notes: list[str]) -> int | None:
    """Return the nodes of a pod where groups of so many are clearly quicker than wider ones, else None."""
    spans = {cluster.nodes_of(link) for link in links if link.span == GroupSpan.MIXED}
    for nodes in sorted(spans - {cluster.num_nodes}, reverse=True):
        near = [link for link in links if link.span == GroupSpan.MIXED and cluster.nodes_of(link) == nodes]
        wider = [link for link in links if link.span != GroupSpan.INTRA and cluster.nodes_of(link) > nodes]
        fast, usual = (_mean(part, cluster, _bandwidth) for part in (near, wider))
        if cluster.num_nodes % nodes or fast is None or usual is None:
            continue
        uncertainty = P90_SIGMAS * (fast.sigma + usual.sigma)
        if math.log(fast.value / usual.value) > max(math.log(FASTER_TIER_RATIO), uncertainty):
            notes.append(
                f"pods of {nodes} nodes: groups of that size moved {fast.value:.3g} GB/s through a node's port, "
                f"wider ones {usual.value:.3g}; --nodes-per-pod would state it"
            )
            return nodes
    return None


def _bandwidth(link: Link, cluster: LinkContext) -> _Sample | None:
    """Return what a link moves through a node's port or a rank's; None where that was not measured."""
    if not link.busbw_gbps:
        return None
    is_intra = link.span == GroupSpan.INTRA or cluster.num_nodes == 1
    bandwidth = link.busbw_gbps * (cluster.concurrent_intra if is_intra else cluster.concurrent_inter)
    if cluster.is_gloo and link.op == Op.REDUCE_SCATTER:
        bandwidth *= 2  # it runs as an all-reduce, which moves twice as much
    if not is_intra:  # rings of all local ranks share the port
        members = link.group_size / cluster.nodes_of(link) if link.span == GroupSpan.MIXED else 1.0
        bandwidth *= max(1.0, min(cluster.ranks_per_node / members, cluster.world_size / max(1, link.group_size)))
    spread = math.log((link.busbw_high_gbps or 1.0) / (link.busbw_low_gbps or 1.0)) / 2 / P90_SIGMAS
    least, most = BANDWIDTH_SIGMAS
    return bandwidth, max(least, min(abs(spread), most)), link.num_samples


def _latency(link: Link, cluster: LinkContext) -> _Sample | None:
    if not (whole_us := (link.alpha_us or 0.0) + link.hidden_us):
        return None
    if _is_tree(link, cluster):
        return whole_us / (2 * sum(_tree_hops(link, cluster))), LATENCY_SIGMA, link.num_samples
    is_twice = link.op == Op.ALL_REDUCE or (cluster.is_gloo and link.op == Op.REDUCE_SCATTER)  # as it runs
    return whole_us / (max(1, link.group_size - 1) * (2 if is_twice else 1)), LATENCY_SIGMA, link.num_samples


@dataclass(frozen=True, slots=True, kw_only=True)
class _HopShares:
    """How the latency of a ring that sends slices on as they come parts into that of its hops.

    Attributes:
        inside_us: of a hop inside nodes, None where none was measured.
        ratio: of a hop between nodes to one inside, where both were measured together.
    """

    inside_us: float | None
    ratio: float

    def inside(self, between: Estimate) -> Estimate | None:
        """Return what a hop inside nodes takes where one between them is known, and none inside was measured alone."""
        if between.source != EstimateSource.MEASURED:
            return None
        return replace(between, value=between.value / self.ratio, source=EstimateSource.DERIVED)

    def between(self, link: Link, cluster: LinkContext) -> _Sample | None:
        """Return what a hop takes: between nodes, of links inside one an average one."""
        mean = _latency(link, cluster)
        if mean is None or link.span != GroupSpan.MIXED:
            return mean
        nodes = cluster.nodes_of(link)
        between, inside = float(max(1, nodes - 1)), link.group_size - nodes
        if _is_tree(link, cluster):
            between, inside = _tree_hops(link, cluster)
        whole_us = mean[0] * (between + inside)
        if self.inside_us is None:
            return whole_us / (between + inside / self.ratio), *mean[1:]
        return max(self.inside_us, (whole_us - inside * self.inside_us) / between), *mean[1:]


def _mean(
    links: Sequence[Link], cluster: LinkContext, sample: Callable[[Link, LinkContext], _Sample | None]
) -> Estimate | None:
    samples = [found for link in links if (found := sample(link, cluster))]
    if not samples:
        return None
    weight = sum(count for _, _, count in samples)
    mean = math.exp(sum(count * math.log(value) for value, _, count in samples) / weight)
    sigma = sum(count * spread for _, spread, count in samples) / weight
    return Estimate(value=mean, sigma=sigma, source=EstimateSource.MEASURED)


def _assume(key: str, value: float, cluster: LinkContext, notes: list[str]) -> Estimate:
    tier, is_bandwidth = key.split("_")[0], key.endswith("gbps")
    factor = PRIOR_LATENCY_FACTOR
    if is_bandwidth:
        factor = GLOO_BANDWIDTH_FACTOR if cluster.is_gloo and cluster.cores_per_rank else PRIOR_BANDWIDTH_FACTOR
    if cluster.ranks_per_node > 1 if tier == "intra" else cluster.num_nodes > 1:
        what, unit = ("bandwidth", "GB/s") if is_bandwidth else ("latency", "us a message")
        notes.append(f"{what} {_WHERE[tier]}: {value:.3g} {unit} assumed, no collective of the run measured it alone")
    return Estimate(value=value, sigma=math.log(factor), source=EstimateSource.PRIOR)
