"""The document that `paro-advise hang` writes: who waits for whom, and who is likely at fault."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

from paro_advise.core.documents import Format

FORMAT = Format(name="paro-advise/hang", version="1.1", hint="make it with `paro-advise hang DUMPS --json FILE`")


class Cause(StrEnum):
    """What makes a rank hold the others up."""

    HOST = "host"  # never issued what they wait in
    DEVICE = "device"  # has issued it, but its device has not finished what others have
    GONE = "gone"  # left no dump
    MISMATCH = "mismatch"  # issued another collective than they did, or theirs in another order


@dataclass(frozen=True, slots=True, kw_only=True)
class Culprit:
    """A rank that holds others up and waits for none.

    Attributes:
        rank: of the job.
        cause: see Cause.
        why: as a sentence.
        last: what its dump shows that it issued last, "" where it shows nothing.
        stack: since 1.1; where its main thread is, the innermost calls first, "" where no stack is at hand.
    """

    rank: int
    cause: Cause
    why: str
    last: str
    stack: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Wait:
    """A collective that some ranks of a group wait in.

    Attributes:
        group, description: of the process group.
        ranks: of the group, as far as known.
        seq: its number in the group.
        operation: with its size and what it would have moved.
        waiting: ranks that have issued it, and have not finished it.
        absent: ranks that never issued it.
        behind: ranks that have issued it, but are stuck in an earlier one of the group.
        without_dump: ranks that left no dump.
    """

    group: str
    description: str
    ranks: tuple[int, ...]
    seq: int
    operation: str
    waiting: tuple[int, ...]
    absent: tuple[int, ...]
    behind: tuple[int, ...]
    without_dump: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Mismatch:
    """A number in a group under which ranks issued different collectives.

    Attributes:
        group, description, seq: see Wait.
        issued: the ranks that issued each, by its text.
    """

    group: str
    description: str
    seq: int
    issued: dict[str, tuple[int, ...]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Hang:
    """The document.

    Attributes:
        text: the verdict as a sentence.
        culprits: empty where none can be told.
        ranks: that left a dump.
        ranks_missing: of the groups that the dumps list, without one.
        waits: the earliest wait of each rank, by group.
        mismatches: at most one a group, the earliest.
        circle: ranks that wait for each other, where no rank is at fault alone.
        places: since 1.1; the ranks whose main threads are in each place, where stacks are at hand.
    """

    format: str
    format_version: str
    text: str
    culprits: tuple[Culprit, ...]
    ranks: tuple[int, ...]
    ranks_missing: tuple[int, ...]
    waits: tuple[Wait, ...]
    mismatches: tuple[Mismatch, ...]
    circle: tuple[int, ...]
    places: dict[str, tuple[int, ...]] = field(default_factory=dict)
