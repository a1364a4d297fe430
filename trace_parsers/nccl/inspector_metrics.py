"""NCCL Inspector's Prometheus text (``NCCL_INSPECTOR_PROM_DUMP=1``): means by communicator, operation and size.

Each pair of lines is the mean of many collectives whose messages lie in a range of sizes (nccl 2.30,
plugins/profiler/inspector/inspector_prom.cc): geometric of bus bandwidths, arithmetic of times.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from paro_advise.core.collective import bus_factor
from paro_advise.core.plural import plural
from paro_advise.errors import BrokenInputError
from paro_advise.trace_parsers.collective_sizes import full_bytes
from paro_advise.trace_parsers.constants import MAX_GROUP_SIZE, MAX_GROUPS, MAX_ROWS, MAX_TIME_US
from paro_advise.trace_parsers.kernel_kinds import op_of_name
from paro_advise.trace_parsers.notice import NoticeList
from paro_advise.trace_parsers.side_rows import RowBuffer, parsed_source, warn_of_limits
from paro_advise.trace_parsers.tables import LINK_SAMPLE_COLUMNS, SourceHeader
from paro_advise.trace_parsers.values import bounded_float, parse_float, parse_int

if TYPE_CHECKING:
    from paro_advise.trace_parsers.bytes.readable import Readable
    from paro_advise.trace_parsers.tables import ParsedSource, SourceFile

_METRIC = re.compile(r"(nccl_[a-z0-9_]{1,60})\{([^{}]{0,1500})\}[ \t]+(\S{1,40})(?:[ \t]+-?\d{1,20})?")
_LABEL = re.compile(r'([a-z0-9_]{1,40})="([^"\\]{0,255})"')
_SIZES = re.compile(r"(\d{1,4})-(\d{1,4})(B|KB|MB|GB|TB)")
_UNITS = {unit: 1024**power for power, unit in enumerate(("B", "KB", "MB", "GB", "TB"))}
_BANDWIDTHS = {"nccl_bus_bandwidth_gbs": "collective", "nccl_p2p_bus_bandwidth_gbs": "p2p_operation"}
_TIMES = ("nccl_collective_exec_time_microseconds", "nccl_p2p_exec_time_microseconds")
_MAX_GBPS = 1e5  # 1e9 bytes/s that no link moves


@dataclass(slots=True)
class _Scan:
    samples: RowBuffer = field(default_factory=lambda: RowBuffer(LINK_SAMPLE_COLUMNS))
    hosts: set[str] = field(default_factory=set)
    versions: set[str] = field(default_factory=set)
    num_lines: int = 0
    num_broken: int = 0
    num_without_sample: int = 0
    world: tuple[int, int | None] = (0, None)  # ranks and nodes of the largest communicator
    # By labels, until the other of the two comes: line by line, or sorted by name.
    _rates: dict[str, float] = field(default_factory=dict)
    _times: dict[str, float] = field(default_factory=dict)

    def feed(self, line: str) -> None:
        found = _METRIC.fullmatch(line)
        value = parse_float(found[3]) if found else None
        if found is None or value is None:
            self.num_broken += 1
            return
        name, labels = found[1], found[2]
        if name not in _BANDWIDTHS and name not in _TIMES:
            return
        self.num_lines += name in _TIMES
        own, other = (self._rates, self._times) if name in _BANDWIDTHS else (self._times, self._rates)
        if labels not in other:
            self.num_broken += labels in own or len(own) >= MAX_ROWS
            if len(own) < MAX_ROWS:
                own[labels] = value
            return
        rate, time_us = (value, other.pop(labels)) if own is self._rates else (other.pop(labels), value)
        self.num_broken += not self._add(dict(_LABEL.findall(labels)), rate, time_us)

    def finish(self) -> None:
        """Count what came alone."""
        self.num_broken += len(self._rates) + len(self._times)

    def _add(self, labels: dict[str, str], busbw: float, time: float) -> bool:
        size = parse_int(labels.get("nranks", ""))
        nodes = parse_int(labels.get("n_nodes", "")) or None
        kind = labels.get("collective") or labels.get("p2p_operation") or ""
        sizes = _SIZES.fullmatch(labels.get("message_size", ""))
        rate, time_us = bounded_float(busbw, high=_MAX_GBPS), bounded_float(time, high=MAX_TIME_US)
        if not kind or size is None or not 1 <= size <= MAX_GROUP_SIZE or rate is None or time_us is None:
            return False
        self._note(labels, size, nodes)
        if size == 1 or not rate or not time_us or sizes is None:
            self.num_without_sample += 1
            return True
        op = op_of_name(kind)
        bounds = [full_bytes(op, int(sizes[end]) * _UNITS[sizes[3]], size) for end in (1, 2)]
        factor = bus_factor(op, size)
        if bounds[0] is None or bounds[1] is None or not factor:
            return False
        # What rate and time say together, where it lies in the range. Means of rates and of times that scatter may
        # contradict the range: then the rate counts, as NCCL took it from each collective by itself.
        num_bytes = min(max(rate * 1e3 * time_us / factor, float(bounds[0])), float(bounds[1]))
        moved_us = bounded_float(num_bytes * factor / rate / 1e3, high=MAX_TIME_US)
        if moved_us is None:
            return False
        self.samples.add(
            op=op.value,
            bytes=round(num_bytes),
            group_size=size,
            num_nodes=nodes,
            time_us=moved_us,
            busbw_gbps=rate,
        )
        return True

    def _note(self, labels: dict[str, str], size: int, nodes: int | None) -> None:
        self.world = max(self.world, (size, nodes), key=lambda pair: (pair[0], pair[1] or 0))
        for names, label in ((self.hosts, "node"), (self.versions, "version")):
            if (text := labels.get(label)) and text != "unknown" and len(names) < MAX_GROUPS:
                names.add(text)


def looks_like(head: bytes) -> bool:
    """Return whether the first 64 KiB hold a metric of NCCL Inspector."""
    return any(f"{name}{{".encode() in head for name in _BANDWIDTHS) and b"\0" not in head


def parse(data: Readable, source: SourceFile) -> ParsedSource:
    """Read link samples: mean times in us, 1e9 bytes/s; sizes in nccl-tests' convention, within the label's range.

    Raises:
        BrokenInputError: no metric can be read.
    """
    scan = _Scan()
    for line in data.lines():
        text = line.strip()
        if text and not text.startswith("#"):
            scan.feed(text)
    scan.finish()
    if not scan.samples.num_rows and not scan.num_without_sample:
        raise BrokenInputError(
            f"a metric of NCCL Inspector was expected, but none is intact ({scan.num_broken} broken)",
            where=source.path,
            hint="a job must run for 30 seconds with NCCL_INSPECTOR_PROM_DUMP=1 before it writes any",
        )
    notices = NoticeList()
    notices.warn_of_skipped(scan.num_broken, "lines of NCCL Inspector's metrics")
    notices.info(
        "Q235",
        f"{plural(scan.samples.num_rows, 'mean')} of NCCL Inspector: times include waiting, sizes are ranges",
        "NCCL_INSPECTOR_PROM_DUMP=0 records every collective",
    )
    if scan.num_without_sample:
        notices.info("Q234", f"{plural(scan.num_without_sample, 'mean')} of one rank, no bytes or 0 us: no links")
    warn_of_limits(notices, data, scan.samples)
    size, nodes = scan.world
    header = SourceHeader(
        rank=None,
        world_size=size,
        host=next(iter(scan.hosts)) if len(scan.hosts) == 1 else None,
        backend="nccl",
        num_nodes=nodes,
        remarks={"clock": "none", "format_version": ",".join(sorted(scan.versions))},
    )
    return parsed_source(source, header, notices, scan.num_lines, link_samples=scan.samples)
