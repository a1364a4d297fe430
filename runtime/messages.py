"""What the runtime says inside a training process.

Not by ``print``: scripts put a function of their own in its place that is silent on all ranks but one, and knows no
``file``.
"""

from __future__ import annotations

import contextlib
import sys


def tell(text: str) -> None:
    """Write a message on stderr; one that cannot be written ends no training."""
    write_lines(f"paro-advise: {text}")


def write_lines(*lines: str) -> None:
    """Write lines on stderr as they are."""
    with contextlib.suppress(OSError, ValueError, AttributeError):  # gone, closed, or None
        sys.stderr.write("".join(f"{line}\n" for line in lines))
        sys.stderr.flush()
