"""Training logs as text: Megatron, DeepSpeed, Hugging Face Trainer, torchtitan, fault injection."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from paro_advise.trace_parsers.logs.constants import MAX_ODD_SHARE
from paro_advise.trace_parsers.logs.text_scan import parse_text

if TYPE_CHECKING:
    from paro_advise.trace_parsers.bytes.readable import Readable
    from paro_advise.trace_parsers.tables import ParsedSource, SourceFile

_STRUCTURED = re.compile(rb"\s*(?:<[?!a-z]|\{\s*[\"}]|\[\s*\{)")


def looks_like(head: bytes) -> bool:
    """Return whether the first 64 KiB are text.

    What makes it a training log may come later, so ask the other readers first.
    """
    if not head or b"\0" in head or _STRUCTURED.match(head):
        return False
    # A character cut at the end of the head is replaced too.
    text = head.decode("utf-8", "replace")
    odd = sum(1 for mark in text if mark == "\ufffd" or (mark < " " and mark not in "\t\n\r\x1b\x08\f"))
    return odd <= 1 + MAX_ODD_SHARE * len(text)


def parse(data: Readable, source: SourceFile) -> ParsedSource:
    """Read what the log says about the run into ``header.remarks`` (units in the names).

    Raises:
        BrokenInputError: nothing known was found.
    """
    return parse_text(data, source, "the log of a training run")
