"""Logs of NCCL and RCCL (NCCL_DEBUG=INFO), also mixed with benchmark tables or training output."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from paro_advise.trace_parsers.logs.text_scan import parse_text

if TYPE_CHECKING:
    from paro_advise.trace_parsers.bytes.readable import Readable
    from paro_advise.trace_parsers.tables import ParsedSource, SourceFile

_MESSAGE = re.compile(rb"\[\d{1,4}\] (?:\S{1,200} )?NCCL (?:INFO|WARN|TRACE) |^NCCL (?:INFO|WARN) ", re.MULTILINE)


def looks_like(head: bytes) -> bool:
    """Return whether the first 64 KiB hold a message of NCCL."""
    return _MESSAGE.search(head) is not None and b"\0" not in head


def parse(data: Readable, source: SourceFile) -> ParsedSource:
    """Read collectives (sizes in bytes, no times), communicators, transports and choices.

    Raises:
        BrokenInputError: nothing known was found.
    """
    return parse_text(data, source, "output of NCCL_DEBUG=INFO")
