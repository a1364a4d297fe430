"""What NCCL's RAS subsystem tells of a running job: ``ncclras -f json``, NCCL 2.28.7 and newer.

A report holds, for each communicator, how many collectives of each kind every rank has launched, and which ranks did
not answer. Written by ``src/ras/client_support.cc`` of NCCL (``jsonWriteHeader`` and the functions after it). Its text
form lists a few ranks only, and changes from release to release.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import msgspec

from paro_advise.errors import BrokenInputError
from paro_advise.trace_parsers.constants import INT64_MAX, MAX_GROUP_SIZE, MAX_GROUPS
from paro_advise.trace_parsers.values import bounded_text


class _Status(msgspec.Struct, gc=False):
    init_state: int = 0
    async_error: int = 0
    finalize_called: bool = False
    destroy_flag: bool = False
    abort_flag: bool = False
    unresponsive: bool = False
    considered_dead: bool = False


class _Rank(msgspec.Struct, gc=False):
    rank: int
    host: str = ""
    pid: int = 0
    nvml_dev: int = 0
    status: _Status = msgspec.field(default_factory=_Status)
    collective_counts: dict[str, int] = msgspec.field(default_factory=dict)


class _Communicator(msgspec.Struct, gc=False):
    hash: str
    size: int
    secondary_hash: str = ""
    ranks: list[_Rank] = msgspec.field(default_factory=list)
    missing_ranks: list[_Rank] = msgspec.field(default_factory=list)


class _Report(msgspec.Struct, gc=False):
    nccl_version: str
    communicators: list[_Communicator]
    timestamp: str = ""


@dataclass(frozen=True, slots=True, order=True)
class TrainingGpu:
    """A GPU that a process trains on.

    Attributes:
        host: address of its node.
        nvml_index: of the GPU on its node, whatever the process is shown of them.
        pid: of the process; -1 where RAS does not know it, so that one such device is not told from another.
    """

    host: str
    nvml_index: int
    pid: int

    @property
    def is_known(self) -> bool:
        """Return whether its process is known."""
        return self.pid >= 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Member:
    """A rank of a communicator that answered.

    Attributes:
        device: where it runs.
        counts: collectives that it has launched, by NCCL's name of the operation.
        is_running: neither being initialized nor left.
        is_leaving, is_aborted: it is being torn down, or was aborted.
        error: its asynchronous error, by NCCL's number; 0 for none.
    """

    device: TrainingGpu
    counts: dict[str, int]
    is_running: bool
    is_leaving: bool
    is_aborted: bool
    error: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Communicator:
    """A communicator.

    Attributes:
        name: its hash, as NCCL's own log has it.
        members: that answered, by rank of the communicator.
        silent: ranks that RAS could not reach, and whether it considers them dead.
        absent: ranks that it did reach, and which do not know the communicator: they have left it, or not joined yet.
    """

    name: str
    members: dict[int, Member]
    silent: dict[int, tuple[TrainingGpu, bool]]
    absent: dict[int, TrainingGpu]


@dataclass(frozen=True, slots=True, kw_only=True)
class RasReport:
    """A report.

    Attributes:
        time: when it was made, by the clock of the node that was asked; as NCCL writes it, sortable.
    """

    time: str
    communicators: tuple[Communicator, ...]


def looks_like(head: bytes) -> bool:
    """Return whether the first 64 KiB are those of a report."""
    return head.lstrip()[:1] == b"{" and b'"nccl_version"' in head[:1024] and b'"communicators"' in head[:1024]


def looks_like_text(head: bytes) -> bool:
    """Return whether the first 64 KiB are those of a report in RAS' text form."""
    return b"Job summary\n===========" in head and b"Communicators..." in head


def read_ras_report(data: bytes, path: str) -> RasReport:
    """Return a report.

    Raises:
        BrokenInputError: it is cut, or something else.
    """
    try:
        report = msgspec.json.decode(data, type=_Report)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise BrokenInputError(f"a report of NCCL's RAS must be whole: {error}", where=path) from error
    names = Counter(one.hash for one in report.communicators[:MAX_GROUPS])
    return RasReport(
        time=bounded_text(report.timestamp, 40),
        communicators=tuple(
            _communicator(one, is_alone=names[one.hash] == 1)
            for one in report.communicators[:MAX_GROUPS]
            if 0 < one.size <= MAX_GROUP_SIZE
        ),
    )


def _communicator(found: _Communicator, *, is_alone: bool) -> Communicator:
    missing = {one.rank: one for one in found.missing_ranks if 0 <= one.rank < found.size}
    silent = {rank: one for rank, one in missing.items() if one.status.unresponsive or one.status.considered_dead}
    return Communicator(
        name=bounded_text(found.hash if is_alone else f"{found.hash}:{found.secondary_hash}", 60),
        members={one.rank: _member(one) for one in found.ranks if 0 <= one.rank < found.size},
        silent={rank: (_device(one), one.status.considered_dead) for rank, one in silent.items()},
        absent={rank: _device(one) for rank, one in missing.items() if rank not in silent},
    )


def _member(found: _Rank) -> Member:
    status = found.status
    is_leaving = status.finalize_called or status.destroy_flag
    return Member(
        device=_device(found),
        counts={
            bounded_text(name, 40): count for name, count in found.collective_counts.items() if 0 <= count <= INT64_MAX
        },
        is_running=status.init_state == 0 and not is_leaving and not status.abort_flag,
        is_leaving=is_leaving,
        is_aborted=status.abort_flag,
        error=status.async_error,
    )


def _device(found: _Rank) -> TrainingGpu:
    return TrainingGpu(host=bounded_text(found.host, 120), nvml_index=found.nvml_dev, pid=found.pid)
