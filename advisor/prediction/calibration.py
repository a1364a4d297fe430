"""What a run tells about its cluster and its model, as the replay needs it: each number with its origin."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from paro_advise.policies.collective_cost import smaller
from paro_advise.policies.plan import EstimateSource

if TYPE_CHECKING:
    from paro_advise.advisor.prediction.cluster_links import Links, ShapedLinks
    from paro_advise.advisor.prediction.sampler import Estimate
    from paro_advise.core.framework import Framework
    from paro_advise.policies.collective_cost import Draws
    from paro_advise.policies.memory import Widths
    from paro_advise.policies.strategy import Strategy


@dataclass(frozen=True, slots=True, kw_only=True)
class Update:
    """What the optimizer's kernels take of a device: each reads and writes all that its rank holds of the states.

    Attributes:
        measured_us: in the run.
        least_us: of it, what does not depend on how much a rank holds: kernels have a shortest time.
        whole_us: the rest, for a rank that held all states.
    """

    measured_us: float = 0.0
    least_us: float = 0.0
    whole_us: float = 0.0

    def us(self, num_shards: int) -> float:
        """Return the time with states that are spread over some ranks."""
        return self.least_us + self.whole_us / num_shards

    def scaled(self, share: float) -> Update:
        """Return a share of everything."""
        return Update(
            measured_us=share * self.measured_us, least_us=share * self.least_us, whole_us=share * self.whole_us
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Calibration:
    """A run as the replay sees it.

    Attributes:
        job_world_size, job_ranks_per_node: of the run.
        unmodelled: why predictions would mislead, "" where they do not.
        is_dealt_out: groups of ranks in a row cross the network, while those predicted lie inside nodes.
        trained_share: of the parameters, those that have gradients.
        forwards: times that a micro-batch's forward gathers a unit, on average: more than once where a model runs
            on several inputs before one backward pass.
        world_size, ranks_per_node, micro_batches: of the ranks that share the data.
        unit_bytes: parameters of each unit in the type they are sent in; the root last.
        root_bytes: of these, the root's of FSDP, which is gathered first and reduced last; 0 where none is known.
        front_bytes: of these, the first unit's where it is larger than the others and no root is known: embeddings.
        bucket_bytes: what the run itself sends at once, where its buckets hide the units; None where they do not.
        passed_by: which units backward does not reach, by place: frozen ones in front of what trains; () for none.
        element_bytes: of that type.
        gather_width, reduce_width: bytes of an element that is gathered as parameter, and reduced as gradient.
        compute_us: arithmetic of a step of one rank.
        least_passes_us: where arithmetic is what a described step leaves beside communication, the least that the
            model's passes take, at the devices' peak; 0 where that is not known, None where arithmetic is.
        aside_us: of it, what neither the model's passes nor the optimizer launch: frozen encoders before the model,
            averages of weights. No communication of the model runs beside it.
        host_floor_us: of a run that is bound by its host, what this works in a step: no step is shorter; 0 else.
        host_idle_us: of ``fixed_us``, how long devices wait for that.
        host_rest_us: what a step takes beyond both, where the host waits for devices.
        host_work_us: of a run that its host does not bind, what this works in a step while a profiler records, beneath
            communication and arithmetic; 0 where it is not known.
        slower_us: of it, what the slowest rank computes longer than any that is no straggler, where it sets the pace.
        uneven_us: beyond it, how much longer the rank takes that computes longest in a step.
        uneven_anew_us: of that, what is another rank's in each step.
        copied_out_us: of it, what lays gathered parameters out, once for each gather.
        copied_in_us: of it, what lays gradients out, before each reduction.
        copy_us_per_byte: of a run that lays nothing out, what FSDP2 would take for each byte beside ``compute_us``; 0
            where the run does so itself, or where it is not known.
        host_update_us: how long devices idle in a step because the optimizer steps on the host, beside ``fixed_us``.
        backward_share: of the passes' arithmetic, backward's; None where no trace tells.
        fixed_us: idle, copies, and communication that no strategy changes (norms, tensor parallelism).
        gaps_us: of these, the host's own work between operators.
        late_us: of these, waiting for a rank that is late by its own doing, and in steps that stalled.
        most_late_us: the most that a step would save if no rank was late: its waits may also be hidden beneath compute,
            and its transfers have been slowed by them.
        untraced_us: of its transfers, what may be waiting for ranks without a trace.
        wait_us: of each collective of a model state beside its transfer, on average: waiting for stragglers.
            Beside a GPU only.
        host_us_per_byte: what a byte that a rank sends takes beside links, where the cores that compute also
            move it: copies, waiting for a core, and for ranks that wait for one. On a CPU only.
        wait_group_size: ranks that waited for each other.
        transfer_us: of all collectives of model states in a step; None where waiting is not told apart.
        step_us: measured.
        traced_error_pct: replay of the traced step from its measured parts against its measured time, where the
            calibration then brings the replay to unprofiled time; None where the replay itself tells.
        is_gpu: collectives run beside compute.
        native_reduce_scatter_is_all_reduce: gloo's.
        baseline: strategy of the run between steps.
        baseline_group_size: ranks of its group.
        copy_group_size: ranks of a group that holds a second copy of the parameters, from which backward gathers; None
            without one.
        gathers_once: parameters gathered for forward are kept for backward.
        replicates_each_pass: gradients are added up across groups on every micro-batch.
        scatters_by_all_reduce: the run's framework all-reduces gradients of which each rank keeps a part.
        overlaps_gathers, overlaps_reductions: whether any of the run's gathers, and reductions in backward, ran
            beside compute.
        reduce_bucket_bytes: of units, that the run's framework reduces at once under any strategy; None for one by one.
        prefetches: whether any of the gathers in backward did: else each is issued behind the reduction of the unit
            before, as without FSDP1's ``backward_prefetch``.
        copies_buckets: the run's DDP holds buckets beside the gradients, which it copies out of them.
        publishes_ahead: updated parameters come back beside the next forward, as with Megatron's overlap_param_gather.
        published_us: what bringing updated parameters back took, where the framework does it in a way of its
            own: one by one, or those few that it keeps whole; None where the strategy tells.
        framework: that ran it.
        inter_alpha_us, inter_gbps: an inter-node message; the port of a node, 1e9 bytes/s.
        intra_alpha_us, intra_gbps: an intra-node message; one rank's sending, 1e9 bytes/s.
        nodes_per_pod: nodes of a pod (faster interconnect domain); None where there are no pods.
        pod_alpha_us, pod_gbps: an inter-node message within a pod; ``inter_*`` are then of those between pods.
        sum_ratio: bus bandwidth of an all-reduce to that of a gather or scatter.
        sums_by_trees: the backend's all-reduces over several nodes run as trees.
        rail_gain: what a node's port moves, to what a ring over several ranks of each node moves through it.
        compute_slowing: how much longer arithmetic takes while a collective runs beside it; 1 where cores compute.
        update: the optimizer's part of ``compute_us``, where a device ran it.
        overlapped_us: communication of the run's step that ran beside compute.
        seen_share: of the job's ranks, those whose traces were read.
        num_steps: that were timed.
        assumptions: what was not in the traces, for people.
        shaped: rates by operation and group shape, None where the tiers tell all.
        widths: bytes per element of each state, None for those that the element type suggests.
        compute_sigma: of the arithmetic, standard deviation of the logarithm; 0 where it was measured.
        beside_backward: strategies whose reductions the framework runs beside backward; None for all.
        is_described: by people's words, no trace was read.
    """

    job_world_size: int
    job_ranks_per_node: int
    unmodelled: str
    trained_share: float
    world_size: int
    ranks_per_node: int
    micro_batches: int
    unit_bytes: tuple[float, ...]
    bucket_bytes: tuple[float, ...] | None
    element_bytes: int
    gather_width: int
    reduce_width: int
    compute_us: float
    fixed_us: float
    gaps_us: float
    late_us: float
    most_late_us: float
    wait_us: float
    host_us_per_byte: float
    wait_group_size: int
    transfer_us: float | None
    step_us: float
    traced_error_pct: float | None = None
    is_gpu: bool
    native_reduce_scatter_is_all_reduce: bool
    baseline: Strategy
    baseline_group_size: int
    gathers_once: bool
    replicates_each_pass: bool
    scatters_by_all_reduce: bool
    overlaps_gathers: bool
    overlaps_reductions: bool
    published_us: float | None
    framework: Framework
    inter_alpha_us: Estimate
    inter_gbps: Estimate
    intra_alpha_us: Estimate
    intra_gbps: Estimate
    nodes_per_pod: int | None
    pod_alpha_us: Estimate
    pod_gbps: Estimate
    sum_ratio: Estimate
    rail_gain: Estimate
    compute_slowing: Estimate
    update: Update
    overlapped_us: float
    seen_share: float
    num_steps: int
    assumptions: tuple[str, ...]
    shaped: ShapedLinks | None = None
    widths: Widths | None = None
    compute_sigma: float = 0.0
    beside_backward: frozenset[str] | None = None
    is_described: bool = False
    forwards: float = 1.0
    is_dealt_out: bool = False
    root_bytes: float = 0.0
    front_bytes: float = 0.0
    passed_by: tuple[bool, ...] = ()
    aside_us: float = 0.0
    least_passes_us: float | None = None
    copied_out_us: float = 0.0
    copied_in_us: float = 0.0
    copy_us_per_byte: float = 0.0
    host_update_us: float = 0.0
    slower_us: float = 0.0
    uneven_us: float = 0.0
    uneven_anew_us: float = 0.0
    untraced_us: float = 0.0
    host_floor_us: float = 0.0
    host_idle_us: float = 0.0
    host_rest_us: float = 0.0
    host_work_us: float = 0.0
    backward_share: float | None = None
    copy_group_size: int | None = None
    prefetches: bool = True
    reduce_bucket_bytes: float | None = None
    publishes_ahead: bool = False
    copies_buckets: bool = False
    sums_by_trees: bool = False

    @property
    def knows_no_network(self) -> bool:
        """Tell whether the run has one node and nobody said what lies between nodes."""
        return self.num_nodes == 1 and self.inter_gbps.source == EstimateSource.PRIOR

    @property
    def sums_by_nodes(self) -> bool:
        """Tell whether the links are known by all-reduces alone, whose nodes may have added up first."""
        return self.inter_gbps.source == EstimateSource.SUMS

    @property
    def parameters(self) -> float:
        """Return the number of parameters."""
        return sum(self.unit_bytes) / self.element_bytes

    @property
    def passes_us(self) -> float:
        """Return the arithmetic of a step without the optimizer's."""
        return self.compute_us - self.update.measured_us

    def alone_us(self, links: Links) -> Draws:
        """Return the arithmetic of a step without the optimizer's, and without collectives beside it."""
        passes = self.passes_us * links.arithmetic
        return passes - smaller(self.overlapped_us, passes - self.aside_us) * (1 - 1 / links.compute_slowing)

    @property
    def groups_per_node(self) -> float:
        """Return how many groups of data-parallel ranks share a node's port, each with its part."""
        return self.job_ranks_per_node / self.ranks_per_node

    @property
    def port_gbps(self) -> float:
        """Return what a node's port moves, for all of these groups."""
        return self.inter_gbps.value * self.groups_per_node

    @property
    def num_nodes(self) -> int:
        """Return the number of nodes."""
        return self.world_size // self.ranks_per_node

    @property
    def has_pods(self) -> bool:
        """Tell whether there are levels between a node and all nodes."""
        return self.nodes_per_pod is not None and self.nodes_per_pod < self.num_nodes
