"""Reads the tables that nccl-tests and rccl-tests print (all_reduce_perf, all_gather_perf, ...).

A row is ``size count type redop root  time algbw busbw wrong  time algbw busbw wrong``, the first
measurement out of place, the second in place. NCCL's own output may tear a row into its head and
its measurements; pieces are put together again, and a row counts only when its bandwidth equals
its size by its time.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from dataclasses import dataclass, field

from paro_advise.core.collective import REDUCTIONS, Op, bus_factor
from paro_advise.trace_parsers.kernel_kinds import op_of_name
from paro_advise.trace_parsers.logs.constants import (
    LARGE_GROUP,
    MAX_BENCHMARK_RANKS,
    MAX_TIME_ERROR,
    MIN_RATIO_GBPS,
    PRINTED_ERROR,
    ROUNDING_SLACK,
)
from paro_advise.trace_parsers.nccl.names import dtype_of_name, element_bytes
from paro_advise.trace_parsers.side_rows import RowBuffer
from paro_advise.trace_parsers.tables import LINK_SAMPLE_COLUMNS
from paro_advise.trace_parsers.values import parse_float, parse_int

_STARTING = re.compile(r"# Collective test starting: (\w{1,60})")
_RANK = re.compile(
    r"#\s+Rank\s+(\d{1,9})\s+(?:Group\s+(\d{1,9})\s+)?Pid\s+\d{1,10}\s+on\s+(\S{1,255})\s+device\s+(\d{1,4})\s+"
    r"\[[^\]]{0,40}\]\s+(\S.{0,100})"
)
_COLUMNS = re.compile(r"#\s+size\s+count\s+type\s.*\btime\s+algbw\s+busbw\b.*")
_PROGRAM = re.compile(
    r"\b(all_reduce|all_gather|reduce_scatter|alltoall|broadcast|reduce|gather|scatter|sendrecv|hypercube)_perf"
)
_ENDINGS = ("# Avg bus bandwidth", "# Collective test concluded")
_OPS = (
    Op.ALL_REDUCE, Op.ALL_GATHER, Op.REDUCE_SCATTER, Op.ALL_TO_ALL, Op.BROADCAST, Op.REDUCE, Op.GATHER,
    Op.SCATTER, Op.SEND_RECV,
)  # fmt: skip
_ROOTED = {Op.BROADCAST, Op.REDUCE, Op.GATHER, Op.SCATTER}


@dataclass(frozen=True, slots=True, kw_only=True)
class _Measurement:
    time_us: float
    algbw_gbps: float
    busbw_gbps: float


@dataclass(frozen=True, slots=True, kw_only=True)
class _Head:
    num_bytes: int
    redop: str
    root: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Row:
    head: _Head
    measured: _Measurement


@dataclass(slots=True)
class _Table:
    program: str = ""
    groups: Counter[int] = field(default_factory=Counter)
    num_ranks: int = 0
    last_rank: int = -1
    devices: dict[str, set[str]] = field(default_factory=dict)
    rows: list[_Row] = field(default_factory=list)
    mentioned: Op = Op.UNKNOWN

    @property
    def is_cut(self) -> bool:
        """Tell whether the list of ranks lacks some, as where somebody has pasted its last line."""
        return self.num_ranks <= self.last_rank and self.num_ranks < MAX_BENCHMARK_RANKS


def _measurement(tokens: list[str]) -> _Measurement | None:
    values = [parse_float(token) for token in tokens[:3]]
    time_us, algbw, busbw = values
    if time_us is None or algbw is None or busbw is None or time_us <= 0:
        return None
    return _Measurement(time_us=time_us, algbw_gbps=algbw, busbw_gbps=busbw)


def _is_measurement(tokens: list[str]) -> bool:
    return len(tokens) == 4 and all(token == "N/A" or parse_float(token) is not None for token in tokens)


def _row_head(tokens: list[str]) -> tuple[_Head, list[str]] | None:
    """Split tokens into the head of a row and what follows it."""
    if len(tokens) < 3 or not (tokens[0].isdigit() and tokens[1].isdigit()):
        return None
    size_of = element_bytes(dtype_of_name(tokens[2])) or (1 if tokens[2].startswith(("fp8", "f8")) else None)
    num_bytes = parse_int(tokens[0])
    if size_of is None or num_bytes is None:
        return None
    rest = tokens[3:]
    redop = rest.pop(0) if rest and rest[0][0].isalpha() and rest[0] != "N/A" else ""
    root = None
    if len(rest) % 4 == 1 and re.fullmatch(r"-?\d{1,9}", rest[0]):
        root = int(rest.pop(0))
    return _Head(num_bytes=num_bytes, redop=redop, root=root), rest


class BenchmarkTables:
    """Tables read so far.

    Attributes:
        samples: LINK_SAMPLE_COLUMNS.
        num_rows: rows seen, also those not kept.
        num_torn: rows put together from pieces.
        num_rejected: rows or pieces whose numbers contradict each other.
        num_empty: rows of size 0 or without a time.
        num_wrong: kept rows whose results the benchmark itself found wrong.
        num_unknown_op: kept rows whose collective is unknown.
        num_derived: kept rows whose collective or group size follows from busbw / algbw.
        largest: (ranks, nodes) of the largest group listed.
        device_name, devices_per_host: as listed, "" and 0 when not.
    """

    def __init__(self) -> None:
        self.samples = RowBuffer(LINK_SAMPLE_COLUMNS)
        self.num_rows = self.num_torn = self.num_rejected = self.num_empty = 0
        self.num_unknown_op = self.num_derived = self.num_wrong = 0
        self.largest: tuple[int, int] = (0, 0)
        self.device_name = ""
        self.devices_per_host = 0
        self._table = _Table()
        self._pending: list[str] = []

    def feed(self, line: str) -> bool:
        """Take a line or a piece of one; return whether it belongs to a table."""
        text = line.strip()
        if text.startswith("#"):
            return self._read_comment(text)
        tokens = text.split(maxsplit=16)
        if not tokens or not (tokens[0][0].isdigit() or tokens[0] == "N/A"):
            if "_perf" in text:
                self._read_mention(text)
            return False
        if _is_measurement(tokens) and self._pending:
            self._pending += tokens
            if len(self._pending) >= 9 + 4:
                self.num_torn += self._add_row(self._pending)
                self._pending = []
            return True
        if _row_head(tokens) is None:
            return False
        if self._pending:
            self._add_row(self._pending)
            self._pending = []
        if len(tokens) >= 12:
            self._add_row(tokens)
        else:
            self._pending = tokens
        return True

    def _read_comment(self, text: str) -> bool:
        if found := _STARTING.match(text):
            self._end_table()
            self._table.program = found[1]
        elif found := _RANK.fullmatch(text):
            if self._table.rows:
                self._end_table()
            self._read_rank(found)
        elif _COLUMNS.fullmatch(text):
            if self._table.rows:
                self._end_table()
        elif text.startswith(_ENDINGS):
            self._end_table()
        else:
            return False
        return True

    def _read_mention(self, text: str) -> None:
        ops = {op_of_name(name) for name in _PROGRAM.findall(text[:4000])}
        if len(ops) == 1:
            self._table.mentioned = ops.pop()

    def _read_rank(self, found: re.Match[str]) -> None:
        table = self._table
        if table.num_ranks < MAX_BENCHMARK_RANKS:
            table.num_ranks += 1
            table.last_rank = max(table.last_rank, int(found[1]))
            table.groups[int(found[2] or 0)] += 1
            table.devices.setdefault(found[3], set()).add(found[4])
            self.device_name = self.device_name or found[5].strip()

    def _add_row(self, tokens: list[str]) -> bool:
        """Add a row; return whether it was kept."""
        self.num_rows += 1
        split = _row_head(tokens)
        if split is None or len(split[1]) < 4:
            self.num_rejected += 1
            return False
        head, rest = split
        measured = _measurement(rest[:4]) or (_measurement(rest[4:8]) if len(rest) >= 8 else None)
        if measured is None or head.num_bytes == 0:
            self.num_empty += 1
            return False
        algbw = head.num_bytes / measured.time_us / 1e3
        is_consistent = abs(algbw - measured.algbw_gbps) <= PRINTED_ERROR + MAX_TIME_ERROR * algbw
        if not is_consistent and "hypercube" not in self._table.program:
            self.num_rejected += 1
            return False
        self._table.rows.append(_Row(head=head, measured=measured))
        self.num_wrong += any((parse_int(wrong) or 0) > 0 for wrong in rest[3::4])
        return True

    def finish(self) -> None:
        """End the last table."""
        self._end_table()

    def _end_table(self) -> None:
        if self._pending:
            self._add_row(self._pending)
            self._pending = []
        table, self._table = self._table, _Table(mentioned=self._table.mentioned)
        if table.is_cut:  # it tells neither how many ranks there are nor how many nodes
            table.groups.clear()
            table.devices.clear()
        listed = table.groups[min(table.groups)] if table.groups else None
        num_nodes = len(table.devices) or None
        if listed:
            self.largest = max(self.largest, (listed, num_nodes or 0))
            per_host = max(len(devices) for devices in table.devices.values())
            self.devices_per_host = max(self.devices_per_host, per_host)
        if not table.rows:
            return
        op, is_derived = _op_of(table, listed)
        size = listed or _group_size_by_ratios(table.rows, op)
        self.num_unknown_op += len(table.rows) if op is Op.UNKNOWN else 0
        self.num_derived += len(table.rows) if is_derived or size != listed else 0
        for row in table.rows:
            self.samples.add(
                op=op.value,
                bytes=row.head.num_bytes,
                group_size=size,
                num_nodes=num_nodes,
                time_us=row.measured.time_us,
                busbw_gbps=row.measured.busbw_gbps,
            )


def _ratio(rows: list[_Row]) -> tuple[float, float] | None:
    """Return busbw / algbw of the fastest row and how far printing may have moved it."""
    best = max(rows, key=lambda row: row.measured.algbw_gbps).measured
    if best.algbw_gbps < MIN_RATIO_GBPS:
        return None
    ratio = best.busbw_gbps / best.algbw_gbps
    return ratio, PRINTED_ERROR * (1 + ratio) / best.algbw_gbps


def _op_of(table: _Table, group_size: int | None) -> tuple[Op, bool]:
    """Return the collective, and whether it follows from the numbers instead of a name."""
    if table.program:
        return op_of_name(table.program.removesuffix("_mpi").removesuffix("_perf")), False
    first = table.rows[0].head
    ratio = _ratio(table.rows)
    possible = [
        op
        for op in _OPS
        if (op in REDUCTIONS) == (first.redop not in {"", "none"})
        and not (op in _ROOTED and first.root == -1)
        and (ratio is None or _fits(op, ratio, group_size))
    ]
    if len(possible) == 1:
        return possible[0], True
    return (table.mentioned, True) if table.mentioned in possible else (Op.UNKNOWN, False)


def _fits(op: Op, ratio: tuple[float, float], group_size: int | None) -> bool:
    value, error = ratio
    if group_size is not None:
        return abs(bus_factor(op, group_size) - value) <= error
    low, high = bus_factor(op, 2), bus_factor(op, LARGE_GROUP)
    return low - error <= value <= high + error


def _group_size_by_ratios(rows: list[_Row], op: Op) -> int | None:
    """Return the only group size that explains busbw / algbw of all rows."""
    scale = {Op.ALL_REDUCE: 2.0}.get(op, 1.0)
    if op is Op.UNKNOWN or bus_factor(op, 2) == bus_factor(op, 3):
        return None
    low, high = 2.0, math.inf
    for row in rows:
        found = _ratio([row])
        if found is None:
            continue
        below, above = (found[0] - found[1]) / scale, (found[0] + found[1]) / scale
        low = max(low, 1 / (1 - below) if below < 1 else math.inf)
        high = min(high, 1 / (1 - above) if above < 1 else math.inf)
    first = math.ceil(low - ROUNDING_SLACK) if math.isfinite(low) else 0
    return first if first and first <= high < first + 1 else None
