"""Makes a strategy happen in a training process."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from paro_advise.runtime.sharding.module import engine_of
    from paro_advise.runtime.sharding.saving.checkpoint import (
        latest_checkpoint,
        load_checkpoint,
        save_checkpoint,
        save_checkpoint_async,
    )
    from paro_advise.runtime.sharding.saving.streaming import stream_state_dict
    from paro_advise.runtime.sharding.shard import shard
    from paro_advise.runtime.sharding.switching import SwitchReport, switch

__all__ = [
    "SwitchReport",
    "engine_of",
    "latest_checkpoint",
    "load_checkpoint",
    "save_checkpoint",
    "save_checkpoint_async",
    "shard",
    "stream_state_dict",
    "switch",
]

_SHARDING = "paro_advise.runtime.sharding"
_HOMES = {
    "SwitchReport": f"{_SHARDING}.switching",
    "engine_of": f"{_SHARDING}.module",
    "latest_checkpoint": f"{_SHARDING}.saving.checkpoint",
    "load_checkpoint": f"{_SHARDING}.saving.checkpoint",
    "save_checkpoint": f"{_SHARDING}.saving.checkpoint",
    "save_checkpoint_async": f"{_SHARDING}.saving.checkpoint",
    "shard": f"{_SHARDING}.shard",
    "stream_state_dict": f"{_SHARDING}.saving.streaming",
    "switch": f"{_SHARDING}.switching",
}


def __getattr__(name: str) -> object:
    """Import torch only when something that needs it is asked for."""
    if name in _HOMES:
        member: object = getattr(import_module(_HOMES[name]), name)
        return member
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
