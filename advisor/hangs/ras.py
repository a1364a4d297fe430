"""Who holds a job up, by what NCCL's RAS tells of its communicators (pure).

RAS counts what ranks have launched, not what has finished. A rank that has launched fewer collectives of a kind than
another one of its communicator is waited for; at fault is who is waited for and has nowhere launched more than others
have, so that it waits for nobody. Counts of one moment also differ in a job that runs: only a second report, in which
they are the same, tells that it stands.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING

from paro_advise.advisor.hangs.model import FORMAT, Cause, Culprit, Hang, Wait
from paro_advise.advisor.hangs.waits import in_circles
from paro_advise.advisor.hangs.words import blame, ranks_text, verb
from paro_advise.advisor.wording.quantities import plural

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from paro_advise.trace_parsers.dumps.ras_report import Communicator, Device, RasReport

# ncclResult_t of nccl.h
_ERRORS = {
    1: "unhandled CUDA error", 2: "system error", 3: "internal error", 4: "invalid argument", 5: "invalid usage",
    6: "remote error", 7: "in progress",
}  # fmt: skip
_IN_PROGRESS = 7


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


def diagnose_ras(reports: Sequence[RasReport]) -> Hang:
    """Return who is waited for, by the newest of a job's reports; earlier ones tell whether it moves.

    Args:
        reports: one or more.
    """
    ordered = sorted(reports, key=lambda report: report.time)
    latest = ordered[-1]
    # Of another job, or of communicators that are gone, nothing can be compared.
    earlier = [one for one in ordered if one.time < latest.time and _counts(one).keys() & _counts(latest).keys()]
    places, is_counted = _places(latest)
    silent = {
        places[one.name][rank]: found
        for one in latest.communicators
        for rank, found in one.silent.items()
        if rank in places[one.name]
    }
    late = [found for one in latest.communicators for found in _late(one, places[one.name])]
    awaited: defaultdict[int, set[int]] = defaultdict(set)
    for one in late:
        for rank in one.ahead:
            awaited[rank] |= one.behind
    moved = None if silent else _moved(earlier, latest)
    devices = {
        places[one.name][rank]: member.device
        for one in latest.communicators
        for rank, member in one.members.items()
        if rank in places[one.name]
    }
    culprits = [] if moved else _culprits(silent, late, awaited, devices)
    circle = in_circles(awaited) if not (culprits or moved) else set()
    sentences = [
        _verdict(culprits, late, circle, latest, moved),
        *_errors(latest, places),
        "" if moved or silent or not late else _how_sure(earlier, latest),
        "" if is_counted else "No communicator has all processes: ranks are counted by host and GPU here.",
    ]
    return Hang(
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


def _places(report: RasReport) -> tuple[dict[str, dict[int, int]], bool]:
    """Return the job's rank of each rank of each communicator, where its process is known, and whether RAS tells it.

    It does if one communicator has all processes: its ranks are those of the job.
    """
    placed = {one.name: _devices(one) for one in report.communicators}
    every = {device for devices in placed.values() for device in devices.values() if device.is_known}
    ranks = {device: number for number, device in enumerate(sorted(every))}
    world = ""
    for name, devices in sorted(placed.items(), key=lambda item: -len(item[1])):
        known = {device: rank for rank, device in devices.items() if device.is_known}
        if known.keys() == every and len(known) == sum(device.is_known for device in devices.values()):
            ranks, world = known, name
            break
    places = {
        name: {rank: rank if name == world else ranks[device] for rank, device in devices.items() if device.is_known}
        for name, devices in placed.items()
    }
    if world:
        places[world] = {rank: rank for rank in placed[world]}
    return places, bool(world) or not every


def _devices(one: Communicator) -> dict[int, Device]:
    return {
        **{rank: member.device for rank, member in one.members.items()},
        **{rank: device for rank, (device, _) in one.silent.items()},
        **one.absent,
    }


def _late(one: Communicator, places: Mapping[int, int]) -> list[_Late]:
    """Return which ranks are behind others, by kind of collective; nothing of a communicator that comes or goes."""
    if one.absent or not all(member.is_running for member in one.members.values()):
        return []
    found = []
    for kind in sorted({kind for member in one.members.values() for kind in member.counts}):
        counts = {places[rank]: found.counts.get(kind, 0) for rank, found in one.members.items() if rank in places}
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


def _moved(earlier: Sequence[RasReport], latest: RasReport) -> RasReport | None:
    """Return the newest earlier report of which a count has changed since; None where the job stands."""
    now = _counts(latest)
    for report in reversed(earlier):
        before = _counts(report)
        if any(before[key] != now[key] for key in before.keys() & now.keys()):
            return report
    return None


def _counts(report: RasReport) -> dict[tuple[str, int], dict[str, int]]:
    return {(one.name, rank): member.counts for one in report.communicators for rank, member in one.members.items()}


def _culprits(
    silent: Mapping[int, tuple[Device, bool]],
    late: Sequence[_Late],
    awaited: Mapping[int, set[int]],
    devices: Mapping[int, Device],
) -> list[Culprit]:
    """Return the ranks that do not answer; where all do, who is waited for and waits for nobody."""
    if silent:
        return [
            Culprit(rank=rank, cause=Cause.GONE, why=_silence(device, is_dead=is_dead), last="")
            for rank, (device, is_dead) in sorted(silent.items())
        ]
    blamed = sorted({rank for one in late for rank in one.behind if not awaited.get(rank)})
    mine = {rank: [one for one in late if rank in one.behind] for rank in blamed}
    # Whom fewer wait for than there are of them may be right: what those launched is then one too many.
    if any(len(one.ahead) < len(one.behind) and one.behind <= set(blamed) for one in late):
        return []
    return [
        Culprit(
            rank=rank,
            cause=Cause.HOST,
            why=(
                f"({_where(devices[rank])}) never launched {mine[rank][0].operation} of communicator "
                f"{mine[rank][0].communicator.name}, in which {ranks_text(mine[rank][0].ahead)} "
                f"{verb(mine[rank][0].ahead)}"
            ),
            last="",
        )
        for rank in blamed
    ]


def _where(device: Device) -> str:
    return f"process {device.pid} on {device.host}, GPU {device.nvml_index}"


def _silence(device: Device, *, is_dead: bool) -> str:
    why = f"({_where(device)}) does not answer NCCL's RAS"
    return f"{why}, which takes it for dead" if is_dead else why


def _verdict(
    culprits: Sequence[Culprit],
    late: Sequence[_Late],
    circle: set[int],
    latest: RasReport,
    moved: RasReport | None,
) -> str:
    if moved is not None:
        return (
            f"The job moved: collectives were launched between the reports of {moved.time} and {latest.time}. If it "
            "stands since then, give two newer ones; to find who is slow, record a trace."
        )
    if culprits:
        return blame(culprits)
    if circle:
        return (
            f"Cannot tell who is at fault: {ranks_text(circle)} wait for each other; they launched different "
            "collectives, or the same in different orders."
        )
    if late:
        one = min(late, key=lambda each: len(each.ahead) - len(each.behind))
        return (
            f"Cannot tell who is at fault: {ranks_text(one.ahead)} {verb(one.ahead)} in {one.operation} of "
            f"communicator {one.communicator.name}, which {ranks_text(one.behind)} never launched: these stand, or it "
            "is one too many."
        )
    total = len(latest.communicators)
    return (
        f"Cannot tell who is at fault: in {plural(total, 'communicator')} all ranks have launched the same number of "
        "collectives. If the job stands, a device or the network does; dumps of the flight recorder or stacks tell "
        "more."
    )


def _errors(latest: RasReport, places: Mapping[str, Mapping[int, int]]) -> list[str]:
    found: defaultdict[int, set[int]] = defaultdict(set)
    for one in latest.communicators:
        for rank, member in one.members.items():
            if member.error not in (0, _IN_PROGRESS) and rank in places[one.name]:
                found[member.error].add(places[one.name][rank])
    return [
        f"NCCL reports error {number} ({_ERRORS.get(number, 'unknown to this version')}) on {ranks_text(having)}."
        for number, having in sorted(found.items())
    ]


def _how_sure(earlier: Sequence[RasReport], latest: RasReport) -> str:
    if earlier:
        return f"No count has changed between {earlier[0].time} and {latest.time}."
    return (
        "Counts of one moment also differ in a job that runs: make a second report a minute later and give both; if "
        "none has changed, the job stands."
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
