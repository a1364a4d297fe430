"""Steps as the device ran them, where it lags behind the host that launched its work."""

from __future__ import annotations

from typing import TYPE_CHECKING

from paro_advise.trace_parsers.kernel_kinds import KernelKind
from paro_advise.trace_parsers.kineto.constants import LAG_SHARE, PAUSE_SHARE, STUB_SHARE, TINY_US
from paro_advise.trace_parsers.tables import HostSpan

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy as np
    from numpy.typing import NDArray

    from paro_advise.trace_parsers.kineto.device.device_table import DeviceRows


def device_steps(steps: Sequence[HostSpan], rows: DeviceRows) -> tuple[HostSpan, ...]:
    """Return when the device ran each step, () where it keeps up with the host or launches are not known.

    A step begins with the first kernel that the host launched in it and ends where the next one begins; the last, and
    one behind which the recording paused, ends as long after its last row as the others, or before it where what they
    send runs on beside the next step, but not before the next one's first kernel, which the host would have launched as
    far into its step as before, could have begun.
    """
    import numpy as np

    if not steps or not len(rows.start_us):
        return ()
    step_of = steps_at(steps, rows.launch_us)
    if not np.isin(np.arange(len(steps)), step_of).all():
        return ()
    lengths = [step.end_us - step.start_us for step in steps]
    starts = _starts(len(steps), rows, step_of)
    launched = np.full(len(steps), np.inf)
    np.minimum.at(launched, step_of[step_of >= 0], rows.launch_us[step_of >= 0])
    known = step_of >= 0
    # A host that waits for the device behind the mark of a step runs not ahead, but the marks do.
    is_later = steps_at(steps, rows.start_us[known]) != step_of[known]
    is_behind = (
        float(np.median(starts - launched)) >= LAG_SHARE * float(np.median(lengths))
        or max(float(is_later.mean()), _share_behind(steps, rows, step_of)) > LAG_SHARE
    )
    if not is_behind or (np.diff(starts) <= 0).any():
        return ()
    last_rows = np.full(len(steps), -np.inf)
    np.maximum.at(last_rows, step_of[step_of >= 0], rows.end_us[step_of >= 0])
    begun, ended = (np.array([getattr(step, end) for step in steps]) for end in ("start_us", "end_us"))
    # Behind its mark another one follows at once, but where the profiler paused.
    is_followed = begun[1:] - ended[:-1] < PAUSE_SHARE * float(np.median(lengths))
    gaps = (starts[1:] - last_rows[:-1])[is_followed]
    gap = float(np.median(gaps)) if len(gaps) else 0.0
    before_first_launch = float(np.median(launched - begun))
    latency = max(0.0, float((rows.start_us[known] - rows.launch_us[known]).min()))  # of a launch, at the least
    alone = np.maximum(last_rows + gap, ended + before_first_launch + latency)
    following = np.append(starts[1:], np.inf)
    ends = np.where(np.append(is_followed, np.False_), following, np.minimum(alone, following))
    return tuple(
        HostSpan(start_us=float(start), end_us=float(end), tid=step.tid, name=step.name)
        for step, start, end in zip(steps, starts, ends, strict=True)
    )


def _share_behind(steps: Sequence[HostSpan], rows: DeviceRows, step_of: NDArray[np.int64]) -> float:
    """Return how much of the time of rows, by launch in a step, lies behind its end in the step of which it is most.

    A few long rows may be most of it.
    """
    import numpy as np

    known = step_of >= 0
    lengths_us = (rows.end_us - rows.start_us)[known]
    behind_us = np.clip(rows.end_us[known] - np.array([step.end_us for step in steps])[step_of[known]], 0.0, lengths_us)
    whole_us = np.bincount(step_of[known], weights=lengths_us, minlength=len(steps))
    later_us = np.bincount(step_of[known], weights=behind_us, minlength=len(steps))
    return float((later_us / np.maximum(whole_us, TINY_US)).max())


def _starts(num_steps: int, rows: DeviceRows, step_of: NDArray[np.int64]) -> NDArray[np.float64]:
    """Return when the device began each step: with its first row, but not before the step before it was computed.

    Other streams run ahead with what a step needs: copies, the next batch.
    """
    import numpy as np

    first = np.full(num_steps, np.inf)
    np.minimum.at(first, step_of[step_of >= 0], rows.start_us[step_of >= 0])
    main = _on_main_stream(rows)
    own_first = np.full(num_steps, np.inf)
    np.minimum.at(own_first, step_of[main & (step_of >= 0)], rows.start_us[main & (step_of >= 0)])
    # A stream runs in the order of launches, so what it began before a step's first row was launched earlier (or
    # before the recording began); a step without a row of its own ends where the next one that has some begins.
    own_first = np.minimum.accumulate(own_first[::-1])[::-1]
    order = np.argsort(rows.start_us[main], kind="stable")
    ended = np.maximum.accumulate(np.append(-np.inf, rows.end_us[main][order]))
    computed = ended[np.searchsorted(rows.start_us[main][order], own_first)]
    starts: NDArray[np.float64] = np.maximum(first, computed)
    return starts


def _on_main_stream(rows: DeviceRows) -> NDArray[np.bool_]:
    """Mark the kernels of the stream that computes most; others run ahead with what the next step needs."""
    import numpy as np

    compute = rows.kind == KernelKind.COMPUTE
    if not compute.any():
        return np.ones(len(rows.kind), dtype=bool)
    streams, index = np.unique(rows.stream[compute], return_inverse=True)
    busy = np.bincount(index, weights=(rows.end_us - rows.start_us)[compute])
    mask: NDArray[np.bool_] = compute & (rows.stream == streams[int(np.argmax(busy))])
    return mask


def steps_at(steps: Sequence[HostSpan], times_us: NDArray[np.float64]) -> NDArray[np.int64]:
    """Return the index of the step that holds each time, -1 where none does or the time is NaN."""
    import numpy as np

    starts = np.array([step.start_us for step in steps])
    ends = np.array([step.end_us for step in steps])
    # Steps are in order and do not overlap.
    index = np.searchsorted(starts, times_us, side="right") - 1
    inside = (index >= 0) & (times_us < ends[np.maximum(index, 0)])
    return np.where(inside, index, -1)


def without_stub(steps: Sequence[HostSpan], starts_us: NDArray[np.float64]) -> tuple[HostSpan, ...]:
    """Leave out a last step that ended with the recording: far shorter than the others, and nothing ran in it.

    Args:
        steps: by start.
        starts_us: of all rows that show work.
    """
    if len(steps) < 2:
        return tuple(steps)
    last = steps[-1]
    before = sorted(step.end_us - step.start_us for step in steps[:-1])
    is_short = last.end_us - last.start_us < STUB_SHARE * before[len(before) // 2]
    is_empty = not ((starts_us >= last.start_us) & (starts_us < last.end_us)).any()
    return tuple(steps[:-1] if is_short and is_empty else steps)
