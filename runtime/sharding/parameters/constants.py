"""Thresholds of sharded parameters (value, unit; meaning; origin)."""

from __future__ import annotations

SMALL_PADDING = 0.02  # of a parameter; padding up to which it is cut by its first dimension; assumed: nobody misses it
