"""A hang as text for a terminal."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import TYPE_CHECKING

from paro_advise.advisor.wording.quantities import number_ranges
from paro_advise.core.plural import plural

if TYPE_CHECKING:
    from collections.abc import Sequence

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
        lines += [f"  rank {one.rank:<6} is in: {one.stack}" for one in hang.culprits if one.stack]
    if hang.places:
        lines += ["", "main threads"]
        lines += [f"  {number_ranges(ranks)} in {place}" for place, ranks in list(hang.places.items())[:_SHOWN]]
        if len(hang.places) > _SHOWN:
            lines.append(f"  ... and {len(hang.places) - _SHOWN} more places")
    awaiting = [wait for wait in hang.waits if awaited(wait)] or list(hang.waits)
    if awaiting:
        lines += ["", "waits"]
        alike = _alike(awaiting)
        lines += [_line(waits) for waits in alike[:_SHOWN]]
        if len(alike) > _SHOWN:
            lines.append(f"  ... and {sum(map(len, alike[_SHOWN:]))} more")
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


def awaited_or_others(wait: Wait) -> str:
    """Return the same; for nobody in particular ranks wait for each other, one alone for what no dump tells."""
    return awaited(wait) or ("each other" if len(wait.waiting) > 1 else "what the dumps do not tell")


def _alike(waits: Sequence[Wait]) -> list[list[Wait]]:
    """Return waits that differ in their numbers only together, as the transfers that one rank has issued to another."""
    found: dict[Wait, list[Wait]] = {}
    for wait in waits:
        # The number comes after the name, which holds numbers of ranks, and before the size and the place.
        unnumbered = replace(wait, seq=0, operation=re.sub(rf" {wait.seq}(?=,| \(|$)", "", wait.operation, count=1))
        found.setdefault(unnumbered, []).append(wait)
    return [sorted(alike, key=lambda wait: wait.seq) for alike in found.values()]


def _line(waits: Sequence[Wait]) -> str:
    wait, who = waits[0], awaited_or_others(waits[0])
    more = f" and in {len(waits) - 1} more of these" if len(waits) > 1 else ""
    return f"  {number_ranges(wait.waiting)} in {wait.operation}{more}, group {group_name(wait)}: for {who}"
