"""Replays a step under a strategy: who waits for whom, with the rules of the code that runs it.

One rank stands for all; how long it waits for late ones in each collective is measured, and less in a
smaller group. Times are numbers or arrays of draws. On a CPU a gather blocks; what reduces in a thread
of its own overlaps the rest of backward, with at most three reductions under way. On a GPU gathers run
one unit ahead of compute in their own stream, and FSDP2's reductions queue behind gathers on one
communicator (reference prediction, section 3.2, layer B).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cache
from typing import TYPE_CHECKING, Any, NamedTuple

from paro_advise.policies.collectives import Algorithm, Effort, Operation, effort_of
from paro_advise.policies.strategy import Level, Strategy
from paro_advise.policies.variants import Variant

if TYPE_CHECKING:
    from paro_advise.advisor.calibration import Calibration

_BACKWARD = 2 / 3  # of the arithmetic: 6 N D = 2 forward + 4 backward
_PENDING = 3
_MIN_STRETCH, _MAX_STRETCH = 0.7, 9.0
# HO-Ring against a native run, as in what bench_prediction lists: its transfers between nodes come within a tenth
# of what the links can do (bench_ho_ring), with nothing added for contention; its waits, and what cores add to its
# bytes, are these shares. Where cores move bytes inside nodes, it has this share of the backend's assumed bandwidth
# with one peer, and is the quicker the more peers are served at once, seen up to four ranks a node.
_HO_RING_BETWEEN, _HO_RING_WAITS, _HO_RING_COPIES = 0.94, 0.7, 0.3
_HO_RING_INSIDE, _HO_RING_RANKS = 0.775, 4
LEVELS = ("inter_alpha_us", "inter_gbps", "intra_alpha_us", "intra_gbps", "pod_alpha_us", "pod_gbps")


@dataclass(frozen=True, slots=True)
class Part:
    """One collective.

    Attributes:
        effort: what it asks of the links.
        size: ranks that take part.
        rank_bytes: that one of them sends.
        is_inside: it stays inside nodes.
        is_in_pod: between nodes, it stays inside a pod.
    """

    effort: Effort
    size: int
    rank_bytes: float
    is_inside: bool
    is_in_pod: bool


# Collectives one after the other.
Parts = tuple[Part, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Links:
    """Latency and bandwidth of all levels, numbers or arrays of one shape, and a factor on all times.

    Attributes:
        inter_alpha_us, inter_gbps: between nodes, where there are pods between those of different pods.
        intra_alpha_us, intra_gbps: inside nodes.
        pod_alpha_us, pod_gbps: between nodes of a pod.
        stretch: on all times.
    """

    inter_alpha_us: Any
    inter_gbps: Any
    intra_alpha_us: Any
    intra_gbps: Any
    pod_alpha_us: Any
    pod_gbps: Any
    stretch: float = 1.0

    def us(self, parts: Parts) -> Any:
        """Return the time of collectives one after the other."""
        return self.stretch * sum((self._alone(part) for part in parts), 0.0)

    def _alone(self, part: Part) -> Any:
        alpha, gbps = self.inter_alpha_us, self.inter_gbps
        if part.is_in_pod:
            alpha, gbps = self.pod_alpha_us, self.pod_gbps
        return part.effort.us(alpha, gbps, self.intra_alpha_us, self.intra_gbps)


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A way to run.

    Attributes:
        strategy: the triple.
        group_size: ranks of a group (m).
        collectives: "native" or "ho_ring".
        gathers_once: parameters gathered for forward are kept for backward.
        replicates_each_pass: gradients are added up across groups on every micro-batch.
        overlaps_reductions: reductions run beside backward, in order.
        separate_queues: reductions do not wait for gathers.
        unit_bytes: sent at once; None for the units of the model.
        published_us: what bringing updated parameters back took where it was measured; None to model it.
        offload: "optimizer" if its states and its step are on the host, else "".
        host_us: what that adds to a step.
        variant: "" or one of ``policies.variants``: what a framework's setting makes of the triple.
        backward_level: from which parameters are gathered in backward; None for the triple's.
        copy_lasts: from there in later micro-batches' forward, too.
        gather_share, reduce_share: of the bytes, that quantised parameters and gradients have.
        host_share: of the host's gaps in the run, that are left when the framework's own code is replaced.
    """

    strategy: Strategy
    group_size: int
    collectives: str
    gathers_once: bool = False
    replicates_each_pass: bool = False
    overlaps_reductions: bool = True
    separate_queues: bool = True
    unit_bytes: tuple[float, ...] | None = None
    published_us: float | None = None
    offload: str = ""
    host_us: float = 0.0
    variant: str = ""
    backward_level: Level | None = None
    copy_lasts: bool = False
    gather_share: float = 1.0
    reduce_share: float = 1.0
    host_share: float = 1.0


@dataclass(frozen=True, slots=True)
class Collectives:
    """The collectives of a candidate on a cluster, as efforts by the bytes of a whole unit."""

    world_size: int
    ranks_per_node: int
    nodes_per_pod: int | None
    group_size: int
    algorithm: Algorithm
    reduce_is_all_reduce: bool

    def _inside(self, operation: Operation, num_bytes: float) -> Parts:
        nodes = max(1, self.group_size // self.ranks_per_node)
        local = min(self.group_size, self.ranks_per_node)
        in_pod = self.nodes_per_pod is not None and self.nodes_per_pod % nodes == 0
        return (self._part(operation, num_bytes, nodes, local, in_pod=in_pod),)

    def _across(self, operation: Operation, num_bytes: float) -> Parts:
        groups = self.world_size // self.group_size
        if groups == 1:
            return ()
        small = self.group_size < self.ranks_per_node
        nodes = self.world_size // self.ranks_per_node if small else groups
        local = self.ranks_per_node // self.group_size if small else 1
        found = self._part(operation, num_bytes / self.group_size, nodes, local)
        # The rings of all local ranks of a group go through the same ports.
        rings = min(self.group_size, self.ranks_per_node)
        return (replace(found, effort=replace(found.effort, inter_bytes=found.effort.inter_bytes * rings)),)

    def _world(self, operation: Operation, num_bytes: float) -> Parts:
        if self.algorithm == Algorithm.HO_RING and self.group_size != self.ranks_per_node:
            return self._inside(operation, num_bytes) + self._across(operation, num_bytes)
        nodes = self.world_size // self.ranks_per_node
        return (self._part(operation, num_bytes, nodes, self.ranks_per_node),)

    def _part(self, operation: Operation, num_bytes: float, nodes: int, local: int, *, in_pod: bool = False) -> Part:
        if operation == Operation.REDUCE_SCATTER and self.reduce_is_all_reduce:
            operation = Operation.ALL_REDUCE
        size = nodes * local
        trips = 2 if operation == Operation.ALL_REDUCE else 1
        return Part(
            effort_of(self.algorithm, operation, num_bytes, nodes, local),
            size,
            trips * num_bytes * (size - 1) / size,
            nodes == 1,
            in_pod,
        )

    def gather(self, level: Level, num_bytes: float) -> Parts:
        """Gather parameters from a level to whole ones."""
        match level:
            case Level.N:
                return ()
            case Level.I:
                return self._inside(Operation.ALL_GATHER, num_bytes)
            case _:
                return self._world(Operation.ALL_GATHER, num_bytes)

    def reduce(self, strategy: Strategy, num_bytes: float, *, last: bool, each_pass: bool) -> Parts:
        """Bring gradients to their level, and at the boundary to the optimizer's (strategies 2.2)."""
        scatter, total = Operation.REDUCE_SCATTER, Operation.ALL_REDUCE
        found: Parts = ()
        level, target = strategy.gradient, strategy.optimizer
        if level == Level.I:
            found = self._inside(scatter, num_bytes)
        elif level == Level.G:
            return self._world_reduction(strategy, num_bytes)
        if not (last or each_pass):
            return found
        match level, target:
            case Level.N, Level.N:
                return self._world(total, num_bytes)
            case Level.N, Level.G:
                return self._world_reduction(strategy, num_bytes)
            case _:
                first = self._inside(scatter, num_bytes)
                return first + self._across(total if target == Level.I else scatter, num_bytes)

    def _world_reduction(self, strategy: Strategy, num_bytes: float) -> Parts:
        scatter = Operation.REDUCE_SCATTER
        if strategy.parameter == Level.I:
            return self._inside(scatter, num_bytes) + self._across(scatter, num_bytes)
        return self._world(scatter, num_bytes)

    def publish(self, strategy: Strategy, num_bytes: float) -> Parts:
        """Bring updated parameters from the optimizer's level to the parameters'."""
        match strategy.optimizer, strategy.parameter:
            case Level.I, Level.N:
                return self._inside(Operation.ALL_GATHER, num_bytes)
            case Level.G, Level.N:
                return self._world(Operation.ALL_GATHER, num_bytes)
            case Level.G, Level.I:
                return self._across(Operation.ALL_GATHER, num_bytes)
            case _:
                return ()


def baseline_candidate(calibration: Calibration) -> Candidate:
    """Return how the run itself was executed."""
    is_own = calibration.framework.startswith("paro-advise")
    # FSDP on a CPU waits for every collective; DDP's reducer and our runtime do not.
    overlaps = calibration.is_gpu or is_own or calibration.framework.startswith("DDP")
    return Candidate(
        strategy=calibration.baseline,
        group_size=calibration.baseline_group_size,
        collectives="ho_ring" if is_own else "native",
        gathers_once=calibration.gathers_once,
        replicates_each_pass=calibration.replicates_each_pass,
        overlaps_reductions=overlaps,
        separate_queues=is_own or not calibration.framework.startswith("FSDP"),
        unit_bytes=calibration.bucket_bytes,
        published_us=calibration.published_us,
        variant=Variant.KEPT.value if calibration.gathers_once and calibration.baseline.parameter != Level.N else "",
    )


def measured_links(calibration: Calibration) -> Links:
    """Return the links of a run, without doubt."""
    return Links(**{name: getattr(calibration, name).value for name in LEVELS}, stretch=stretch(calibration))


def collectives_us(calibration: Calibration) -> float:
    """Return the time of all collectives of the run itself, were each as quick as its best ones."""
    links = Links(**{name: getattr(calibration, name).value for name in LEVELS})
    return float(_Step(calibration, baseline_candidate(calibration), links).collectives_us())


def stretch(calibration: Calibration) -> float:
    """Return how much longer the run's transfers took than its best ones of each size, which links are.

    Contention and jitter are not in latency and bandwidth; what slowed the run will slow others too.
    """
    if not calibration.transfer_us:
        return 1.0
    modelled = collectives_us(replace(calibration, wait_us=0.0))
    return min(_MAX_STRETCH, max(_MIN_STRETCH, calibration.transfer_us / modelled)) if modelled else 1.0


def floor_us(calibration: Calibration, candidate: Candidate) -> float:
    """Return what is left of a step without communication, of the run's own arithmetic and host time."""
    return min(calibration.compute_us + _fixed_us(calibration, candidate), calibration.step_us)


def _fixed_us(calibration: Calibration, candidate: Candidate) -> float:
    return calibration.fixed_us - (1 - candidate.host_share) * calibration.gaps_us


def step_us(calibration: Calibration, candidate: Candidate, links: Links) -> Any:
    """Return the time of a step.

    Args:
        calibration: the run.
        candidate: how it shall run.
        links: numbers or draws.
    """
    step = _Step(calibration, candidate, links)
    more = calibration.micro_batches - 1
    total = step.micro_batch(first=not more, last=True) + step.publish()
    if more:
        middle = step.micro_batch(first=not candidate.copy_lasts, last=False)
        total = total + more * middle
        if candidate.copy_lasts:
            total = total + step.micro_batch(first=True, last=False) - middle
    return total + _fixed_us(calibration, candidate) + candidate.host_us


class _UnitCosts(NamedTuple):
    """Times of one unit in a micro-batch."""

    gather: Any
    again: Any  # the gather in backward; 0 where none is needed
    reduce: Any
    busy: Any  # what of it takes the cores that compute
    publish: Any
    compute: Any


class _Step:
    def __init__(self, calibration: Calibration, candidate: Candidate, links: Links) -> None:
        self._calibration = calibration
        self._candidate = candidate
        self._units = candidate.unit_bytes or calibration.unit_bytes
        native = candidate.collectives == "native"
        collectives = Collectives(
            calibration.world_size,
            calibration.ranks_per_node,
            calibration.nodes_per_pod if calibration.has_pods else None,
            candidate.group_size,
            Algorithm.RING if native else Algorithm.HO_RING,
            native and calibration.native_reduce_scatter_is_all_reduce,
        )
        strategy = candidate.strategy
        total = sum(self._units)
        per_micro = calibration.compute_us / calibration.micro_batches

        had_ring = calibration.framework.startswith("paro-advise")
        used = replace(links, stretch=1.0) if had_ring == native else links
        waits, copies = (1.0, 1.0) if had_ring != native else (_HO_RING_WAITS, _HO_RING_COPIES)
        if native and had_ring:
            waits, copies = 1 / waits, 1 / copies
        # The assumed bandwidth inside nodes is that of the cores already, with the backend's own collectives.
        has_copies = calibration.intra_gbps.source != "prior"
        if not native:
            used = _with_ho_ring(used, calibration, 1.0 if had_ring else _HO_RING_BETWEEN)

        def cost(parts: Parts) -> Any:
            late = sum(calibration.wait_us * _lateness(part.size, calibration.wait_group_size) for part in parts)
            moved = sum(part.rank_bytes for part in parts if has_copies or not part.is_inside)
            alone = used.us(parts)
            return alone + waits * late + copies * calibration.host_us_per_byte * moved

        def on_cores(parts: Parts) -> Any:
            moved = sum(part.rank_bytes for part in parts if has_copies or not part.is_inside)
            near = tuple(replace(part, effort=_inside_nodes(part.effort)) for part in parts)
            return used.us(near) + copies * calibration.host_us_per_byte * moved

        @cache
        def costs(num_bytes: float, *, last: bool, first: bool = True) -> _UnitCosts:
            each = candidate.replicates_each_pass
            gathered, reduced = candidate.gather_share * num_bytes, candidate.reduce_share * num_bytes
            reduction = collectives.reduce(strategy, reduced, last=last, each_pass=each)
            whole = cost(reduction)
            near = candidate.backward_level or strategy.parameter
            forward = strategy.parameter if first or not candidate.copy_lasts else near
            return _UnitCosts(
                gather=cost(collectives.gather(forward, gathered)),
                again=0.0 if candidate.gathers_once else cost(collectives.gather(near, gathered)),
                reduce=whole,
                busy=_earlier(on_cores(reduction), whole),
                publish=cost(collectives.publish(strategy, gathered)),
                compute=per_micro * num_bytes / total,
            )

        self._costs = costs

    def collectives_us(self) -> Any:
        """Return the time of all collectives of a step, whatever hides them."""
        total: Any = 0.0
        units = self._units
        for number in range(self._calibration.micro_batches):
            last = number == self._calibration.micro_batches - 1
            for place, size in enumerate(units):
                costs = self._costs(size, last=last)
                # The root is still gathered when backward begins.
                total = total + costs.gather + (costs.again if place < len(units) - 1 else 0.0) + costs.reduce
        return total if self._candidate.published_us is not None else total + self.publish()

    def publish(self) -> Any:
        """Return the time of bringing updated parameters back, unit by unit."""
        if self._candidate.published_us is not None:
            return self._candidate.published_us
        return sum((self._costs(size, last=True).publish for size in self._units), 0.0)

    def micro_batch(self, *, first: bool, last: bool) -> Any:
        """Return the time of forward and backward."""
        costs = [self._costs(size, last=last, first=first) for size in self._units]
        return self._streams(costs) if self._calibration.is_gpu else self._blocking(costs)

    def _blocking(self, units: list[_UnitCosts]) -> Any:
        now: Any = 0.0
        behind = _Background()
        for unit in units:
            now = now + unit.gather + unit.compute * (1 - _BACKWARD)
        root = len(units) - 1
        for place in range(root, -1, -1):
            unit = units[place]
            if place != root and not self._candidate.gathers_once:
                now = now + behind.beside(unit.again)
            now = now + unit.compute * _BACKWARD
            if not self._candidate.overlaps_reductions:
                now = now + unit.reduce
                continue
            # Cores that copy bytes do not compute meanwhile, nor do they serve the wire.
            behind.run(unit.compute * _BACKWARD)
            now = now + unit.busy + behind.admit(unit.reduce - unit.busy)
        return now + behind.rest()

    def _streams(self, units: list[_UnitCosts]) -> Any:
        candidate = self._candidate
        compute_end: Any = 0.0
        compute_start: Any = 0.0
        gathers: Any = 0.0
        for unit in units:
            gathers = _later(gathers, compute_start) + unit.gather
            compute_start = _later(compute_end, gathers)
            compute_end = compute_start + unit.compute * (1 - _BACKWARD)
        reductions: Any = 0.0
        root = len(units) - 1
        ready: Any = compute_end  # the root is still gathered
        for place in range(root, -1, -1):
            unit = units[place]
            compute_start = _later(compute_end, ready)
            if place and not candidate.gathers_once:  # the next gather goes before this unit's reduction
                gathers = _later(gathers, compute_start) + units[place - 1].again
                ready = gathers
            compute_end = compute_start + unit.compute * _BACKWARD
            if candidate.separate_queues:
                reductions = _later(reductions, compute_end) + unit.reduce
            else:
                gathers = _later(gathers, compute_end) + unit.reduce
                reductions = gathers
        return _later(compute_end, reductions)


class _Background:
    """Reductions under way beside the main thread, at most three, in order.

    A gather and a reduction at the same time share the links: both go at half their speed.
    """

    def __init__(self) -> None:
        self._left: list[Any] = []

    def run(self, time: Any) -> None:
        """Let them go on for a time alone."""
        for place, left in enumerate(self._left):
            used = left + (time - left) * (time < left)
            self._left[place] = left - used
            time = time - used

    def beside(self, gather: Any) -> Any:
        """Let a gather run beside them; return how long it takes."""
        total = self.rest()
        shared = gather + (total - gather) * (total < gather)
        self.run(shared)
        return gather + shared

    def admit(self, reduction: Any) -> Any:
        """Add one; return how long it has to wait for its place."""
        waited: Any = 0.0
        if len(self._left) >= _PENDING:
            waited = self._left.pop(0)
        self._left.append(reduction)
        return waited

    def rest(self) -> Any:
        """Return how long all of them still take alone."""
        return sum(self._left, 0.0)


def _with_ho_ring(links: Links, calibration: Calibration, share: float) -> Links:
    """Return links as HO-Ring uses them: a share of what was measured between nodes, and its own way inside them."""
    between = replace(links, inter_gbps=links.inter_gbps * share, pod_gbps=links.pod_gbps * share)
    if calibration.is_gpu or calibration.intra_gbps.source != "prior":
        return between
    ranks = max(2, calibration.ranks_per_node)
    # The backend has a rank's bandwidth for (m - 1) / m of a buffer, whatever m.
    peers = min(ranks, _HO_RING_RANKS) / 2 * ranks / (2 * (ranks - 1))
    return replace(between, intra_gbps=links.intra_gbps * _HO_RING_INSIDE * peers)


def _inside_nodes(effort: Effort) -> Effort:
    return replace(effort, inter_messages=0, inter_bytes=0, overlapped_rounds=0)


def _lateness(size: int, measured_size: int) -> float:
    """Return how long the last of some ranks lets wait, against that of the measured group.

    The largest of p equal normal deviates is about sqrt(2 ln p) deviations late.
    """
    return math.sqrt(math.log(size) / math.log(measured_size)) if size > 1 and measured_size > 1 else 0.0


def _earlier(first: Any, second: Any) -> Any:
    """Return the smaller of two numbers, or of each pair of two arrays."""
    return first + (second - first) * (second < first)


def _later(first: Any, second: Any) -> Any:
    """Return the larger of two numbers, or of each pair of two arrays."""
    return first + (second - first) * (second > first)
