"""What the readers of binary and JSON dumps promise, on small samples."""

from __future__ import annotations

import json
import math
import pickle
import sqlite3

import pytest
from helpers import analyze

from paro_advise.errors import BrokenInputError, HostileInputError, InputError
from paro_advise.trace_parsers import nsys
from paro_advise.trace_parsers.bytes.readable import Readable
from paro_advise.trace_parsers.dumps import flight_recorder
from paro_advise.trace_parsers.nccl import inspector, inspector_metrics, profiler_plugin
from paro_advise.trace_parsers.tables import SourceFile, SourceKind


def source(path="sample"):
    return SourceFile(path=path, bytes=0, sha256="", kind=SourceKind.NCCL_LOG)


def read(module, content, path="sample"):
    data = content.encode() if isinstance(content, str) else content
    pieces = [data[start : start + 7] for start in range(0, len(data), 7)]
    return module.parse(Readable(pieces, 1 << 28), source(path))


def codes(parsed):
    return [notice.code for notice in parsed.notices]


# --- NCCL Inspector -------------------------------------------------------------------------------


def inspector_record(**changes):
    perf = {
        "coll": "AllGather",
        "coll_sn": 3,
        "coll_msg_size_bytes": 1000,
        "coll_exec_time_us": 20,
        "coll_timing_source": "kernel_gpu",
    } | changes
    header = {"id": "0xa", "rank": 1, "n_ranks": 4, "nnodes": 2}
    metadata = {
        "inspector_output_format_version": "v4.0",
        "dump_timestamp_us": 1_700_000_000_000_100,
        "hostname": "h",
    }
    return {"header": header, "metadata": metadata, "coll_perf": perf}


def test_inspector_sizes_are_full_buffers_and_bandwidth_is_recomputed():
    records = [
        inspector_record(),
        inspector_record(coll="AllReduce", coll_sn=0),
        inspector_record(coll="ReduceScatter", coll_sn=0, event_trace_ts={"coll_start_ts": 1_700_000_000_000_010}),
    ]
    parsed = read(inspector, "\n".join(map(json.dumps, records)))
    by_op = {row["op"]: row for row in parsed.link_samples.to_dicts()}
    assert by_op["all_gather"]["bytes"] == by_op["reduce_scatter"]["bytes"] == 4000
    assert by_op["all_gather"]["busbw_gbps"] == pytest.approx(4000 / 20e-6 / 1e9 * 3 / 4)
    assert by_op["all_reduce"]["busbw_gbps"] == pytest.approx(1000 / 20e-6 / 1e9 * 2 * 3 / 4)
    assert by_op["all_reduce"]["num_nodes"] == 2
    assert parsed.header.origin_ns == 1_700_000_000_000_010_000
    assert parsed.collectives["start_us"].to_list() == [0.0, 70.0, 70.0]
    assert parsed.collectives["end_us"].to_list() == [20.0, 90.0, 90.0]
    assert (parsed.header.rank, parsed.header.world_size) == (1, 4)
    assert {"Q230", "Q231"} <= set(codes(parsed))


def test_inspector_v43_takes_header_from_the_marker_and_reports_losses():
    record = inspector_record()
    marker = {
        "header": record["header"],
        "metadata": record["metadata"],
        "dump_stats": {"coll_dropped_total": 12},
    }
    content = "\n".join(
        map(
            json.dumps,
            [marker, {"coll_perf": record["coll_perf"]}, {"coll_perf": record["coll_perf"] | {"coll_sn": 5}}],
        )
    )
    parsed = read(inspector, content)
    assert parsed.collectives["group_size"].to_list() == [4, 4]
    messages = {notice.code: notice.message for notice in parsed.notices}
    assert "12 records" in messages["Q232"]
    assert messages["Q233"].startswith("1 of 3 ")


@pytest.mark.parametrize(
    "broken",
    [
        "{cut",
        "[" * 100_000,
        '{"coll_perf": {"coll": "AllReduce"}}',
        json.dumps(inspector_record(coll_msg_size_bytes=10**30)),
        json.dumps(inspector_record(coll_exec_time_us=math.nan)),
        json.dumps(inspector_record(coll_msg_size_bytes=True)),
        json.dumps(inspector_record(coll=["AllReduce"])),
    ],
)
def test_inspector_skips_and_counts_broken_records(broken):
    parsed = read(inspector, broken + "\n" + json.dumps(inspector_record(coll_sn=10**30)) + "\n")
    assert parsed.collectives.height == 1
    assert parsed.collectives["seq"].to_list() == [None]
    assert any(notice.code == "Q201" and notice.message.endswith("left out: 1") for notice in parsed.notices)
    with pytest.raises(BrokenInputError):
        read(inspector, broken)


def metric_lines(*, collective="AllGather", sizes="4-5MB", ranks=32, nodes=4, busbw=50.0, time_us=3000.0):
    """The two lines that NCCL Inspector writes for one mean, as nccl 2.30 prints them."""
    labels = (
        f'version="v5.1",slurm_job_id="7",node="h",gpu="GPU0",comm_name="unknown",n_nodes="{nodes}",nranks="{ranks}",'
        f'collective="{collective}",message_size="{sizes}",algo_proto="RING_SIMPLE"'
    )
    return (
        f"nccl_bus_bandwidth_gbs{{{labels}}} {busbw:.6g}\n"
        f"nccl_collective_exec_time_microseconds{{{labels}}} {time_us:.6g}"
    )


def test_inspector_metrics_are_samples_of_links():
    """A shard of 4 to 5 MiB on each of 32 ranks; 50 GB/s and 3,000 us say 154.8e6 bytes, 4.6 MiB a rank."""
    text = metric_lines() + "\n# a comment\n" + metric_lines(collective="AllReduce", sizes="64-65MB", ranks=8, nodes=1)
    parsed = read(inspector_metrics, text + " 1700000000000\n")
    rows = {row["op"]: row for row in parsed.link_samples.to_dicts()}
    assert rows["all_gather"] == {
        "op": "all_gather", "bytes": round(50e9 * 3000e-6 * 32 / 31), "group_size": 32, "num_nodes": 4,
        "time_us": pytest.approx(3000.0), "busbw_gbps": 50.0, "group_name": "", "seq": None, "rank": None,
    }  # fmt: skip
    # 50 GB/s and 3,000 us say 86 MB of an all-reduce on 8 ranks: more than the range holds, so its end.
    assert rows["all_reduce"]["bytes"] == 65 << 20
    assert (parsed.header.world_size, parsed.header.num_nodes, parsed.header.host) == (32, 4, "h")
    assert parsed.header.remarks["format_version"] == "v5.1"
    assert codes(parsed) == ["Q235"]


def test_inspector_metrics_of_messages_between_two_ranks_count():
    text = metric_lines(collective="Send", sizes="1-2MB", busbw=19.2, time_us=92.6).replace(
        "collective=", "p2p_operation="
    )
    text = text.replace("nccl_bus", "nccl_p2p_bus").replace("nccl_collective_exec", "nccl_p2p_exec")
    parsed = read(inspector_metrics, text)
    assert parsed.link_samples["op"].to_list() == ["send"]
    assert parsed.link_samples["busbw_gbps"].to_list() == [19.2]


@pytest.mark.parametrize(
    "broken",
    [
        "nccl_bus_bandwidth_gbs{",
        metric_lines(time_us=-5.0),
        metric_lines(busbw=math.nan),
        metric_lines(ranks=0),
        metric_lines(collective=""),
        metric_lines(busbw=1e9),
        metric_lines().splitlines()[1],
    ],
)
def test_inspector_metrics_that_are_broken_are_counted(broken):
    parsed = read(inspector_metrics, broken + "\n" + metric_lines())
    assert parsed.link_samples.height == 1
    assert "Q201" in codes(parsed)
    with pytest.raises(BrokenInputError):
        read(inspector_metrics, broken)


def test_a_mean_of_one_rank_says_nothing_about_links():
    parsed = read(inspector_metrics, metric_lines(ranks=1, nodes=1))
    assert parsed.link_samples.height == 0
    assert "Q234" in codes(parsed)


# --- profiler plugin ------------------------------------------------------------------------------


def plugin_events(index, start, op="AllReduce", kernel=True):
    common = {"name": op, "cat": "COLL", "id": index, "pid": 1, "tid": 1}
    args = {
        "SeqNum": index,
        "CommHash": 2**64 - 1,
        "Rank": 2,
        "Count": 10,
        "Datatype": "ncclFloat32",
        "Algorithm": "RING",
        "Protocol": "LL",
    }
    channel = {"name": "KernelCh", "cat": "GPU", "id": 0, "pid": 1, "tid": 1}
    events = [common | {"ph": "b", "ts": start, "args": args}]
    if kernel:
        events += [channel | {"ph": "b", "ts": start + 5.5}, channel | {"ph": "e", "ts": start + 8.5}]
    return [*events, common | {"ph": "e", "ts": start + 9}]


def test_plugin_dump_of_a_killed_run_is_salvaged():
    events = [event for index in range(3) for event in plugin_events(index, 100.0 * index, kernel=index < 2)]
    whole = "[\n" + "".join(json.dumps(event) + ",\n" for event in events)
    complete = read(profiler_plugin, whole + "{}]\n")
    assert complete.collectives["start_us"].to_list() == [5.5, 105.5, 200.0]
    assert complete.collectives["end_us"].to_list() == [8.5, 108.5, 209.0]
    assert complete.collectives["issue_us"].to_list() == [0.0, 100.0, 200.0]
    assert complete.collectives["bytes"].to_list() == [40] * 3
    assert complete.collectives["group_name"].to_list() == [str(2**64 - 1)] * 3
    assert complete.collectives["name"].to_list() == ["AllReduce RING LL rank 2"] * 3
    assert complete.header.rank == 2
    assert codes(complete) == ["Q241"]
    cut = read(profiler_plugin, whole[:-20])
    assert cut.collectives["seq"].to_list() == [0, 1]
    assert {"Q201", "Q240"} <= set(codes(cut))


def test_plugin_all_gather_without_group_size_has_no_bytes():
    parsed = read(profiler_plugin, "[\n" + ",\n".join(map(json.dumps, plugin_events(0, 1.0, "AllGather"))))
    assert parsed.collectives["bytes"].to_list() == [None]
    assert "Q212" in codes(parsed)
    with pytest.raises(BrokenInputError):
        read(profiler_plugin, '[\n{"name": "AllReduce", "cat": "COLL", "ph": "b", "ts": 1,')


# --- flight recorder ------------------------------------------------------------------------------


def flight_dump(**changes):
    entry = {
        "process_group": ("7", "mesh_dp"),
        "collective_seq_id": 4,
        "p2p_seq_id": 0,
        "profiling_name": "nccl:_all_gather_base",
        "time_created_ns": 1_700_000_000_000_000_123,
        "input_sizes": [[8, 4]],
        "input_dtypes": ["BFloat16"],
        "output_sizes": [[16, 4]],
        "output_dtypes": ["BFloat16"],
        "state": "completed",
        "time_discovered_started_ns": 1_700_000_000_000_002_123,
        "time_discovered_completed_ns": 1_700_000_000_900_000_000,
        "duration_ms": 0.25,
        "is_p2p": False,
        "thread_name": "pt_autograd_0",
        "frames": [
            {"filename": "torch/csrc/x.cpp", "name": "c", "line": 1},
            {"filename": "/v/site-packages/torch/distributed/c10d.py", "name": "all_gather", "line": 1},
            {
                "filename": "/v/site-packages/torch/distributed/fsdp/_fully_shard/_group.py",
                "name": "unshard",
                "line": 1,
            },
            {"filename": "/home/me/train.py", "name": "step", "line": 1},
        ],
    } | changes
    config = {"7": {"name": "7", "desc": "mesh_dp", "ranks": "[3, 5]"}}
    return {"version": "2.9", "nccl_version": "2.27.3", "pg_config": config, "entries": [entry]}


def test_a_deep_stack_is_named_by_its_innermost_six_frames():
    frames = [{"filename": f"/home/me/f{number}.py", "name": "call", "line": 1} for number in range(300)]
    assert flight_recorder.owner_of(frames) == " > ".join(f"f{number}.py:call" for number in (5, 4, 3, 2, 1, 0))


@pytest.mark.parametrize(
    "encode", [lambda v: pickle.dumps(v, 2), lambda v: pickle.dumps(v, 5), lambda v: json.dumps(v).encode()]
)
def test_flight_recorder_entries_become_rows(encode):
    data = encode(flight_dump())
    assert flight_recorder.looks_like(data[:65536])
    parsed = read(flight_recorder, data, "/x/_dump_5")
    (row,) = parsed.collectives.to_dicts()
    assert (row["op"], row["bytes"], row["dtype"], row["seq"]) == ("all_gather", 16 * 4 * 2, "BFloat16", 4)
    assert (row["group_name"], row["group_desc"], row["group_ranks"], row["group_size"]) == (
        "7",
        "mesh_dp",
        "3,5",
        2,
    )
    assert (row["issue_us"], row["start_us"], row["end_us"]) == (0.0, 2.0, 252.0)
    assert row["owner"] == "train.py:step > _group.py:unshard"
    assert row["phase"] == "backward"
    header = parsed.header
    assert (header.rank, header.backend, header.nccl_version) == (5, "nccl", "2.27.3")
    assert header.origin_ns == 1_700_000_000_000_000_123
    assert codes(parsed) == ["Q251"]


def test_flight_recorder_names_the_first_open_collective():
    dump = flight_dump()
    second = flight_dump(state="scheduled", profiling_name="nccl:send 0->1", is_p2p=True, p2p_seq_id=9)["entries"]
    parsed = read(flight_recorder, pickle.dumps(dump | {"entries": dump["entries"] + second}, 2))
    (notice,) = [notice for notice in parsed.notices if notice.code == "Q250"]
    assert "1 of 2" in notice.message and "send 0->1 seq 9" in notice.message
    assert "Q253" in codes(parsed)


class Evil:
    def __reduce__(self):
        import os

        return os.system, ("touch evil_was_here",)


@pytest.mark.parametrize("protocol", [0, 2, 5])
def test_pickle_that_runs_code_is_refused(tmp_path, monkeypatch, protocol):
    monkeypatch.chdir(tmp_path)
    data = pickle.dumps({"entries": [Evil()]}, protocol)
    data = data if data[:1] == b"\x80" else b"\x80\x02" + data
    with pytest.raises(HostileInputError):
        read(flight_recorder, data)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "data",
    [
        pickle.dumps(flight_dump(), 2)[:-30],
        b"\x80\x02.",
        b"\x80\x02(.",
        b"\x80\x02]K\x01s.",
        b"\x80\x02h\x05.",
        b"\x80\x02r\xff\xff\xff\xff.",
        b"\x80\x02}" + b")" + b"\x85" * 1000 + b"Ns.",
        b"\x80\x04\x8e\xff\xff\xff\xff\xff\xff\xff\x7f.",
        b"\x80\x02K\x01.",
        b'{"entries": ',
        b"[" * 100_000,
    ],
)
def test_damaged_dumps_are_refused_without_harm(data):
    with pytest.raises(InputError):
        read(flight_recorder, data)


def test_flight_recorder_skips_absurd_values():
    dump = flight_dump(input_sizes=[[10**30]], output_sizes="x", time_created_ns=-1, collective_seq_id="a")
    dump["entries"] += [None, 3, {"profiling_name": 4}]
    dump["entries"].append(flight_dump(profiling_name="nccl:\ud800")["entries"][0])
    parsed = read(flight_recorder, json.dumps(dump))
    assert parsed.collectives["bytes"].to_list() == [None, 64]
    assert parsed.num_events == 5
    assert {"Q201", "Q212"} <= set(codes(parsed))


# --- Nsight Systems -------------------------------------------------------------------------------


def make_nsys(path, with_runtime=True, extra=""):
    with sqlite3.connect(path) as db:
        db.executescript(
            """
            CREATE TABLE StringIds (id INTEGER, value TEXT);
            INSERT INTO StringIds VALUES
                (1, 'ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgs)'), (2, 'gemm'), (3, 'Layer.forward');
            CREATE TABLE CUPTI_ACTIVITY_KIND_KERNEL (
                start INTEGER, end INTEGER, deviceId INTEGER, streamId INTEGER, correlationId INTEGER,
                globalPid INTEGER, demangledName INTEGER, shortName INTEGER);
            INSERT INTO CUPTI_ACTIVITY_KIND_KERNEL VALUES
                (5000, 9500, 0, 20, 11, 16777216, 1, 1), (1000, 4000, 0, 7, 12, 16777216, 2, 2),
                (1000, 4000, 1, 7, 12, 16777216, 2, 2), (9, 'x', 0, 7, 1, 16777216, 2, 2);
            CREATE TABLE NVTX_EVENTS (
                start INTEGER, end INTEGER, eventType INTEGER, text TEXT, textId INTEGER, globalTid INTEGER);
            INSERT INTO NVTX_EVENTS VALUES
                (0, 8000, 59, 'iteration 4', NULL, 16777221), (100, 900, 59, NULL, 3, 16777221),
                (50, NULL, 34, 'MPI Rank 6', NULL, 16777221);
            """
        )
        if with_runtime:
            db.execute(
                "CREATE TABLE CUPTI_ACTIVITY_KIND_RUNTIME "
                "(start INTEGER, end INTEGER, globalTid INTEGER, correlationId INTEGER)"
            )
            db.execute("INSERT INTO CUPTI_ACTIVITY_KIND_RUNTIME VALUES (700, 800, 16777221, 11)")
        db.executescript(extra)
    db.close()
    return path


def test_nsys_device_rows_collectives_and_spans(tmp_path):
    parsed = nsys.parse(make_nsys(tmp_path / "a?b#c.sqlite"), source())
    device = parsed.events.device
    assert device["start_us"].to_list() == [1.0, 5.0]
    assert device["kind"].to_list() == [0, 1]
    assert [parsed.events.names[code] for code in device["name"]] == [
        "gemm",
        "ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgs)",
    ]
    assert math.isnan(device["launch_us"][0]) and device["launch_us"][1] == 0.7
    (row,) = parsed.collectives.to_dicts()
    assert (row["op"], row["start_us"], row["end_us"], row["issue_us"], row["issue_tid"]) == (
        "all_gather",
        5.0,
        9.5,
        0.7,
        5,
    )
    assert [span.name for span in parsed.events.spans] == ["Layer.forward"]
    assert [span.name for span in parsed.events.steps] == ["iteration 4"]
    assert parsed.header.rank == 6
    assert {"Q201", "Q270", "Q273"} <= set(codes(parsed))
    assert "Q271" in codes(nsys.parse(make_nsys(tmp_path / "b.sqlite", with_runtime=False), source()))


def test_nsys_graphs_that_were_recorded_as_wholes_carry_no_verdict(tmp_path):
    """Its default: one row for each execution of a CUDA graph, whatever runs in it."""
    graphs = """CREATE TABLE CUPTI_ACTIVITY_KIND_GRAPH_TRACE (start INTEGER, end INTEGER, deviceId INTEGER,
            contextId INTEGER, streamId INTEGER, correlationId INTEGER, globalPid INTEGER, graphId INTEGER);
        INSERT INTO CUPTI_ACTIVITY_KIND_GRAPH_TRACE VALUES (4000, 4900, 0, 1, 7, 13, 16777216, 1),
            (4000, 4900, 1, 1, 7, 13, 16777216, 1);"""
    path = make_nsys(tmp_path / "graphs.sqlite", extra=graphs)
    parsed = nsys.parse(path, source())
    device = parsed.events.device
    assert [(row["start_us"], row["end_us"], row["kind"]) for row in device.to_dicts()][1] == (4.0, 4.9, 0)
    assert "Q276" in codes(parsed)
    assert "CUDA graphs were recorded as wholes" in analyze(path).verdict.text
    alone = make_nsys(tmp_path / "alone.sqlite", extra=f"{graphs} DELETE FROM CUPTI_ACTIVITY_KIND_KERNEL;")
    assert nsys.parse(alone, source()).events.device["end_us"].to_list() == [4.9]


def test_nsys_hostile_schema_and_damage_do_not_hang(tmp_path):
    bomb = """CREATE VIEW CUPTI_ACTIVITY_KIND_MEMCPY AS
        WITH RECURSIVE n(start) AS (SELECT 1 UNION ALL SELECT start + 1 FROM n)
        SELECT start, start AS end FROM n;"""
    parsed = nsys.parse(make_nsys(tmp_path / "view.sqlite", extra=bomb), source())
    assert parsed.events.device.height == 2
    content = (tmp_path / "view.sqlite").read_bytes()
    for name, damaged in (
        ("cut", content[:5000]),
        ("flip", content[:4200] + b"\xff" * 3000 + content[7200:]),
        ("text", b"SQLite format 3\0" + b"x" * 99),
    ):
        path = tmp_path / name
        path.write_bytes(damaged)
        try:
            nsys.parse(path, source())
        except InputError as error:
            assert error.exit_code == 3
    empty = tmp_path / "other.sqlite"
    with sqlite3.connect(empty) as db:
        db.execute("CREATE TABLE t (a)")
    db.close()
    with pytest.raises(BrokenInputError):
        nsys.parse(empty, source())
