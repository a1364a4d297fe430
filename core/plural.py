"""Counts with their nouns, for every room that says how many."""

from __future__ import annotations


def plural(count: int, noun: str, nouns: str = "") -> str:
    """Return a count with its noun or all that agrees with it: "1 step", "2 steps"; "1 event was", "2 events were".

    Args:
        count: how many, 0 or more.
        noun: what stands behind 1.
        nouns: what stands behind any other count, ``noun`` with an "s" if not given.
    """
    return f"{count:,} {noun if count == 1 else nouns or noun + 's'}"
