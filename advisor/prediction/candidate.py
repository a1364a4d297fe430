"""A way to run: what a plan compares."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from paro_advise.core.framework import Framework
from paro_advise.policies.frameworks.model import Offload, Variant
from paro_advise.policies.strategy import Collectives, Level, Strategy

if TYPE_CHECKING:
    from paro_advise.advisor.prediction.calibration import Calibration


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A way to run.

    Attributes:
        strategy: the triple.
        group_size: ranks of a group (m).
        collectives: what moves the bytes.
        gathers_once: parameters gathered for forward are kept for backward.
        replicates_each_pass: gradients are added up across groups on every micro-batch.
        overlaps_reductions: reductions run beside backward, in order.
        separate_queues: reductions do not wait for gathers.
        unit_bytes: sent at once; None for the units of the model.
        published_us: what bringing updated parameters back took where it was measured; None to model it.
        offload: states on the host.
        host_us: what that adds to a step.
        variant: what a framework's setting makes of the triple.
        backward_level: from which parameters are gathered in backward; None for the triple's.
        copy_lasts: from there in later micro-batches' forward, too.
        gather_share, reduce_share: of the bytes, that quantised parameters and gradients have.
        host_share: of the host's gaps in the run, that are left when the framework's own code is replaced.
    """

    strategy: Strategy
    group_size: int
    collectives: Collectives
    gathers_once: bool = False
    replicates_each_pass: bool = False
    overlaps_reductions: bool = True
    separate_queues: bool = True
    unit_bytes: tuple[float, ...] | None = None
    published_us: float | None = None
    offload: Offload = Offload.NONE
    host_us: float = 0.0
    variant: Variant = Variant.PLAIN
    backward_level: Level | None = None
    copy_lasts: bool = False
    gather_share: float = 1.0
    reduce_share: float = 1.0
    host_share: float = 1.0


def baseline_candidate(calibration: Calibration) -> Candidate:
    """Return how the run itself was executed."""
    is_own = calibration.framework == Framework.RUNTIME
    # FSDP on a CPU waits for every collective; DDP's reducer and our runtime do not.
    overlaps = calibration.is_gpu or is_own or calibration.framework.is_ddp
    return Candidate(
        strategy=calibration.baseline,
        group_size=calibration.baseline_group_size,
        collectives=Collectives.HO_RING if is_own else Collectives.NATIVE,
        gathers_once=calibration.gathers_once,
        replicates_each_pass=calibration.replicates_each_pass,
        overlaps_reductions=overlaps,
        separate_queues=is_own or not calibration.framework.is_fsdp,
        unit_bytes=calibration.bucket_bytes,
        published_us=calibration.published_us,
        variant=Variant.KEPT
        if calibration.gathers_once and calibration.baseline.parameter != Level.N
        else Variant.PLAIN,
    )
