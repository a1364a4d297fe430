"""Where the processes of a hung job are, by their Python stacks (pure)."""

from __future__ import annotations

from collections import defaultdict
from pathlib import PurePath
from typing import TYPE_CHECKING

from paro_advise.advisor.hangs.model import FORMAT, Cause, Culprit, Hang
from paro_advise.advisor.hangs.words import blame, named_ranks, verb

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from paro_advise.trace_parsers.dumps.stacks import Frame, Stacks

# Files in which a collective is issued or waited for; parts of paths.
_COLLECTIVES = (
    "torch/distributed/distributed_c10d.py", "torch/distributed/_functional_collectives.py", "deepspeed/comm/",
)  # fmt: skip
_WRAPPERS = 4  # calls of torch's and DeepSpeed's between the innermost one and the collective, at most; seen
_SHOWN = 3  # calls, the innermost first


def diagnose_stacks(stacks: Mapping[int, Stacks]) -> Hang:
    """Return which ranks do something else while most wait for others, from nothing but their stacks.

    Args:
        stacks: by rank of the job.
    """
    places: defaultdict[str, list[int]] = defaultdict(list)
    for rank in sorted(stacks):
        places[location_text(stacks[rank])].append(rank)
    waiting = [rank for rank in sorted(stacks) if is_waiting(stacks[rank])]
    working = [rank for rank in sorted(stacks) if rank not in waiting]
    # Who waits for its device does so in the script by its Python stack, so that of two places either may be such.
    working_places = {location_text(stacks[rank]) for rank in working}
    culprits = [
        Culprit(
            rank=rank,
            cause=Cause.HOST,
            why=f"is in {location_text(stacks[rank])}, while {named_ranks(waiting)} {verb(waiting)} in collectives",
            last="",
            stack=location_text(stacks[rank]),
        )
        for rank in (working if len(working) < len(waiting) and len(working_places) == 1 else ())
    ]
    highest = max(stacks, default=-1)
    return Hang(
        format=FORMAT.name,
        format_version=FORMAT.version,
        text=_text(culprits, places),
        culprits=tuple(culprits),
        ranks=tuple(sorted(stacks)),
        ranks_missing=tuple(rank for rank in range(highest) if rank not in stacks),
        waits=(),
        mismatches=(),
        circle=(),
        places={place: tuple(ranks) for place, ranks in places.items()},
    )


def is_waiting(stacks: Stacks) -> bool:
    """Tell whether any thread of a process is in a collective."""
    return any(_waits(frame) for frames in (stacks.main, *stacks.others) for frame in frames[:_WRAPPERS])


def location_text(stacks: Stacks) -> str:
    """Return where the main thread is: its innermost calls."""
    return " < ".join(_frame_text(frame) for frame in stacks.main[:_SHOWN])


def _text(culprits: Sequence[Culprit], places: Mapping[str, Sequence[int]]) -> str:
    if culprits:
        return blame(culprits)
    where = "; ".join(f"{named_ranks(ranks)} in {place}" for place, ranks in places.items())
    return f"Cannot tell who is at fault from stacks alone: {where}."


def _waits(frame: Frame) -> bool:
    return any(part in frame.file for part in _COLLECTIVES)


def _frame_text(frame: Frame) -> str:
    return f"{frame.function} ({'/'.join(PurePath(frame.file).parts[-2:])}:{frame.line})"
