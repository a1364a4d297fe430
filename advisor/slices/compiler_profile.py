"""Durations from a run's traces for the compiler's overlap scheduling, equal on every rank.

Inductor (torch 2.13, ``_inductor/fx_passes/profile_guided_estimation.py``) reads a Kineto trace and looks up
a collective by operation, ranks, type and elements; where the ranks are other ones, by the stride and number of its
ranks, provided the profile knows one group of these. A raw trace misleads it: its durations include waiting for other
ranks, and ranks that find another estimate reorder their collectives in another way, which hangs. Here each kind of
group stands once, with the median time that data moved.
"""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

import msgspec

from paro_advise.advisor.ranks.clock_alignment import align_clocks
from paro_advise.advisor.ranks.run import assemble_run
from paro_advise.advisor.ranks.source import decode
from paro_advise.advisor.ranks.topology import find_topology
from paro_advise.advisor.slices.trace_events import as_file, events_within
from paro_advise.advisor.wording.quantities import plural
from paro_advise.core.collective import Op
from paro_advise.core.dtypes import dtype_bytes
from paro_advise.errors import InputError
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


def profile_for_compiler(facts: Sequence[RankFacts], refs: Mapping[str, SourceRef]) -> CompilerProfile:
    """Return the durations of a run's collectives and of one rank's operators.

    Args:
        facts: of all traces of a run.
        refs: where each trace lies, by the path in its facts.

    Raises:
        InputError: no trace times a step, or none ran on a GPU.
    """
    run = assemble_run([decode(item) for item in facts])
    aligned = align_clocks(run, find_topology(run, None))
    if aligned is None or not run.steps:
        raise InputError("a compiler's profile must come from traces with steps, got none")
    rank, source = run.timed[0]
    operators, num_kernels = _operators(source, refs[source.facts.source.path])
    if not num_kernels:
        raise InputError(
            "a compiler's profile must come from traces of a GPU, got none with kernels",
            hint="Inductor schedules collectives on GPUs only",
        )
    table, notes = _usable(aligned.table)
    times, ranks_of = _times(table)
    events = [_collective(kind, statistics.median(times[kind]), ranks_of[kind]) for kind in sorted(times)]
    for number, (key, durations) in enumerate(sorted(operators.items()), start=1):
        events += _operator(number, key, sum(durations) / len(durations))
    if not operators:
        notes.append("no operator has shapes and strides, so the compiler estimates these itself (record_shapes=True)")
    else:
        notes.append(f"operators are those of rank {rank}")
    notes.extend(notice.message for notice in run.notices)
    return CompilerProfile(
        data=as_file([msgspec.json.encode(event) for event in events], compress=False),
        num_collectives=len(times),
        num_operators=len(operators),
        notes=tuple(notes),
    )


def _usable(table: pl.DataFrame) -> tuple[pl.DataFrame, list[str]]:
    """Return the collectives in steps that the compiler could find, and what is said of the others."""
    import polars as pl

    asked = table.filter(pl.col("op").is_in([op.value for op in _RECORDED_NAMES]))
    known = asked.filter(
        (pl.col("group_ranks") != "")
        & pl.col("bytes").is_not_null()
        & pl.col("dtype").map_elements(lambda name: dtype_bytes(name) is not None, return_dtype=pl.Boolean)
    )
    regular = known.filter(
        pl.col("group_ranks").map_elements(lambda text: _stride(text) is not None, return_dtype=pl.Boolean)
    )
    joined = regular.filter(pl.col("match").is_not_null())
    notes = []
    if unknown := len(asked) - len(known):
        notes.append(f"{plural(unknown, 'collective')} without ranks, size or type left out")
    if irregular := len(known) - len(regular):
        notes.append(f"{plural(irregular, 'collective')} left out, of groups whose ranks do not lie in equal strides")
    if alone := len(regular) - len(joined):
        notes.append(
            f"{plural(alone, 'collective')} left out that one rank's trace shows: how long it waited is not known"
            if len(joined)
            else "each collective is in one rank's trace only: durations include waiting for other ranks"
        )
    return joined if len(joined) else regular, notes


def _stride(text: str) -> int | None:
    """Return the distance of a group's ranks, None where they lie at several."""
    ranks = sorted(ranks_in(text))
    strides = {after - before for before, after in pairwise(ranks)}
    return strides.pop() if len(strides) == 1 else None


def _times(table: pl.DataFrame) -> tuple[dict[_Kind, list[float]], dict[_Kind, list[int]]]:
    """Return how long each kind of collective moved data (us), and the lowest group of that kind."""
    import polars as pl

    times: dict[_Kind, list[float]] = {}
    ranks_of: dict[tuple[int, int], list[int]] = {}
    moved = pl.coalesce("transfer_us", pl.col("end_us") - pl.col("start_us")).alias("moved_us")
    rows = table.select("op", "group_ranks", "dtype", "bytes", moved)
    for (op, text, dtype, size), part in rows.group_by("op", "group_ranks", "dtype", "bytes"):
        ranks = sorted(ranks_in(str(text)))
        kind = _Kind(str(op), ranks[1] - ranks[0], len(ranks), str(dtype).removeprefix("c10::"), int(str(size)))
        positive = part["moved_us"].filter(part["moved_us"] > 0).to_list()
        if not positive:
            continue
        times.setdefault(kind, []).extend(positive)
        shape = (kind.stride, kind.group_size)
        ranks_of[shape] = min(ranks_of.get(shape, ranks), ranks)
    return times, {kind: ranks_of[kind.stride, kind.group_size] for kind in times}


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


def _operators(source: Source, ref: SourceRef) -> tuple[dict[str, list[float]], int]:
    """Return how long each kind of operator ran on the device, in a rank's steps.

    Returns:
        Durations (us) by the operator's name and arguments as JSON, and the number of kernels seen.
    """
    first, last = source.steps[0], source.steps[-1]
    zero_us = source.header.zero_us
    window = (zero_us + first.start_us, zero_us + last.start_us + last.wall_us)
    kinds: dict[object, str] = {}
    kernel_us: dict[object, float] = {}
    num_kernels = 0
    for event, _ in events_within(ref, window):
        arguments = event.get("args")
        number = arguments.get("External id") if isinstance(arguments, dict) else None
        if not isinstance(arguments, dict) or not isinstance(number, int | str):
            continue
        if event.get("cat") == "kernel":
            num_kernels += 1
            kernel_us[number] = kernel_us.get(number, 0.0) + float(event.get("dur") or 0.0)
        elif event.get("cat") == "cpu_op" and arguments.get("Input Dims") and arguments.get("Input Strides"):
            shown = {name: arguments.get(name, []) for name in ("Input Dims", "Input Strides", "Input type")}
            kinds[number] = msgspec.json.encode([str(event.get("name", "")), shown]).decode()
    found: dict[str, list[float]] = {}
    for number, kind in kinds.items():
        if kernel_us.get(number, 0.0) > 0:
            found.setdefault(kind, []).append(kernel_us[number])
    return found, num_kernels


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
