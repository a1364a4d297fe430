"""When a rank computed what the model's forward and backward passes launched."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from paro_advise.advisor.facts.constants import LAUNCHES_KNOWN_SHARE
from paro_advise.advisor.facts.intervals import Intervals
from paro_advise.trace_parsers.kernel_kinds import KernelKind
from paro_advise.trace_parsers.tables import PassKind

if TYPE_CHECKING:
    from paro_advise.trace_parsers.tables import EventTables


class Passes(NamedTuple):
    """When what was launched in forward and in backward passes computed."""

    forward: Intervals
    backward: Intervals


def computing_passes(events: EventTables, compute: Intervals) -> Passes | None:
    """Return when passes computed, None where it is not known what launched most of the computing.

    Args:
        events: of a rank.
        compute: when it computed; operators of a CPU run may hold waiting.
    """
    device = events.device
    if "pass" not in device.columns or not events.backward_passes:
        return None
    start, end = device["start_us"].to_numpy(), device["end_us"].to_numpy()
    kinds = device["pass"].to_numpy()
    computes = device["kind"].to_numpy() == KernelKind.COMPUTE
    took = np.where(computes, end - start, 0.0)
    if took[kinds != PassKind.UNKNOWN].sum() < LAUNCHES_KNOWN_SHARE * took.sum():
        return None
    forward, backward = (computes & (kinds == kind) for kind in (PassKind.FORWARD, PassKind.BACKWARD))
    return Passes(
        Intervals.union_of(start[forward], end[forward]).meet(compute),
        Intervals.union_of(start[backward], end[backward]).meet(compute),
    )
