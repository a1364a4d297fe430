"""Durations from a run's traces for the compiler's overlap scheduling, equal on every rank.

Inductor (torch 2.13, ``_inductor/fx_passes/profile_guided_estimation.py``) reads a Kineto trace and looks up
a collective by operation, ranks, type and elements; where the ranks are other ones, by the stride and number of its
ranks, provided the profile knows one group of these. A raw trace misleads it: its durations include waiting for other
ranks, and ranks that find another estimate reorder their collectives in another way, which hangs. Here each kind of
group stands once, with the median time that data moved, and only where every rank seen has a group of that kind.
"""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

import msgspec

from paro_advise.advisor.facts.capture_log import NO_LOGS, StepLogs
from paro_advise.advisor.ranks.clocks.clock_alignment import align_as_logged
from paro_advise.advisor.ranks.run import assemble_run
from paro_advise.advisor.ranks.source import decode
from paro_advise.advisor.slices.trace_events import as_file, events_within
from paro_advise.core.collective import Op
from paro_advise.core.dtypes import dtype_bytes, plain_dtype
from paro_advise.core.plural import plural
from paro_advise.errors import InputError
from paro_advise.trace_parsers.kineto.events import as_float
from paro_advise.trace_parsers.logs.constants import MAX_US
from paro_advise.trace_parsers.rank_lists import ranks_in

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import polars as pl

    from paro_advise.advisor.facts.model import RankFacts
    from paro_advise.advisor.ranks.source import Source
    from paro_advise.advisor.slices.trace_events import TraceEvent
    from paro_advise.trace_parsers.bytes.blocks import SourceRef

# Those that the scheduler moves, by the names that it looks for in a profile.
_RECORDED_NAMES = {
    Op.ALL_GATHER: "_allgather_base",
    Op.REDUCE_SCATTER: "_reduce_scatter_base",
    Op.ALL_REDUCE: "allreduce",
    Op.ALL_TO_ALL: "alltoall_base",
}
# As torch names a tensor's type (c10/core/ScalarType.h), by what traces may call it in lower case.
_TYPE_NAMES = {
    "float": "Float", "float32": "Float", "fp32": "Float", "double": "Double", "float64": "Double",
    "bfloat16": "BFloat16", "bf16": "BFloat16", "half": "Half", "float16": "Half", "fp16": "Half",
    "int": "Int", "int32": "Int", "long": "Long", "long int": "Long", "int64": "Long", "byte": "Byte", "uint8": "Byte",
}  # fmt: skip
_SIZES = ("Input Dims", "Input Strides")
_MOST_NESTED = 3  # lists: of the arguments, of the tensors in one, of the sizes of a tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class CompilerProfile:
    """A profile as a file's content.

    Attributes:
        num_collectives: kinds of collective in it, by operation, group, type and size.
        num_operators: kinds of operator in it, by name, shapes, strides and type.
        notes: what people should know of it.
    """

    data: bytes
    num_collectives: int
    num_operators: int
    notes: tuple[str, ...]


@dataclass(frozen=True, slots=True, order=True)
class _Kind:
    """What the compiler tells collectives apart by."""

    op: str
    stride: int
    group_size: int
    dtype: str
    bytes: int


def profile_for_compiler(
    facts: Sequence[RankFacts], refs: Mapping[str, SourceRef], step_logs: StepLogs = NO_LOGS
) -> CompilerProfile:
    """Return the durations of a run's collectives and of one rank's operators.

    Args:
        facts: of all traces of a run.
        refs: where each trace lies, by the path in its facts.
        step_logs: that lie beside the traces, and say such as which ranks are on one machine.

    Raises:
        InputError: no trace times a step, none ran on a GPU, or nobody can tell how long ranks waited.
    """
    run = assemble_run([decode(item) for item in facts])
    captured, log_notices = step_logs.of_run(run.places, facts)
    aligned = align_as_logged(run, captured)
    if aligned is None or not run.steps:
        raise InputError("a compiler's profile must come from traces with steps, got none")
    rank, source = run.timed[0]
    operators = _operators(source, refs[source.facts.source.path])
    if not operators.num_kernels:
        raise InputError(
            "a compiler's profile must come from traces of a GPU, got none with kernels",
            hint="Inductor schedules collectives on GPUs only",
        )
    table, notes = _usable(aligned.table, {number for number, _ in run.timed})
    times, ranks_of = _times(table)
    events = [_collective(kind, statistics.median(times[kind]), ranks_of[kind]) for kind in sorted(times)]
    for number, (key, durations) in enumerate(sorted(operators.us.items()), start=1):
        events += _operator(number, key, statistics.fmean(durations))
    if not operators.us:
        notes.append("no operator has shapes and strides, so the compiler estimates these itself (record_shapes=True)")
    else:
        notes.append(f"operators are those of rank {rank}")
    if operators.num_odd:
        odd = plural(operators.num_odd, "operator or kernel", "operators or kernels")
        notes.append(f"{odd} left out whose record is damaged")
    notes.extend(notice.message for notice in (*run.notices, *log_notices))
    return CompilerProfile(
        data=as_file([msgspec.json.encode(event) for event in events], compress=False),
        num_collectives=len(times),
        num_operators=len(operators.us),
        notes=tuple(notes),
    )


def _usable(table: pl.DataFrame, seen: set[int]) -> tuple[pl.DataFrame, list[str]]:
    """Return the collectives in steps that every rank would find alike, and what is said of the others.

    Raises:
        InputError: each collective is in one rank's trace alone.
    """
    import polars as pl

    shapes = {text: _shape(text) for text in table["group_ranks"].drop_nulls().unique().to_list()}
    types = [name for name in table["dtype"].drop_nulls().unique().to_list() if plain_dtype(name) in _TYPE_NAMES]
    asked = table.filter(pl.col("op").is_in([op.value for op in _RECORDED_NAMES]) & pl.col("group_size").ne_missing(1))
    known = asked.filter(
        pl.col("group_ranks").is_in([text for text in shapes if text])
        & pl.col("bytes").is_not_null()
        & pl.col("dtype").is_in(types)
    )
    everywhere = known.filter(pl.col("group_ranks").is_in(_of_every_rank(known, shapes, seen)))
    joined = everywhere.filter(pl.col("match").is_not_null() & (pl.col("transfer_us") > 0))
    if len(everywhere) and not len(joined):
        raise InputError(
            "a compiler's profile must come from several ranks, each collective is in one rank's trace alone",
            hint="how long a rank waited for the others cannot be told; give the traces of all ranks",
        )
    notes = []
    for count, why in (
        (len(asked) - len(known), "without ranks, size or type that the compiler knows"),
        (
            len(known) - len(everywhere),
            "of groups of a kind that not every rank has, or with ranks in unequal strides",
        ),
        (
            len(everywhere) - len(joined),
            "that one rank's trace shows alone, or of which ranks tell different sizes or no time",
        ),
    ):
        if count:
            notes.append(f"{plural(count, 'collective')} left out {why}")
    if partial := len(joined.filter(pl.col("joined_ranks") < pl.col("group_size"))):
        notes.append(
            f"in {partial} of {plural(len(joined), 'collective')} not every rank has a trace: waiting for such a rank "
            "counts as moving data"
        )
    return joined, notes


def _of_every_rank(table: pl.DataFrame, shapes: Mapping[str, tuple[int, int] | None], seen: set[int]) -> list[str]:
    """Return the groups of such shapes that each rank seen has a group of the shape."""
    ranks_of: dict[tuple[int, int], set[int]] = {}
    texts: dict[tuple[int, int], list[str]] = {}
    for text in table["group_ranks"].unique().to_list():
        shape = shapes[text]
        if shape is not None:
            ranks_of.setdefault(shape, set()).update(ranks_in(text))
            texts.setdefault(shape, []).append(text)
    return [text for shape, found in texts.items() if seen <= ranks_of[shape] for text in found]


def _shape(text: str) -> tuple[int, int] | None:
    """Return the distance of a group's ranks and their number, None where they lie at several distances."""
    ranks = sorted(ranks_in(text))
    strides = {after - before for before, after in pairwise(ranks)}
    return (strides.pop(), len(ranks)) if len(strides) == 1 else None


def _times(table: pl.DataFrame) -> tuple[dict[_Kind, list[float]], dict[_Kind, list[int]]]:
    """Return how long each kind of collective moved data (us), and the lowest group of that kind."""
    times: dict[_Kind, list[float]] = {}
    lowest: dict[tuple[int, int], list[int]] = {}
    rows = table.select("op", "group_ranks", "dtype", "bytes", "transfer_us")
    for (op, text, dtype, size), part in rows.group_by("op", "group_ranks", "dtype", "bytes"):
        ranks = sorted(ranks_in(str(text)))
        shape = (ranks[1] - ranks[0], len(ranks))
        kind = _Kind(str(op), *shape, _TYPE_NAMES[plain_dtype(str(dtype))], int(str(size)))
        times.setdefault(kind, []).extend(part["transfer_us"].to_list())
        lowest[shape] = min(lowest.get(shape, ranks), ranks)
    return times, {kind: lowest[kind.stride, kind.group_size] for kind in times}


def _collective(kind: _Kind, duration_us: float, ranks: list[int]) -> TraceEvent:
    """Return a kernel as NCCL's are recorded."""
    elements = kind.bytes // (dtype_bytes(kind.dtype) or 1)
    inputs = elements // kind.group_size if kind.op == Op.ALL_GATHER else elements
    outputs = elements // kind.group_size if kind.op == Op.REDUCE_SCATTER else elements
    return _event(
        "kernel",
        f"nccl:{kind.op}",
        duration_us,
        {
            "Collective name": _RECORDED_NAMES[Op(kind.op)],
            "In msg nelems": inputs,
            "Out msg nelems": outputs,
            "Group size": kind.group_size,
            "dtype": kind.dtype,
            "Process Group Name": f"stride {kind.stride} size {kind.group_size}",
            "Process Group Ranks": msgspec.json.encode(ranks).decode(),
        },
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Operators:
    """What one rank's operators took on the device.

    Attributes:
        us: durations by the operator's name and arguments as JSON.
        num_kernels: that were seen, whether an operator is known for them or not.
        num_odd: records that cannot be ones of the profiler.
    """

    us: dict[str, list[float]]
    num_kernels: int
    num_odd: int


def _operators(source: Source, ref: SourceRef) -> _Operators:
    """Return how long each kind of operator ran on the device, in a rank's steps."""
    first, last = source.steps[0], source.steps[-1]
    zero_us = source.header.zero_us
    window = (zero_us + first.start_us, zero_us + last.start_us + last.wall_us)
    kinds: dict[object, str] = {}
    known: dict[str, str] = {}  # one text for all operators of a kind
    kernel_us: dict[object, float] = {}
    communicating: set[object] = set()
    num_kernels = num_odd = 0
    for event, _ in events_within(ref, window):
        category, arguments = event.get("cat"), event.get("args")
        num_kernels += category == "kernel"
        number = arguments.get("External id") if isinstance(arguments, dict) else None
        if not isinstance(arguments, dict) or not isinstance(number, int | str):
            continue
        if category == "kernel" and "Collective name" in arguments:
            communicating.add(number)
        elif category == "kernel":
            duration = as_float(event.get("dur", 0))
            if duration is None or not 0 <= duration < MAX_US:
                num_odd += 1
            else:
                kernel_us[number] = kernel_us.get(number, 0.0) + duration
        elif category == "cpu_op" and arguments.get("Input Dims") and arguments.get("Input Strides"):
            shown = {name: arguments.get(name, []) for name in ("Input Dims", "Input Strides", "Input type")}
            if not _is_recorded(shown):
                num_odd += 1
                continue
            text = msgspec.json.encode([str(event.get("name", "")), shown]).decode()
            kinds[number] = known.setdefault(text, text)
    found: dict[str, list[float]] = {}
    for number, kind in kinds.items():
        if kernel_us.get(number, 0.0) > 0 and number not in communicating:
            found.setdefault(kind, []).append(kernel_us[number])
    return _Operators(us=found, num_kernels=num_kernels, num_odd=num_odd)


def _is_recorded(arguments: Mapping[str, object]) -> bool:
    """Tell whether arguments of an operator are such as the profiler records: lists of whole numbers, and texts."""
    types = arguments["Input type"]
    return (
        isinstance(types, list)
        and all(isinstance(item, str) for item in types)
        and all(isinstance(arguments[name], list) and _are_sizes(arguments[name]) for name in _SIZES)
    )


def _are_sizes(value: object, depth: int = 0) -> bool:
    """Tell whether a value is a whole number, or a list of such, of the depth that lists of tensors have."""
    if isinstance(value, list):
        return depth < _MOST_NESTED and all(_are_sizes(item, depth + 1) for item in value)
    return type(value) is int


def _operator(number: int, kind: str, duration_us: float) -> list[TraceEvent]:
    """Return an operator and the kernel that it launched."""
    name, arguments = msgspec.json.decode(kind)
    own = {"External id": number}
    return [_event("cpu_op", name, duration_us, arguments | own), _event("kernel", name, duration_us, own)]


def _event(category: str, name: str, duration_us: float, arguments: Mapping[str, object]) -> TraceEvent:
    return {
        "ph": "X",
        "cat": category,
        "name": name,
        "pid": 0,
        "tid": 0,
        "ts": 0,
        "dur": duration_us,
        "args": arguments,
    }
