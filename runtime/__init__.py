"""Makes a strategy happen in a training process."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from paro_advise.runtime.sharding.shard import engine_of, shard

__all__ = ["engine_of", "shard"]

_HOMES = {
    "shard": "paro_advise.runtime.sharding.shard",
    "engine_of": "paro_advise.runtime.sharding.shard",
}


def __getattr__(name: str) -> Any:
    """Import torch only when something that needs it is asked for."""
    if name in _HOMES:
        return getattr(import_module(_HOMES[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
