"""A hang as text for a terminal."""

from __future__ import annotations

from typing import TYPE_CHECKING

from paro_advise.advisor.wording.quantities import number_ranges
from paro_advise.core.plural import plural

if TYPE_CHECKING:
    from paro_advise.advisor.hangs.model import Hang, Mismatch, Wait

# Waits, and places, in a terminal; the page and the JSON hold all.
_SHOWN = 12


def hang_text(hang: Hang) -> str:
    """Return the verdict, what the ranks at fault did last, and who waits for whom."""
    lines = [hang.text]
    missing = f"; nothing of {number_ranges(hang.ranks_missing)}" if hang.ranks_missing else ""
    lines += ["", f"Seen: {plural(len(hang.ranks), 'rank')}{missing}."]
    if hang.culprits:
        lines += ["", "at fault"]
        lines += [f"  rank {one.rank:<6} {one.cause:<9} last issued: {one.last or 'unknown'}" for one in hang.culprits]
        lines += [f"  rank {one.rank:<6} stands in: {one.stack}" for one in hang.culprits if one.stack]
    if hang.places:
        lines += ["", "main threads"]
        lines += [f"  {number_ranges(ranks)} in {place}" for place, ranks in list(hang.places.items())[:_SHOWN]]
        if len(hang.places) > _SHOWN:
            lines.append(f"  ... and {len(hang.places) - _SHOWN} more places")
    awaiting = [wait for wait in hang.waits if awaited(wait)] or list(hang.waits)
    if awaiting:
        lines += ["", "waits"]
        lines += [_line(wait) for wait in awaiting[:_SHOWN]]
        if len(awaiting) > _SHOWN:
            lines.append(f"  ... and {len(awaiting) - _SHOWN} more")
    for mismatch in hang.mismatches:
        issued = "; ".join(f"{kind} by {number_ranges(ranks)}" for kind, ranks in mismatch.issued.items())
        lines.append(f"  group {mismatch.group} {mismatch.description}, number {mismatch.seq}: {issued}")
    return "\n".join(lines)


def group_name(item: Wait | Mismatch) -> str:
    """Return the name of a process group with its description, if it has one."""
    return f"{item.group} {item.description}".strip()


def awaited(wait: Wait) -> str:
    """Return for whom ranks wait, and why, "" for nobody in particular."""
    kinds = (("never issued it", wait.absent), ("stuck before it", wait.behind), ("no dump", wait.without_dump))
    return "; ".join(f"{number_ranges(ranks)} ({why})" for why, ranks in kinds if ranks)


def _line(wait: Wait) -> str:
    who = awaited(wait) or "each other"
    return f"  {number_ranges(wait.waiting)} in {wait.operation}, group {group_name(wait)}: for {who}"
