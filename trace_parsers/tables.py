"""The tables in which every kind of input ends, and what is known about their source.

Times are microseconds, sizes bytes. Every time of one source is relative to that source's
``origin_ns`` (host clock, nanoseconds since the epoch when the input says so, else 0 based).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import IntEnum, StrEnum
from typing import TYPE_CHECKING, TypeAlias

from paro_advise.core.framework import Framework

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import polars as pl

    from paro_advise.trace_parsers.notice import Notice


class SourceKind(StrEnum):
    """The kinds of file that can be read."""

    KINETO = "kineto"
    NCCL_LOG = "nccl_log"
    NCCL_TESTS = "nccl_tests"
    INSPECTOR = "nccl_inspector"
    PROFILER_PLUGIN = "nccl_profiler_plugin"
    FLIGHT_RECORDER = "flight_recorder"
    COMMS_LOGGER = "deepspeed_comms_logger"
    NSYS = "nsys_sqlite"
    NCCL_TOPOLOGY = "nccl_topology"
    TRAIN_LOG = "train_log"


Cell: TypeAlias = int | float | str | None

# One row per collective on one rank. `bytes` is the full buffer in nccl-tests' convention:
# all-gather: gathered output; reduce-scatter: input; others: the tensor.
COLLECTIVE_COLUMNS: dict[str, str] = {
    "start_us": "f64",  # execution start (kernel or worker thread), null when not timed
    "end_us": "f64",
    "issue_us": "f64",  # when the host issued it, null when unknown
    "issue_tid": "i64",
    "op": "str",  # an Op value
    "bytes": "i64",  # null when unknown
    "dtype": "str",
    "group_size": "i64",
    "group_name": "str",
    "group_desc": "str",
    "group_ranks": "str",  # as rank_lists writes them, "" when unknown
    "seq": "i64",  # per-group sequence number, null when unknown
    "peer": "i64",  # global rank at the other end of a send or receive, null when unknown
    "stream": "i64",  # CUDA stream or worker thread
    "name": "str",  # kernel or span name as recorded
    "host_op": "str",  # issuing c10d operator, "" when unknown
    "owner": "str",  # enclosing annotations of the issuing call, outer to inner, " > " separated
    "phase": "str",  # forward, backward, boundary, update, "" when unknown
    "micro_batch": "i64",  # index within the step, null when unknown
}

# One row per measurement of a link by a benchmark or a logger.
LINK_SAMPLE_COLUMNS: dict[str, str] = {
    "op": "str",
    "bytes": "i64",  # nccl-tests' convention
    "group_size": "i64",
    "num_nodes": "i64",  # null when unknown
    "time_us": "f64",
    "busbw_gbps": "f64",
    "group_name": "str",  # with the next two: which ranks measured the same collective; "" where that is not known
    "seq": "i64",
    "rank": "i64",  # in the group
}

_POLARS_NAMES = {"f64": "Float64", "i64": "Int64", "str": "String"}


def empty_table(columns: dict[str, str]) -> pl.DataFrame:
    """Return a table of the given columns without rows."""
    return table_of(columns, {name: [] for name in columns})


def table_of(columns: dict[str, str], data: Mapping[str, Sequence[object]]) -> pl.DataFrame:
    """Build a table with exactly these columns and types.

    Args:
        columns: name to type, one of the constants above.
        data: name to sequence; every column must be there and of equal length.
    """
    import polars as pl

    return pl.DataFrame(
        {name: data[name] for name in columns},
        schema={name: getattr(pl, _POLARS_NAMES[kind]) for name, kind in columns.items()},
        strict=False,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessGroup:
    """A communicator as the trace describes it."""

    name: str
    description: str
    ranks: tuple[int, ...]  # global ranks, () when unknown
    size: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceFile:
    """One input file, as it stands in provenance."""

    path: str  # as given, with "!member" for a file inside an archive
    bytes: int  # on disk (of the member as stored in the archive)
    sha256: str
    kind: SourceKind


@dataclass(frozen=True, slots=True, kw_only=True)
class StatedStrategy:
    """What our own runtime writes into a trace about how it shards.

    Attributes:
        triple: levels of parameters, gradients and optimizer states.
        group_size: ranks of a group, None without one.
        parameters: trained parameters of the whole model, None when not stated.
    """

    triple: str
    group_size: int | None
    parameters: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceHeader:
    """What an input says about itself; None where it is silent.

    Attributes:
        zero_us: where the source's times begin on the axis that the file itself writes (us).
        autograd_marks: names that only one framework leaves in autograd, for runs without annotations.
        copies_buckets: DDP copied reduced gradients out of its buckets, which it holds beside them.
        stated: the strategy as our own runtime states it.
        median_iteration_us, mean_iteration_us: of a training log; the mean where it gives no more.
        framework: that a training log names, UNKNOWN where none.
        zero_stage: of DeepSpeed, as a training log says.
        is_benchmark: the input is a benchmark's output, so nothing trains in it.
        computes_16_bit: matrix products take 16-bit operands, as names of kernels say; None without any.
        remarks: anything else that people may want to read, by name; no code depends on it.
    """

    rank: int | None = None
    world_size: int | None = None
    host: str | None = None
    backend: str | None = None
    device_index: int | None = None
    gpus_per_node: int | None = None
    num_nodes: int | None = None
    device_name: str | None = None
    device_memory_bytes: int | None = None
    nccl_version: str | None = None
    origin_ns: int = 0
    zero_us: float = 0.0
    groups: tuple[ProcessGroup, ...] = ()
    autograd_marks: tuple[str, ...] = ()
    copies_buckets: bool = False
    stated: StatedStrategy | None = None
    median_iteration_us: float | None = None
    mean_iteration_us: float | None = None
    framework: Framework = Framework.UNKNOWN
    zero_stage: int | None = None
    is_benchmark: bool = False
    computes_16_bit: bool | None = None
    remarks: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class HostSpan:
    """A named span on a host thread (annotation or operator)."""

    start_us: float
    end_us: float
    tid: int
    name: str


class PassKind(IntEnum):
    """Which of a model's passes launched a row; the value is what the ``pass`` column holds."""

    UNKNOWN = 0
    NONE = 1
    FORWARD = 2
    BACKWARD = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class EventTables:
    """Timed events of one rank (Kineto or Nsight Systems).

    Attributes:
        device: DataFrame start_us, end_us, stream (i64), kind (u8, see kernel_kinds), name (u32
            code into ``names``), launch_us (f64, NaN when unknown), and where the
            host's runtime calls were read launch_end_us; of Kineto traces pass (u8, a PassKind); on device runs
            flops (f64, of matrix products, 0 for others). On CPU runs: the host operators that compute, with kind
            COMPUTE.
        names: the names behind the codes.
        steps: (label, start_us, end_us) of each profiler step on the host, in order.
        spans: annotations from which phases and owners follow, by start.
        backward_passes: (start_us, end_us) of each backward pass, in order.
        device_steps: the steps as a device ran them that lags behind its host, () where it keeps up.
        blocking_calls: (start_us, end_us) of runtime calls in which the host waited for the device, by start.
        records_calls: calls of the runtime were recorded, so that those are all there were.
        trains: whether a backward pass or an optimizer's step was seen; None where the host was not recorded.
        updates: when a device ran what the optimizer's steps had launched, by start.
        is_gpu: whether device rows come from an accelerator.
        memory_peaks: the most that was allocated (bytes), by step and phase; {} where it was not recorded.
    """

    device: pl.DataFrame
    names: tuple[str, ...]
    steps: tuple[HostSpan, ...]
    spans: tuple[HostSpan, ...]
    backward_passes: tuple[tuple[float, float], ...] = ()
    device_steps: tuple[HostSpan, ...] = ()
    blocking_calls: tuple[tuple[float, float], ...] = ()
    records_calls: bool = False
    trains: bool | None = None
    updates: tuple[HostSpan, ...] = ()
    is_gpu: bool
    memory_peaks: Mapping[int, Mapping[str, int]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class ParsedSource:
    """Everything one file gave.

    Attributes:
        collectives: COLLECTIVE_COLUMNS, by start.
        link_samples: LINK_SAMPLE_COLUMNS.
        events: timed events, None for logs and dumps.
        num_micro_batches: micro-batches per step as the trace shows them, None when unknown.
        num_forwards: forward passes of whole models per step, of those that train or not, None when unknown.
        num_updates: how often optimizers step in a marked step, 0 where many hold none; None when unknown.
        notices: what was skipped, repaired or guessed.
        num_events: rows seen in the file, kept or not.
    """

    source: SourceFile
    header: SourceHeader
    collectives: pl.DataFrame
    link_samples: pl.DataFrame
    events: EventTables | None
    num_micro_batches: int | None = None
    num_forwards: int | None = None
    num_updates: int | None = None
    notices: tuple[Notice, ...]
    num_events: int
