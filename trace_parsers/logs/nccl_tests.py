"""Output of nccl-tests and rccl-tests, also inside Markdown."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from paro_advise.trace_parsers.logs.text_scan import parse_text

if TYPE_CHECKING:
    from paro_advise.trace_parsers.bytes.readable import Readable
    from paro_advise.trace_parsers.tables import ParsedSource, SourceFile

_TABLE = re.compile(rb"# Collective test starting: |#\s+size\s+count\s+type\b[^\n]*\balgbw\s+busbw\b")


def looks_like(head: bytes) -> bool:
    """Return whether the first 64 KiB hold the beginning of a benchmark's table."""
    return _TABLE.search(head) is not None and b"\0" not in head


def parse(data: Readable, source: SourceFile) -> ParsedSource:
    """Read link samples: bytes as printed, time in us (out of place where printed), GB/s.

    Raises:
        BrokenInputError: nothing known was found.
    """
    return parse_text(data, source, "a table of nccl-tests")
