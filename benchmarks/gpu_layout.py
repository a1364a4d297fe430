"""The text of torch 2.13's GPU traces: one field a line, with marks where copies in time differ.

A mark is ``\\x01<kind><number>\\x02``; ``make_traces`` replaces marks by numbers, copy by copy.
"""

from __future__ import annotations

import json
from typing import Any

# Kinds of marks: T time (ns, written as us), C correlation, E External id, F flow, N Ev Idx,
# Q autograd sequence number, S collective sequence number, H collective hash, P profiler step.
KINDS = "TCEFNQSHP"
PID = 41872
DEVICE = 0
NUM_DEVICES = 8
WINDOW_NS = 4_458_676_605_205_277
_FLOW_END = ', "bp": "e"'
_MARKED_ARGS = {"External id": "E", "Ev Idx": "N", "Sequence number": "Q"}


def mark(kind: str, number: int) -> str:
    """Return a number that every copy shifts."""
    return f"\x01{kind}{number}\x02"


def us(nanoseconds: int) -> str:
    """Write a duration as Kineto does."""
    return f"{nanoseconds // 1000}.{nanoseconds % 1000:03d}"


def span(category: str, name: str, where: tuple[int, int], start_ns: int, duration_ns: int, args: str) -> str:
    """Render a row with a duration; ``where`` is (pid, tid)."""
    return (
        f'  {{\n    "ph": "X",\n    "cat": "{category}",\n    "name": "{name}",\n'
        f'    "pid": {where[0]},\n    "tid": {where[1]},\n    "ts": {mark("T", start_ns)},\n'
        f'    "dur": {us(duration_ns)}\n    ,\n    "args": {{\n      {args}\n    }}\n  }}'
    )


def flow(name: str, number: str, where: tuple[int, int], start_ns: int, *, is_end: bool) -> str:
    """Render one end of an arrow between rows."""
    return (
        f'  {{\n    "ph": "{"f" if is_end else "s"}",\n    "id": {number},\n'
        f'    "pid": {where[0]},\n    "tid": {where[1]},\n    "ts": {mark("T", start_ns)},\n'
        f'    "cat": "{name}",\n    "name": "{name}"\n    {_FLOW_END if is_end else ""}\n  }}'
    )


def label(name: str, where: tuple[int, int], args: str) -> str:
    """Render a row that names a process or thread."""
    return (
        f'  {{\n    "ph": "M",\n    "name": "{name}",\n    "ts": {us(WINDOW_NS)},\n'
        f'    "pid": {where[0]},\n    "tid": {where[1]},\n    "args": {{\n      {args}\n    }}\n  }}'
    )


def labels(threads: dict[int, str], streams: list[int]) -> str:
    """Render the names of all processes, threads and streams, each followed by a comma."""
    rows = []
    for pid, name, index in [
        (PID, "CPU", PID),
        *((gpu, f"GPU {gpu}", 16777216 + gpu) for gpu in range(NUM_DEVICES)),
    ]:
        rows.append(label("process_name", (pid, 0), '"name": "python"'))
        rows.append(label("process_labels", (pid, 0), f'"labels": "{name}"'))
        rows.append(label("process_sort_index", (pid, 0), f'"sort_index": {index}'))
    places = [((PID, tid), f"thread {tid} ({name})") for tid, name in threads.items()]
    places += [((DEVICE, stream), f"stream {stream} ") for stream in streams]
    for where, name in places:
        rows.append(label("thread_name", where, f'"name": "{name}"'))
        rows.append(label("thread_sort_index", where, f'"sort_index": {where[1]}'))
    return "".join(row + ",\n" for row in rows)


def host_args(args: dict[str, Any], marks: dict[str, int]) -> str:
    """Render the arguments of an operator; the marked ones take their numbers from ``marks``."""
    parts = []
    for key, value in args.items():
        kind = _MARKED_ARGS.get(key)
        text = mark(kind, marks.get(key, value)) if kind else json.dumps(value)
        parts.append(f'"{key}": {text}')
    return ", ".join(parts).replace(', "Record function id"', ',"Record function id"', 1)


def head(rank: int, world: int, base_ns: int) -> str:
    """Render everything before the first row."""
    device = (
        '\n    {{\n      "id": {0}, "name": "NVIDIA H100 80GB HBM3", "totalGlobalMem": 84942979072,\n'
        '      "computeMajor": 9, "computeMinor": 0,\n      "maxThreadsPerBlock": 1024, '
        '"maxThreadsPerMultiprocessor": 2048,\n      "regsPerBlock": 65536, "warpSize": 32,\n'
        '      "sharedMemPerBlock": 49152, "numSms": 132\n    , "regsPerMultiprocessor": 65536, '
        '"sharedMemPerBlockOptin": 232448, "sharedMemPerMultiprocessor": 233472\n    }}'
    )
    group = {
        "pg_name": "0",
        "pg_desc": "default_pg",
        "backend_config": "cuda:nccl",
        "pg_size": world,
        "ranks": list(range(world)),
    }
    job = {
        "backend": "nccl",
        "rank": rank,
        "world_size": world,
        "pg_count": 1,
        "pg_config": [group],
        "nccl_version": "2.28.9",
    }
    return (
        ' {\n    "schemaVersion": 1,\n    "deviceProperties": ['
        + ",".join(device.format(index) for index in range(NUM_DEVICES))
        + '\n    ],\n    \n      "cupti_version": 130000,\n      "cuda_runtime_version": 13000,\n'
        f'      "trace_id": "{rank:032X}",\n      "record_shapes": 1,\n'
        f'      "distributedInfo": {json.dumps(job)},\n      "cuda_driver_version": 13000,\n'
        f'      "host_name": "node{rank // NUM_DEVICES}",\n    "displayTimeUnit": "ms",\n'
        f'    "baseTimeNanoseconds": {base_ns},\n    "traceEvents": [\n    \n'
    )


def tail(length_ns: int) -> str:
    """Render the last rows and what closes the file."""
    start, end = us(WINDOW_NS), us(WINDOW_NS + length_ns)
    return (
        '  {\n    "ph": "X",\n    "cat": "Trace",\n    "name": "PyTorch Profiler (0)",\n    "pid": "Spans",\n'
        f'    "tid": "PyTorch Profiler",\n    "ts": {start},\n    "dur": {us(length_ns)}\n    ,\n'
        '    "args": {\n      "Op count": 0\n    }\n  },\n  {\n    "ph": "M",\n    "name": "process_sort_index",\n'
        f'    "ts": {start},\n    "pid": "Spans",\n    "tid": 0,\n    "args": {{\n'
        '      "sort_index": 536870912\n    }\n  },\n  {\n    "ph": "i",\n    \n    "s": "g",\n'
        '    "name": "Iteration Start: PyTorch Profiler",\n    "pid": "Traces",\n'
        f'    "tid": "Trace PyTorch Profiler",\n    "ts": {start}\n    \n  }},\n  {{\n    "ph": "i",\n    \n'
        '    "s": "g",\n    "name": "Record Window End",\n    "pid": "",\n    "tid": "",\n'
        f'    "ts": {end}\n    \n  }}\n  ],"traceName": "trace.json" }}'
    )
