"""Who holds a job up, by what NCCL's RAS tells of its communicators (pure).

RAS counts what ranks have launched, not what has finished, and neither sends and receives nor what CUDA graphs replay.
A rank that has launched fewer collectives of a kind than another one of its communicator is waited for; likely at fault
is who is waited for and has nowhere launched more than others have. Counts of one moment also differ in a job that
runs: only a second report, in which they are the same, tells that it is stuck.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING

from paro_advise.advisor.hangs.model import FORMAT, Cause, Culprit, Hang, Wait
from paro_advise.advisor.hangs.waits import in_cycles
from paro_advise.advisor.hangs.words import blame, named_ranks, verb
from paro_advise.core.plural import plural

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from paro_advise.trace_parsers.dumps.ras_report import Communicator, Member, RasReport, TrainingGpu

# ncclResult_t of nccl.h
_ERRORS = {
    1: "unhandled CUDA error", 2: "system error", 3: "internal error", 4: "invalid argument", 5: "invalid usage",
    6: "remote error",
}  # fmt: skip
_IN_PROGRESS = 7
_LISTED = 4  # communicators, and ranks of one, that a sentence lists
# NCCL_NUM_FUNCTIONS of src/include/nccl_common.h, and src/plugin/profiler.cc
_NOT_COUNTED = "sends and receives, collectives in CUDA graphs, and other libraries'"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Late:
    """Ranks of the job that have launched fewer collectives of a kind than others of their communicator.

    Attributes:
        operation: the first that they have not launched, with its number among those of its kind.
        number: that number.
        ahead: have launched it.
        behind: have not.
    """

    communicator: Communicator
    ranks: tuple[int, ...]
    operation: str
    number: int
    ahead: frozenset[int]
    behind: frozenset[int]


@dataclass(frozen=True, slots=True, kw_only=True)
class RasVerdict:
    """What RAS tells.

    Attributes:
        hang: the verdict.
        is_numbered: its ranks are those of the job, by a communicator that has all processes.
        has_moved: collectives were launched between the last two reports.
    """

    hang: Hang
    is_numbered: bool
    has_moved: bool


def diagnose_ras(reports: Sequence[RasReport]) -> RasVerdict:
    """Return who is waited for, by the newest of a job's reports; earlier ones tell whether it moves.

    Args:
        reports: one or more.
    """
    ordered = sorted(reports, key=lambda report: report.time)
    latest = ordered[-1]
    # Of another job nothing can be compared.
    earlier = [one for one in ordered if one.time < latest.time and _counts(one).keys() & _counts(latest).keys()]
    places, is_numbered = _places(latest)
    silent: dict[int, tuple[TrainingGpu, bool]] = {}
    nameless: list[str] = []
    for one in latest.communicators:
        for rank, found in one.silent.items():
            if rank in places[one.name]:
                silent[places[one.name][rank]] = found
            else:
                nameless.append(f"Rank {rank} of communicator {one.name} does not answer NCCL's RAS.")
    late = [found for one in latest.communicators for found in _late(one, places[one.name])]
    awaited: defaultdict[int, set[int]] = defaultdict(set)
    for wait in late:
        for rank in wait.ahead:
            awaited[rank] |= wait.behind
    moved, still_since = _last_change(earlier, latest)
    devices = {
        places[one.name][rank]: member.device
        for one in latest.communicators
        for rank, member in one.members.items()
        if rank in places[one.name]
    }
    culprits = [] if nameless or (moved and not silent) else _culprits(silent, late, awaited, devices)
    circle = in_cycles(awaited) if not (culprits or moved or nameless) else set()
    is_of_counts = bool(late) and not (silent or nameless or moved)
    sentences = [
        *nameless[:_LISTED],
        _moved_text(moved, latest) if moved else "",
        "" if nameless or (moved and not silent) else _verdict(culprits, late, circle, latest, places),
        *_errors(latest, places),
        *_not_compared(latest, places),
        _how_sure(still_since, latest) if is_of_counts else "",
        "" if is_numbered else "No communicator has all processes: ranks are counted by host and GPU here.",
    ]
    hang = Hang(
        format=FORMAT.name,
        format_version=FORMAT.version,
        text=" ".join(sentence for sentence in sentences if sentence),
        culprits=tuple(culprits),
        ranks=tuple(sorted(devices.keys() - silent.keys())),
        ranks_missing=tuple(sorted(silent)),
        waits=() if moved else tuple(_wait(one, silent) for one in late),
        mismatches=(),
        circle=tuple(sorted(circle)),
    )
    return RasVerdict(hang=hang, is_numbered=is_numbered, has_moved=moved is not None)


def _places(report: RasReport) -> tuple[dict[str, dict[int, int]], bool]:
    """Return the job's rank of each rank of each communicator, where it is known, and whether RAS tells it.

    It does if one communicator has all processes: its ranks are those of the job. A process that is unknown, or that
    two ranks of a communicator seem to be (containers count theirs anew), is not found in other communicators.
    """
    placed = {one.name: _devices(one) for one in report.communicators}
    times = [Counter(devices.values()) for devices in placed.values()]
    shared = {device for counted in times for device, count in counted.items() if count > 1 or not device.is_known}
    every = {device for counted in times for device in counted} - shared
    world = next(
        (name for name, each in sorted(placed.items(), key=lambda item: -len(item[1])) if every <= set(each.values())),
        None,
    )
    if world is None:
        ranks = {device: number for number, device in enumerate(sorted(every))}
    else:
        ranks = {device: rank for rank, device in placed[world].items() if device not in shared}
    places = {
        name: {rank: ranks[device] for rank, device in devices.items() if device in ranks}
        for name, devices in placed.items()
    }
    if world is not None:
        places[world] = {rank: rank for rank in placed[world]}
    return places, world is not None or not every


def _devices(one: Communicator) -> dict[int, TrainingGpu]:
    return {
        **{rank: member.device for rank, member in one.members.items()},
        **{rank: device for rank, (device, _) in one.silent.items()},
        **one.absent,
    }


def _late(one: Communicator, places: Mapping[int, int]) -> list[_Late]:
    """Return which ranks are behind others, by kind of collective; nothing of a communicator that comes or goes."""
    if not _is_compared(one, places):
        return []
    found = []
    for kind in sorted({kind for member in one.members.values() for kind in member.counts}):
        counts = {places[rank]: member.counts.get(kind, 0) for rank, member in one.members.items()}
        least = min(counts.values(), default=0)
        ahead = frozenset(rank for rank, count in counts.items() if count > least)
        if ahead:
            found.append(
                _Late(
                    communicator=one,
                    ranks=tuple(sorted(places.values())),
                    operation=f"{kind} {least + 1}",
                    number=least + 1,
                    ahead=ahead,
                    behind=frozenset(counts) - ahead,
                )
            )
    return found


def _is_compared(one: Communicator, places: Mapping[int, int]) -> bool:
    """Tell whether the counts of a communicator can be compared: none of it comes or goes."""
    is_whole = not one.absent and all(member.is_running for member in one.members.values())
    return is_whole and all(rank in places for rank in one.members)


def _not_compared(latest: RasReport, places: Mapping[str, Mapping[int, int]]) -> list[str]:
    """Return sentences on the communicators whose counts were not compared."""
    found = []
    for one in latest.communicators:
        if _is_compared(one, places[one.name]):
            continue
        parts = [
            f"rank {rank} {what}"
            for rank, what in (
                *((rank, "does not know it (it left, or has not joined)") for rank in sorted(one.absent)),
                *((rank, _state(member)) for rank, member in sorted(one.members.items()) if not member.is_running),
                *((rank, "is a process that RAS does not tell from others") for rank in sorted(one.members)
                  if rank not in places[one.name]),
            )
        ]  # fmt: skip
        more = f" and {len(parts) - _LISTED} more" if len(parts) > _LISTED else ""
        found.append(f"Communicator {one.name} was not compared: {', '.join(parts[:_LISTED])}{more}.")
    if len(found) > _LISTED:
        found[_LISTED:] = [f"And {plural(len(found) - _LISTED, 'more communicator')} of this kind."]
    return found


def _state(member: Member) -> str:
    if member.is_aborted:
        return "has aborted it"
    return "is tearing it down" if member.is_leaving else "is initializing it"


def _last_change(earlier: Sequence[RasReport], latest: RasReport) -> tuple[RasReport | None, RasReport | None]:
    """Return the last report before the newest, if a count has changed since; else the first since which none has."""
    still: RasReport | None = None
    for report in reversed(earlier):
        if not _is_same(report, latest):
            return (report if still is None else None), still
        still = report
    return None, still


def _is_same(before: RasReport, now: RasReport) -> bool:
    """Tell whether no communicator has come or gone, and no count of a rank that answered both times has changed."""
    if {one.name for one in before.communicators} != {one.name for one in now.communicators}:
        return False
    old, new = _counts(before), _counts(now)
    return all(old[key] == new[key] for key in old.keys() & new.keys())


def _moved_text(moved: RasReport, latest: RasReport) -> str:
    return (
        f"The job moved: collectives were launched, or communicators made or left, between the reports of {moved.time} "
        f"and {latest.time}. If it has been stuck since then, give two newer reports; to find who is slow, record a "
        "trace."
    )


def _counts(report: RasReport) -> dict[tuple[str, int], dict[str, int]]:
    return {(one.name, rank): member.counts for one in report.communicators for rank, member in one.members.items()}


def _culprits(
    silent: Mapping[int, tuple[TrainingGpu, bool]],
    late: Sequence[_Late],
    awaited: Mapping[int, set[int]],
    devices: Mapping[int, TrainingGpu],
) -> list[Culprit]:
    """Return the ranks that do not answer; where all do, who is waited for and waits for nobody."""
    if silent:
        return [
            Culprit(rank=rank, cause=Cause.GONE, why=_silence(device, is_dead=is_dead), last="")
            for rank, (device, is_dead) in sorted(silent.items())
        ]
    blamed = sorted({rank for one in late for rank in one.behind if not awaited.get(rank)})
    first = {rank: next(one for one in late if rank in one.behind) for rank in blamed}
    # Whom fewer wait for than there are of them may be right: what those launched is then one too many.
    if any(len(one.ahead) < len(one.behind) and one.behind <= set(blamed) for one in late):
        return []
    return [
        Culprit(
            rank=rank,
            cause=Cause.HOST,
            why=(
                f"({_where(devices[rank])}) never launched {first[rank].operation} of communicator "
                f"{first[rank].communicator.name}, in which {named_ranks(first[rank].ahead)} {verb(first[rank].ahead)}"
            ),
            last="",
        )
        for rank in blamed
    ]


def _where(device: TrainingGpu) -> str:
    return f"process {device.pid} on {device.host}, GPU {device.nvml_index}"


def _silence(device: TrainingGpu, *, is_dead: bool) -> str:
    why = f"({_where(device)}) does not answer NCCL's RAS"
    return f"{why}, which takes it for dead" if is_dead else why


def _verdict(
    culprits: Sequence[Culprit],
    late: Sequence[_Late],
    circle: set[int],
    latest: RasReport,
    places: Mapping[str, Mapping[int, int]],
) -> str:
    if culprits:
        return blame(culprits)
    if circle:
        return (
            f"Cannot tell who is at fault: {named_ranks(circle)} wait for each other; they launched different "
            "collectives, or the same in different orders."
        )
    if late:
        one = min(late, key=lambda each: len(each.ahead) - len(each.behind))
        return (
            f"Cannot tell who is at fault: {named_ranks(one.ahead)} {verb(one.ahead)} in {one.operation} of "
            f"communicator {one.communicator.name}, which {named_ranks(one.behind)} never launched: either these "
            "ranks are stuck, or that collective should not have been launched."
        )
    total = sum(_is_compared(one, places[one.name]) for one in latest.communicators)
    if not total:
        return "Cannot tell who is at fault: no communicator in this report could be compared."
    return (
        f"Cannot tell who is at fault: in {plural(total, 'communicator')} all ranks have launched the same number of "
        f"collectives. If the job is stuck, the cause may be a device, the network or what RAS does not count: "
        f"{_NOT_COUNTED}. Flight-recorder dumps or stacks tell more."
    )


def _errors(latest: RasReport, places: Mapping[str, Mapping[int, int]]) -> list[str]:
    found: defaultdict[int, set[int]] = defaultdict(set)
    for one in latest.communicators:
        for rank, member in one.members.items():
            if member.error not in (0, _IN_PROGRESS) and rank in places[one.name]:
                found[member.error].add(places[one.name][rank])
    return [
        f"NCCL reports error {number} ({_ERRORS.get(number, 'unknown to this version')}) on {named_ranks(having)}."
        for number, having in sorted(found.items())
    ]


def _how_sure(still_since: RasReport | None, latest: RasReport) -> str:
    not_seen = f"RAS does not count {_NOT_COUNTED}; who waits there is not seen to wait."
    if still_since is not None:
        return f"No count has changed between {still_since.time} and {latest.time}. {not_seen}"
    return (
        "Counts of one moment also differ in a job that runs: make a second report a minute later and give both. "
        f"{not_seen}"
    )


def _wait(one: _Late, silent: Mapping[int, object]) -> Wait:
    return Wait(
        group=one.communicator.name,
        description="",
        ranks=one.ranks,
        seq=one.number,
        operation=one.operation,
        waiting=tuple(sorted(one.ahead)),
        absent=tuple(sorted(one.behind)),
        behind=(),
        without_dump=tuple(rank for rank in one.ranks if rank in silent),
    )
