"""The training frameworks that a run is recognised as."""

from __future__ import annotations

from enum import StrEnum


class Framework(StrEnum):
    """What shards the model of a run, as reports name it."""

    FSDP1 = "FSDP1"
    FSDP2 = "FSDP2"
    DDP = "DDP"
    DDP_ZERO = "DDP + ZeroRedundancyOptimizer"
    DEEPSPEED = "DeepSpeed"
    MEGATRON = "Megatron-LM"
    RUNTIME = "paro-advise runtime"
    UNKNOWN = "unknown"

    @property
    def is_fsdp(self) -> bool:
        """Tell whether it is FSDP of either version."""
        return self in (Framework.FSDP1, Framework.FSDP2)

    @property
    def is_ddp(self) -> bool:
        """Tell whether DDP's reducer reduces the gradients."""
        return self in (Framework.DDP, Framework.DDP_ZERO)
