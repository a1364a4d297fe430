"""Reads what a job that hangs has left: dumps, stacks, reports of NCCL's RAS, and lines of the watchdog in its logs."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from paro_advise.advisor.hangs.constants import OF_ANOTHER_RUN_S
from paro_advise.advisor.hangs.diagnosis import diagnose
from paro_advise.advisor.hangs.model import Cause
from paro_advise.advisor.hangs.ras import diagnose_ras
from paro_advise.advisor.hangs.stacks import diagnose_stacks, location_text
from paro_advise.advisor.hangs.words import named_ranks
from paro_advise.advisor.wording.quantities import time_text
from paro_advise.errors import InputError, NoInputError
from paro_advise.trace_parsers.bytes.blocks import BlockReader
from paro_advise.trace_parsers.bytes.readable import Readable
from paro_advise.trace_parsers.constants import MAX_RANK, MAX_RAS_BYTES, MAX_TEXT_BYTES
from paro_advise.trace_parsers.dumps import flight_recorder, ras_report, stacks
from paro_advise.trace_parsers.dumps.rank_dump import read_dump
from paro_advise.trace_parsers.dumps.ras_report import read_ras_report
from paro_advise.trace_parsers.dumps.watchdog_lines import read_watchdog
from paro_advise.trace_parsers.read import read_head

_IN_DUMP_NAMES = ("trace_rank_", "_dump_")  # of the flight recorder (TORCH_NCCL_DEBUG_INFO_TEMP_FILE and its default)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from paro_advise.advisor.hangs.model import Culprit, Hang
    from paro_advise.trace_parsers.bytes.blocks import SourceRef
    from paro_advise.trace_parsers.dumps.rank_dump import RankDump
    from paro_advise.trace_parsers.dumps.ras_report import RasReport
    from paro_advise.trace_parsers.dumps.stacks import Stacks


@dataclass(slots=True)
class HangInputs:
    """What a job has left, each by rank.

    Attributes:
        dumps: of the flight recorder; where a rank has none, what the watchdog's lines tell of it.
        stacks: of the rank's process.
        ras_reports: of the whole job.
        unread: ranks whose dumps cannot be read, by their names.
        left_out: what could not be used, and why.
    """

    dumps: dict[int, RankDump] = field(default_factory=dict)
    stacks: dict[int, Stacks] = field(default_factory=dict)
    ras_reports: list[RasReport] = field(default_factory=list)
    unread: set[int] = field(default_factory=set)
    left_out: list[str] = field(default_factory=list)


def read_hang(refs: Sequence[SourceRef], *, is_collection: bool) -> tuple[Hang, list[str]]:
    """Return who holds a job up, and what was left out.

    Raises:
        InputError: the only input cannot be read.
        NoInputError: nothing tells of a hang.
    """
    left = HangInputs()
    for ref in refs:
        try:
            problem = _add(left, ref)
        except InputError as error:
            if not is_collection and len(refs) == 1:
                raise
            problem = str(error)
        rank = flight_recorder.rank_in_dump_name(ref.file_name)
        if problem and rank is not None and any(part in ref.file_name for part in _IN_DUMP_NAMES):
            left.unread.add(rank)
        if problem:
            left.left_out.append(f"{ref.label}: {problem}")
    left.unread -= left.dumps.keys()
    _leave_old_ones_out(left)
    if left.dumps:
        hang = _with_stacks(_with_ras(diagnose(left.dumps, left.unread), left.ras_reports), left.stacks)
    elif left.ras_reports:
        by_ras = diagnose_ras(left.ras_reports)
        hang = by_ras.hang
        # Stacks are named after ranks of the job, and are of one moment.
        if by_ras.is_numbered and not by_ras.has_moved:
            hang = _with_stacks(hang, left.stacks)
        elif left.stacks:
            why = "collectives were launched meanwhile" if by_ras.has_moved else "RAS does not tell the job's ranks"
            left.left_out.append(f"the stacks: {why}")
    elif left.stacks:
        hang = diagnose_stacks(left.stacks)
    else:
        raise NoInputError(
            "a hang must be told from dumps of PyTorch's flight recorder, Python stacks, reports of NCCL's RAS or "
            f"lines of the NCCL watchdog, there are none ({next(iter(left.left_out), 'no rank is named')})",
            where=refs[0].label,
            hint="start the job with TORCH_NCCL_TRACE_BUFFER_SIZE=2000 and TORCH_NCCL_DUMP_ON_TIMEOUT=1",
        )
    return hang, left.left_out


def _leave_old_ones_out(left: HangInputs) -> None:
    """Leave out dumps of an earlier run: ranks of one job stop within a step or so of each other."""
    newest_ns = max((dump.newest_ns for dump in left.dumps.values()), default=0)
    for rank, dump in sorted(left.dumps.items()):
        older_s = (newest_ns - dump.newest_ns) / 1e9
        if dump.newest_ns and older_s > OF_ANOTHER_RUN_S:
            del left.dumps[rank]
            left.unread.add(rank)
            left.left_out.append(
                f"{dump.path}: its last collective is {time_text(1e6 * older_s)} older than that of others, as of "
                "another run"
            )


def _add(left: HangInputs, ref: SourceRef) -> str:
    """Take a file in; return why it is left out, "" if it is not."""
    head = read_head(ref)
    if flight_recorder.looks_like(head):
        return _add_dump(left, read_dump(ref))
    if ras_report.looks_like(head):
        data = Readable(BlockReader(ref), MAX_TEXT_BYTES).read_all(MAX_RAS_BYTES)
        left.ras_reports.append(read_ras_report(data, ref.label))
        return ""
    if ras_report.looks_like_text(head):
        return "the text of NCCL's RAS lists a few ranks only: give `ncclras -f json` (NCCL 2.28.7 and newer)"
    if b"\0" in head:
        return "neither a dump of the flight recorder nor text"
    # A log may hold both: torch prints stacks where it ends a process.
    told = read_watchdog(Readable(BlockReader(ref), MAX_TEXT_BYTES), ref.label)
    for dump in told:
        if dump.rank is not None:
            left.dumps.setdefault(dump.rank, dump)
    if not told and stacks.looks_like(head):
        found = stacks.read_stacks(Readable(BlockReader(ref), MAX_TEXT_BYTES), ref.label)
        return _add_stacks(left.stacks, found)
    return (
        "" if told else "no dump of the flight recorder, no stacks, no report of NCCL's RAS, no lines of its watchdog"
    )


def _add_dump(left: HangInputs, dump: RankDump) -> str:
    """Take a dump in; of two of one rank the newer one counts, as jobs that were started again leave older ones."""
    if dump.rank is None:
        return "neither the dump nor its name tells the rank"
    known = left.dumps.get(dump.rank)
    if known is not None and not known.is_log:
        if dump.newest_ns <= known.newest_ns:
            return f"rank {dump.rank} is in {known.path} already"
        left.left_out.append(f"{known.path}: rank {dump.rank} is in {dump.path}, which is newer")
    left.dumps[dump.rank] = dump
    left.left_out += [f"of {dump.path}: {notice.message}" for notice in dump.notices]
    return ""


def _add_stacks(known: dict[int, Stacks], found: Stacks | None) -> str:
    if found is None:
        return "stacks without a frame"
    if found.rank is None or found.rank > MAX_RANK:
        return "stacks must be named after their rank, for example stack_rank_3.txt"
    if found.rank in known:
        return f"stacks of rank {found.rank} are in {known[found.rank].path} already"
    known[found.rank] = found
    return ""


def _with_ras(hang: Hang, reports: Sequence[RasReport]) -> Hang:
    """Let RAS tell where dumps do not, or blame a rank of which nothing is here and that answers RAS."""
    by_ras = diagnose_ras(reports) if reports else None
    if by_ras is None or not by_ras.is_numbered:
        return hang
    answering = sorted({one.rank for one in hang.culprits if one.cause == Cause.GONE} & set(by_ras.hang.ranks))
    if by_ras.hang.culprits and (answering or not hang.culprits):
        return by_ras.hang
    if not answering:
        return hang
    here = f"of {named_ranks(answering)} no dump is here, but NCCL's RAS gets answers there"
    return replace(hang, text=f"Cannot tell who is at fault: {here}.", culprits=())


def _with_stacks(hang: Hang, known: dict[int, Stacks]) -> Hang:
    """Add where ranks are; where dumps do not tell who is at fault, stacks may."""
    if not known:
        return hang
    by_stacks = diagnose_stacks(known)
    if not hang.culprits and by_stacks.culprits:
        return replace(hang, text=by_stacks.text, culprits=by_stacks.culprits, places=by_stacks.places)
    culprits = tuple(_with_stack(one, known) for one in hang.culprits)
    located = " ".join(f"Rank {one.rank} is in {one.stack}." for one in culprits if one.stack)
    return replace(hang, text=f"{hang.text} {located}".strip(), culprits=culprits, places=by_stacks.places)


def _with_stack(culprit: Culprit, known: dict[int, Stacks]) -> Culprit:
    mine = known.get(culprit.rank)
    return replace(culprit, stack=location_text(mine)) if mine is not None else culprit
