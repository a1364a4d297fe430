"""Output of DeepSpeed's communication logger, also inside Markdown or a training log."""

from __future__ import annotations

from typing import TYPE_CHECKING

from paro_advise.trace_parsers.logs.text_scan import parse_text

if TYPE_CHECKING:
    from paro_advise.trace_parsers.bytes.readable import Readable
    from paro_advise.trace_parsers.tables import ParsedSource, SourceFile


def looks_like(head: bytes) -> bool:
    """Return whether the first 64 KiB hold a summary table or a verbose line."""
    has_table = b"Comm. Op " in head and b"Message Size" in head
    return (has_table or b"| comm op: " in head) and b"\0" not in head


def parse(data: Readable, source: SourceFile) -> ParsedSource:
    """Read link samples: bytes of the full buffer, time in us (averages), GB/s.

    Raises:
        BrokenInputError: nothing known was found.
    """
    return parse_text(data, source, "a summary of DeepSpeed's communication logger")
