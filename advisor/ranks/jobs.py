"""Parts inputs into the jobs that they were recorded in, and picks the one to analyse.

A user may name a folder of everything. Ranks of one job agree on the world size, record at the same
time, and are each there once. Neither a clock that is off nor a stray trace makes two jobs of one: parts
are jobs of their own only where they hold the same ranks, or take other numbers of micro-batches a
step. Logs that lie elsewhere than the traces belong to them only if there is one job alone.
"""

from __future__ import annotations

import itertools
import re
from collections import Counter
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from typing import TYPE_CHECKING

from paro_advise.advisor.ranks.constants import APART_S, LISTED_JOBS
from paro_advise.advisor.wording.quantities import number_ranges
from paro_advise.core.plural import plural
from paro_advise.trace_parsers.notice import Notice, Severity

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Sequence

    from paro_advise.advisor.ranks.source import Source

_EPOCH_NS = 10**18  # ns; 2001 as Unix time; clocks that count from a start of their own stay below
_NUMBERS = re.compile(r"\d+")
_ARCHIVE = re.compile(r"(\.(?:zip|tgz|tar(?:\.\w+)?))!", re.IGNORECASE)  # runs.tar.gz!member


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """The inputs of one job, in order of path."""

    timed: tuple[Source, ...]
    untimed: tuple[Source, ...]

    @property
    def inputs(self) -> tuple[Source, ...]:
        """Return all inputs, those that time steps first."""
        return (*self.timed, *self.untimed)

    @property
    def world_size(self) -> int | None:
        """Return the world size that most inputs state, None where none does."""
        said = Counter(item.header.world_size for item in self.inputs if item.header.world_size)
        return max(said, key=lambda size: (said[size], size or 0), default=None)

    @property
    def started_ns(self) -> int:
        """Return when the first trace begins (host clock), 0 where no clock says."""
        return min((item.header.origin_ns for item in self.timed if item.header.origin_ns >= _EPOCH_NS), default=0)

    @property
    def weight(self) -> tuple[int, int, int]:
        """Return what makes a job the likelier one to be meant: traces, logs, then how new it is."""
        return len(self.timed), len(self.untimed), self.started_ns


def choose_job(sources: Sequence[Source]) -> tuple[Job, tuple[Notice, ...]]:
    """Return the largest job of some inputs, and a list of the others to choose from."""
    jobs = sorted(part_jobs(sources), key=lambda job: job.weight, reverse=True)
    if len(jobs) < 2:
        return (jobs[0], _apart(jobs[0])) if jobs else (Job(timed=(), untimed=()), ())
    shown = [_text(job) for job in jobs[:LISTED_JOBS]]
    if len(set(shown)) < len(shown):  # of one folder and minute: only their files tell them apart
        firsts = [min(item.file_name for item in job.inputs) for job in jobs]
        shown = [f"{text} with {first}" for text, first in zip(shown, firsts, strict=False)]
    more = f"; and {len(jobs) - LISTED_JOBS} more" if len(jobs) > LISTED_JOBS else ""
    message = (
        f"the inputs are of {len(jobs)} different jobs or recordings; analysed is {shown[0]}. Left out: "
        + "; ".join(shown[1:])
    )
    notice = Notice(
        code="Q304",
        severity=Severity.WARNING,
        message=message + more,
        help="analyse one job at a time: pass its folder or files",
    )
    return jobs[0], (notice, *_apart(jobs[0]))


def _apart(job: Job) -> tuple[Notice, ...]:
    """Say that ranks of a job were recorded far apart, which may be a clock or another run."""
    parts = _split_by_time(job.timed)
    if len(parts) < 2:
        return ()
    ends = [part[0].header.origin_ns / 1e9 for part in (parts[0], parts[-1])]
    ranks = [sorted({item.header.rank for item in part if item.header.rank is not None}) for part in parts]
    shown = " and ".join(
        f"rank{'s' * (len(some) != 1)} {number_ranges(some)}" if some else "others" for some in (ranks[0], ranks[-1])
    )
    notice = Notice(
        code="Q328",
        severity=Severity.WARNING,
        message=f"{shown} were recorded {(ends[1] - ends[0]) / 3600:.1f} h apart and count as one run",
        help="pass the traces of one run; if they are, the clocks of the hosts differ",
    )
    return (notice,)


def part_jobs(sources: Sequence[Source]) -> list[Job]:
    """Part inputs into jobs."""
    timed = [item for item in sources if item.facts.has_events]
    untimed = [item for item in sources if not item.facts.has_events]
    groups: list[list[Source]] = []
    for same_world in _by_world(timed):
        for same_time in _by_time(same_world):
            groups += _by_place(same_time)
    if len(groups) > 1:
        logs = {id(item): _home(item, groups) for item in untimed}
        jobs = [
            Job(timed=tuple(group), untimed=tuple(item for item in untimed if logs[id(item)] is group))
            for group in groups
        ]
        homeless = [item for item in untimed if logs[id(item)] is None]
        return jobs + [Job(timed=(), untimed=tuple(part)) for part in _log_jobs(homeless)]
    if groups:
        return [Job(timed=tuple(groups[0]), untimed=tuple(untimed))]
    return [Job(timed=(), untimed=tuple(part)) for part in _log_jobs(untimed)]


def _group(inputs: Sequence[Source], key: Callable[[Source], Hashable]) -> list[list[Source]]:
    groups: dict[Hashable, list[Source]] = {}
    for item in inputs:
        groups.setdefault(key(item), []).append(item)
    return list(groups.values())


def _by_world(inputs: list[Source]) -> list[list[Source]]:
    """Part traces by world size; those that state none join the largest world that has their rank or lies beside."""
    said = Counter(item.header.world_size for item in inputs if item.header.world_size)
    sizes = sorted((size for size in said if size), key=lambda size: (said[size], size), reverse=True)
    places = {(item.header.world_size, _folder(item)) for item in inputs}

    def world(item: Source) -> int | None:
        if item.header.world_size:
            return item.header.world_size
        rank = item.header.rank
        if rank is None:
            return next((size for size in sizes if (size, _folder(item)) in places), None)
        return next((size for size in sizes if rank < size), None)

    return _group(inputs, world)


def _by_time(inputs: list[Source]) -> list[list[Source]]:
    """Part traces that were recorded far apart; those whose clock does not say when join the first."""
    numbers = {id(item): number for number, part in enumerate(_split_by_time(inputs)) for item in part}
    parts = _group(inputs, lambda item: numbers.get(id(item), 0))
    return parts if _hold_the_same_ranks(parts) or _train_otherwise(parts) else [inputs]


def _split_by_time(inputs: Sequence[Source]) -> list[list[Source]]:
    """Return traces in order of time, parted where two follow each other by more than clocks of hosts differ."""
    parts: list[list[Source]] = []
    for item in sorted(inputs, key=lambda item: item.header.origin_ns):
        if item.header.origin_ns < _EPOCH_NS:
            continue  # its clock does not say
        if not parts or item.header.origin_ns - parts[-1][-1].header.origin_ns > APART_S * 1e9:
            parts.append([])
        parts[-1].append(item)
    return parts


def _train_otherwise(parts: Sequence[Sequence[Source]]) -> bool:
    """Tell whether no part takes as many micro-batches a step as another one: ranks of one job take the same number."""
    counts = [{item.facts.num_micro_batches for item in part} - {None} for part in parts]
    return len(parts) > 1 and all(counts) and not any(one & other for one, other in itertools.combinations(counts, 2))


def _by_place(inputs: list[Source]) -> list[list[Source]]:
    """Part traces among which ranks stand twice, if their folders or names part them into whole sets of ranks."""
    if not _has_doubles(inputs):
        return [inputs]
    depth = max(_folder(item).count("/") + 1 for item in inputs)
    places: list[Callable[[Source], str]] = [partial(_folder_at, level) for level in range(depth)]
    for place in [*places, _folder, _stem]:
        parts = _group(inputs, place)
        is_whole = len(parts) > 1 and min(map(len, parts)) > 1 and not any(map(_has_doubles, parts))
        if is_whole and _hold_the_same_ranks(parts):
            return parts
    return [inputs]


def _hold_the_same_ranks(parts: Sequence[Sequence[Source]]) -> bool:
    """Tell whether most ranks of each part are also in the largest one; parts that tell no ranks may be anything."""
    ranks = [{item.header.rank for item in part if item.header.rank is not None} for part in parts]
    largest = max(ranks, key=len, default=set())
    return all(not part or 2 * len(part & largest) > len(part) for part in ranks)


def _has_doubles(inputs: list[Source]) -> bool:
    """Tell whether a rank has two traces of different content."""
    by_rank: dict[int, str] = {}
    for item in inputs:
        rank, digest = item.header.rank, item.facts.source.sha256
        if rank is not None and by_rank.setdefault(rank, digest) != digest:
            return True
    return False


def _folder(item: Source) -> str:
    """Return the folder that an input lies in; an archive is one too."""
    path = _ARCHIVE.sub(r"\1/", item.facts.source.path.replace("\\", "/"))
    return path.rpartition("/")[0]


def _folder_at(level: int, item: Source) -> str:
    """Return the name of the folder at a level of an input's path, "" where it has none there."""
    names = _folder(item).split("/")
    return names[level] if level < len(names) else ""


def _stem(item: Source) -> str:
    """Return an input's path without the numbers in it, which are those of ranks, hosts and processes."""
    return _NUMBERS.sub("#", item.facts.source.path)


def _home(item: Source, groups: list[list[Source]]) -> list[Source] | None:
    """Return the traces that a log lies beside, above or below; None where no traces or those of several jobs do."""
    here = _folder(item)
    near = [group for group in groups if any(_is_near(here, _folder(other)) for other in group)]
    return near[0] if len(near) == 1 else None


def _is_near(one: str, other: str) -> bool:
    return one == other or one.startswith(f"{other}/") or other.startswith(f"{one}/")


def _log_jobs(inputs: list[Source]) -> list[list[Source]]:
    """Part logs by folder where folders contradict each other: several training logs, or several world sizes."""
    folders = _group(inputs, _folder)
    training = sum(
        any(item.header.median_iteration_us or item.header.mean_iteration_us for item in folder) for folder in folders
    )
    worlds = {item.header.world_size for item in inputs if item.header.world_size}
    return folders if training > 1 or len(worlds) > 1 else [inputs] if inputs else []


def _text(job: Job) -> str:
    """Return a job as one of a list: "ranks 0-7 of 16 in runs/a (2026-03-01 12:00 UTC)"."""
    ranks = sorted({item.header.rank for item in job.inputs if item.header.rank is not None})
    named = f"rank{'s' * (len(ranks) != 1)} {number_ranges(ranks)}" if ranks else plural(len(job.inputs), "file")
    of = f" of {job.world_size}" if job.world_size else ""
    places = sorted({_folder(item) for item in job.inputs})
    names = sorted(item.file_name for item in job.inputs)
    where = places[0] or names[0] if len(places) == 1 else f"{places[0] or names[0]} and {len(places) - 1} more"
    if len(job.inputs) == 1:
        where = job.inputs[0].facts.source.path
    when = f" ({datetime.fromtimestamp(job.started_ns / 1e9, UTC):%Y-%m-%d %H:%M} UTC)" if job.started_ns else ""
    return f"{named}{of} in {where}{when}"
