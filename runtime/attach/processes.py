"""Which of the processes that ask are the ranks of the job."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from paro_advise.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

# Rank, ranks, ranks of this node: torchrun's own, then those of the launchers that scripts read (Slurm, Open MPI).
_VARIABLES = (
    ("RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"),
    ("SLURM_PROCID", "SLURM_NTASKS", "SLURM_NTASKS_PER_NODE"),
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where a process stands in its job, as its launcher told it; None for what it did not.

    Attributes:
        rank: its number.
        world_size: ranks of the job.
        local_world_size: ranks of its node.
    """

    rank: int
    world_size: int | None = None
    local_world_size: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Process:
    """A process that asks.

    Attributes:
        number: as this machine knows it, by the kernel's word; 0 where it cannot be seen from here.
        line: itself and its ancestors, as it knows them.
        job: number of its Slurm job, 0 without one.
        place: in its job, None where nothing tells.
        is_first: what started it is no rank; where that cannot be seen, it may itself be a part of a rank.
    """

    number: int
    line: tuple[int, ...]
    job: int = 0
    place: Place | None = None
    is_first: bool = False

    @property
    def name(self) -> str:
        """Return what people call it."""
        return f"process {self.line[0]}" if self.place is None else f"rank {self.place.rank}"


def place_of(environment: Mapping[str, str]) -> Place | None:
    """Return what an environment says, None without a rank."""
    for names in _VARIABLES:
        rank, world_size, local_world_size = (_number(environment.get(name)) for name in names)
        if rank is not None and (world_size is None or rank < world_size):
            return Place(rank=rank, world_size=world_size, local_world_size=local_world_size)
    return None


def environment_of(number: int) -> dict[str, str]:
    """Return the environment that a process was started with; nothing where this user may not read it."""
    if number < 1:
        return {}
    try:
        data = Path(f"/proc/{number}/environ").read_bytes()
    except OSError:
        return {}
    pairs = (item.partition("=") for item in data.decode(errors="replace").split("\0"))
    return {name: value for name, _, value in pairs if name}


def seen(number: int, line: tuple[int, ...], job: int) -> Process:
    """Return what this machine knows of a process that asks; see ``Process``."""
    place = place_of(environment_of(number))
    is_here = len(line) > 1 and line[0] == number  # else it counts processes in another way
    is_first = place is not None and is_here and place_of(environment_of(line[1])) is None
    return Process(number=number, line=line, job=job, place=place, is_first=is_first)


def chosen(processes: Iterable[Process], *, below: int | None, job: int | None) -> list[Process]:
    """Return those that are meant.

    Args:
        processes: all that ask.
        below: a process; it and what it has started are meant, None for all.
        job: a Slurm job, None for all.
    """
    return [
        process
        for process in processes
        if (below is None or below == process.number or below in process.line) and (job is None or job == process.job)
    ]


def ranks_of(processes: Sequence[Process]) -> list[Process]:
    """Return the ranks among the processes of a job, by number.

    A launcher has no rank; what a rank starts, a spawned data loader say, inherits its rank. Where no environment tells
    a rank, all are returned.

    Raises:
        UsageError: two processes of no common line say the same rank.
    """
    placed = [process for process in processes if process.place is not None]
    if not placed:
        return sorted(processes, key=lambda process: process.line)
    ranks: dict[int, Process] = {}
    for process in sorted(placed, key=lambda process: len(process.line)):
        rank = process.place.rank if process.place is not None else 0
        other = ranks.setdefault(rank, process)
        if other is not process and other.line[0] not in process.line:
            raise UsageError(
                f"attach must know one job, got two: the processes {other.line[0]} and {process.line[0]} are both "
                f"rank {rank}",
                hint="name its launcher with --pid, or its Slurm job with --job-id",
            )
    return [ranks[rank] for rank in sorted(ranks)]


def are_all(ranks: Sequence[Process]) -> bool:
    """Tell whether every rank of this node has asked for sure."""
    counts = {process.place.local_world_size for process in ranks if process.place is not None}
    return counts == {len(ranks)} and all(process.is_first for process in ranks)


def _number(text: str | None) -> int | None:
    return int(text) if text and text.isascii() and text.isdecimal() and len(text) < 8 else None
