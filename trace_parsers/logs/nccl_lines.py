"""Reads the lines that NCCL and RCCL print with NCCL_DEBUG=INFO."""

from __future__ import annotations

import re
from array import array
from collections import Counter
from dataclasses import dataclass, field

from paro_advise.trace_parsers.collective_sizes import full_bytes
from paro_advise.trace_parsers.constants import MAX_GROUPS, MAX_ROWS
from paro_advise.trace_parsers.kernel_kinds import op_of_name
from paro_advise.trace_parsers.logs.constants import MAX_KEYS, MAX_LIST_TEXT, MAX_MESSAGE
from paro_advise.trace_parsers.nccl.names import (
    algorithm_name,
    dtype_of_number,
    element_bytes,
    protocol_name,
)
from paro_advise.trace_parsers.side_rows import RowBuffer
from paro_advise.trace_parsers.tables import COLLECTIVE_COLUMNS, ProcessGroup
from paro_advise.trace_parsers.values import bounded_int, bounded_text, parse_int

# What follows the host's name. Searched first: a name may begin anywhere, but this is rare.
_AFTER_HOST = re.compile(r":(\d{1,10}):(\d{1,10}) \[(\d{1,4})\] (?:\S{1,200}:\d{1,6} )?NCCL (INFO|WARN|TRACE) +(.*)")
_HOST_BACKWARDS = re.compile(r"[\w.-]{0,254}[A-Za-z0-9]")
_MAX_HOST = 255  # characters; longest host name; RFC 1035 allows 255 octets
_CELL = re.compile(r"[\d.]+|N/A")
_BARE = re.compile(r"\s*(?:NCCL (INFO|WARN|TRACE) +|(?=R?NCCL version \d))(.*)")
_POINTER = r"(?:0x[0-9a-f]{1,16}|\(nil\))"
_COLL = re.compile(
    rf"(\w{{1,40}}): opCount ([0-9a-f]{{1,16}}) sendbuff {_POINTER} recvbuff {_POINTER} (?:acc {_POINTER} )?"
    rf"count (\d{{1,20}}) datatype (\d{{1,3}}) op \d{{1,12}} root \d{{1,9}} comm ({_POINTER})"
    rf"(?: \[nranks=(\d{{1,9}})\])?(?: stream ({_POINTER}))?(?: task \d{{1,9}} globalrank (\d{{1,9}}))?\s*"
)
_INIT = re.compile(
    rf"comm ({_POINTER}) rank (\d{{1,9}}) nranks (\d{{1,9}}) cudaDev (\d{{1,4}})"
    r"(?:.{0,60}? commId (0x[0-9a-f]{1,16}))?.{0,80} - Init (?:START|COMPLETE)"
)
_NODES = re.compile(rf"comm ({_POINTER}) rank \d{{1,9}} n[Rr]anks \d{{1,9}} nNodes (\d{{1,9}}) localRanks (\d{{1,9}})")
_CHANNEL = re.compile(
    r"Channel \d{1,4}(?:/\d{1,4})? : (\d{1,9}\[\w{1,8}\]) -> (\d{1,9}\[\w{1,8}\]) "
    r"(?:\[\w{1,8}\] )?via (\S.{0,100})"
)
_TUNING = re.compile(
    r"(\w{1,40})(?: \[[\w ]{1,20}\])?: *\d{1,20} Bytes -> "
    r"(?:Algo +(\w{1,20}) +proto +(\w{1,20})\b.*|Kernel (\w{1,80})\b.*|(cudaMemcpy\w{0,20})\b.*)"
)
_VERSION = re.compile(r"R?NCCL version (\d[\w.+-]{0,60})")


def _header(line: str) -> tuple[re.Match[str] | None, int]:
    """Return the first prefix of NCCL in a line from the end of its host's name on, and where that name begins."""
    found = _AFTER_HOST.search(line)
    while found is not None:
        before = line[max(0, found.start() - _MAX_HOST) : found.start()]
        if host := _HOST_BACKWARDS.match(before[::-1]):
            return found, found.start() - host.end()
        found = _AFTER_HOST.search(line, found.start() + 1)
    return None, 0


@dataclass(slots=True, kw_only=True)
class _Comm:
    index: int
    rank: int | None = None
    size: int | None = None
    name: str = ""
    first_op_count: int | None = None
    is_advancing: bool = False
    num_calls: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class NcclLine:
    """One message of NCCL.

    Attributes:
        front: what another writer printed before it on the same line, "" on a clean line.
        host: host name, "" when the prefix is missing.
        pid: process, 0 when the prefix is missing.
        level: INFO, WARN or TRACE.
        body: the message.
    """

    front: str
    host: str
    pid: int
    level: str
    body: str


@dataclass(slots=True)
class NcclLines:
    """Facts from NCCL's lines so far; counts are of lines unless said otherwise."""

    rows: RowBuffer = field(default_factory=lambda: RowBuffer(COLLECTIVE_COLUMNS))
    hosts: set[str] = field(default_factory=set)
    versions: Counter[str] = field(default_factory=Counter)
    transports: dict[str, set[str]] = field(default_factory=dict)
    tuning: Counter[str] = field(default_factory=Counter)
    groups: dict[str, int] = field(default_factory=dict)  # commId to number of ranks
    ranks: set[int] = field(default_factory=set)
    num_nodes: int | None = None
    local_ranks: int | None = None
    num_lines: int = 0
    num_collectives: int = 0
    num_torn: int = 0
    num_without_size: int = 0
    num_warnings: int = 0
    first_warning: str = ""
    _hosts_of: dict[tuple[int, str], dict[int, str]] = field(default_factory=dict)
    _comms: dict[tuple[str, int, str], _Comm] = field(default_factory=dict)
    _row_comm: array[int] = field(default_factory=lambda: array("q"))
    _comm_list: list[_Comm] = field(default_factory=list)

    def split(self, line: str) -> NcclLine | None:
        """Return the message in a line, None when it holds none of NCCL's."""
        if "NCCL" not in line or len(line) > MAX_MESSAGE:
            return None
        found, start = _header(line)
        if found is None:
            bare = _BARE.fullmatch(line)
            if bare is None:
                return None
            return NcclLine(front="", host="", pid=0, level=bare[1] or "INFO", body=bare[2])
        host = line[start : found.start()]
        if host not in self.hosts:
            # A table's cell may touch the host's name: "   sum   -1node7:12:12 [0] NCCL INFO ...".
            cell = _CELL.match(host)
            cuts = range(1, cell.end() + 1) if cell else ()
            cut = next((cut for cut in cuts if host[cut:] in self.hosts), 0)
            start, host = start + cut, host[cut:]
        return NcclLine(front=line[:start], host=host, pid=int(found[1]), level=found[4], body=found[5].rstrip())

    def use(self, line: NcclLine) -> None:
        """Take over one message; a message that holds a second one is counted as torn."""
        self.num_lines += 1
        if " NCCL INFO " in line.body or " NCCL WARN " in line.body:
            self.num_torn += 1
            return
        if line.host and len(self.hosts) < MAX_GROUPS and not line.front:
            self.hosts.add(line.host)
        body = line.body
        if line.level == "WARN":
            self.num_warnings += 1
            self.first_warning = self.first_warning or bounded_text(body, 160)
        elif "opCount" in body:
            self._read_collective(line)
        elif "Init " in body and (found := _INIT.search(body)):
            self._read_init(line, found)
        elif body.startswith("Channel ") and (found := _CHANNEL.fullmatch(body)):
            self._read_channel(found)
        elif " Bytes -> " in body and (found := _TUNING.fullmatch(body)):
            self._count_tuning(found)
        elif "nNodes " in body and (found := _NODES.search(body)):
            self.num_nodes = max(self.num_nodes or 0, int(found[2])) or None
            self.local_ranks = max(self.local_ranks or 0, int(found[3])) or None
        elif (found := _VERSION.search(body)) and len(self.versions) < MAX_KEYS:
            self.versions[found[1]] += 1

    def _read_init(self, line: NcclLine, found: re.Match[str]) -> None:
        rank, size = int(found[2]), int(found[3])
        key = (line.host, line.pid, found[1])
        if rank >= size or len(self._comms) >= MAX_GROUPS:
            self.num_torn += 1
            return
        name = found[5] or ""
        old = self._comms.get(key)
        if old is None or (old.rank, old.size) != (rank, size) or (name and old.name != name):
            self._comms[key] = self._new_comm(rank, size, name)
        self.ranks.add(rank)
        # Without a commId (before 2.15) ranks of equally large communicators fall together here.
        self._hosts_of.setdefault((size, name), {})[rank] = line.host
        if name:
            self.groups[name] = size

    def _new_comm(self, rank: int | None, size: int | None, name: str) -> _Comm:
        comm = _Comm(index=len(self._comm_list), rank=rank, size=size, name=name)
        self._comm_list.append(comm)
        return comm

    def _read_collective(self, line: NcclLine) -> None:
        if self.rows.num_rows >= MAX_ROWS:
            self.num_collectives += 1
            self.rows.num_dropped += 1
            return
        found = _COLL.fullmatch(line.body)
        count = parse_int(found[3]) if found else None
        op_count = parse_int(found[2], 16) if found else None
        if found is None or count is None or op_count is None:
            self.num_torn += 1
            return
        self.num_collectives += 1
        comm = self._comm_of((line.host, line.pid, found[5]), found[6])
        dtype = dtype_of_number(int(found[4]))
        size = element_bytes(dtype)
        op = op_of_name(found[1])
        num_bytes = None if size is None else full_bytes(op, count * size, comm.size)
        self.num_without_size += num_bytes is None
        rank = comm.rank if found[8] is None else int(found[8])
        pointer = found[7]
        dropped = self.rows.num_dropped
        self.rows.add(
            op=op.value,
            bytes=num_bytes,
            dtype=dtype,
            group_size=comm.size,
            group_name=comm.name or found[5],
            seq=op_count,
            stream=None if pointer is None else 0 if pointer == "(nil)" else parse_int(pointer, 16),
            name=found[1] if rank is None else f"{found[1]} rank {rank}",
        )
        if self.rows.num_dropped == dropped:
            self._row_comm.append(comm.index)
        comm.num_calls += 1
        comm.is_advancing = comm.is_advancing or comm.first_op_count not in (None, op_count)
        comm.first_op_count = op_count if comm.first_op_count is None else comm.first_op_count

    def _comm_of(self, key: tuple[str, int, str], printed_size: str | None) -> _Comm:
        comm = self._comms.get(key)
        if comm is None:
            comm = self._new_comm(None, None, "")
            if len(self._comms) < MAX_GROUPS:
                self._comms[key] = comm
        if comm.size is None and printed_size is not None:
            comm.size = bounded_int(int(printed_size), 1)
        return comm

    def _read_channel(self, found: re.Match[str]) -> None:
        # "NET/IB/0(12)/GDRDMA/Shared": numbers are devices, the rest but the buffers' kind names the path.
        parts = [part for part in found[3].strip().split("/") if part[:1].isalpha()]
        name = "/".join(part for part in parts if part not in {"read", "Shared"})[:60]
        if name in self.transports or len(self.transports) < MAX_KEYS:
            edges = self.transports.setdefault(name, set())
            if len(edges) < MAX_GROUPS:
                edges.add(f"{found[1]}>{found[2]}")

    def _count_tuning(self, found: re.Match[str]) -> None:
        choice = found[4] or found[5] or f"{algorithm_name(found[2])}_{protocol_name(found[3])}"
        key = f"tuning_{found[1]}_{choice}"
        if key in self.tuning or len(self.tuning) < MAX_KEYS:
            self.tuning[key] += 1

    def drop_stuck_sequences(self) -> int:
        """Blank the sequence numbers of communicators whose opCount never moves.

        Returns:
            The number of rows that lost theirs.
        """
        stuck = [comm.num_calls > 1 and not comm.is_advancing for comm in self._comm_list]
        column = self.rows.column("seq")
        num_blanked = 0
        for row, comm in enumerate(self._row_comm):
            if stuck[comm]:
                column[row] = None
                num_blanked += 1
        return num_blanked

    def layout(self) -> tuple[int | None, int | None, int | None]:
        """Return (ranks, nodes, ranks on a node) of the largest communicator, None where unknown."""
        printed = max((comm.size or 0 for comm in self._comm_list), default=0)
        if not self._hosts_of:
            return printed or None, self.num_nodes, self.local_ranks
        size, name = max(self._hosts_of)
        hosts = self._hosts_of[(size, name)]
        if len(hosts) < size or self.num_nodes:
            return size, self.num_nodes, self.local_ranks
        on_host = Counter(hosts.values())
        return size, len(on_host), max(on_host.values())

    def process_groups(self) -> tuple[ProcessGroup, ...]:
        """Return the communicators by name; their ranks are not known as global ones."""
        return tuple(
            ProcessGroup(name=name, description="", ranks=(), size=size) for name, size in sorted(self.groups.items())
        )

    def metadata(self) -> dict[str, str]:
        """Return hosts, transports (distinct directed rank pairs) and tuning choices (lines)."""
        out = {f"transport_{name}": str(len(edges)) for name, edges in sorted(self.transports.items())}
        out.update({name: str(count) for name, count in sorted(self.tuning.items())})
        if self.hosts:
            out["hosts"] = ",".join(sorted(self.hosts))[:MAX_LIST_TEXT]
        if self.ranks:
            out["num_ranks_logged"] = str(len(self.ranks))
        return out
