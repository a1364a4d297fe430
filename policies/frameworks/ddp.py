"""Frameworks that a trace shows and that have no sharding settings of their own to export."""

from __future__ import annotations

from paro_advise.core.framework import Framework
from paro_advise.policies.frameworks.model import TrainingFramework

RUNTIME_TRACES = TrainingFramework(name="", observed_as=Framework.RUNTIME, trace_marks=("paro_advise::gradient",))
ZERO_REDUNDANCY = TrainingFramework(
    name="", observed_as=Framework.DDP_ZERO, trace_marks=("Optimizer.step#ZeroRedundancyOptimizer",)
)
DDP = TrainingFramework(name="", observed_as=Framework.DDP, trace_marks=("DistributedDataParallel.",))
