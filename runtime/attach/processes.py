"""Which of the processes that ask belong to the job, and which of them are its ranks."""

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
# What the ranks of one job have in common, and those of two jobs have not.
_OF_A_JOB = ("TORCHELASTIC_RUN_ID", "MASTER_ADDR", "MASTER_PORT", "SLURM_JOB_ID", "SLURM_STEP_ID")


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where a process stands in its job, as its launcher told it; None for what it did not.

    Attributes:
        rank: its number.
        world_size: ranks of the job.
        local_world_size: ranks of its node.
        is_torchs: told by the variables that torch reads itself.
        job: what only ranks of the same job share.
    """

    rank: int
    world_size: int | None = None
    local_world_size: int | None = None
    is_torchs: bool = False
    job: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Process:
    """A process that asks.

    Attributes:
        number: as this machine knows it, by the kernel's word; 0 where it cannot be seen from here.
        line: itself and its ancestors, as it knows them.
        namespace: in which it knows them so.
        job: number of its Slurm job, 0 without one.
        place: in its job, None where nothing tells.
    """

    number: int
    line: tuple[int, ...]
    namespace: str = ""
    job: int = 0
    place: Place | None = None

    @property
    def name(self) -> str:
        """Return what people call it."""
        return f"process {self.line[0]}" if self.place is None else f"rank {self.place.rank} (process {self.line[0]})"

    @property
    def has_ended(self) -> bool:
        """Tell whether it is gone for sure."""
        if self.number < 1:
            return False
        try:
            state = Path(f"/proc/{self.number}/stat").read_text(errors="replace").rpartition(")")[2].split()
        except OSError:
            return True
        return state[:1] in (["Z"], ["X"])

    def is_below(self, other: Process) -> bool:
        """Tell whether another process has started it, or what has started it."""
        return self.namespace == other.namespace and other.line[0] in self.line[1:]


def place_of(environment: Mapping[str, str]) -> Place | None:
    """Return what an environment says, None without a rank."""
    for names in _VARIABLES:
        rank, world_size, local_world_size = (_number(environment.get(name)) for name in names)
        if rank is not None and (world_size is None or rank < world_size):
            return Place(
                rank=rank,
                world_size=world_size,
                local_world_size=local_world_size,
                is_torchs=names == _VARIABLES[0],
                job=tuple(environment.get(name, "") for name in _OF_A_JOB),
            )
    return None


def seen(number: int, line: tuple[int, ...], job: int) -> Process:
    """Return what this machine knows of a process that asks; see ``Process``."""
    return Process(
        number=number, line=line, namespace=_namespace(number), job=job, place=place_of(_environment(number))
    )


def members(processes: Iterable[Process], *, below: int | None, job: int | None) -> list[Process]:
    """Return the processes of the job that is meant: ranks, launchers and what ranks have started.

    Which are ranks is not asked here: a script may set what its launcher did not, so that what it starts says more of a
    rank than it does.

    Args:
        processes: all that ask.
        below: a process; it and what it has started are meant, None for all.
        job: a Slurm job, None for all.

    Raises:
        UsageError: they belong to more than one job.
    """
    found = [
        process
        for process in processes
        if not process.has_ended
        and (below is None or below == process.number or below in process.line)
        and (job is None or job == process.job)
    ]
    _check_one_job(found, is_chosen=below is not None)
    return sorted(found, key=lambda process: (process.place.rank if process.place else -1, process.line))


def _check_one_job(processes: Sequence[Process], *, is_chosen: bool) -> None:
    """Check those that no other has started: ranks of one job share what their launcher told them."""
    jobs: dict[tuple[object, ...], Process] = {}
    for process in processes:
        if any(process.is_below(other) for other in processes):
            continue
        if process.place is not None:
            jobs[process.place.world_size, *process.place.job] = process
        elif not is_chosen:
            jobs[process.number, *process.line] = process
    if len(jobs) > 1:
        names = ", ".join(sorted(process.name for process in jobs.values())[:5])
        raise UsageError(
            f"attach must know one job, got {len(jobs)}: {names}",
            hint="name its launcher with --pid, or its Slurm job with --job-id",
        )


def ranks_of(processes: Sequence[Process], stepped: Iterable[Process]) -> dict[Process, int | None]:
    """Return the ranks among the processes of a job that were recorded, each with its number if that is sure.

    Args:
        processes: that were recorded.
        stepped: those whose trace holds steps of an optimizer: a launcher or a data loader takes none.
    """
    stepped = set(stepped)
    kept = [process for process in processes if process in stepped] or _by_place(processes)
    told = [process.place.rank for process in kept if process.place is not None]
    return {
        process: process.place.rank if process.place is not None and told.count(process.place.rank) == 1 else None
        for process in kept
    }


def _by_place(processes: Sequence[Process]) -> list[Process]:
    """Return the ranks as far as their places tell: what a rank starts inherits its place, a launcher has another."""
    placed = _choose_placed(processes) or list(processes)
    ranks = [process for process in placed if not any(o.is_below(process) and o.place != process.place for o in placed)]
    return [process for process in ranks if not any(process.is_below(other) for other in ranks)]


def _choose_placed(processes: Sequence[Process]) -> list[Process]:
    """Return those with a place; beside torch's own variables, those of other launchers name launchers."""
    placed = [process for process in processes if process.place is not None]
    return [process for process in placed if process.place and process.place.is_torchs] or placed


def unheard(processes: Sequence[Process]) -> int:
    """Return how many ranks of this node have not asked, as far as their launcher tells."""
    places = {process.place for process in _choose_placed(processes) if process.place is not None}
    expected = max((place.local_world_size or 0 for place in places), default=0)
    return max(0, expected - len({place.rank for place in places}))


def _environment(number: int) -> dict[str, str]:
    """Return the environment that a process was started with; nothing where this user may not read it."""
    try:
        data = Path(f"/proc/{number}/environ").read_bytes() if number > 0 else b""
    except OSError:
        return {}
    pairs = (item.partition("=") for item in data.decode(errors="replace").split("\0"))
    return {name: value for name, _, value in pairs if name}


def _namespace(number: int) -> str:
    """Return the name of the namespace of a process's numbers, empty where it cannot be read."""
    try:
        return str(Path(f"/proc/{number}/ns/pid").readlink()) if number > 0 else ""
    except OSError:
        return ""


def _number(text: str | None) -> int | None:
    return int(text) if text and text.isascii() and text.isdecimal() and len(text) < 8 else None
