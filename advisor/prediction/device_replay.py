"""Replays a micro-batch on a device: queues that run beside compute and share the links of a node.

Queues as FSDP2 has them (torch 2.13, torch/distributed/fsdp/_fully_shard): gathers run one unit ahead of compute and,
with the reductions of the same process group, in order of issue on one communicator; what goes between groups has a
group and a stream of its own. Whatever runs at the same time shares a node's port and the fabric inside it: bytes of
one collective wait for those of the other, so that no step is shorter than what it asks of a link
(docs/prediction.md, replay).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from paro_advise.advisor.prediction.constants import BACKWARD_SHARE
from paro_advise.policies.collective_cost import Draws, larger, smaller


@dataclass(frozen=True, slots=True, kw_only=True)
class Leg:
    """One collective.

    Attributes:
        alone: its time (us).
        port, fabric: how long its bytes take a node's port and the fabric inside (us).
        takes_port, takes_fabric: whether they do; asked once, since a leg is sent many times.
    """

    alone: Draws
    port: Draws
    fabric: Draws
    takes_port: bool = field(init=False)
    takes_fabric: bool = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "takes_port", _is_some(self.port))
        object.__setattr__(self, "takes_fabric", _is_some(self.fabric))


# Collectives one after the other.
Legs = tuple[Leg, ...]


class UnitWork(NamedTuple):
    """What one unit asks in a micro-batch.

    Attributes:
        gather, again: of parameters, in forward and in backward.
        reduce: of gradients, among the ranks that share parameters.
        between: of gradients, between groups.
        compute: of forward and backward (us).
        copy: to where the model computes with it, once it is gathered (us).
        is_passed_by: backward does not reach it: it is frozen, and nothing before it trains.
        copied_in: of ``compute``, what lays gradients out for their reduction, at the end of backward (us).
    """

    gather: Legs
    again: Legs
    reduce: Legs
    between: Legs
    compute: Draws
    copy: Draws = 0.0
    is_passed_by: bool = False
    copied_in: Draws = 0.0

    def forward_us(self, queues: Queues) -> Draws:
        """Return what it takes of the compute stream in one pass forward."""
        arithmetic = self.compute * ((1.0 if self.is_passed_by else 1 - queues.backward) / queues.forwards)
        return arithmetic + self.copy

    def slowed(self, factor: Draws) -> UnitWork:
        """Return the same where all that the device computes takes longer."""
        return self._replace(compute=self.compute * factor, copy=self.copy * factor, copied_in=self.copied_in * factor)


class Queues(NamedTuple):
    """How the code that runs a micro-batch orders its work.

    Attributes:
        overlaps_gathers: gathers run one unit ahead of compute; else compute waits for each.
        prefetches: in backward too, where each is issued before the reduction of the unit before it; else behind it.
        overlaps_reductions: reductions run beside backward; else backward waits for each.
        separate: reductions do not queue behind gathers.
        gathers_once: parameters gathered in forward are kept for backward.
        forwards: passes forward before the one backward.
        backward: share of the arithmetic that is backward's.
        has_root: the last unit is the root of the model, which is gathered before the others and reduced after them,
            as FSDP does: it holds embeddings at one end and a head at the other.
        holds_back: compute waits behind a unit for the reduction of the unit before, whose memory FSDP2 takes again
            to lay the unit's gradients out (FSDPParamGroup.post_backward of torch 2.13). And its gathers run two units
            ahead in forward: each waits until the unit before the last is laid out, whose buffer it takes again
            (FSDPParamGroup.wait_for_unshard).
    """

    overlaps_gathers: bool
    overlaps_reductions: bool
    separate: bool
    gathers_once: bool
    forwards: float = 1.0
    backward: float = BACKWARD_SHARE
    has_root: bool = False
    prefetches: bool = True
    holds_back: bool = False


class _Links:
    """Until when the links of a node are taken (us)."""

    def __init__(self) -> None:
        self._port: Draws = 0.0
        self._fabric: Draws = 0.0

    def send(self, legs: Legs, start: Draws) -> Draws:
        """Send collectives one after the other from a moment on; return when the last one ends."""
        for leg in legs:
            end = start + leg.alone
            if leg.takes_port:
                self._port = larger(start, self._port) + leg.port
                end = larger(end, self._port)
            if leg.takes_fabric:
                self._fabric = larger(start, self._fabric) + leg.fabric
                end = larger(end, self._fabric)
            start = end
        return start


def _is_some(time: Draws) -> bool:
    return time > 0 if isinstance(time, float | int) else bool((time > 0).any())


def backward_share(forwards: float) -> float:
    """Return the share of the arithmetic that is backward's, where it is twice that of one pass forward."""
    one_pass = (1 - BACKWARD_SHARE) / BACKWARD_SHARE
    return 1 / (1 + forwards * one_pass)


def micro_batch_us(units: list[UnitWork], queues: Queues) -> Draws:
    """Return the time of forward and backward of one micro-batch.

    Args:
        units: in order of forward; the last one stays gathered for backward.
        queues: of the code that runs it.
    """
    links = _Links()
    share = queues.backward
    main, compute_end = _forward(units, queues, links)
    earlier = (queues.forwards - 1) * compute_end
    reductions: Draws = main
    between: Draws = 0.0
    ready: Draws = compute_end
    waiting: tuple[Legs, Draws] | None = None  # what goes between groups, and from when on
    root = len(units) - 1
    prefetches = queues.overlaps_gathers and queues.prefetches
    done: Draws = 0.0  # with the reduction of the unit before
    for place in range(root, -1, -1):
        unit = units[place]
        if unit.is_passed_by:
            continue
        begin = larger(compute_end, ready)
        if place != root and not queues.gathers_once:
            begin = begin + unit.copy
        again = units[place - 1].again if place and not queues.gathers_once else ()
        if again and prefetches:
            main = ready = links.send(again, larger(main, begin))
        if waiting is not None:
            between = links.send(waiting[0], larger(between, waiting[1]))
            waiting = None
        compute_end = begin + unit.compute * share
        if (unit.reduce or unit.between) and not (queues.has_root and place == root):
            if queues.holds_back:
                compute_end = larger(compute_end, done + unit.copied_in)
            queue = larger(reductions if queues.separate else main, compute_end)
            done = links.send(unit.reduce, queue)
            if queues.separate:
                reductions = done
            else:
                main = done
            if queues.overlaps_reductions:
                waiting = (unit.between, done)
            else:
                between = links.send(unit.between, larger(between, done))
                compute_end = larger(done, between) if unit.between else done
        if again and not prefetches:
            main = ready = links.send(again, larger(main, compute_end))
    if waiting is not None:
        between = links.send(waiting[0], larger(between, waiting[1]))
    if queues.has_root:
        if queues.holds_back:
            compute_end = larger(compute_end, done + units[root].copied_in)
        queue = larger(reductions if queues.separate else main, compute_end)
        reductions = links.send(units[root].reduce, queue)
        between = links.send(units[root].between, larger(between, reductions))
    return earlier + larger(larger(compute_end, between), larger(main, reductions))


def _forward(units: list[UnitWork], queues: Queues, links: _Links) -> tuple[Draws, Draws]:
    """Return when the gathers' queue and compute are done with forward."""
    main: Draws = 0.0
    compute_start: Draws = 0.0
    compute_end: Draws = 0.0
    before_last: Draws = 0.0  # when the unit before the last one was laid out
    laid_out: Draws = 0.0  # the same of the last one
    blocks, root = (units[:-1], units[-1:]) if queues.has_root else (units, [])
    for unit in root:
        main = compute_start = compute_end = links.send(unit.gather, main)
    for unit in blocks:
        issue = compute_end
        if queues.overlaps_gathers:
            issue = before_last if queues.holds_back else compute_start
        before_last = laid_out
        main = links.send(unit.gather, larger(main, issue))
        compute_start = larger(compute_end, main)
        laid_out = compute_start + unit.copy
        compute_end = compute_start + unit.forward_us(queues)
    for unit in root:
        compute_end = compute_end + unit.forward_us(queues)
    return main, compute_end


def slowed_micro_batch_us(units: list[UnitWork], queues: Queues, slowing: Draws, *, both: bool = False) -> Draws:
    """Return the time of a micro-batch in which what the device computes beside collectives takes longer.

    Args:
        units, queues: as of ``micro_batch_us``.
        slowing: how much longer.
        both: collectives take longer as well, whose times were measured with nothing beside them.
    """
    time = micro_batch_us(units, queues)
    again = units[:0] if queues.gathers_once else units[:-1]
    sent = sum((leg.alone for unit in units for leg in (*unit.reduce, *unit.between)), 0.0)
    sent = sent + queues.forwards * sum((leg.alone for unit in units for leg in unit.gather), 0.0)
    sent = sent + sum((leg.alone for unit in again for leg in unit.again), 0.0)
    copies = queues.forwards * sum(unit.copy for unit in units) + sum(unit.copy for unit in again if unit.again)
    alone = sum((unit.compute for unit in units), 0.0) + copies
    # What is not exposed runs beside compute, and hides that this takes longer where it sets the pace itself.
    beside = smaller(larger(sent - (time - alone), 0.0), alone)
    if both or not _is_some(2 * sent - alone):
        return time + (slowing - 1) * beside
    longer = 1 + (slowing - 1) * beside / larger(alone, 1.0)
    return micro_batch_us([unit.slowed(longer) for unit in units], queues)
