"""Replays a step under a strategy: who waits for whom, with the rules of the code that runs it.

One rank stands for all; how long it waits for late ones in each collective is measured, and less in a
smaller group. Times are numbers or arrays of draws. On a CPU a gather blocks; what reduces in a thread
of its own overlaps the rest of backward, with at most three reductions under way. On a GPU queues run
beside compute (device_replay.py; docs/prediction.md, replay).
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace
from functools import cache
from typing import TYPE_CHECKING, NamedTuple

from paro_advise.advisor.prediction.candidates import Candidate, baseline_candidate, longer_us
from paro_advise.advisor.prediction.cluster_links import LINK_QUANTITIES, Links, Parts, StepCollectives
from paro_advise.advisor.prediction.constants import (
    HO_RING_BETWEEN,
    HO_RING_COPIES,
    HO_RING_INSIDE,
    HO_RING_RANKS,
    HO_RING_WAITS,
    PENDING_REDUCTIONS,
    SLOWDOWN_RANGE,
)
from paro_advise.advisor.prediction.device_replay import (
    Leg,
    Legs,
    Queues,
    UnitWork,
    backward_share,
    slowed_micro_batch_us,
)
from paro_advise.advisor.prediction.moved_units import (
    UnitKind,
    buckets,
    gathered_bytes,
    laid_out_and_in,
    more_copies_us,
    unit_kinds,
    updates_us,
)
from paro_advise.policies.collective_cost import Draws, Effort, RingAlgorithm, larger, smaller
from paro_advise.policies.plan import EstimateSource
from paro_advise.policies.procedure import Hops, Scope, gather_from, procedure_of
from paro_advise.policies.strategy import CollectiveBackend, Level

if TYPE_CHECKING:
    from paro_advise.advisor.prediction.calibration import Calibration


def measured_links(calibration: Calibration) -> Links:
    """Return the links of a run, without uncertainty."""
    return replace(_best_links(calibration), slowdown=slowdown(calibration))


def _best_links(calibration: Calibration) -> Links:
    """Return the links of a run as its best transfers show them."""
    values = {name: getattr(calibration, name).value for name in LINK_QUANTITIES}
    return Links(**values, sums_by_nodes=calibration.sums_by_nodes, shaped=calibration.shaped)


def collectives_us(calibration: Calibration) -> float:
    """Return the time of all collectives of the run itself, were each as quick as its best ones."""
    return float(_Step(calibration, baseline_candidate(calibration), _best_links(calibration)).collectives_us())


def slowdown(calibration: Calibration) -> float:
    """Return how much longer the run's transfers took than its best ones of each size, which links are.

    Contention and jitter are not in latency and bandwidth; what slowed the run will slow others too.
    """
    if not calibration.transfer_us:
        return 1.0
    modelled = collectives_us(replace(calibration, wait_us=0.0))
    return min(max(calibration.transfer_us / modelled, SLOWDOWN_RANGE[0]), SLOWDOWN_RANGE[1]) if modelled else 1.0


def floor_us(calibration: Calibration, candidate: Candidate) -> float:
    """Return what is left of a step without communication, of the run's own arithmetic and host time."""
    return min(calibration.compute_us + _fixed_us(calibration, candidate), calibration.step_us)


def device_floor_us(calibration: Calibration, candidate: Candidate, links: Links) -> Draws:
    """Return what is left of a step on a device without communication: arithmetic, what is fixed, the optimizer."""
    alone = calibration.alone_us(links) + calibration.fixed_us + more_copies_us(calibration, candidate)
    return smaller(alone, calibration.step_us) + sum(updates_us(calibration, candidate))


def arithmetic_us(calibration: Calibration, candidate: Candidate, links: Links) -> Draws:
    """Return what is left of a step without communication, on a device or without one."""
    if calibration.is_gpu:
        return device_floor_us(calibration, candidate, links)
    return floor_us(calibration, candidate)


def _fixed_us(calibration: Calibration, candidate: Candidate) -> float:
    return calibration.fixed_us - _saved_us(calibration, candidate)


def _saved_us(calibration: Calibration, candidate: Candidate) -> float:
    """Return what a candidate saves of the host's work between operators, and so of waiting for it."""
    return (1 - candidate.host_share) * calibration.gaps_us


def demand_us(calibration: Calibration, candidate: Candidate, links: Links) -> Draws:
    """Return what no step of a candidate on a device can be shorter than: its bytes on any link, or its arithmetic."""
    return _Step(calibration, candidate, replace(links, slowdown=1.0)).demand_us()


def link_demand_us(calibration: Calibration, candidate: Candidate, links: Links) -> Draws:
    """Return the same of its bytes alone."""
    return _Step(calibration, candidate, replace(links, slowdown=1.0)).link_demand_us()


def step_us(calibration: Calibration, candidate: Candidate, links: Links) -> Draws:
    """Return the time of a step.

    Args:
        calibration: the run.
        candidate: how it shall run.
        links: numbers or draws.
    """
    step = _Step(calibration, candidate, links)
    more = calibration.micro_batches - 1
    ahead = calibration.is_gpu and candidate.publishes_ahead
    total = step.micro_batch(first=not more, last=True, publishes=ahead and not more)
    if not ahead:
        total = total + step.publish()
    if more:
        middle = step.micro_batch(first=not candidate.copy_lasts, last=False)
        total = total + more * middle
        if candidate.copy_lasts or ahead:
            total = total + step.micro_batch(first=True, last=False, publishes=ahead) - middle
    fixed = calibration.aside_us + _fixed_us(calibration, candidate) + candidate.host_us
    on_device, on_host = updates_us(calibration, candidate)
    total = total + on_device + fixed
    if calibration.host_work_us:
        total = larger(total, calibration.host_work_us * links.host_share)
    if not calibration.host_floor_us:
        return total + on_host
    saved = _saved_us(calibration, candidate)
    busy = total - max(0.0, calibration.host_idle_us - saved)
    return larger(busy, calibration.host_floor_us - saved) + calibration.host_rest_us + on_host


class _UnitCosts(NamedTuple):
    """Times of one unit in a micro-batch."""

    gather: Draws
    again: Draws  # the gather in backward; 0 where none is needed
    reduce: Draws
    busy: Draws  # what of it takes the cores that compute
    compute: Draws


class _Step:
    """A step of one candidate on one set of links."""

    def __init__(self, calibration: Calibration, candidate: Candidate, links: Links) -> None:
        self._calibration = calibration
        self._candidate = candidate
        self._units = candidate.unit_bytes or calibration.unit_bytes
        self._kinds = unit_kinds(calibration, candidate)
        self._numbers = Counter(self._kinds)
        self._passed_share = sum(kind.num_bytes for kind in self._kinds if kind.is_passed_by) / sum(self._units)
        # Of the bytes of units that backward reaches, those that have gradients.
        self._trained_share = min(1.0, calibration.trained_share / (1 - self._passed_share))
        base = baseline_candidate(calibration)
        self._copied_out_us = calibration.copied_out_us if gathered_bytes(calibration, base) else 0.0
        self._copy_us_per_byte, self._laid_in_us_per_byte = laid_out_and_in(calibration, candidate)
        native = candidate.collectives == CollectiveBackend.NATIVE
        self._collectives = StepCollectives(
            calibration.world_size,
            calibration.ranks_per_node,
            calibration.nodes_per_pod if calibration.has_pods else None,
            candidate.group_size,
            RingAlgorithm.RING if native else RingAlgorithm.HO_RING,
            native and (calibration.native_reduce_scatter_is_all_reduce or candidate.scatters_by_all_reduce),
            is_streamed=calibration.is_gpu,
            sums_by_trees=calibration.sums_by_trees,
        )
        had_ring = base.collectives == CollectiveBackend.HO_RING
        # With one rank a node it is the flat ring that a GPU's backend has.
        changes = had_ring == native and not (calibration.is_gpu and calibration.ranks_per_node == 1)
        changed = (HO_RING_WAITS, HO_RING_COPIES) if changes else (1.0, 1.0)
        self._waits, self._copies = (1 / factor for factor in changed) if native and had_ring else changed
        used = replace(links, slowdown=1.0) if changes else links
        self._links = used if native else _with_ho_ring(used, calibration, had_ring=had_ring)
        self._costs, self._work, self._legs = cache(self._unit_costs), cache(self._unit_work), cache(self._made_legs)

    def _moved_bytes(self, parts: Parts) -> float:
        """Return the bytes that the cores move; an assumed intra-node bandwidth is that of the cores already."""
        has_copies = self._calibration.intra_gbps.source != EstimateSource.PRIOR
        return sum(part.rank_bytes for part in parts if has_copies or not part.is_inside)

    def _cost(self, parts: Parts) -> Draws:
        calibration = self._calibration
        late = sum(calibration.wait_us * _lateness(part.size, calibration.wait_group_size) for part in parts)
        moved = self._copies * calibration.host_us_per_byte * self._moved_bytes(parts)
        return self._links.us(parts) + self._waits * late + moved

    def _on_cores(self, parts: Parts) -> Draws:
        near = tuple(replace(part, effort=_inside_nodes(part.effort)) for part in parts)
        return self._links.us(near) + self._copies * self._calibration.host_us_per_byte * self._moved_bytes(parts)

    def _sent_bytes(self, num_bytes: float) -> tuple[float, float]:
        """Return the bytes of a unit's parameters as they are gathered, and of its gradients as they are reduced."""
        calibration, candidate = self._calibration, self._candidate
        elements = num_bytes / calibration.element_bytes
        gathered = candidate.gather_share * elements * calibration.gather_width
        reduced = candidate.reduce_share * elements * calibration.reduce_width * self._trained_share
        return gathered, reduced

    def _reducing_hops(self, *, last: bool) -> Hops:
        """Return what reduces gradients, in the last micro-batch of a step or in another one."""
        procedure = procedure_of(self._candidate.strategy)
        return procedure.reduce + (procedure.synchronise if last or self._candidate.replicates_each_pass else ())

    def _unit_costs(self, num_bytes: float, *, last: bool, first: bool = True) -> _UnitCosts:
        candidate, collectives = self._candidate, self._collectives
        strategy = candidate.strategy
        gathered, reduced = self._sent_bytes(num_bytes)
        reduction = collectives.parts(self._reducing_hops(last=last), reduced)
        whole = self._cost(reduction)
        near = candidate.backward_level or strategy.parameter
        forward = strategy.parameter if first or not candidate.copy_lasts else near
        per_micro = (self._calibration.compute_us - self._calibration.aside_us) / self._calibration.micro_batches
        return _UnitCosts(
            gather=self._cost(collectives.parts(gather_from(forward), gathered)),
            again=0.0 if candidate.gathers_once else self._cost(collectives.parts(gather_from(near), gathered)),
            reduce=whole,
            busy=smaller(self._on_cores(reduction), whole),
            compute=per_micro * num_bytes / sum(self._units),
        )

    @property
    def _backward_share(self) -> float:
        if self._calibration.backward_share is not None:
            return self._calibration.backward_share
        whole = backward_share(self._calibration.forwards)
        back = whole * (1 - self._passed_share)
        return back / (1 - whole + back)

    def collectives_us(self) -> Draws:
        """Return the time of all collectives of a step, whatever hides them."""
        total: Draws = 0.0
        for count, _, last in _passes(self._calibration.micro_batches):
            for kind, number in self._numbers.items():
                costs = self._costs(kind.num_bytes, last=last)
                total = total + count * number * self._calibration.forwards * costs.gather
                if kind.is_passed_by:
                    continue
                # The root is still gathered when backward begins.
                total = total + count * (number - (kind == self._kinds[-1])) * costs.again
                total = total + count * number * costs.reduce
        return total if self._candidate.published_us is not None else total + self.publish()

    def publish(self) -> Draws:
        """Return the time of bringing updated parameters back, unit by unit."""
        if self._candidate.published_us is not None:
            return self._candidate.published_us
        hops = procedure_of(self._candidate.strategy).publish
        total: Draws = 0.0
        for kind, number in self._numbers.items():
            if not kind.is_passed_by:
                total = total + number * self._cost(
                    self._collectives.parts(hops, self._published_bytes(kind.num_bytes))
                )
        return total

    def micro_batch(self, *, first: bool, last: bool, publishes: bool = False) -> Draws:
        """Return the time of forward and backward, beside which updated parameters come back where it publishes."""
        if self._calibration.is_gpu:
            return self._on_device(first=first, last=last, publishes=publishes)
        return self._blocking([self._costs(size, last=last, first=first) for size in self._units])

    def _blocking(self, units: list[_UnitCosts]) -> Draws:
        now: Draws = 0.0
        behind = _Background()
        share = self._backward_share
        for unit in units:
            now = now + self._calibration.forwards * unit.gather + unit.compute * (1 - share)
        root = len(units) - 1
        for place in range(root, -1, -1):
            unit = units[place]
            if place != root and not self._candidate.gathers_once:
                now = now + behind.beside(unit.again)
            now = now + unit.compute * share
            if not self._candidate.overlaps_reductions:
                now = now + unit.reduce
                continue
            # Cores that copy bytes do not compute meanwhile, nor do they serve the wire.
            behind.run(unit.compute * share)
            now = now + unit.busy + behind.admit(unit.reduce - unit.busy)
        return now + behind.rest()

    def _on_device(self, *, first: bool, last: bool, publishes: bool) -> Draws:
        candidate = self._candidate
        queues = Queues(
            overlaps_gathers=candidate.overlaps_gathers,
            overlaps_reductions=candidate.overlaps_reductions,
            separate=candidate.separate_queues,
            gathers_once=candidate.gathers_once,
            forwards=self._calibration.forwards,
            # Of the arithmetic of the units that backward reaches.
            backward=self._backward_share / (1 - (1 - self._backward_share) * self._passed_share),
            has_root=self._calibration.root_bytes > 0,
            prefetches=candidate.prefetches,
            holds_back=candidate.holds_back,
        )
        works = self._works(first=first, last=last, publishes=publishes)
        idle_links = self._calibration.is_described  # their rates are those of benchmarks
        return slowed_micro_batch_us(works, queues, self._links.compute_slowing, both=idle_links)

    def _works(self, *, first: bool, last: bool, publishes: bool) -> list[UnitWork]:
        by_kind = {kind: self._work(kind, last=last, first=first) for kind in self._numbers}
        if publishes:
            hops = procedure_of(self._candidate.strategy).publish
            for kind, work in by_kind.items():
                if not kind.is_passed_by:
                    published = self._legs(hops, self._published_bytes(kind.num_bytes))
                    by_kind[kind] = work._replace(gather=(*published, *work.gather))
        works = [by_kind[kind] for kind in self._kinds]
        if bucket_bytes := self._candidate.reduce_bucket_bytes:
            return self._in_buckets(works, bucket_bytes, last=last)
        return works

    def _in_buckets(self, works: list[UnitWork], bucket_bytes: float, *, last: bool) -> list[UnitWork]:
        """Return units of which the last one in backward that a bucket holds reduces the gradients of all of them."""
        found = list(works)
        for first, end in buckets(self._units, bucket_bytes):
            reduce, between = self._reductions(sum(self._units[first:end]), last=last)
            found[first] = found[first]._replace(reduce=reduce, between=between)
            for place in range(first + 1, end):
                found[place] = found[place]._replace(reduce=(), between=())
        return found

    def _reductions(self, num_bytes: float, *, last: bool) -> tuple[Legs, Legs]:
        """Return what reduces the gradients of so many bytes of units, among the ranks that share them and between."""
        _, reduced = self._sent_bytes(num_bytes)
        hops = self._reducing_hops(last=last)
        inside = tuple(hop for hop in hops if hop.scope != Scope.ACROSS)
        across = tuple(hop for hop in hops if hop.scope == Scope.ACROSS)
        return self._legs(inside, reduced), self._legs(across, reduced)

    def _published_bytes(self, num_bytes: float) -> float:
        """Return the bytes of a unit's updated parameters as they come back."""
        gathered, _ = self._sent_bytes(num_bytes)
        return gathered * self._trained_share

    def _unit_work(self, kind: UnitKind, *, last: bool, first: bool) -> UnitWork:
        num_bytes = kind.num_bytes
        calibration, candidate = self._calibration, self._candidate
        gathered, _ = self._sent_bytes(num_bytes)
        near = candidate.backward_level or candidate.strategy.parameter
        forward = candidate.strategy.parameter if first or not candidate.copy_lasts else near
        passes = calibration.alone_us(self._links) - calibration.aside_us - self._copied_out_us
        copy = num_bytes * self._copy_us_per_byte
        per_micro = (passes + longer_us(calibration, candidate)) / calibration.micro_batches
        compute = per_micro * self._compute_share(kind)
        gather = self._legs(gather_from(forward), gathered)
        if kind.is_passed_by:
            return UnitWork(gather, again=(), reduce=(), between=(), compute=compute, copy=copy, is_passed_by=True)
        reduce, between = self._reductions(num_bytes, last=last)
        times = 1 if calibration.baseline.gradient == Level.N else calibration.micro_batches  # if whole, once
        reached_bytes = times * sum(self._units) * (1 - self._passed_share)
        laid_in = num_bytes * self._laid_in_us_per_byte if reduce else 0.0
        return UnitWork(
            gather=gather,
            again=self._legs(gather_from(near), gathered),
            reduce=reduce,
            between=between,
            compute=compute + laid_in,
            copy=copy,
            copied_in=laid_in or calibration.copied_in_us * num_bytes / reached_bytes,
        )

    def _compute_share(self, kind: UnitKind) -> Draws:
        """Return a unit's share of the arithmetic: that of its bytes, of embeddings as far as they compute.

        A unit that backward passes by has its part of forward's alone.
        """
        most = self._calibration.root_bytes or self._calibration.front_bytes
        embedded = sum(min(item.num_bytes, most) for item in self._kinds if item.is_looked_up)
        idle = (1 - self._links.root_share) * embedded
        share = (kind.num_bytes - (idle if kind.is_looked_up else 0.0)) / (sum(self._units) - idle)
        passed = self._passed_share
        if not passed:
            return share
        forward = (1 - self._backward_share) * share
        return forward if kind.is_passed_by else forward + self._backward_share * share / (1 - passed)

    def _made_legs(self, hops: Hops, num_bytes: float) -> Legs:
        return tuple(
            Leg(alone=self._cost((part,)), port=self._links.port_us(part), fabric=self._links.fabric_us(part))
            for part in self._collectives.parts(hops, num_bytes)
        )

    def demand_us(self) -> Draws:
        """Return the least that a step takes: what it asks of a node's port, of the fabric, or of compute."""
        alone = self._calibration.alone_us(self._links)
        alone = alone + more_copies_us(self._calibration, self._candidate)
        return larger(self.link_demand_us(), alone + sum(updates_us(self._calibration, self._candidate)))

    def link_demand_us(self) -> Draws:
        """Return the least that a step takes for what it asks of a node's port and of the fabric."""
        port: Draws = 0.0
        fabric: Draws = 0.0
        for count, first, last in _passes(self._calibration.micro_batches):
            for kind, number in self._numbers.items():
                work = self._work(kind, last=last, first=first or not self._candidate.copy_lasts)
                # The last unit is whole still when backward begins.
                again = 0 if self._candidate.gathers_once else number - (kind == self._kinds[-1])
                passes = ((number, work.reduce), (number, work.between), (again, work.again))
                for times, legs in (*passes, (number * self._calibration.forwards, work.gather)):
                    for leg in legs:
                        port, fabric = port + count * times * leg.port, fabric + count * times * leg.fabric
        return larger(port, fabric) + sum(updates_us(self._calibration, self._candidate))


def _passes(micro_batches: int) -> tuple[tuple[int, bool, bool], ...]:
    """Return the kinds of micro-batches of a step: how many, whether the first, whether the last."""
    if micro_batches == 1:
        return ((1, True, True),)
    middle = ((micro_batches - 2, False, False),) if micro_batches > 2 else ()
    return ((1, True, False), *middle, (1, False, True))


class _Background:
    """Reductions under way beside the main thread, at most three, in order.

    A gather and a reduction at the same time share the links: both go at half their speed.
    """

    def __init__(self) -> None:
        self._left: list[Draws] = []

    def run(self, time: Draws) -> None:
        """Let them go on for a time alone."""
        for place, left in enumerate(self._left):
            used = smaller(left, time)
            self._left[place] = left - used
            time = time - used

    def beside(self, gather: Draws) -> Draws:
        """Let a gather run beside them; return how long it takes."""
        total = self.rest()
        shared = smaller(gather, total)
        self.run(shared)
        return gather + shared

    def admit(self, reduction: Draws) -> Draws:
        """Add one; return how long it has to wait for its place."""
        waited: Draws = 0.0
        if len(self._left) >= PENDING_REDUCTIONS:
            waited = self._left.pop(0)
        self._left.append(reduction)
        return waited

    def rest(self) -> Draws:
        """Return how long all of them still take alone."""
        return sum(self._left, 0.0)


def _with_ho_ring(links: Links, calibration: Calibration, *, had_ring: bool) -> Links:
    """Return links as HO-Ring uses them: on CPUs a share of what was measured, and its own way inside nodes."""
    share = 1.0 if had_ring or calibration.is_gpu else HO_RING_BETWEEN
    between = replace(links, inter_gbps=links.inter_gbps * share, pod_gbps=links.pod_gbps * share)
    if calibration.is_gpu or calibration.intra_gbps.source != EstimateSource.PRIOR:
        return between
    ranks = max(2, calibration.ranks_per_node)
    # The backend has a rank's bandwidth for (m - 1) / m of a buffer, whatever m.
    peers = min(ranks, HO_RING_RANKS) / 2 * ranks / (2 * (ranks - 1))
    return replace(between, intra_gbps=links.intra_gbps * HO_RING_INSIDE * peers)


def _inside_nodes(effort: Effort) -> Effort:
    return replace(effort, inter_messages=0, inter_bytes=0, overlapped_rounds=0)


def _lateness(size: int, measured_size: int) -> float:
    """Return the wait imposed by the slowest rank of a group, as a share of that in the measured group.

    The largest of p equal normal deviates is about sqrt(2 ln p) deviations late.
    """
    return math.sqrt(math.log(size) / math.log(measured_size)) if size > 1 and measured_size > 1 else 0.0
