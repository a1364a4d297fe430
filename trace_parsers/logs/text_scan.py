"""Reads a text log of any kind: what NCCL, nccl-tests, DeepSpeed and the trainer wrote into it.

One job's output often mixes them, so that every reader of text looks for all.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from paro_advise.core.framework import Framework
from paro_advise.core.plural import plural
from paro_advise.errors import UnknownFormatError
from paro_advise.trace_parsers.logs.log_lines import strip_prefix, whole_lines
from paro_advise.trace_parsers.logs.nccl_lines import NcclLines
from paro_advise.trace_parsers.logs.printed_tables.benchmark_lines import BenchmarkTables
from paro_advise.trace_parsers.logs.printed_tables.comms_lines import CommsTables
from paro_advise.trace_parsers.logs.training_lines import TrainingFacts
from paro_advise.trace_parsers.notice import NoticeList
from paro_advise.trace_parsers.side_rows import RowBuffer, parsed_source, warn_of_limits
from paro_advise.trace_parsers.tables import LINK_SAMPLE_COLUMNS, SourceHeader

if TYPE_CHECKING:
    from paro_advise.trace_parsers.bytes.readable import Readable
    from paro_advise.trace_parsers.tables import ParsedSource, SourceFile

_RECORD_KINETO = "record a few steps with the PyTorch profiler on every rank"


class TextScan:
    """Everything found in one text.

    Attributes:
        nccl, benchmark, comms, training: facts from each writer.
        num_lines: lines read.
    """

    def __init__(self, data: Readable) -> None:
        self.nccl = NcclLines()
        self.benchmark = BenchmarkTables()
        self.comms = CommsTables()
        self.training = TrainingFacts()
        self.num_lines = 0
        for whole in whole_lines(data.lines()):
            self.num_lines += 1
            self._feed(whole)
        self.benchmark.finish()
        self.comms.finish()

    @property
    def is_empty(self) -> bool:
        """Return whether no writer left a fact."""
        rows = (self.nccl.num_lines, self.benchmark.samples.num_rows, self.comms.samples.num_rows)
        return not any(rows) and self.training.is_empty

    def _feed(self, whole: str) -> None:
        line = strip_prefix(whole)
        message = self.nccl.split(line)
        if message is None:
            if not (self.benchmark.feed(line) or self.comms.feed(line)):
                self.training.feed(whole)  # what it looks for stands anywhere; some would pass for a prefix
        elif not message.front.strip() or self.benchmark.feed(message.front):
            self.nccl.use(message)
        else:
            self.nccl.num_torn += 1


def parse_text(data: Readable, source: SourceFile, expected: str) -> ParsedSource:
    """Read a text log.

    Args:
        data: the content.
        source: where it comes from.
        expected: what the file should hold, for the message when it holds nothing.

    Raises:
        UnknownFormatError: no line is known, so it is some other log.
    """
    scan = TextScan(data)
    if scan.is_empty:
        raise UnknownFormatError(
            f"{expected} was expected, but none of its lines is known ({scan.num_lines:,} read)",
            where=source.path,
            hint=_RECORD_KINETO,
        )
    notices = _notices(scan)
    nccl, benchmark, comms = scan.nccl, scan.benchmark, scan.comms
    samples = _merge_samples(benchmark.samples, comms.samples)
    warn_of_limits(notices, data, nccl.rows, samples)
    return parsed_source(
        source,
        _header(scan),
        notices,
        nccl.num_collectives + benchmark.num_rows + comms.num_entries,
        collectives=nccl.rows,
        link_samples=samples,
    )


def _merge_samples(first: RowBuffer, second: RowBuffer) -> RowBuffer:
    if not second.num_rows:
        return first
    for cells in zip(*(second.column(name) for name in LINK_SAMPLE_COLUMNS), strict=True):
        first.add(**dict(zip(LINK_SAMPLE_COLUMNS, cells, strict=True)))
    return first


def _header(scan: TextScan) -> SourceHeader:
    nccl, benchmark, training = scan.nccl, scan.benchmark, scan.training
    size, num_nodes, local_ranks = nccl.layout()
    listed_size, listed_nodes = benchmark.largest
    rank = min(nccl.ranks) if len(nccl.ranks) == 1 and size != 1 else None
    is_benchmark = benchmark.num_rows > 0 and training.is_empty
    metadata = {**training.metadata(), **nccl.metadata()}
    if benchmark.num_empty:
        metadata["empty_benchmark_rows"] = str(benchmark.num_empty)
    return SourceHeader(
        rank=rank,
        world_size=size or training.world_size or listed_size or scan.comms.group_size,
        host=next(iter(nccl.hosts)) if len(nccl.hosts) == 1 else None,
        backend="nccl" if nccl.num_lines or benchmark.num_rows else None,
        gpus_per_node=local_ranks or benchmark.devices_per_host or training.gpus_per_node,
        num_nodes=num_nodes or listed_nodes or training.num_nodes,
        device_name=benchmark.device_name or None,
        nccl_version=max(nccl.versions, key=lambda name: (nccl.versions[name], name), default=None),
        groups=nccl.process_groups(),
        median_iteration_us=training.median_iteration_us,
        mean_iteration_us=training.mean_iteration_us,
        framework=Framework.UNKNOWN if is_benchmark else training.framework,  # a page of benchmarks may name some
        zero_stage=training.zero_stage,
        is_benchmark=is_benchmark,
        remarks=metadata,
    )


def _notices(scan: TextScan) -> NoticeList:
    notices = NoticeList()
    _add_nccl_notices(scan.nccl, notices)
    _add_benchmark_notices(scan.benchmark, notices)
    _add_comms_notices(scan.comms, notices)
    if not scan.training.is_empty:
        notices.info(
            "Q280",
            "a training log has no time of any collective: it cannot tell which state costs the time",
            _RECORD_KINETO,
        )
    return notices


def _add_nccl_notices(nccl: NcclLines, notices: NoticeList) -> None:
    if nccl.num_torn:
        notices.warn(
            "Q210",
            f"{plural(nccl.num_torn, 'line')} of NCCL's log torn by other output and not used",
            "set NCCL_DEBUG_FILE=nccl.%h.%p.log so that every process writes its own file",
        )
    if nccl.num_warnings:
        notices.warn("Q215", f"NCCL printed {plural(nccl.num_warnings, 'warning')}, the first: {nccl.first_warning}")
    if not nccl.num_collectives:
        if nccl.hosts:
            notices.info(
                "Q216",
                "NCCL's log lists no collectives, only how communicators were set up",
                "set NCCL_DEBUG_SUBSYS=INIT,GRAPH,TUNING,COLL to have them listed",
            )
        return
    notices.info(
        "Q211",
        f"NCCL's log has no times of its {plural(nccl.num_collectives, 'collective')}: volume and order only",
        _RECORD_KINETO,
    )
    notices.warn_of_sizes(nccl.num_without_size, "element type or communicator")
    if blanked := nccl.drop_stuck_sequences():
        notices.info(
            "Q213", f"opCount never advances in this log: no sequence numbers of {plural(blanked, 'collective')}"
        )
    if len(nccl.ranks) > 1:
        notices.info("Q214", f"{len(nccl.ranks)} ranks wrote into this log; its collectives are those of all")


def _add_benchmark_notices(benchmark: BenchmarkTables, notices: NoticeList) -> None:
    if benchmark.num_wrong:
        notices.warn(
            "Q224",
            f"the benchmark found wrong results in {plural(benchmark.num_wrong, 'row')} (#wrong): data were corrupted "
            "on the way",
            "find the faulty device, link or library before you train on it",
        )
    if benchmark.num_unknown_op:
        notices.warn(
            "Q220",
            plural(
                benchmark.num_unknown_op,
                "benchmark row does not say which collective it measures and is not used",
                "benchmark rows do not say which collective they measure and are not used",
            ),
            "keep the line '# Collective test starting: ...' or print it with nccl-tests 2.13 or newer",
        )
    if benchmark.num_derived:
        notices.info(
            "Q221",
            f"collective or group size of {plural(benchmark.num_derived, 'benchmark row')} follows from busbw / algbw",
        )
    if benchmark.num_rejected:
        notices.warn(
            "Q222",
            f"{plural(benchmark.num_rejected, 'benchmark row')} left out: contradictory or cut",
        )
    if benchmark.num_torn:
        notices.info(
            "Q223",
            f"{plural(benchmark.num_torn, 'benchmark row')} torn by other output and put together again; "
            "bandwidth matches size and time",
        )


def _add_comms_notices(comms: CommsTables, notices: NoticeList) -> None:
    if not comms.num_entries:
        return
    waiting = comms.samples.num_rows - comms.num_without_wait
    notices.warn(
        "Q260",
        f"{plural(comms.samples.num_rows, 'entry', 'entries')} of DeepSpeed's communication logger, each an average; "
        f"{waiting} of them include the wait for other ranks; sizes are rounded, bandwidths computed anew",
        "use nccl-tests or NCCL Inspector to measure the links",
    )
    if comms.group_size and comms.samples.num_rows:
        notices.info(
            "Q261",
            f"group size {comms.group_size} follows from busbw / algbw; it is that of the world",
        )
    if comms.num_without_size:
        notices.warn(
            "Q262", f"{plural(comms.num_without_size, 'entry', 'entries')} left out because the group size is unknown"
        )
    if comms.num_impossible:
        notices.warn(
            "Q263",
            f"{plural(comms.num_impossible, 'entry', 'entries')} left out: too little time for the size, "
            "as when an asynchronous call is timed at its launch",
        )
    notices.warn_of_skipped(comms.num_broken, "entries of the communication logger")
