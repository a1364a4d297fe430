"""Numbers for people: one place that turns units into text."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

_SIZE = re.compile(r"^\s*([0-9]*\.?[0-9]+)\s*(B|[KMGT]B?|[KMGT]iB?)\s*$", re.IGNORECASE)
_UNITS: dict[str, int] = {
    "b": 1,
    **{f"{letter}{end}": 1000**power for power, letter in enumerate("kmgt", start=1) for end in ("", "b")},
    **{f"{letter}{end}": 1024**power for power, letter in enumerate("kmgt", start=1) for end in ("i", "ib")},
}


def bytes_of(text: str) -> float | None:
    """Return the bytes of a size such as 80GiB or 256MB, None where it is none."""
    found = _SIZE.match(text)
    if not found:
        return None
    number, unit = found.groups()
    return float(number) * float(_UNITS[unit.lower()])


def time_text(value_us: float | None) -> str:
    """Return a time with three significant digits, "unknown" for None."""
    if value_us is None:
        return "unknown"
    size = abs(value_us)
    if size < 5e-4:  # below what profilers write; sums of float64 leave as much
        return "0 us"
    if size >= 999.5e6:
        return f"{value_us / 1e6:,.0f} s"
    if size >= 999_500:
        return f"{value_us / 1e6:.3g} s"
    if size >= 999.5:
        return f"{value_us / 1e3:.3g} ms"
    return f"{value_us:.3g} us"


def signed_text(value_pct: float) -> str:
    """Return a change in percent with its sign and one digit; what rounds to nothing has a plus."""
    return f"{round(value_pct, 1) + 0.0:+.1f}"


def bytes_text(value: float | None) -> str:
    """Return a size in binary units (1024), "unknown" for None."""
    if value is None:
        return "unknown"
    for unit, size in (("PiB", 1 << 50), ("TiB", 1 << 40), ("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        # Three digits hold 999; from there on to 1,023 they are 0.976 and more of the next unit.
        if abs(value) >= 999.5 * size / 1024:
            return f"{value / size:.3g} {unit}"
    return f"{value:.0f} B"


def share_text(value: float | None) -> str:
    """Return a share as percentage, "unknown" for None."""
    return "unknown" if value is None else f"{value:.1%}"


def gbps_text(value: float | None) -> str:
    """Return a bandwidth in GB/s (1e9 bytes/s), "unknown" for None."""
    if value is None:
        return "unknown"
    return f"{value:,.0f} GB/s" if abs(value) >= 999.5 else f"{value:.3g} GB/s"


def count_text(value: float | None) -> str:
    """Return a count: whole numbers plain, large ones as 7.3 M or 1.2 B, "unknown" for None."""
    if value is None:
        return "unknown"
    for unit, size in (("B", 1e9), ("M", 1e6)):
        if abs(value) >= size:
            return f"{value / size:.4g} {unit}"
    return f"{value:.0f}" if abs(value - round(value)) < 0.05 else f"{value:.1f}"


def number_ranges(numbers: Sequence[int]) -> str:
    """Write 1-3, 7 for 1, 2, 3, 7; at most eight pieces."""
    pieces: list[list[int]] = []
    for number in numbers:
        if pieces and number == pieces[-1][1] + 1:
            pieces[-1][1] = number
        else:
            pieces.append([number, number])
    text = [f"{low}-{high}" if high > low else str(low) for low, high in pieces]
    return ", ".join(text[:8]) + (", ..." if len(text) > 8 else "")
