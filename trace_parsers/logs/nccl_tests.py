"""Output of nccl-tests and rccl-tests: what they print, also inside Markdown, and the JSON of their option ``-J``."""

from __future__ import annotations

import re
from pathlib import PurePath
from typing import TYPE_CHECKING

import msgspec

from paro_advise.errors import BrokenInputError
from paro_advise.trace_parsers.bytes.readable import Readable
from paro_advise.trace_parsers.constants import MAX_TEXT_BYTES
from paro_advise.trace_parsers.logs.constants import MAX_BENCHMARK_RANKS
from paro_advise.trace_parsers.logs.text_scan import parse_text
from paro_advise.trace_parsers.values import bounded_text

if TYPE_CHECKING:
    from collections.abc import Iterator

    from paro_advise.trace_parsers.tables import ParsedSource, SourceFile

_EXPECTED = "a table of nccl-tests"
_TABLE = re.compile(rb"# Collective test starting: |#\s+size\s+count\s+type\b[^\n]*\balgbw\s+busbw\b")
# As ``jsonOutputInit`` of nccl-tests' src/util.cu begins a file, version 1 (2.17) to 3 (2.19).
_JSON = re.compile(rb'\s{0,100}\{\s*"version"\s*:\s*\d{1,3}\s*,\s*"start_time"\s*:')


class _Measurement(msgspec.Struct, gc=False):
    alg_bw: float | str  # "nan" as all of them where nothing was timed
    bus_bw: float | str
    time: float | str | None = None  # us
    cpu_time: float | str | None = None  # in its place with ``-C``
    nwrong: float | str | None = None


class _Row(msgspec.Struct, gc=False):
    size: int
    count: int
    type: str
    redop: str = ""
    root: str = "-1"
    out_of_place: _Measurement | None = None
    in_place: _Measurement | None = None


class _Device(msgspec.Struct, gc=False):
    rank: int
    group: int = 0
    hostname: str = ""
    device: int = 0
    device_info: str = ""


class _Config(msgspec.Struct, gc=False):
    nthreads: int = 1
    ngpus: int = 1


class _Report(msgspec.Struct, gc=False):
    args: list[str]
    results: list[_Row] = msgspec.field(default_factory=list)
    devices: list[_Device] = msgspec.field(default_factory=list)
    config: _Config = msgspec.field(default_factory=_Config)


def looks_like(head: bytes) -> bool:
    """Return whether the first 64 KiB hold the beginning of a benchmark's table."""
    return _TABLE.search(head) is not None and b"\0" not in head


def looks_like_json(head: bytes) -> bool:
    """Return whether a file begins as one that a benchmark wrote with ``-J``."""
    return _JSON.match(head) is not None


def parse(data: Readable, source: SourceFile) -> ParsedSource:
    """Read link samples: bytes as printed, time in us (out of place where printed), GB/s.

    Raises:
        BrokenInputError: nothing known was found.
    """
    return parse_text(data, source, _EXPECTED)


def parse_json(data: Readable, source: SourceFile) -> ParsedSource:
    """Read link samples as ``parse`` does, from the JSON that holds the same.

    Raises:
        BrokenInputError: it is no whole report, or holds nothing known.
    """
    try:
        report = msgspec.json.decode(data.read_all(), type=_Report)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise BrokenInputError(
            f"a report of nccl-tests must be whole JSON: {error}",
            where=source.path,
            hint="give what the benchmark printed instead, or run it again",
        ) from error
    printed = "\n".join(" ".join(line.split()) for line in _printed(report))
    return parse_text(Readable([printed.encode("utf-8", "replace")], MAX_TEXT_BYTES), source, _EXPECTED)


def _printed(report: _Report) -> Iterator[str]:
    """Yield a report in the lines that the benchmark prints beside it."""
    if report.args:
        yield f"# Collective test starting: {bounded_text(PurePath(report.args[0]).name)}"
    # Of the GPUs of each process a report lists the first one only.
    devices = report.devices[:MAX_BENCHMARK_RANKS]
    most = MAX_BENCHMARK_RANKS // max(1, len(devices))
    per_process = max(1, min(report.config.nthreads * report.config.ngpus, most))
    for listed in devices:
        for place in range(per_process):
            where = f"on {bounded_text(listed.hostname) or '?'} device {listed.device + place}"
            info = bounded_text(listed.device_info)
            yield f"# Rank {listed.rank + place} Group {listed.group} Pid 0 {where} [] {info}"
    for row in report.results:
        if measured := row.out_of_place or row.in_place:
            time_us = measured.time if measured.time is not None else measured.cpu_time
            head = f"{row.size} {row.count} {row.type} {row.redop} {row.root}"
            counts = [one.nwrong for one in (row.out_of_place, row.in_place) if one and isinstance(one.nwrong, float)]
            wrong = f"{sum(counts):.0f}" if any(counts) else "N/A"
            # The second measurement is not looked at where there is a first one.
            yield f"{head} {time_us} {measured.alg_bw} {measured.bus_bw} {wrong} N/A N/A N/A N/A"
