"""Records a training run without changing it: traces of chosen steps, and facts of every step."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from paro_advise.runtime.capture.callback import CaptureCallback
    from paro_advise.runtime.capture.context import capture

__all__ = ["CaptureCallback", "capture"]

_HOMES = {
    "CaptureCallback": "paro_advise.runtime.capture.callback",
    "capture": "paro_advise.runtime.capture.context",
}


def __getattr__(name: str) -> object:
    """Import torch only when something that needs it is asked for."""
    if name in _HOMES:
        member: object = getattr(import_module(_HOMES[name]), name)
        return member
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
