"""Reads what DeepSpeed's communication logger prints: summary tables and verbose lines.

The printed size is that of the input tensor, in units of 1024 and rounded to two decimals: the
shard for an all-gather, the full buffer for the others. Bandwidths are printed in Gbit/s with
factors that changed between releases, so they are computed anew; only their ratio, (n - 1) / n
with n ranks in the world, is used.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

from paro_advise.core.collective import Op
from paro_advise.trace_parsers.collective_sizes import busbw_gbps
from paro_advise.trace_parsers.kernel_kinds import op_of_name
from paro_advise.trace_parsers.logs.constants import (
    MAX_COMMS_ENTRIES,
    MAX_LINK_GBPS,
    MAX_PRINTED_SIZE,
    PRINTED_ERROR,
    ROUNDING_SLACK,
)
from paro_advise.trace_parsers.side_rows import RowBuffer
from paro_advise.trace_parsers.tables import LINK_SAMPLE_COLUMNS
from paro_advise.trace_parsers.values import parse_float

# Bytes; DeepSpeed prints multiples of 1024.
_UNITS = {unit: 1024**power for power, unit in enumerate(("B", "KB", "MB", "GB", "TB", "PB"))}
_SIZE = r"(\d[\d.]{0,12}) ?([KMGTP]?B)"
_OP = re.compile(r"(\w{1,60})(?: \| \[Caller Func: .{1,200}\])?\s*")
_NUMBER = r"([\d.]{1,20})"
_ROW = re.compile(rf"\s+{_SIZE}\s+(\d{{1,12}})\s+{_NUMBER}\s+{_NUMBER}\s+{_NUMBER}\s+{_NUMBER}\s*")
_VERBOSE = re.compile(
    r"comm op: (\w{1,60})(?: \| \[Caller Func: .{1,200}?\])? "
    rf"\| time \(ms\): {_NUMBER} \| msg size: {_SIZE} "
    rf"\| algbw \(Gbps\): {_NUMBER}\s+\| busbw \(Gbps\): {_NUMBER}"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Entry:
    op: Op
    tensor_bytes: int
    latency_us: float
    algbw: float | None
    busbw: float | None


class CommsTables:
    """Entries read so far.

    Attributes:
        samples: LINK_SAMPLE_COLUMNS, filled by ``finish``.
        num_entries: rows and verbose lines seen.
        num_broken: of these, unreadable.
        num_calls: collective calls behind the rows.
        num_without_size: entries left out because the group size is unknown.
        num_impossible: entries left out because no link is that fast: the time of an asynchronous
            call ended before its transfer did.
        num_without_wait: entries whose time is the minimum over ranks (straggler table).
        group_size: ranks in the world, None when the ratios do not give it.
    """

    def __init__(self) -> None:
        self.samples = RowBuffer(LINK_SAMPLE_COLUMNS)
        self.num_entries = self.num_broken = self.num_calls = 0
        self.num_without_size = self.num_without_wait = self.num_impossible = 0
        self.group_size: int | None = None
        self._entries: list[_Entry] = []
        self._minimum_us: dict[tuple[Op, int], float] = {}
        self._table = ""
        self._op = Op.UNKNOWN

    def feed(self, line: str) -> bool:
        """Take a line; return whether it belongs to the logger's output."""
        if "comm op: " in line and "msg size: " in line:
            self._read_verbose(line)
            return True
        if line.lstrip().startswith("Comm. Op "):
            self._table = "straggler" if "straggler(ms)" in line else "summary"
            self._op = Op.UNKNOWN
            return True
        if not self._table:
            return False
        if row := _ROW.fullmatch(line):
            self._read_row(row)
            return True
        if op := _OP.fullmatch(line):
            self._op = op_of_name(op[1])
            return True
        if line.strip():
            self._table = ""
        return False

    def _read_verbose(self, line: str) -> None:
        self.num_entries += 1
        found = _VERBOSE.search(line)
        values = [parse_float(found[index]) for index in (2, 5, 6)] if found else [None] * 3
        tensor_bytes = _tensor_bytes(found[3], found[4]) if found else None
        if found is None or values[0] is None or tensor_bytes is None:
            self.num_broken += 1
            return
        self.num_calls += 1
        self._keep(op_of_name(found[1]), tensor_bytes, values[0] * 1e3, values[1], values[2])

    def _read_row(self, row: re.Match[str]) -> None:
        self.num_entries += 1
        tensor_bytes = _tensor_bytes(row[1], row[2])
        cells = [parse_float(row[index]) for index in (4, 5, 6, 7)]
        if tensor_bytes is None or cells[1] is None or cells[2] is None:
            self.num_broken += 1
        elif self._table == "straggler":
            self._minimum_us[(self._op, tensor_bytes)] = cells[2] * 1e3
        else:
            self.num_calls += int(row[3])
            self._keep(self._op, tensor_bytes, cells[1] * 1e3, cells[2], cells[3])

    def _keep(self, op: Op, tensor_bytes: int, latency_us: float, algbw: float | None, busbw: float | None) -> None:
        if len(self._entries) < MAX_COMMS_ENTRIES:
            self._entries.append(
                _Entry(op=op, tensor_bytes=tensor_bytes, latency_us=latency_us, algbw=algbw, busbw=busbw)
            )

    def finish(self) -> None:
        """Derive the group size and fill ``samples``."""
        size = self.group_size = _group_size_by_ratios(self._entries)
        for entry in self._entries:
            minimum_us = self._minimum_us.get((entry.op, entry.tensor_bytes))
            time_us = entry.latency_us if minimum_us is None else minimum_us
            if entry.op in {Op.BARRIER, Op.UNKNOWN} or entry.tensor_bytes == 0 or time_us <= 0:
                continue
            is_shard = entry.op is Op.ALL_GATHER
            num_bytes = entry.tensor_bytes * (size or 0) if is_shard else entry.tensor_bytes
            busbw = busbw_gbps(entry.op, num_bytes, time_us, size)
            if busbw is None:
                self.num_without_size += 1
                continue
            if busbw > MAX_LINK_GBPS:
                self.num_impossible += 1
                continue
            self.num_without_wait += minimum_us is not None
            self.samples.add(
                op=entry.op.value,
                bytes=num_bytes,
                group_size=size,
                num_nodes=None,
                time_us=time_us,
                busbw_gbps=busbw,
            )


def _tensor_bytes(amount: str, unit: str) -> int | None:
    value = parse_float(amount)
    return None if value is None or value > MAX_PRINTED_SIZE else round(value * _UNITS[unit])


def _group_size_by_ratios(entries: list[_Entry]) -> int | None:
    """Return the only n for which all printed busbw / algbw are (n - 1) / n, None if there is none."""
    low, high = 2.0, math.inf
    for entry in entries:
        if not entry.algbw or not entry.busbw or entry.busbw >= entry.algbw:
            continue
        ratio = entry.busbw / entry.algbw
        error = PRINTED_ERROR * (1 + ratio) / entry.algbw
        low = max(low, 1 / (1 - ratio + error))
        high = min(high, 1 / (1 - ratio - error) if ratio + error < 1 else math.inf)
    first = math.ceil(low - ROUNDING_SLACK)
    return first if first <= high < first + 1 else None
