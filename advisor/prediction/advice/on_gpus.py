"""What a way to run needs beside a GPU that its prediction takes as given, and what was never timed there."""

from __future__ import annotations

from typing import TYPE_CHECKING

from paro_advise.core.framework import Framework
from paro_advise.policies.frameworks.model import Fidelity
from paro_advise.policies.frameworks.registry import exports_of
from paro_advise.policies.strategy import CollectiveBackend, Level

if TYPE_CHECKING:
    from paro_advise.advisor.prediction.calibration import Calibration
    from paro_advise.advisor.prediction.scoring import Scored

HO_RING_ON_GPUS = (
    "HO-Ring has never been timed on GPUs, where `paro-advise run` uses the backend's own collectives instead"
)
RUN_ON_GPUS = "only `paro-advise run` does it, which was never timed on more than one GPU"


def needed_of_script(calibration: Calibration, baseline: Scored, chosen: Scored) -> str:
    """Return what another way to run needs that the prediction takes as given, "" for nothing."""
    candidate, framework = chosen.candidate, calibration.framework
    if not calibration.is_gpu:
        return ""
    if candidate.collectives != CollectiveBackend.NATIVE:
        return f" The prediction does not apply to it yet: {HO_RING_ON_GPUS}."
    if candidate.by_runtime and framework != Framework.RUNTIME:
        return f" Experimental: {RUN_ON_GPUS}."
    exports = exports_of(candidate.strategy, candidate.collectives, candidate.variant, candidate.offload)
    if framework == Framework.FSDP1 and exports["fsdp1"] != Fidelity.EXACT and exports["fsdp2"] == Fidelity.EXACT:
        return " FSDP1 has no setting for it: the script has to shard by fully_shard (FSDP2)."
    sums_once = candidate.strategy.gradient == Level.I and not candidate.replicates_each_pass
    before = baseline.candidate
    is_new = sums_once and (before.strategy.gradient != Level.I or before.replicates_each_pass)
    if framework == Framework.FSDP2 and is_new and calibration.micro_batches > 1:
        return (
            " It holds where gradients are summed between groups once a step: the script has to call "
            "set_requires_all_reduce(False) in all micro-batches but the last."
        )
    return ""
