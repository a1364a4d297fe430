"""Collectives of a device that have no time: their kernels are missing, or have no duration."""

from __future__ import annotations

from typing import TYPE_CHECKING

from paro_advise.trace_parsers.kineto.collectives.host_calls import enclosing_calls

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import numpy as np
    from numpy.typing import NDArray

    from paro_advise.trace_parsers.kineto.collectives.host_calls import HostCall
    from paro_advise.trace_parsers.kineto.columns import DeviceColumns
    from paro_advise.trace_parsers.kineto.host_rows import HostRows
    from paro_advise.trace_parsers.tables import HostSpan


def untimed_us(
    host: HostRows, raw: DeviceColumns, calls: Callable[[], Sequence[HostCall]], origin_us: float
) -> tuple[NDArray[np.float64], int]:
    """Find collectives without a time on the device.

    A communication kernel takes some time, so that one of 0 us lost its duration. A call that launched a kernel which
    has no row lost it; calls that launch nothing (gloo's, or those of a group that another call launches) lost nothing.

    Args:
        host: rows, with launches where they were read.
        raw: rows of the device.
        calls: returns the host calls of collectives.
        origin_us: of the device's times.

    Returns:
        when they began or were launched (us from ``origin_us``, in order), and how many collectives there are.
    """
    import numpy as np

    start_us, duration_us = np.array(raw.start) - origin_us, np.array(raw.duration)
    is_collective = raw.are_of_communication()
    is_timeless = is_collective & ~(duration_us > 0)
    launches = host.kernel_launches()
    lost = launches[~np.isin(host.correlation[launches], np.array(raw.correlation))]
    places = list(zip(host.start_us[lost].tolist(), host.tid[lost].tolist(), strict=True))
    around = enclosing_calls(calls(), places) if places else []
    lost_us = [place[0] for place, call in zip(places, around, strict=True) if call is not None and call.tells]
    found_us = np.concatenate([start_us[is_timeless], np.array(lost_us, dtype=np.float64)])
    return np.sort(found_us), int(is_collective.sum()) + len(lost_us)


def timed_steps(steps: Sequence[HostSpan], lost_us: NDArray[np.float64]) -> tuple[HostSpan, ...]:
    """Return the steps in which no collective lost its time."""
    import numpy as np

    ends = [np.searchsorted(lost_us, (step.start_us, step.end_us)) for step in steps]
    return tuple(step for step, (low, high) in zip(steps, ends, strict=True) if low == high)
