"""Reading four times as much takes about four times the work, whatever the input is made of.

Compared are CPU times of one process, each the least so far, at sizes where reading outweighs the overhead. A linear
reader passes as soon as neighbours leave both sizes in peace once; a quadratic one takes sixteen times as long in
every round.
"""

from __future__ import annotations

import json
import pickle
import time
from contextlib import suppress

import pytest
from helpers import facts_of
from test_side_dumps import flight_dump, inspector_record, plugin_events
from test_side_formats import COLL, COLUMNS, GPU, INIT, RANKS, TOPOLOGY, table_row
from trace_builder import LAYOUTS, TraceBuilder, fsdp_rank

from paro_advise.errors import InputError

MAX_RATIO = 8.0  # of CPU times at 4n and n: between 4 (linear) and 16 (quadratic)
ROUNDS = 20  # at most; most inputs need one
ROW = {"ph": "X", "pid": 1, "tid": 1, "dur": 5.0}


def host_trace(events, *, groups=(), devices=()):
    info = {"backend": "gloo", "rank": 0, "world_size": 4, "pg_config": list(groups)}
    head = {"schemaVersion": 1, "distributedInfo": info, "deviceProperties": list(devices)}
    return json.dumps(head | {"traceEvents": events})


def gloo_rows(count, *, call_elements=8, call_begins_us=0.0, thread_of=lambda _: 1000):
    """Return calls of all-reduces, and as many spans of 8 elements."""
    for number in range(count):
        args = {"Input Dims": [[[call_elements]]], "External id": number}
        begin = call_begins_us + 10.0 * number
        yield ROW | {"cat": "cpu_op", "name": "c10d::allreduce_", "ts": begin, "args": args}
        args = {"Input Dims": [[8]], "Input type": ["float"]}
        begin, tid = 10.0 * number + 3, thread_of(number)
        yield ROW | {"cat": "user_annotation", "name": "gloo:all_reduce", "tid": tid, "ts": begin, "args": args}


def gloo_groups_and_pools(count):
    groups = [
        {"pg_name": str(number), "pg_desc": "g", "pg_size": 2, "ranks": [number, number + 1]} for number in range(count)
    ]
    return host_trace(list(gloo_rows(count, thread_of=lambda number: 1000 + 3 * number)), groups=groups)


def gloo_spans_that_fit_no_call(count):
    return host_trace(list(gloo_rows(count, call_elements=9)))


def gloo_spans_that_began_too_early(count):
    return host_trace(list(gloo_rows(count, call_begins_us=1e6)))


def shapes_of_many_dimensions(count):
    huge = [(1 << 48) - 1] * count
    rows = [
        ROW | {"cat": "cpu_op", "name": "c10d::allreduce_", "ts": 1.0, "args": {"Input Dims": [[huge]]}},
        ROW | {"cat": "user_annotation", "name": "gloo:all_reduce", "ts": 2.0, "args": {"Input Dims": [huge]}},
    ]
    return host_trace(rows * 8)


def steps_and_backward_passes(count):
    node = "autograd::engine::evaluate_function: A"
    events = []
    for number in range(count):
        begin = 10.0 * number
        events.append(ROW | {"cat": "user_annotation", "name": f"ProfilerStep#{number}", "ts": begin, "dur": 9.0})
        events.append(ROW | {"cat": "user_annotation", "name": "FSDP::root_pre_forward", "ts": begin + 1, "dur": 0.5})
        events.append(
            ROW | {"cat": "cpu_op", "name": node, "ts": begin + 2, "tid": 2, "args": {"Sequence number": number}}
        )
    return host_trace(events)


def steps_that_a_device_runs_late(count):
    events = []
    for number in range(count):
        begin = 10.0 * number
        events.append(ROW | {"cat": "user_annotation", "name": f"ProfilerStep#{number}", "ts": begin, "dur": 9.0})
        launch, kernel = {"correlation": number}, {"stream": 7, "correlation": number, "External id": number}
        events.append(ROW | {"cat": "cuda_runtime", "name": "cudaLaunchKernel", "ts": begin + 1, "args": launch})
        events.append(ROW | {"cat": "kernel", "name": "gemm", "tid": 7, "ts": begin + 25, "args": kernel})
    return host_trace(events, devices=[{"id": 0, "numSms": 1}])


def calls_nested_in_calls(count):
    events = []
    for number in range(count):
        args = {"External id": number, "Input Dims": [[[8]]]}
        call = {"cat": "cpu_op", "name": "c10d::allreduce_", "ts": 1.0 * number, "dur": 1e7 - 2 * number, "args": args}
        launch = {
            "cat": "cuda_runtime",
            "name": "cudaLaunchKernel",
            "ts": 1e6 + number,
            "args": {"correlation": number},
        }
        kernel = {"cat": "kernel", "name": "ncclKernel_AllReduce", "tid": 7, "ts": 2e6 + 10.0 * number}
        events += [ROW | call, ROW | launch, ROW | kernel | {"args": {"stream": 7, "correlation": number}}]
    return host_trace(events, devices=[{"id": 0, "numSms": 1}])


def collectives_of_as_many_groups(count):
    trace = TraceBuilder(0, 2)
    trace.step(0, 0, 10.0 * count)
    for number in range(count):
        trace.collective("AllReduce", 10.0 * number + 5, 3, nelems=100, issue=10.0 * number, seq=number)
        for event in trace.events[-2:]:
            event["args"]["Process Group Name"] = str(number)
    head = trace.head()
    ranks = [
        {"pg_name": str(number), "pg_desc": "g", "pg_size": 2, "ranks": [number, number + 1]} for number in range(count)
    ]
    head["distributedInfo"]["pg_config"] = ranks
    return LAYOUTS["torch213"](head, trace.events)


def ranges_of_the_runtime_in_each_other(count):
    name = "paro_advise::all_gather Float 8->32 ranks 0:4:1"
    events = [ROW | {"cat": "cpu_op", "name": name, "ts": 1.0 * number, "dur": 1e6} for number in range(count)]
    events += [ROW | {"cat": "cpu_op", "name": "aten::mm", "ts": number + 0.5} for number in range(count)]
    return host_trace(events)


def broken_events(count):
    text = fsdp_rank(0).text("one_line")
    return text[:-3] + ', {"ph": "X", "name": "a"b", ' * count


def a_name_of_quotes(count):
    begin = '{"traceEvents": [{"ph": "X", "cat": "cpu_op", "name": "'
    event = '", "ts": 1, "dur": 1}, {"ph": "X", "cat": "cpu_op", "name": "'
    return begin + '\\"' * 100 * count + event + '"' * 100 * count + '", "ts": 1, "dur": 1}]}'


def an_event_of_closing_brackets(count):
    events = '{"traceEvents": [{"ph": "X", "cat": "cpu_op", "name": "a", "ts": 1.0, "dur": 1.0}, {"ph": "X",'
    return events + "} ] " * 100 * count


def ranks_of_as_many_benchmark_groups(count):
    lines = (
        f"#  Rank {rank} Group  {rank} Pid  {40 + rank} on  host{rank} device  {rank % 8} [0000:1:00] NVIDIA Z100\n"
        for rank in range(4 * count)
    )
    return "# Collective test starting: all_gather_perf\n" + "".join(lines) + COLUMNS + table_row(1 << 20, 50.0, 0.75)


def benchmark_tables(count):
    return (RANKS + COLUMNS + table_row(1 << 20, 50.0, 0.75, "none") + "\n") * count


def nccl_lines(count):
    begin = "".join(INIT.format(n=number, r=number % 10) for number in range(count))
    calls = (COLL.format(n=number, r=number % 10, op="AllReduce", seq=f"{number:x}", count=4, type=7, stream="0x1")
             for number in range(count))  # fmt: skip
    return begin + "".join(calls)


def hosts_that_touch_a_number(count):
    return INIT.format(n=0, r=0) + "".join(f"{'1' * 200}n{number}:7:7 [0] NCCL INFO x\n" for number in range(count))


def lines_that_may_be_a_host_all_along(count):
    return INIT.format(n=0, r=0) + ("a" * 15_000 + " NCCL INFO x\n") * (count // 10)


def rows_of_deepspeed(count):
    row = "".join(f"{cell: <20}" for cell in ("", "64.0 MB", "5", "10.0", "2.0", "268.44", "234.88"))
    return "Comm. Op      \nall_reduce\n" + (row + "\n") * count


def one_line_of_progress(count):
    return " iteration 1/ 9 | elapsed time per iteration (ms): 3\n" + "1/2 [00:10<00:15, " * 20 * count + "it/s\n"


def records_of_inspector(count):
    record, lines = inspector_record(), []
    for number in range(count):
        record["header"] = {"id": f"0x{number:x}", "rank": number % 4, "n_ranks": 4, "nnodes": 2}
        record["metadata"]["hostname"] = f"h{number}"
        lines.append(json.dumps(record))
    return "\n".join(lines)


def plugin_events_that_end_late(count):
    begins, ends = zip(
        *((events[0], events[-1]) for events in (plugin_events(n, 9.0 * n) for n in range(count))), strict=True
    )
    return "[\n" + ",\n".join(map(json.dumps, (*begins, *ends)))


def entries_of_as_many_groups(count):
    dump = flight_dump()
    (entry,) = dump["entries"]
    dump["pg_config"] = {str(number): {"name": str(number), "ranks": f"[0, {number}]"} for number in range(count)}
    dump["entries"] = [entry | {"process_group": (str(number), "x"), "state": "scheduled"} for number in range(count)]
    dump["pg_status"] = {
        str(number): {"last_completed_collective": 1, "last_enqueued_collective": 2} for number in range(count)
    }
    return pickle.dumps(dump, 2)


def gpus_of_a_node(count):
    return TOPOLOGY.format(GPU * 4 * count)


INPUTS = (
    gloo_groups_and_pools, gloo_spans_that_fit_no_call, gloo_spans_that_began_too_early, shapes_of_many_dimensions,
    steps_and_backward_passes, steps_that_a_device_runs_late, calls_nested_in_calls, collectives_of_as_many_groups,
    ranges_of_the_runtime_in_each_other, broken_events, a_name_of_quotes, an_event_of_closing_brackets,
    ranks_of_as_many_benchmark_groups, benchmark_tables, nccl_lines, hosts_that_touch_a_number,
    lines_that_may_be_a_host_all_along, rows_of_deepspeed, one_line_of_progress, records_of_inspector,
    plugin_events_that_end_late, entries_of_as_many_groups, gpus_of_a_node,
)  # fmt: skip


def cpu_s(path):
    begin = time.process_time()
    with suppress(InputError):  # a refusal must come as soon
        facts_of(path)
    return time.process_time() - begin


@pytest.mark.parametrize("make", INPUTS, ids=lambda make: make.__name__)
def test_four_times_the_input_takes_no_more_than_eight_times_the_work(tmp_path, make):
    paths = []
    for count in (1500, 6000):
        content = make(count)
        paths.append(tmp_path / f"_dump_{count}")
        paths[-1].write_bytes(content if isinstance(content, bytes) else content.encode())
    times = []
    for _ in range(ROUNDS):
        times.append([cpu_s(path) for path in paths])
        small, large = (min(each) for each in zip(*times, strict=True))
        if large < MAX_RATIO * small + 0.05:
            return
    pytest.fail(f"{small:.3f} s became {large:.3f} s in each of {ROUNDS} rounds")
