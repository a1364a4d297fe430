"""Reads one input into facts; what it cannot use is a value, so that one file never ends the rest."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import TYPE_CHECKING

from paro_advise.advisor.facts.reading.cache import entry_name, load, store
from paro_advise.errors import BrokenInputError, InputError, UsageError
from paro_advise.trace_parsers.notice import Notice, Severity

if TYPE_CHECKING:
    from paro_advise.advisor.facts.model import RankFacts
    from paro_advise.trace_parsers.bytes.blocks import SourceRef


def read_one(ref: SourceRef, cache: str | None) -> RankFacts | InputError:
    """Read one input, or its cached facts.

    Args:
        ref: the input.
        cache: folder or address of cached facts, None to read it anew.
    """
    from paro_advise.advisor.facts.rank_facts import rank_facts
    from paro_advise.trace_parsers.bytes.local_copy import local_copy
    from paro_advise.trace_parsers.read import read_source

    try:
        name = entry_name(ref) if cache else ""
        if cache and name and (known := load(cache, name)):
            return known
        with local_copy(ref) as copy:
            facts = _with_missing(rank_facts(read_source(copy)), copy)
        if cache and name and not copy.missing_bytes:
            store(cache, name, facts)
    except InputError as error:
        return error
    except UsageError as error:  # of a store that this machine cannot ask
        return InputError(error.what, where=ref.label, hint=error.hint)
    except OSError as error:
        return InputError(f"an input must be a readable file: {error.strerror or error}", where=ref.label)
    except Exception as error:
        if os.environ.get("PARO_ADVISE_DEBUG"):
            raise
        return BrokenInputError(
            f"the reader failed on this input ({type(error).__name__}: {str(error)[:200]})",
            where=ref.label,
            hint="this is a defect of paro-advise: please report it with PARO_ADVISE_DEBUG=1",
        )
    return facts


def _with_missing(facts: RankFacts, copy: SourceRef) -> RankFacts:
    """Add what a store did not give."""
    if not copy.missing_bytes:
        return facts
    notice = Notice(
        code="Q109",
        severity=Severity.WARNING,
        message=f"the store broke off: {copy.missing_bytes:,} bytes of it were not read",
        help="read it again when the store answers; what came is not cached",
    )
    return replace(facts, notices=(*facts.notices, notice))
