"""Steps, backward passes and phases of training in a Kineto trace."""

from __future__ import annotations

import itertools
import operator
import re
from bisect import bisect_left, bisect_right
from typing import TYPE_CHECKING

from paro_advise.core.collective import REDUCTIONS
from paro_advise.trace_parsers.kineto.columns import HostKind
from paro_advise.trace_parsers.kineto.constants import (
    DOUBLE_MARK_SHARE,
    ENOUGH_MARKS,
    ENOUGH_UPDATES,
    MIN_GATHERS,
    TAIL_SHARE,
    TOUCH_US,
    TWO_MARKS_US,
    UPDATED_SHARE,
)
from paro_advise.trace_parsers.kineto.host_rows import AUTOGRAD_NODE
from paro_advise.trace_parsers.tables import HostSpan

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy as np
    from numpy.typing import NDArray

    from paro_advise.core.collective import Op
    from paro_advise.trace_parsers.kineto.host_rows import HostRows

SEVERAL_UPDATES = "optimizer steps by"  # begins the name of a step that holds several
_STEP = re.compile(r"^ProfilerStep#?\s*(\d+)")
_TRAINING = re.compile(rf"^{AUTOGRAD_NODE}|^Optimizer\.step#|Backward\d*$|^FSDP::post_backward")
_ACCUMULATES = "torch::autograd::AccumulateGrad"  # once for each parameter that a pass reaches
# One per forward of the whole model. FSDP1's and DDP's may nest: only outermost ones count.
_ROOT_FORWARD = (
    "FSDP::root_pre_forward",
    "FullyShardedDataParallel.forward",
    "DistributedDataParallel.forward",
)
# Where a model is entered that trains, the root first.
_ENTRANCES = (*_ROOT_FORWARD, "FSDP::pre_forward", "FSDP::all_gather")
_GATHERS = ("c10d::_allgather_base_", "c10d::allgather_")


def profiler_steps(rows: HostRows, passes: Sequence[tuple[float, float]]) -> list[HostSpan]:
    """Return the ``ProfilerStep#N`` spans; failing those, windows between optimizer steps.

    Of the marks that two profilers of one thread wrote, as where a script profiles itself while it is recorded, the
    earlier one of each step counts.
    """
    # The oldest traces record the marks as operators.
    may_mark = (rows.kind == HostKind.ANNOTATION) | (rows.kind == HostKind.OPERATOR)
    marks = rows.select(may_mark & rows.mask_of_names(bool(_STEP.match(name)) for name in rows.names))
    if marks:
        return _of_one_profiler(sorted(marks, key=lambda span: span.start_us))
    outer, starts = outermost(optimizer_spans(rows)), [start for start, _ in passes]
    if starts:  # those that no backward pass parts are of one step: of several optimizers, or inside of backward
        parted = itertools.groupby(outer, lambda span: bisect_right(starts, span.start_us))
        outer = [list(together)[-1] for _, together in parted]
    period = _period(_gradients_between(rows, outer))
    name = "optimizer step" if period == 1 else f"{SEVERAL_UPDATES} {period}:"
    return [
        HostSpan(start_us=before.end_us, end_us=after.end_us, tid=after.tid, name=f"{name} {index}")
        for index, (before, after) in enumerate(itertools.pairwise(outer[::period]), start=1)
    ]


def _gradients_between(rows: HostRows, spans: Sequence[HostSpan]) -> list[int]:
    """Return how many gradients are accumulated between the ends of spans."""
    made = rows.select(rows.mask_of_names(name == _ACCUMULATES for name in rows.names))
    starts = sorted(span.start_us for span in made)
    places = [bisect_right(starts, span.end_us) for span in spans]
    return [after - before for before, after in itertools.pairwise(places)]


def _period(counts: Sequence[int]) -> int:
    """Return after how many updates all repeats, as where several models are trained in turn (GANs); else 1."""
    if len(set(counts)) < 2:
        return 1
    periods = range(2, len(counts) // 2 + 1)
    return next((length for length in periods if all(map(operator.eq, counts, counts[length:]))), 1)


def _of_one_profiler(marks: Sequence[HostSpan]) -> list[HostSpan]:
    kept: list[HostSpan] = []
    last_of: dict[int, HostSpan] = {}
    for mark in marks:
        before = last_of.get(mark.tid)
        if before is not None and 0 < mark.start_us - before.start_us <= TWO_MARKS_US:
            shared_us = min(before.end_us, mark.end_us) - mark.start_us
            if 2 * shared_us > min(before.end_us - before.start_us, mark.end_us - mark.start_us):
                continue
        last_of[mark.tid] = mark
        kept.append(mark)
    return kept


def num_merged(steps: Sequence[HostSpan]) -> int:
    """Return how many processes a file holds whose steps of one number run at the same time, as merged files do.

    Marks that are recorded twice begin at the same time.
    """
    most = 1
    for _, group in itertools.groupby(
        sorted(steps, key=lambda step: (step.name, step.start_us)), lambda step: step.name
    ):
        first, *others = group
        together = [step.start_us for step in others if step.start_us < first.end_us]
        if together and together[-1] - first.start_us > DOUBLE_MARK_SHARE * (first.end_us - first.start_us):
            most = max(most, 1 + len(together))
    return most


def optimizer_spans(rows: HostRows) -> list[HostSpan]:
    """Return the ``Optimizer.step#...`` annotations, nested ones included."""
    may_mark = (rows.kind == HostKind.ANNOTATION) | (rows.kind == HostKind.OPERATOR)
    return rows.select(may_mark & rows.mask_of_names(name.startswith("Optimizer.step#") for name in rows.names))


def device_updates(rows: HostRows) -> list[HostSpan]:
    """Return when a device ran what optimizers' steps had launched (by start)."""
    return outermost(rows.select(rows.kind == HostKind.DEVICE_SPAN))


def shows_training(rows: HostRows) -> bool:
    """Tell whether any host row is of a backward pass or an optimizer's step."""
    return any(_TRAINING.search(name) for name in rows.names)


def outermost(spans: Sequence[HostSpan]) -> list[HostSpan]:
    """Return the spans that lie in no other of the sequence (by start)."""
    out: list[HostSpan] = []
    for span in sorted(spans, key=lambda item: (item.start_us, -item.end_us)):
        if not out or span.start_us >= out[-1].end_us:
            out.append(span)
    return out


def backward_passes(rows: HostRows) -> list[tuple[float, float]]:
    """Return (start_us, end_us) of each backward pass, in order.

    The autograd engine runs nodes of one pass in falling sequence number; a node recorded after
    the pass began has a higher number than all of it, so a number above the pass's maximum
    opens the next pass.
    """
    import numpy as np

    mask = rows.mask_of_names(name.startswith(AUTOGRAD_NODE) for name in rows.names)
    index = np.flatnonzero(mask)
    index = index[_is_outermost(rows, index)]
    if not len(index):
        return []
    sequence = rows.sequence[index]
    opens = np.append(True, sequence[1:] > np.maximum.accumulate(np.maximum(sequence, 0))[:-1])
    first = np.flatnonzero(opens)
    ends = np.maximum.reduceat(rows.end_us[index], first)
    starts = rows.start_us[index][first]
    return [(start, end) for start, end in zip(starts.tolist(), ends.tolist(), strict=True) if end > start]


def _is_outermost(rows: HostRows, index: NDArray[np.intp]) -> NDArray[np.bool_]:
    """Mark those of some rows that no earlier one of them on their thread still encloses."""
    import numpy as np

    mask = np.zeros(len(index), dtype=bool)
    tids = rows.tid[index]
    for tid in np.unique(tids).tolist():
        mine = np.flatnonzero(tids == tid)
        ends = np.maximum.accumulate(rows.end_us[index[mine]])
        mask[mine] = rows.start_us[index[mine]] >= np.append(-np.inf, ends[:-1]) - TOUCH_US
    return mask


def extend_passes(
    rows: HostRows, passes: Sequence[tuple[float, float]], cuts_us: Sequence[float]
) -> list[tuple[float, float]]:
    """Extend each backward pass of a step but its last to where the host enters the model again.

    Reductions that a framework flushes after the engine returned belong to the pass. Annotations tell where the next
    forward pass begins, and so does its first operator: those carry a sequence number; autograd nodes lie inside
    passes. Where neither is known, the first TAIL_SHARE of the time up to the next pass counts: frameworks flush their
    last bucket there.

    Args:
        rows: all host rows.
        passes: of the whole trace, in order.
        cuts_us: ends of steps and starts of optimizer steps; no tail crosses one.
    """
    import numpy as np

    starts = np.sort(np.concatenate((_numbered_operators(rows)[0], _entrances(rows))))
    cuts = sorted(cuts_us)
    out = []
    for (begin, end), (following, _) in itertools.pairwise(passes):
        place = bisect_left(cuts, end)
        if place < len(cuts) and cuts[place] <= following:
            out.append((begin, end))
            continue
        index = int(np.searchsorted(starts, end, side="right"))
        if index < len(starts) and starts[index] < following:
            out.append((begin, max(end, float(np.nextafter(starts[index], 0)))))
        else:
            out.append((begin, end + TAIL_SHARE * (following - end)))
    return out + list(passes[-1:])


def _entrances(rows: HostRows) -> NDArray[np.float64]:
    """Return when (us) annotations say that the host enters the model."""
    annotations = rows.kind == HostKind.ANNOTATION
    found: NDArray[np.float64] = rows.start_us[
        annotations & rows.mask_of_names(name.startswith(_ENTRANCES) for name in rows.names)
    ]
    return found


def _numbered_operators(rows: HostRows) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
    """Return the starts (us) and sequence numbers of the operators that have one, autograd's nodes left out."""
    numbered = (rows.sequence >= 0) & rows.mask_of_names(not name.startswith(AUTOGRAD_NODE) for name in rows.names)
    return rows.start_us[numbered], rows.sequence[numbered]


def first_layers(rows: HostRows, passes: Sequence[tuple[float, float]]) -> list[float]:
    """Return until when (us) after each pass no operator has made a node for the next one.

    Operators carry the number of the next node, whether they make it or not: what a framework runs after a pass, such
    as the copies of gradients into a bucket, all have one number, and so has the first layer of the next forward pass.

    Args:
        rows: all host rows.
        passes: extended, of the whole trace, in order.
    """
    import numpy as np

    starts, numbers = _numbered_operators(rows)
    until = []
    following = [*(start for start, _ in passes[1:]), float("inf")][: len(passes)]
    for (_, end), start in zip(passes, following, strict=True):
        first, last = int(np.searchsorted(starts, end, side="right")), int(np.searchsorted(starts, start))
        higher = np.flatnonzero(numbers[first:last] > numbers[first : first + 1])
        until.append(max(end, float(starts[first + int(higher[0]) - 1])) if len(higher) else end)
    return until


def forward_passes(
    rows: HostRows, steps: Sequence[HostSpan], passes: Sequence[tuple[float, float]]
) -> list[tuple[float, float]]:
    """Return (start_us, end_us) of the forward pass before each backward pass.

    It begins where the host enters the model; where no annotation says where, with the first of several gathers, which
    are then of parameters, else with the step or after the pass before. What a script runs before, such as a frozen
    encoder, is no part of it.

    Args:
        rows: all host rows.
        steps: of training, in order.
        passes: of backward, in order.
    """
    import numpy as np

    entered = _entrances(rows)
    gathered = rows.start_us[rows.mask_of_names(name.startswith(_GATHERS) for name in rows.names)]
    step_starts = [step.start_us for step in steps]
    out, before = [], float("-inf")
    for begin, end in passes:
        step = bisect_right(step_starts, begin) - 1
        low = max(before, step_starts[step]) if step >= 0 else before
        for marks, least in ((entered, 1), (gathered, MIN_GATHERS)):
            first, last = np.searchsorted(marks, (low, begin), side="left").tolist()
            if last - first >= least:
                low = float(marks[first])
                break
        out.append((low, begin))
        before = end
    return out


class PhaseClock:
    """Tells the phase of training at a host time.

    forward and backward are those of a micro-batch; boundary lies after the last backward of a
    step, update from the start of the optimizer's step on. What is reduced before the step of another
    optimizer is that one's.

    Args:
        passes: of backward, in order.
        steps: of training.
        optimizer: its steps.
        reduced_until: until when (us) reductions still belong to each pass; None for its end.
    """

    def __init__(
        self,
        passes: Sequence[tuple[float, float]],
        steps: Sequence[HostSpan],
        optimizer: Sequence[HostSpan] = (),
        reduced_until: Sequence[float] | None = None,
    ) -> None:
        self._starts = [start for start, _ in passes]
        self._ends = [end for _, end in passes]
        self._reduced_until = self._ends if reduced_until is None else reduced_until
        self._step_starts = [step.start_us for step in steps]
        self._step_ends = [step.end_us for step in steps]
        self._updates = sorted(span.start_us for span in optimizer)

    def step_of(self, time_us: float) -> int:
        """Return the index of the step that holds a time, -1 when none does."""
        index = bisect_right(self._step_starts, time_us) - 1
        return index if index >= 0 and time_us < self._step_ends[index] else -1

    def phase(self, time_us: float, op: Op | None = None) -> str:
        """Return "forward", "backward", "boundary", "update", or "" when unknown.

        Args:
            time_us: of a call on the host.
            op: that it calls; None if that does not matter.
        """
        before = bisect_right(self._starts, time_us) - 1
        if before >= 0 and time_us <= self._ends[before]:
            return "backward"
        step = self.step_of(time_us)
        if step < 0:
            return "forward" if before < 0 and self._starts else ""
        begins, ends = self._step_starts[step], self._step_ends[step]
        if before + 1 < len(self._starts) and self._starts[before + 1] < ends:
            is_late = op in REDUCTIONS and before >= 0 and begins < self._ends[before]
            return "backward" if is_late and time_us <= self._reduced_until[before] else "forward"
        if before < 0 or self._ends[before] <= begins:
            return ""
        update = bisect_right(self._updates, time_us) - 1
        if update < 0 or self._updates[update] < self._ends[before]:
            return "boundary"
        is_before_another = update + 1 < len(self._updates) and self._updates[update + 1] < ends
        return "boundary" if is_before_another and op in REDUCTIONS else "update"

    def micro_batch(self, time_us: float, op: Op | None = None) -> int | None:
        """Return the index within its step of the micro-batch that a call on the host belongs to."""
        step = self.step_of(time_us)
        if step < 0 or not self._starts:
            return None
        first = bisect_right(self._starts, self._step_starts[step])
        ended = bisect_right(self._ends, time_us)
        if op in REDUCTIONS and ended > 0 and time_us <= self._reduced_until[ended - 1]:
            ended -= 1
        last = bisect_right(self._starts, self._step_ends[step]) - 1
        return max(0, min(ended, last) - first)


def micro_batches(
    steps: Sequence[HostSpan], spans: Sequence[HostSpan], passes: Sequence[tuple[float, float]]
) -> int | None:
    """Return the micro-batches per step (median over steps), None when unknown.

    Counted from the root module's forward annotations, else from backward passes.
    """
    if not steps:
        return None
    forwards = root_forwards(steps, spans)
    backwards = _median_per_step([start for start, _ in passes], steps)
    # A forward without a backward (a frozen reference model, evaluation) is no micro-batch.
    return min(forwards, backwards) if forwards and backwards else forwards or backwards or None


def root_forwards(steps: Sequence[HostSpan], spans: Sequence[HostSpan]) -> int | None:
    """Return how often whole models run forward in a step (median over steps), None where no annotation says so."""
    return _median_per_step(_root_forwards(spans), steps) or None if steps else None


def updates_per_step(
    steps: Sequence[HostSpan], optimizer: Sequence[HostSpan], passes: Sequence[tuple[float, float]]
) -> int | None:
    """Return how often optimizers step after passes of their own in a step (median over steps), None when unknown.

    Several optimizers that step one after the other, with no backward pass in between, are one update, and so are those
    that step inside of one. 0 where many steps hold none, as where a script marks each micro-batch.
    """
    outer = outermost(optimizer)
    if not steps or not outer or not passes:
        return None
    starts = [start for start, _ in passes]
    counts = sorted(
        len({bisect_right(starts, span.start_us) for span in outer if step.start_us <= span.start_us < step.end_us})
        for step in steps
    )
    if not counts[-1]:
        return None
    num_updated = sum(count > 0 for count in counts)
    if len(counts) >= ENOUGH_MARKS and num_updated <= UPDATED_SHARE * len(counts):
        return 0
    return counts[len(counts) // 2]


def joined_marks(
    steps: Sequence[HostSpan], optimizer: Sequence[HostSpan], passes: Sequence[tuple[float, float]]
) -> tuple[HostSpan, ...]:
    """Return the steps of the optimizer, each of as many marked passes; () where marks are no passes.

    Marked steps at both ends that are no whole step are left out.
    """
    if updates_per_step(steps, optimizer, passes) != 0:
        return ()

    def holders(starts: Sequence[float]) -> list[int]:
        bounds = [(bisect_left(starts, step.start_us), bisect_left(starts, step.end_us)) for step in steps]
        return [place for place, (first, end) in enumerate(bounds) if first < end]

    ends = holders([span.start_us for span in outermost(optimizer)])
    if len(holders([start for start, _ in passes])) < len(steps):
        return ()
    lengths = {later - earlier for earlier, later in itertools.pairwise(ends)}
    length = lengths.pop() if len(lengths) == 1 else 1
    # Two of the optimizer's steps tell a length where the first is whole: one may have been skipped between them.
    is_told = len(ends) > ENOUGH_UPDATES or ends[0] + 1 == length
    if length == 1 or not is_told or max(ends[0] + 1, len(steps) - ends[-1]) > length:
        return ()
    return tuple(
        HostSpan(
            start_us=steps[end + 1 - length].start_us,
            end_us=steps[end].end_us,
            tid=steps[end].tid,
            name=steps[end].name,
        )
        for end in ends
        if end + 1 >= length
    )


def _root_forwards(spans: Sequence[HostSpan]) -> list[float]:
    """Return where each forward of the whole model starts (us), by the first known annotation that occurs."""
    for name in _ROOT_FORWARD:
        if roots := outermost([span for span in spans if span.name == name]):
            return [span.start_us for span in roots]
    return []


def _median_per_step(marks_us: Sequence[float], steps: Sequence[HostSpan]) -> int:
    marks = sorted(marks_us)
    counts = sorted(max(0, bisect_left(marks, step.end_us) - bisect_left(marks, step.start_us)) for step in steps)
    return counts[len(counts) // 2]
