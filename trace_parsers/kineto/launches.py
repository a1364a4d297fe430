"""What the calls of a device's runtime tell, and when a trace must be read again with all its operators."""

from __future__ import annotations

import itertools
import re
from typing import TYPE_CHECKING

from paro_advise.trace_parsers.kineto.collectives.host_calls import CALL_NAMES, COMMS_ROWS, rows_of_names
from paro_advise.trace_parsers.kineto.columns import HostKind
from paro_advise.trace_parsers.kineto.constants import (
    LONG_CALL_US,
    MAX_BLOCKING_CALLS,
    MAX_LOST_SHARE,
    MIN_LINKED_SHARE,
)
from paro_advise.trace_parsers.kineto.host_rows import sort_host_rows
from paro_advise.trace_parsers.kineto.phases import backward_passes

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy as np
    from numpy.typing import NDArray

    from paro_advise.trace_parsers.kineto.host_rows import HostRows
    from paro_advise.trace_parsers.kineto.rows import KinetoRows
    from paro_advise.trace_parsers.tables import HostSpan

_REDUCES = re.compile(r"^(?:c10d::_?|_c10d_functional::|nccl:)(?:all)?_?reduce")
_GRAPH_LAUNCH = re.compile(r"^(?:cuda|cu|hip)GraphLaunch")
# Calls in which the host waits for the device. A copy to pageable memory waits although it is called asynchronous.
_BLOCKING = re.compile(
    r"^(?:cuda|hip|cu)(?:Stream|Device|Event|Ctx)Synchronize|^(?:cuda|hip)Memcpy(?:Async|WithStream)?$"
)


def needs_operators(rows: KinetoRows) -> bool:
    """Tell whether a device's trace that was read without most of its operators would say more with them.

    They lead from kernels to the calls that issue collectives where ids do not (torch before 2.1), and tell where the
    next forward pass begins, in front of which a framework may still reduce gradients of the last one.
    """
    if not len(rows.device.start) or not len(rows.host.start):
        return False
    return _lacks_issuers(rows) or _reduces_between_passes(rows)


def _lacks_issuers(rows: KinetoRows) -> bool:
    import numpy as np

    kernels = np.array(rows.device.external)[rows.device.are_of_communication()]
    known = np.array(rows.host.external)[rows_of_names(rows.host, CALL_NAMES)]
    if not len(kernels):
        return len(known) > 0
    linked = np.isin(kernels, known) & (kernels >= 0)
    return bool(linked.sum() < MIN_LINKED_SHARE * len(kernels))


def _reduces_between_passes(rows: KinetoRows) -> bool:
    """Tell whether gradients may be reduced behind a backward pass that another one of its step follows."""
    import numpy as np

    host = sort_host_rows(rows.host, np.array(rows.host.start), np.maximum(np.array(rows.host.duration), 0.0))
    cuts = host.mask_of_names(name.startswith(("ProfilerStep", "Optimizer.step#")) for name in host.names)
    calls_us, cuts_us = _reductions_us(rows), host.start_us[cuts]
    for (_, end), (following, _) in itertools.pairwise(backward_passes(host)):
        between = np.searchsorted(cuts_us, (end, following))
        reduced = np.searchsorted(calls_us, (end, following))
        if between[0] == between[1] and reduced[0] < reduced[1]:
            return True
    return False


def _reductions_us(rows: KinetoRows) -> NDArray[np.float64]:
    """Return when (us) the host issues what may be a reduction, in order: a call that does not say what it is may."""
    import numpy as np

    told = {row: args.collective for row, args in rows.host.comm if isinstance(args.collective, str)}
    names = rows.host.names.values_in_order()
    mask = np.array([bool(_REDUCES.match(name)) for name in names])[np.array(rows.host.name)]
    for row in rows_of_names(rows.host, COMMS_ROWS):
        mask[row] = "reduce" in told.get(row, "reduce")
    found: NDArray[np.float64] = np.sort(np.array(rows.host.start)[mask])
    return found


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


def num_replayed(rows: KinetoRows) -> tuple[int, int]:
    """Return how many communication kernels graphs replayed, where launches were read, and how many there are."""
    import numpy as np

    replays = np.array([bool(_GRAPH_LAUNCH.match(name)) for name in rows.host.names], dtype=bool)
    if not replays.any():
        return 0, 0
    launched = np.array(rows.host.correlation)[replays[np.array(rows.host.name)]]
    sent = np.array(rows.device.correlation)[rows.device.are_of_communication()]
    return int(np.isin(sent[sent >= 0], launched).sum()), len(sent)


def blocking_calls(host: HostRows) -> tuple[tuple[float, float], ...]:
    """Return (start_us, end_us) of the calls in which the host waited for the device, by start."""
    import numpy as np

    named = host.mask_of_names(bool(_BLOCKING.match(name)) for name in host.names)
    mask = (host.kind == HostKind.RUNTIME) & named & (host.end_us - host.start_us >= LONG_CALL_US)
    index = np.flatnonzero(mask)[:MAX_BLOCKING_CALLS]
    return tuple(zip(host.start_us[index].tolist(), host.end_us[index].tolist(), strict=True))
