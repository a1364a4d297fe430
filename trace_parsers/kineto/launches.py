"""When a trace's launches must be read: a lean reading skips them, since most traces need none."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from paro_advise.trace_parsers.kernel_kinds import KernelKind, kind_of_kernel
from paro_advise.trace_parsers.kineto.collectives.host_calls import CALL_NAMES, COMMS_ROWS
from paro_advise.trace_parsers.kineto.columns import HostKind
from paro_advise.trace_parsers.kineto.constants import (
    IDLE_SHARE,
    LAG_SHARE,
    LONG_CALL_US,
    MAX_BLOCKING_CALLS,
    MAX_LOST_SHARE,
    MIN_LINKED_SHARE,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy as np
    from numpy.typing import NDArray

    from paro_advise.trace_parsers.kineto.host_rows import HostRows
    from paro_advise.trace_parsers.kineto.rows import KinetoRows
    from paro_advise.trace_parsers.tables import HostSpan

_GRAPH_LAUNCH = re.compile(r"^(?:cuda|cu|hip)GraphLaunch")
# Calls in which the host waits for the device. A copy to pageable memory waits although it is called asynchronous.
_BLOCKING = re.compile(
    r"^(?:cuda|hip|cu)(?:Stream|Device|Event|Ctx)Synchronize|^(?:cuda|hip)Memcpy(?:Async|WithStream)?$"
)


def needs_launches(rows: KinetoRows) -> bool:
    """Tell whether the launches of a trace that was read without them would change what it says.

    They link kernels to their host calls where ids do not (torch before 2.1), tell which step a kernel belongs to
    where the device lags behind the host, why a device idles, and whether its first kernels are missing.
    """
    import numpy as np

    if not len(rows.device.start) or not len(rows.host.start):
        return False
    start = np.array(rows.device.start)
    end = start + np.maximum(np.array(rows.device.duration), 0.0)
    span = float(end.max() - start.min())
    if _is_loosely_linked(rows, start) or _busy_us(start, end) < (1 - IDLE_SHARE) * span:
        return True
    cuts = _cuts_us(rows)
    if not len(cuts):
        return False
    step_us = float(np.median(np.diff(cuts))) if len(cuts) > 1 else span
    if float(start.min() - cuts[0]) > IDLE_SHARE * step_us:
        return True
    last_us = _end_of_marks_us(rows)
    behind = end > last_us
    return bool(behind.any()) and _busy_us(np.maximum(start[behind], last_us), end[behind]) > LAG_SHARE * step_us


def lit_steps(
    steps: Sequence[HostSpan], host: HostRows, correlation: NDArray[np.int64]
) -> tuple[tuple[HostSpan, ...], int]:
    """Leave out first steps whose kernels were launched but not recorded, as where the device's recorder began late.

    Args:
        steps: by start.
        host: rows with launches; without them nothing is left out.
        correlation: of the device's rows.

    Returns:
        the steps that are left, and how many kernels were launched before the first with a row (0 where none is left
        out).
    """
    import numpy as np

    launches = host.kernel_launches()
    recorded = np.isin(host.correlation[launches], correlation)
    if not recorded.any() or recorded[0]:
        return tuple(steps), 0
    launch_us = host.start_us[launches]
    lost_us = launch_us[: int(np.argmax(recorded))]
    lit = [
        step
        for step in steps
        if _count(lost_us, step) <= MAX_LOST_SHARE * _count(launch_us, step) or step.start_us > lost_us[-1]
    ]
    return tuple(lit), len(lost_us) if len(lit) < len(steps) else 0


def _count(times_us: NDArray[np.float64], step: HostSpan) -> int:
    """Return how many of the times, in order, lie in a step."""
    import numpy as np

    low, high = np.searchsorted(times_us, (step.start_us, step.end_us))
    return int(high - low)


def _is_loosely_linked(rows: KinetoRows, start_us: NDArray[np.float64]) -> bool:
    """Tell whether communication kernels lack an issuing call, or run in a later step than it."""
    import numpy as np

    kinds = np.array([kind_of_kernel(name) == KernelKind.COMMUNICATION for name in rows.device.names])
    calls = np.array([name.startswith(CALL_NAMES) for name in rows.host.names])
    mine = kinds[np.array(rows.device.name)]
    theirs = calls[np.array(rows.host.name)]
    kernels, known = np.array(rows.device.external)[mine], np.array(rows.host.external)[theirs]
    # Calls whose kernels are missing launched them all the same.
    described = np.array([name in COMMS_ROWS for name in rows.host.names])[np.array(rows.host.name)]
    issued_ids = np.array(rows.host.external)[described]
    num_without = len(np.setdiff1d(issued_ids[issued_ids >= 0], np.array(rows.device.external)))
    if num_without > MAX_LOST_SHARE * len(issued_ids):
        return True
    if not len(kernels):
        return len(known) > 0
    order = np.argsort(known, kind="stable")
    place = np.minimum(np.searchsorted(known[order], kernels), max(0, len(known) - 1))
    linked = (known[order][place] == kernels) & (kernels >= 0) if len(known) else np.zeros(len(kernels), dtype=bool)
    if linked.sum() < MIN_LINKED_SHARE * len(kernels):
        return True
    issued = np.array(rows.host.start)[theirs][order][place][linked]
    steps = _cuts_us(rows)
    # A kernel that starts in a later step than its call was launched by a host that runs ahead.
    ahead = np.searchsorted(steps, start_us[mine][linked], side="right") > np.searchsorted(steps, issued, side="right")
    return bool(ahead.mean() > LAG_SHARE)


def num_replayed(rows: KinetoRows) -> tuple[int, int]:
    """Return how many communication kernels graphs replayed, where launches were read, and how many there are."""
    import numpy as np

    replays = np.array([bool(_GRAPH_LAUNCH.match(name)) for name in rows.host.names], dtype=bool)
    kinds = np.array([kind_of_kernel(name) == KernelKind.COMMUNICATION for name in rows.device.names], dtype=bool)
    if not replays.any() or not kinds.any():
        return 0, 0
    launched = np.array(rows.host.correlation)[replays[np.array(rows.host.name)]]
    sent = np.array(rows.device.correlation)[kinds[np.array(rows.device.name)]]
    return int(np.isin(sent[sent >= 0], launched).sum()), len(sent)


def _cuts_us(rows: KinetoRows) -> NDArray[np.float64]:
    """Return where steps begin on the host, in order: at the profiler's marks, else where optimizers' steps end."""
    import numpy as np

    starts, names, marks = np.array(rows.host.start), np.array(rows.host.name), _are_marks(rows)
    if marks.any():
        return np.sort(starts[marks])
    steps = np.array([name.startswith("Optimizer.step#") for name in rows.host.names])[names]
    return np.sort(starts[steps] + np.maximum(np.array(rows.host.duration)[steps], 0.0))


def _are_marks(rows: KinetoRows) -> NDArray[np.bool_]:
    """Mark the host rows that are the profiler's steps."""
    import numpy as np

    found: NDArray[np.bool_] = np.array([name.startswith("ProfilerStep") for name in rows.host.names])[
        np.array(rows.host.name)
    ]
    return found


def _end_of_marks_us(rows: KinetoRows) -> float:
    """Return where the profiler's last mark of a step ends on the host; without marks nothing lies behind it."""
    import numpy as np

    marks = _are_marks(rows)
    ends = np.array(rows.host.start)[marks] + np.maximum(np.array(rows.host.duration)[marks], 0.0)
    return float(ends.max()) if len(ends) else np.inf


def _busy_us(start_us: NDArray[np.float64], end_us: NDArray[np.float64]) -> float:
    """Return the length of the union of intervals."""
    import numpy as np

    order = np.argsort(start_us, kind="stable")
    start, end = start_us[order], np.maximum.accumulate(end_us[order])
    gaps = np.maximum(start[1:] - end[:-1], 0.0)
    return float(end[-1] - start[0] - gaps.sum())


def blocking_calls(host: HostRows) -> tuple[tuple[float, float], ...]:
    """Return (start_us, end_us) of the calls in which the host waited for the device, by start."""
    import numpy as np

    named = host.mask_of_names(bool(_BLOCKING.match(name)) for name in host.names)
    calls = (host.kind == HostKind.RUNTIME) | (host.kind == HostKind.WAITING)
    mask = calls & named & (host.end_us - host.start_us >= LONG_CALL_US)
    index = np.flatnonzero(mask)[:MAX_BLOCKING_CALLS]
    return tuple(zip(host.start_us[index].tolist(), host.end_us[index].tolist(), strict=True))
