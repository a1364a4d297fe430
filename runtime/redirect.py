"""The public name of ``use_plan`` in scripts that ``paro-advise apply`` has edited."""

from __future__ import annotations

from paro_advise.runtime.adapters import use_plan

__all__ = ["use_plan"]
