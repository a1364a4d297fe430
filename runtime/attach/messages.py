"""What a process and its listener send each other: a size (8 bytes), a kind (32 bytes, ended by zeros), the content."""

from __future__ import annotations

import struct
from dataclasses import dataclass

_HEAD = struct.Struct("<Q32s")  # Metadata, dynolog/src/ipcfabric/FabricManager.h
_ASK = struct.Struct(
    "<iiq"
)  # LibkinetoRequest, dynolog/src/ipcfabric/Utils.h: what can be recorded, number of processes, job
_KIND = b"req"
_CAN_TRACE = 2  # LibkinetoConfigType::ACTIVITIES, libkineto/src/IpcFabricConfigClient.h; off while the process records


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceQuery:
    """A process asks whether a trace of it is wanted.

    Attributes:
        processes: itself and then its ancestors, as it knows them.
        job: number of its Slurm job, 0 without one.
        is_free: it could record now.
    """

    processes: tuple[int, ...]
    job: int
    is_free: bool


def parse(data: bytes) -> TraceQuery | None:
    """Read a message; None for one that is no question, or is cut."""
    if len(data) < _HEAD.size + _ASK.size:
        return None
    size, kind = _HEAD.unpack_from(data)
    content = data[_HEAD.size :]
    if size != len(content) or kind.partition(b"\0")[0] != _KIND:
        return None
    able, count, job = _ASK.unpack_from(content)
    if count < 1 or len(content) != _ASK.size + 4 * count:
        return None
    processes = struct.unpack_from(f"<{count}i", content, _ASK.size)
    return TraceQuery(processes=processes, job=job, is_free=bool(able & _CAN_TRACE))


def answer(settings: str) -> bytes:
    """Return the answer to a question.

    Where nothing is wanted no answer is sent: a process waits for 0.1 s, and would take one that it has missed for the
    answer to its next question, and each answer after that likewise.
    """
    content = settings.encode()
    return _HEAD.pack(len(content), _KIND) + content


def settings(*, trace: str, start_unix_s: float, seconds: float, warm_up_s: int) -> str:
    """Return what tells a process to record (keys: libkineto/src/Config.cpp).

    Args:
        trace: path; the process puts ``_`` and its number before the ending ``.json``.
        start_unix_s: when it starts, by the clock of all nodes.
        seconds: that it records.
        warm_up_s: of its profiler before the start.
    """
    return "\n".join(
        (
            f"ACTIVITIES_LOG_FILE={trace}",
            f"PROFILE_START_TIME={start_unix_s * 1e3:.0f}",
            f"ACTIVITIES_DURATION_MSECS={seconds * 1e3:.0f}",
            f"ACTIVITIES_WARMUP_PERIOD_SECS={warm_up_s}",
            "PROFILE_REPORT_INPUT_SHAPES=true",
            "",
        )
    )
