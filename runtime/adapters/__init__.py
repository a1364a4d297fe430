"""Lets an unchanged training script train under a plan: the frameworks' entry points lead to our runtime."""

from __future__ import annotations

from paro_advise.runtime.adapters.redirection import redirect, use_plan

__all__ = ["redirect", "use_plan"]
