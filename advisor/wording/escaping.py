"""Text from inputs as it may be shown on a terminal."""

from __future__ import annotations


def plain(text: str) -> str:
    """Return text without control characters, so that an input cannot steer a terminal."""
    return "".join(char if char.isprintable() else "?" for char in text)
