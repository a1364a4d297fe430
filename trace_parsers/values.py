"""Guards against what logs and dumps may hold: numbers out of range, text without end."""

from __future__ import annotations

import math

from paro_advise.trace_parsers.constants import (
    INT64_MAX,
    MAX_INTEGER_DIGITS,
    MAX_NUMBER,
    MAX_NUMBER_DIGITS,
    MAX_TEXT,
)


def bounded_int(value: object, low: int = 0, high: int = INT64_MAX) -> int | None:
    """Return an integer within [low, high], None for anything else."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    if isinstance(value, float) and not (math.isfinite(value) and value.is_integer()):
        return None
    return int(value) if low <= value <= high else None


def bounded_float(value: object, high: float = MAX_NUMBER) -> float | None:
    """Return a finite number within [0, high], None for anything else."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return float(value) if 0.0 <= value <= high else None


def bounded_text(value: object, limit: int = MAX_TEXT) -> str:
    """Return text of at most ``limit`` characters, "" for anything that is not text."""
    if not isinstance(value, str):
        return ""
    cut = value[:limit]
    # JSON and pickles can hold halves of surrogate pairs, which no table can.
    return cut if cut.isascii() else cut.encode("utf-8", "replace").decode("utf-8")


def parse_float(text: str) -> float | None:
    """Return the finite, non-negative number that a log printed, None for anything else."""
    try:
        return bounded_float(float(text)) if len(text) <= MAX_NUMBER_DIGITS else None
    except ValueError:
        return None


def parse_int(text: str, base: int = 10) -> int | None:
    """Return the integer in [0, 2^63) that a log printed, None for anything else."""
    try:
        return bounded_int(int(text[:MAX_INTEGER_DIGITS], base)) if len(text) <= MAX_INTEGER_DIGITS else None
    except ValueError:
        return None
