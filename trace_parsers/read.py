"""Recognises an input and reads it: one door to all parsers."""

from __future__ import annotations

import re
from functools import partial
from typing import TYPE_CHECKING

from paro_advise.errors import BrokenInputError, InputError, UnknownFormatError
from paro_advise.trace_parsers import nsys
from paro_advise.trace_parsers.bytes.archive import is_archive
from paro_advise.trace_parsers.bytes.blocks import BlockReader, SourceRef
from paro_advise.trace_parsers.bytes.readable import Readable
from paro_advise.trace_parsers.constants import HEAD_BYTES, MAX_TEXT_BYTES, OWN_TITLE, OWN_TRACE
from paro_advise.trace_parsers.dumps import flight_recorder, ras_report, stacks
from paro_advise.trace_parsers.dumps.watchdog_lines import read_watchdog
from paro_advise.trace_parsers.kineto.reader import read_kineto
from paro_advise.trace_parsers.logs import comms_logger, nccl_log, nccl_tests, train_log
from paro_advise.trace_parsers.nccl import inspector, inspector_metrics, profiler_plugin
from paro_advise.trace_parsers.nccl import topology as nccl_topology
from paro_advise.trace_parsers.tables import ParsedSource, SourceFile, SourceKind

if TYPE_CHECKING:
    from collections.abc import Callable


# In order: the more specific signature first. Kineto comes after the formats that look like it.
_STREAMED: tuple[tuple[SourceKind, Callable[[bytes], bool], Callable[[Readable, SourceFile], ParsedSource]], ...] = (
    (SourceKind.FLIGHT_RECORDER, flight_recorder.looks_like, flight_recorder.parse),
    (SourceKind.NCCL_TOPOLOGY, nccl_topology.looks_like, nccl_topology.parse),
    (SourceKind.PROFILER_PLUGIN, profiler_plugin.looks_like, profiler_plugin.parse),
    (SourceKind.INSPECTOR, inspector.looks_like, inspector.parse),
    (SourceKind.INSPECTOR, inspector_metrics.looks_like, inspector_metrics.parse),
    (SourceKind.NCCL_TESTS, nccl_tests.looks_like_json, nccl_tests.parse_json),
)
_TEXT: tuple[tuple[SourceKind, Callable[[bytes], bool], Callable[[Readable, SourceFile], ParsedSource]], ...] = (
    (SourceKind.NCCL_LOG, nccl_log.looks_like, nccl_log.parse),
    (SourceKind.NCCL_TESTS, nccl_tests.looks_like, nccl_tests.parse),
    (SourceKind.COMMS_LOGGER, comms_logger.looks_like, comms_logger.parse),
    (SourceKind.TRAIN_LOG, train_log.looks_like, train_log.parse),
)

_OWN_FORMAT = re.compile(rb'"format":\s?"paro-advise/(\w+)"')
_FIRST_KEY = re.compile(rb'\{\s*"schemaVersion"')  # as Kineto writes it; elsewhere dashboards have one too

_NSYS_REPORT = b"NVIDIA Tegra Profiler Report"
_NSYS_JSON = re.compile(rb'\s{0,100}\{\s*(?:"Type"\s*:\s*\d{1,9}\s*,\s*)?"(?:CudaEvent|NvtxEvent|TraceProcessEvent)"')
# First bytes of files in forms that are not read: what the input must be, what it is, and what to do.
_OTHER_FORMS = (
    (b"PK\x03\x04", "an archive must be a .tar, .tar.gz, .tar.bz2 or .tar.xz, this file is a zip archive",
     "unpack it and give the folder"),
    (b"BZh", "a file must be plain, or packed by gzip or zstd, this one is packed by bzip2", "unpack it: bunzip2 FILE"),
    (b"\xfd7zXZ\x00", "a file must be plain, or packed by gzip or zstd, this one is packed by xz",
     "unpack it: unxz FILE"),
    (b"\xff\xfe", "a text must be UTF-8, this one is UTF-16", "convert it: iconv -f UTF-16 -t UTF-8 FILE"),
    (b"\xfe\xff", "a text must be UTF-8, this one is UTF-16", "convert it: iconv -f UTF-16 -t UTF-8 FILE"),
)  # fmt: skip


def read_source(ref: SourceRef) -> ParsedSource:
    """Read one input of any kind.

    Raises:
        UnknownFormatError: no parser recognises it.
        InputError: it cannot be used (broken, hostile, unreadable).
    """
    head = read_head(ref)
    if _is_other_nsys_report(ref, head):
        raise UnknownFormatError(
            "a report of Nsight Systems must be an SQLite export, this one is another form of it",
            where=ref.label,
            hint="export it with: nsys export --type sqlite report.nsys-rep",
        )
    if ref.file_name.lower().endswith(".toml"):
        raise UnknownFormatError(
            "an input must be a recording, this one is TOML", where=ref.label, hint="`recommend` takes a description"
        )
    found = _recognise(head)
    if found is not None:
        try:
            return found[1](ref)
        except UnknownFormatError:
            if not _tells_of_a_hang(ref, head):
                raise
    if found is not None or ras_report.looks_like(head):
        raise UnknownFormatError(
            "an input must tell of steps or transfers, this one tells where ranks wait",
            where=ref.label,
            hint="`paro-advise hang` reads it",
        )
    if head.startswith(OWN_TRACE):
        raise UnknownFormatError(
            "an input must be a recorded trace, this one is a part that paro-advise has cut",
            where=ref.label,
            hint="analyze the traces that it was cut from; ui.perfetto.dev shows it",
        )
    for first, why, hint in _OTHER_FORMS:
        if head.startswith(first):
            raise UnknownFormatError(why, where=ref.label, hint=hint)
    if not head.strip():
        raise UnknownFormatError(
            "an input must hold something, this file is empty", where=ref.label, hint="copy it again, or leave it out"
        )
    if document := "report" if OWN_TITLE in head else _own_document(ref, head):
        article = "an" if document[0] in "aeiou" else "a"
        raise UnknownFormatError(
            f"an input must be a recording, this one is {article} {document} of paro-advise",
            where=ref.label,
            hint="`paro-advise show` prints it",
        )
    raise UnknownFormatError(
        "an input must be a torch profiler trace, an NCCL log or dump, a flight-recorder dump, an "
        "Nsight Systems export or a training log; this file is none of them",
        where=ref.label,
        hint="see `paro-advise explain E302` for the kinds and how to record them",
    )


def _is_other_nsys_report(ref: SourceRef, head: bytes) -> bool:
    """Tell whether a file is a report as ``nsys profile`` writes it, or its export to JSON."""
    is_report = ref.file_name.endswith((".nsys-rep", ".qdrep")) or head.startswith(_NSYS_REPORT)
    return is_report or _NSYS_JSON.match(head) is not None


def is_an_input(ref: SourceRef) -> bool:
    """Tell whether a file is one that an analysis takes in; one that cannot be opened may be."""
    if is_archive(ref.path):
        return True
    try:
        head = read_head(ref)
    except InputError:
        return True
    found = _recognise(head)
    if found is None or found[0] is not SourceKind.TRAIN_LOG:
        return found is not None
    if _tells_of_a_hang(ref, head):
        return True
    try:
        found[1](ref)  # any text looks like a log at first
    except InputError:
        return False
    return True


def _tells_of_a_hang(ref: SourceRef, head: bytes) -> bool:
    """Tell whether a text is a report of NCCL's RAS, stacks, or a log with lines of NCCL's watchdog."""
    if ras_report.looks_like_text(head) or stacks.looks_like(head):
        return True
    return bool(read_watchdog(Readable(BlockReader(ref), MAX_TEXT_BYTES), ref.label))


def _recognise(head: bytes) -> tuple[SourceKind, Callable[[SourceRef], ParsedSource]] | None:
    """Return which kind of input begins so, and what reads it; None where nothing does."""
    if head.startswith(OWN_TRACE):
        return None
    if nsys.looks_like(head):
        return SourceKind.NSYS, _read_database
    for kind, looks_like, parse in _STREAMED:
        if looks_like(head):
            return kind, partial(_read_stream, kind, parse)
    if looks_like_kineto(head):
        return SourceKind.KINETO, read_kineto
    for kind, looks_like, parse in _TEXT:
        if looks_like(head):
            return kind, partial(_read_stream, kind, parse)
    return None


def _read_database(ref: SourceRef) -> ParsedSource:
    with ref.path.open("rb") as file:
        is_plain = ref.member is None and nsys.looks_like(file.read(64))
    if not is_plain:
        raise InputError(
            "an Nsight Systems export must lie uncompressed on disk, this one is packed",
            where=ref.label,
            hint="unpack it first",
        )
    reader = BlockReader(ref)
    reader.finish()
    source = SourceFile(path=ref.label, bytes=reader.input_bytes, sha256=reader.sha256, kind=SourceKind.NSYS)
    return nsys.parse(ref.path, source)


def _own_document(ref: SourceRef, head: bytes) -> str:
    """Return which of the product's own JSON documents a file is, "" for none; sorted keys tell late in it."""
    if not head.startswith(b"{"):
        return ""
    for block in BlockReader(ref):
        if found := _OWN_FORMAT.search(block):
            return found[1].decode()
    return ""


def read_head(ref: SourceRef) -> bytes:
    """Return the first 64 KiB of the decompressed content."""
    parts: list[bytes] = []
    size = 0
    reader = BlockReader(ref)
    for block in reader:
        parts.append(block)
        size += len(block)
        if size >= HEAD_BYTES:
            break
    if ref.member is not None and not parts and reader.truncated:
        raise BrokenInputError(
            f"the archive must hold this file whole: {reader.truncated}", where=ref.label, hint="copy the archive again"
        )
    return b"".join(parts)[:HEAD_BYTES]


def looks_like_kineto(head: bytes) -> bool:
    """Tell whether the content is a chrome trace as torch's profiler writes it."""
    text = head.lstrip(b"\xef\xbb\xbf \r\n\t")
    if text.startswith(b"{"):
        marks = (b'"traceEvents"', b'"deviceProperties"', b'"distributedInfo"')
        return any(mark in head for mark in marks) or _FIRST_KEY.match(text) is not None
    return text.startswith(b"[") and b'"ph"' in head and b'"ts"' in head


def _read_stream(
    kind: SourceKind, parse: Callable[[Readable, SourceFile], ParsedSource], ref: SourceRef
) -> ParsedSource:
    from dataclasses import replace

    reader = BlockReader(ref)
    blank = SourceFile(path=ref.label, bytes=0, sha256="", kind=kind)
    parsed = parse(Readable(reader, MAX_TEXT_BYTES), blank)
    reader.finish()
    source = SourceFile(path=ref.label, bytes=reader.input_bytes, sha256=reader.sha256, kind=kind)
    return replace(parsed, source=source)
