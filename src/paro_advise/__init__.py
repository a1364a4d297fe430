"""Finds what limits a ZeRO, FSDP or DeepSpeed training run, recommends a sharding strategy and applies it.

The rooms of the package lie at the top of the repository; the links beside this file give them their import names.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from paro_advise.advisor.api import AnalysisResult, ComparisonResult, PlanResult, analyze, compare, recommend

__all__ = ["AnalysisResult", "ComparisonResult", "PlanResult", "analyze", "compare", "recommend"]


def __getattr__(name: str) -> object:
    """Import the interface only when something of it is asked for."""
    if name in __all__:
        from paro_advise.advisor import api

        member: object = getattr(api, name)
        return member
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
