"""Which device rows the model's forward and backward passes launched.

Profilers number operators as they begin, and a kernel carries the number of the operator that launched it: numbers tell
the pass where launches were not read.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeAlias

from paro_advise.trace_parsers.kineto.columns import HostKind
from paro_advise.trace_parsers.kineto.constants import MAX_UNORDERED_SHARE
from paro_advise.trace_parsers.kineto.host_rows import AUTOGRAD_NODE
from paro_advise.trace_parsers.tables import PassKind

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy as np
    from numpy.typing import NDArray

    from paro_advise.trace_parsers.kineto.device.device_table import DeviceRows
    from paro_advise.trace_parsers.kineto.host_rows import HostRows


def kinds_by_launch(
    issued_us: NDArray[np.float64], forward: Sequence[tuple[float, float]], backward: Sequence[tuple[float, float]]
) -> NDArray[np.uint8]:
    """Return the PassKind of each row.

    Args:
        issued_us: when the host launched it, NaN when unknown.
        forward, backward: (start_us, end_us) of passes on the host, in order.
    """
    import numpy as np

    kinds = np.where(np.isfinite(issued_us), PassKind.NONE, PassKind.UNKNOWN).astype(np.uint8)
    for windows, kind in ((forward, PassKind.FORWARD), (backward, PassKind.BACKWARD)):
        if windows:
            kinds[_within(issued_us, *np.array(windows).T)] = kind
    return kinds


def kinds_of_rows(
    rows: DeviceRows, host: HostRows, forward: Sequence[tuple[float, float]], backward: Sequence[tuple[float, float]]
) -> NDArray[np.uint8]:
    """Return the PassKind of each device row, by its launch where that was read, else by the number of its operator."""
    import numpy as np

    kinds = kinds_by_launch(rows.launch_us, forward, backward)
    numbered = np.flatnonzero((kinds == PassKind.UNKNOWN) & (rows.external >= 0))
    bounds = _numbers(host, forward, backward) if len(numbered) and rows.names_operators else None
    if bounds is not None:
        kinds[numbered] = PassKind.NONE
        for (lows, highs), kind in zip(bounds, (PassKind.FORWARD, PassKind.BACKWARD), strict=True):
            kinds[numbered[_within(rows.external[numbered], lows, highs)]] = kind
    return kinds


def _within(values: _Values, lows: _Values, highs: _Values) -> NDArray[np.bool_]:
    """Mark values in windows, which begin with their lows, in order, and end before their highs."""
    import numpy as np

    place = np.searchsorted(lows, values, side="right") - 1
    inside: NDArray[np.bool_] = (place >= 0) & (values < highs[np.maximum(place, 0)])
    return inside


_Values: TypeAlias = "NDArray[np.float64] | NDArray[np.int64]"
_Bounds: TypeAlias = "tuple[NDArray[np.int64], NDArray[np.int64]]"


def _numbers(
    host: HostRows, forward: Sequence[tuple[float, float]], backward: Sequence[tuple[float, float]]
) -> tuple[_Bounds, _Bounds] | None:
    """Return the numbers of each pass's operators, from and up to, of forward and of backward passes.

    None where numbers do not follow time.

    What the last node of a backward pass runs begins after it and counts as none: it adds up a gradient.
    """
    import numpy as np

    named = (host.kind == HostKind.OPERATOR) | (host.kind == HostKind.ANNOTATION)
    rows = np.flatnonzero(named & (host.external >= 0))
    ids, starts = host.external[rows], host.start_us[rows]
    if not len(rows) or not backward or (np.diff(ids) < 0).sum() > MAX_UNORDERED_SHARE * len(rows):
        return None
    highest = np.maximum.accumulate(ids)

    def until(times_us: NDArray[np.float64]) -> NDArray[np.int64]:
        place = np.searchsorted(starts, times_us, side="right") - 1
        return np.where(place >= 0, highest[np.maximum(place, 0)], -1)

    begins, ends = np.array(backward).T
    nodes = np.flatnonzero(host.mask_of_names(name.startswith(AUTOGRAD_NODE) for name in host.names)[rows])
    if not len(nodes):
        return None
    last = nodes[np.maximum(np.searchsorted(starts[nodes], ends, side="right") - 1, 0)]
    first_of_backward = until(begins)
    if (highest[last] <= first_of_backward).any():  # of a pass of one node nothing would be left
        return None
    lows = until(np.array([low for low, _ in forward]))
    return (lows + 1, first_of_backward), (first_of_backward, highest[last] + 1)
