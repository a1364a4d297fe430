"""Replays a micro-batch on a device: queues that run beside compute and share the links of a node.

Queues as FSDP2 has them (torch 2.13, torch/distributed/fsdp/_fully_shard): gathers run one unit ahead of compute and,
with the reductions of the same process group, in order of issue on one communicator; what goes between groups has a
group and a stream of its own. Whatever runs at the same time shares a node's port and the fabric inside it: bytes of
one collective wait for those of the other, so that no step is shorter than what it asks of a link
(docs/prediction.md, replay).
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from functools import partial
from itertools import groupby
from typing import TYPE_CHECKING, NamedTuple, TypeVar

from paro_advise.advisor.prediction.constants import BACKWARD_SHARE, SAME_MOMENT_US, SETTLING_UNITS
from paro_advise.policies.collective_cost import Draws, larger, smaller

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence


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


class _Forward(NamedTuple):
    """Moments (us) of a pass forward.

    Attributes:
        main: when the gathers' queue is done.
        compute_start, compute_end: of the last unit.
        before_last, laid_out: when the unit before the last one, and the last one, was laid out.
        port, fabric: until when the links of a node are taken.
    """

    main: Draws = 0.0
    compute_start: Draws = 0.0
    compute_end: Draws = 0.0
    before_last: Draws = 0.0
    laid_out: Draws = 0.0
    port: Draws = 0.0
    fabric: Draws = 0.0


class _Backward(NamedTuple):
    """Moments (us) of a pass backward.

    Attributes:
        main, reductions, between: when the queues of gathers, of reductions and of what goes between groups are done.
        ready: when what the next unit computes with is gathered.
        compute_end: of the last unit.
        done: with the reduction of the unit before.
        waiting: from when on what goes between groups may.
        port, fabric: until when the links of a node are taken.
    """

    main: Draws
    reductions: Draws
    between: Draws
    ready: Draws
    compute_end: Draws
    done: Draws
    waiting: Draws
    port: Draws
    fabric: Draws


_Moments = TypeVar("_Moments", _Forward, _Backward)


def _send(legs: Legs, start: Draws, port: Draws, fabric: Draws) -> tuple[Draws, Draws, Draws]:
    """Send collectives one after the other from a moment on.

    Args:
        legs: of them.
        start: the moment (us).
        port, fabric: until when the links of a node are taken.

    Returns:
        When the last one ends, and until when the links are taken then.
    """
    for leg in legs:
        end = start + leg.alone
        if leg.takes_port:
            port = larger(start, port) + leg.port
            end = larger(end, port)
        if leg.takes_fabric:
            fabric = larger(start, fabric) + leg.fabric
            end = larger(end, fabric)
        start = end
    return start, port, fabric


def _repeat(step: Callable[[_Moments], _Moments], moments: _Moments, times: int) -> _Moments:
    """Return the moments after so many steps that are alike.

    A step adds and takes the larger, nothing else. Where it moves all moments on by what the step before did, all
    further ones may do so: the last two tell, which are taken once more from where they would begin. The larger of
    straight lines is convex, so it is straight where its ends and a moment between them lie on one line.
    """
    settling = SETTLING_UNITS
    while times > settling + 2:
        before = moments
        for _ in range(settling):
            before, moments = moments, step(moments)
        times -= settling
        pace = [now - then for now, then in zip(moments, before, strict=True)]
        last = type(moments)(*(now + (times - 2) * gain for now, gain in zip(moments, pace, strict=True)))
        near = step(last)
        if _gains(near, last, pace):
            end = step(near)
            if _gains(end, near, pace):
                return end
        settling *= 2
    for _ in range(times):
        moments = step(moments)
    return moments


def _gains(now: _Moments, then: _Moments, pace: Sequence[Draws]) -> bool:
    """Tell whether all moments went on by so much."""
    for moment, earlier, gain in zip(now, then, pace, strict=True):
        off = moment - earlier - gain
        most = abs(off) if isinstance(off, float) else float(abs(off).max())
        if not most <= SAME_MOMENT_US:  # nor where times are infinite
            return False
    return True


def _is_some(time: Draws) -> bool:
    return time > 0 if isinstance(time, float | int) else bool((time > 0).any())


def backward_share(forwards: float) -> float:
    """Return the share of the arithmetic that is backward's, where it is twice that of one pass forward."""
    one_pass = (1 - BACKWARD_SHARE) / BACKWARD_SHARE
    return 1 / (1 + forwards * one_pass)


class _Pass(NamedTuple):
    """One unit in backward.

    Attributes:
        unit: which.
        again: what is gathered for the next one.
        held: of the unit before, what goes between groups and has not been sent; None where nothing waits.
        is_root: it is the last unit, which is whole still.
    """

    unit: UnitWork
    again: Legs
    held: Legs | None
    is_root: bool

    def reduces(self, queues: Queues) -> bool:
        """Tell whether its gradients are reduced behind it; those of a model's root are at the end."""
        return bool(self.unit.reduce or self.unit.between) and not (queues.has_root and self.is_root)


def micro_batch_us(units: Sequence[UnitWork], queues: Queues) -> Draws:
    """Return the time of forward and backward of one micro-batch.

    Args:
        units: in order of forward; the last one stays gathered for backward. What is the same object is the same work:
            of many in a row few are looked at.
        queues: of the code that runs it.
    """
    forward = _after_forward(units, queues)
    now = _Backward(
        main=forward.main,
        reductions=forward.main,
        between=0.0,
        ready=forward.compute_end,
        compute_end=forward.compute_end,
        done=0.0,
        waiting=0.0,
        port=forward.port,
        fabric=forward.fabric,
    )
    passes = _passes(units, queues)
    for one, times in passes:
        now = _repeat(partial(_after_pass, one=one, queues=queues), now, times)
    main, reductions, between, _, compute_end, done, waiting, port, fabric = now
    if passes and (held := _left_held(passes[-1][0], queues)) is not None:
        between, port, fabric = _send(held, larger(between, waiting), port, fabric)
    if queues.has_root:
        root = units[-1]
        if queues.holds_back:
            compute_end = larger(compute_end, done + root.copied_in)
        queue = larger(reductions if queues.separate else main, compute_end)
        reductions, port, fabric = _send(root.reduce, queue, port, fabric)
        between, port, fabric = _send(root.between, larger(between, reductions), port, fabric)
    earlier = (queues.forwards - 1) * forward.compute_end
    return earlier + larger(larger(compute_end, between), larger(main, reductions))


def _left_held(one: _Pass, queues: Queues) -> Legs | None:
    """Return what of a unit's gradients is to go between groups behind the next unit."""
    return one.unit.between if one.reduces(queues) and queues.overlaps_reductions else None


def _passes(units: Sequence[UnitWork], queues: Queues) -> list[tuple[_Pass, int]]:
    """Return what backward does, in order, and how often in a row it does the same."""
    found: list[tuple[_Pass, int]] = []
    is_root = True
    with_next = zip(reversed(units), (*reversed(units[:-1]), None), strict=True)
    for _, alike in groupby(with_next, key=lambda pair: (id(pair[0]), id(pair[1]))):
        (unit, following), *more = alike
        again = following.again if following and not queues.gathers_once else ()
        left = 0 if unit.is_passed_by else 1 + len(more)
        while left:
            one = _Pass(unit, again, _left_held(found[-1][0], queues) if found else None, is_root)
            # What the first of them finds held is another unit's.
            times = left if one.held is _left_held(one, queues) and not is_root else 1
            found.append((one, times))
            left, is_root = left - times, False
        is_root = False
    return found


def _after_pass(now: _Backward, *, one: _Pass, queues: Queues) -> _Backward:
    """Return the moments when one unit is through backward."""
    main, reductions, between, ready, compute_end, done, waiting, port, fabric = now
    unit, again = one.unit, one.again
    prefetches = queues.overlaps_gathers and queues.prefetches
    begin = larger(compute_end, ready)
    if not one.is_root and not queues.gathers_once:
        begin = begin + unit.copy
    if again and prefetches:
        ready, port, fabric = _send(again, larger(main, begin), port, fabric)
        main = ready
    if one.held is not None:
        between, port, fabric = _send(one.held, larger(between, waiting), port, fabric)
    compute_end = begin + unit.compute * queues.backward
    if one.reduces(queues):
        if queues.holds_back:
            compute_end = larger(compute_end, done + unit.copied_in)
        queue = larger(reductions if queues.separate else main, compute_end)
        done, port, fabric = _send(unit.reduce, queue, port, fabric)
        if queues.separate:
            reductions = done
        else:
            main = done
        if queues.overlaps_reductions:
            waiting = done
        else:
            between, port, fabric = _send(unit.between, larger(between, done), port, fabric)
            compute_end = larger(done, between) if unit.between else done
    if again and not prefetches:
        ready, port, fabric = _send(again, larger(main, compute_end), port, fabric)
        main = ready
    return _Backward(main, reductions, between, ready, compute_end, done, waiting, port, fabric)


def _after_forward(units: Sequence[UnitWork], queues: Queues) -> _Forward:
    """Return the moments when all units are through forward."""
    now = _Forward()
    blocks, root = (units[:-1], units[-1:]) if queues.has_root else (units, ())
    for unit in root:
        gathered, port, fabric = _send(unit.gather, now.main, now.port, now.fabric)
        now = _Forward(gathered, gathered, gathered, port=port, fabric=fabric)
    for _, alike in groupby(blocks, key=id):
        unit, *more = alike
        now = _repeat(partial(_after_unit, unit=unit, queues=queues), now, 1 + len(more))
    for unit in root:
        now = now._replace(compute_end=now.compute_end + unit.forward_us(queues))
    return now


def _after_unit(now: _Forward, *, unit: UnitWork, queues: Queues) -> _Forward:
    """Return the moments when one unit is through forward."""
    issue = now.compute_end
    if queues.overlaps_gathers:
        issue = now.before_last if queues.holds_back else now.compute_start
    main, port, fabric = _send(unit.gather, larger(now.main, issue), now.port, now.fabric)
    start = larger(now.compute_end, main)
    return _Forward(main, start, start + unit.forward_us(queues), now.laid_out, start + unit.copy, port, fabric)


def slowed_micro_batch_us(units: Sequence[UnitWork], queues: Queues, slowing: Draws, *, both: bool = False) -> Draws:
    """Return the time of a micro-batch in which what the device computes beside collectives takes longer.

    Args:
        units, queues: as of ``micro_batch_us``.
        slowing: how much longer.
        both: collectives take longer as well, whose times were measured with nothing beside them.
    """
    time = micro_batch_us(units, queues)
    sent: Draws = 0.0
    alone: Draws = 0.0
    distinct = {id(unit): unit for unit in units}
    for key, times in Counter(map(id, units)).items():
        unit = distinct[key]
        # The last one is whole still when backward begins.
        more = 0 if queues.gathers_once else times - (unit is units[-1])
        legs = ((times, unit.reduce), (times, unit.between), (times * queues.forwards, unit.gather), (more, unit.again))
        sent = sent + sum((count * leg.alone for count, sends in legs for leg in sends), 0.0)
        alone = alone + times * unit.compute + (times * queues.forwards + (more if unit.again else 0)) * unit.copy
    # What is not exposed runs beside compute, and hides that this takes longer where it sets the pace itself.
    beside = smaller(larger(sent - (time - alone), 0.0), alone)
    if both or not _is_some(2 * sent - alone):
        return time + (slowing - 1) * beside
    longer = 1 + (slowing - 1) * beside / larger(alone, 1.0)
    slowed = {key: unit.slowed(longer) for key, unit in distinct.items()}
    return micro_batch_us([slowed[id(unit)] for unit in units], queues)
