"""What a Kineto trace says about itself: rank, world size, device, process groups."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from paro_advise.trace_parsers.constants import MAX_GROUP_SIZE, MAX_TIME_US
from paro_advise.trace_parsers.kernel_kinds import computes_16_bit
from paro_advise.trace_parsers.kineto.collectives.group_ranks import group_ranks
from paro_advise.trace_parsers.kineto.collectives.runtime_annotations import stated_strategy
from paro_advise.trace_parsers.kineto.constants import MAX_METADATA_TEXT
from paro_advise.trace_parsers.kineto.events import as_int, parse_head
from paro_advise.trace_parsers.tables import ProcessGroup, SourceHeader

if TYPE_CHECKING:
    from collections.abc import Iterable

    from paro_advise.trace_parsers.bytes.chunks import EventChunks
    from paro_advise.trace_parsers.kineto.rows import KinetoRows

_RANK_IN_NAME = re.compile(r"(?:^|[^a-z0-9])rank[-_]?(\d{1,6})(?!\d)", re.IGNORECASE)
# Names that only one framework leaves in autograd, for runs without annotations.
_AUTOGRAD_MARKS = ("PreBackwardFunctionForModule", "PostBackwardFunctionModule", "ZeroStage3")
# Of DDP's reducer, where ``gradient_as_bucket_view`` is off (torch/csrc/distributed/c10d/reducer.cpp).
_COPIES_BUCKETS = "torch.distributed.ddp.reducer::copy_bucket_to_grad"

_OF_ALL_ALIKE = re.compile(r"allreduce|all_?gather|reduce_scatter|all_?to_?all")  # collectives without a root


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceMetadata:
    """The fields beside the event array.

    Attributes:
        fields: as decoded, by name.
        is_readable: what stands before the array could be decoded, or nothing does.
    """

    fields: dict[str, object]
    is_readable: bool

    def section(self, name: str) -> dict[str, object]:
        """Return an object among the fields, empty when there is none."""
        value = self.fields.get(name)
        return value if isinstance(value, dict) else {}

    def objects(self, name: str) -> list[dict[str, object]]:
        """Return the objects in a list among the fields, empty when there is none."""
        value = self.fields.get(name)
        return [item for item in value if isinstance(item, dict)] if isinstance(value, list) else []


def trace_metadata(chunks: EventChunks) -> TraceMetadata:
    """Decode the metadata before and after the events; what stands before counts more."""
    has_head = bool(chunks.head.strip(b" \r\n\t{,"))
    head = parse_head(chunks.head) if has_head else {}
    closing = chunks.tail.find(b"]")
    tail = chunks.tail[closing + 1 :].strip().rstrip(b"\0 \n}").lstrip(b", \n")
    after = (parse_head(tail) or {}) if closing >= 0 and tail.startswith(b'"') else {}
    return TraceMetadata(fields={**after, **(head or {})}, is_readable=head is not None)


def rank_in_trace_name(name: str) -> int | None:
    """Return the rank that a file's name states, failing that the nearest folder's; None when none does."""
    found = (_RANK_IN_NAME.search(part) for part in reversed(re.split(r"[/\\]", name)))
    return next((int(match.group(1)) for match in found if match), None)


def impossible_rank(metadata: TraceMetadata) -> str:
    """Return a rank as the metadata state it that no job can have, as "rank 99 of 8", or ""."""
    info = metadata.section("distributedInfo")
    rank, world_size = as_int(info.get("rank")), _world_size(info)
    if rank is None or 0 <= rank < (world_size or MAX_GROUP_SIZE):
        return ""
    return f"rank {rank}" if world_size is None else f"rank {rank} of {world_size}"


def _world_size(info: dict[str, object]) -> int | None:
    size = as_int(info.get("world_size"))
    return size if size and 0 < size <= MAX_GROUP_SIZE else None


def trace_header(metadata: TraceMetadata, rows: KinetoRows, label: str, origin_us: float) -> SourceHeader:
    """Return what a trace says about itself.

    Args:
        metadata: the fields beside its events.
        rows: its events.
        label: name of the file, which may state the rank.
        origin_us: time of the first event on the axis of the metadata's base time.
    """
    fields = metadata.fields
    info = metadata.section("distributedInfo")
    devices = metadata.objects("deviceProperties")
    device = devices[0] if devices else {}
    rank = as_int(info.get("rank")) if not impossible_rank(metadata) else None
    if rank is None:
        rank = rank_in_trace_name(label)
    if rank is None:
        rank = _rank_in_calls(rows)
    base_ns = as_int(fields.get("baseTimeNanoseconds")) or 0
    if not 0 <= base_ns <= MAX_TIME_US * 1000:
        base_ns = 0
    return SourceHeader(
        rank=rank,
        world_size=_world_size(info),
        host=_text(fields.get("host_name")),
        backend=_text(info.get("backend")),
        device_index=next((as_int(args.device) for _, args in rows.device.comm[:1]), None),
        gpus_per_node=len(devices) or None,
        device_name=_text(device.get("name")),
        device_memory_bytes=as_int(device.get("totalGlobalMem")),
        nccl_version=_text(info.get("nccl_version")),
        origin_ns=base_ns + int(origin_us * 1000),
        zero_us=origin_us,
        groups=_process_groups(info.get("pg_config")),
        autograd_marks=_autograd_marks(rows.host.names),
        copies_buckets=_COPIES_BUCKETS in rows.host.names,
        stated=stated_strategy(rows.host.names),
        computes_16_bit=computes_16_bit(rows.device.names),
    )


def _rank_in_calls(rows: KinetoRows) -> int | None:
    """Return the rank that a trace's collectives state, None where they state none or several.

    Those in which all ranks do the same state it in their process group, which is the global one where the group is of
    the first ranks. Of others it is the root's, or the other side's (torch, ProcessGroupNCCL.cpp, RECORD_PARAM_COMMS).
    """
    stated = {
        (as_int(args.rank), str(args.group_ranks), as_int(args.group_size)): args
        for _, args in (*rows.device.comm, *rows.host.comm)
        if args.rank is not None and _OF_ALL_ALIKE.search(str(args.collective))
    }
    found = set()
    for (rank, _, _), args in stated.items():
        members = group_ranks(args, {})
        if rank is not None and len(members) > 1 and members == tuple(range(len(members))) and rank in members:
            found.add(rank)
    return found.pop() if len(found) == 1 else None


def _autograd_marks(names: Iterable[str]) -> tuple[str, ...]:
    return tuple(sorted({mark for name in names for mark in _AUTOGRAD_MARKS if mark in name}))


def _text(value: object) -> str | None:
    return str(value)[:MAX_METADATA_TEXT] if value not in (None, "") else None


def _process_groups(config: object) -> tuple[ProcessGroup, ...]:
    """Return the process groups of ``pg_config`` (a list, or text in some versions)."""
    items = config if isinstance(config, list) else []
    return tuple(_process_group(item) for item in items if isinstance(item, dict))


def _process_group(item: dict[str, object]) -> ProcessGroup:
    ranks = item.get("ranks")
    known = [as_int(value) for value in ranks] if isinstance(ranks, list) else []
    members = tuple(rank for rank in known if rank is not None)
    size = as_int(item.get("pg_size")) or len(members)
    return ProcessGroup(
        name=str(item.get("pg_name", "")),
        description=str(item.get("pg_desc", "")),
        ranks=members if len(members) == size else (),
        size=size,
    )
