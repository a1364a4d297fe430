"""What the readers of text logs promise, on small samples."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
from helpers import analyze
from helpers import read as read_file

from paro_advise.errors import BrokenInputError, HostileInputError, UnknownFormatError
from paro_advise.trace_parsers.bytes.readable import MAX_LINE_BYTES, Readable
from paro_advise.trace_parsers.logs import comms_logger, nccl_log, nccl_tests, train_log
from paro_advise.trace_parsers.nccl import topology as nccl_topology
from paro_advise.trace_parsers.tables import SourceFile, SourceKind


def source(path="sample"):
    return SourceFile(path=path, bytes=0, sha256="", kind=SourceKind.NCCL_LOG)


def read(module, content, path="sample"):
    data = content.encode() if isinstance(content, str) else content
    pieces = [data[start : start + 7] for start in range(0, len(data), 7)]
    return module.parse(Readable(pieces, 1 << 28), source(path))


def codes(parsed):
    return [notice.code for notice in parsed.notices]


# --- Readable -------------------------------------------------------------------------------------


def test_lines_survive_any_cut_of_blocks_and_long_lines_are_cut():
    content = b"\xef\xbb\xbfone\r\n\ntwo \xff\n" + b"x" * (MAX_LINE_BYTES + 5) + b"\nlast"
    expected = ["one", "", "two \ufffd", "x" * MAX_LINE_BYTES, "last"]
    for size in (1 << 10, 1 << 22):
        data = Readable([content[at : at + size] for at in range(0, len(content), size)], 10)
        assert list(data.lines()) == expected
        assert data.num_cut_lines == 1


def test_read_all_refuses_more_than_its_limit():
    assert Readable([b"ab", b"c"], 3).read_all() == b"abc"
    with pytest.raises(HostileInputError):
        Readable([b"ab", b"cd"], 3).read_all()
    with pytest.raises(HostileInputError):
        Readable([b"ab", b"cd"], 100).read_all(3)


# --- NCCL's log -----------------------------------------------------------------------------------

INIT = (
    "node{n}:7{r}:7{r} [{r}] NCCL INFO ncclCommInitRank comm 0xa{r} rank {r} nranks 4 cudaDev {r} "
    "nvmlDev {r} busId {r}000 commId 0xfeed - Init COMPLETE\n"
)
COLL = (
    "node{n}:7{r}:7{r} [{r}] NCCL INFO {op}: opCount {seq} sendbuff 0x1 recvbuff 0x2 count {count} "
    "datatype {type} op 0 root 0 comm 0xa{r} [nranks=4] stream {stream}\n"
)


def nccl_sample():
    lines = [INIT.format(n=r // 2, r=r) for r in range(4)]
    lines += [
        "0: " + COLL.format(n=0, r=0, op="AllGather", seq="1a", count=4096, type=9, stream="0x10"),
        "[default0]:" + COLL.format(n=0, r=0, op="ReduceScatter", seq="1b", count=100, type=7, stream="(nil)"),
        "2026-03-01 10:00:00 " + COLL.format(n=0, r=0, op="AllReduce", seq="1c", count=5, type=6, stream="0x10"),
        "node0:70:70 [0] NCCL INFO Channel 00/0 : 1[1] -> 2[0] [send] via NET/IB/0/GDRDMA/Shared\n",
        "node0:70:70 [0] NCCL INFO Channel 01/0 : 1[1] -> 2[0] [send] via NET/IB/1(0)/GDRDMA\n",
        "node0:70:70 [0] NCCL INFO Channel 00/0 : 0[0] -> 1[1] via P2P/IPC/read\n",
        "node0:70:70 [0] NCCL INFO AllReduce: 4096 Bytes -> Algo RING proto LL128 channel{Lo..Hi}={0..15}\n",
        "node0:70:70 [0] NCCL INFO AllReduce: 64 Bytes -> Algo 0 proto 0 time 12.5\n",
        "node0:70:70 [0] NCCL INFO NCCL version 2.27.7+cuda13.0\n",
    ]
    return "".join(lines)


def test_nccl_log_gives_volume_groups_and_transports():
    parsed = read(nccl_log, nccl_sample())
    assert parsed.collectives["op"].to_list() == ["all_gather", "reduce_scatter", "all_reduce"]
    assert parsed.collectives["bytes"].to_list() == [4096 * 2 * 4, 100 * 4 * 4, 5 * 2]
    assert parsed.collectives["dtype"].to_list() == ["BFloat16", "Float", "Half"]
    assert parsed.collectives["seq"].to_list() == [26, 27, 28]
    assert parsed.collectives["stream"].to_list() == [16, 0, 16]
    assert parsed.collectives["group_name"].to_list() == ["0xfeed"] * 3
    assert parsed.collectives["start_us"].null_count() == 3
    header = parsed.header
    assert (header.world_size, header.num_nodes, header.gpus_per_node, header.nccl_version) == (
        4,
        2,
        2,
        "2.27.7+cuda13.0",
    )
    assert header.remarks["transport_NET/IB/GDRDMA"] == "1"
    assert header.remarks["transport_P2P/IPC"] == "1"
    assert header.remarks["tuning_AllReduce_RING_LL128"] == "1"
    assert header.remarks["tuning_AllReduce_TREE_LL"] == "1"
    assert header.remarks["hosts"] == "node0,node1"


def test_torn_nccl_lines_are_counted_and_not_used():
    whole = COLL.format(n=0, r=0, op="AllReduce", seq="2", count=9, type=7, stream="0x1")
    torn = [
        whole[:70] + "\n",
        whole.rstrip()[:-40] + whole,
        "garbage of python " + whole,
        whole.replace("count 9 ", f"count {10**19} "),
    ]
    parsed = read(nccl_log, nccl_sample() + "".join(torn))
    assert parsed.collectives.height == 3
    (notice,) = [notice for notice in parsed.notices if notice.code == "Q210"]
    assert notice.message.startswith("4 ")


def test_op_count_that_never_moves_is_no_sequence():
    line = COLL.format(n=0, r=0, op="AllReduce", seq="0", count=9, type=7, stream="0x1")
    parsed = read(nccl_log, INIT.format(n=0, r=0) + line * 3)
    assert parsed.collectives["seq"].to_list() == [None] * 3
    assert "Q213" in codes(parsed)


def test_rccl_line_and_unknown_type():
    line = (
        "n:1:1 [0] NCCL INFO AllGather: opCount 2 sendbuff 0x1 recvbuff 0x2 acc (nil) count 8 "
        "datatype {} op 0 root 0 comm 0x9 [nranks=4096] stream 0x9 task 0 globalrank 17\n"
    )
    parsed = read(nccl_log, line.format(9) + line.format(77))
    assert parsed.collectives["bytes"].to_list() == [8 * 2 * 4096, None]
    assert parsed.collectives["name"].to_list() == ["AllGather rank 17"] * 2
    assert "Q212" in codes(parsed)


# --- nccl-tests -----------------------------------------------------------------------------------

RANKS = "".join(
    f"#  Rank {r:2d} Group  0 Pid  {40 + r} on  host{r // 2} device  {r % 2} [0000:1{r}:00] NVIDIA Z100\n"
    for r in range(4)
)
MEASURED = "     time   algbw   busbw #wrong"
COLUMNS = f"#       size         count      type   redop    root{MEASURED}{MEASURED}\n"


def table_row(size, time_us, factor, redop="sum"):
    algbw = size / time_us / 1e3
    cells = f"{time_us:9.2f} {algbw:7.2f} {algbw * factor:7.2f} 0"
    return f"{size:12d} {size // 4:12d} float {redop} -1 {cells} {cells}"


def test_benchmark_table_with_program_and_ranks():
    rows = [table_row(1 << 20, 50.0, 0.75, "none"), table_row(1 << 24, 400.0, 0.75, "none")]
    content = f"# Collective test starting: all_gather_perf\n{RANKS}{COLUMNS}" + "\n".join(rows) + "\n"
    parsed = read(nccl_tests, content)
    assert parsed.link_samples["op"].to_list() == ["all_gather"] * 2
    assert parsed.link_samples["bytes"].to_list() == [1 << 20, 1 << 24]
    assert parsed.link_samples["time_us"].to_list() == [50.0, 400.0]
    assert parsed.link_samples["busbw_gbps"].to_list() == [
        round(0.75 * 2**20 / 50e3, 2),
        round(0.75 * 2**24 / 4e5, 2),
    ]
    assert parsed.link_samples["group_size"].to_list() == [4, 4]
    assert parsed.link_samples["num_nodes"].to_list() == [2, 2]
    assert (parsed.header.gpus_per_node, parsed.header.device_name) == (2, "NVIDIA Z100")


def report(*, time="time", processes=4, **changes):
    """Return what ``-J`` writes of an all-gather on two nodes, in processes of as many GPUs each as make four."""
    gpus = 4 // processes
    sizes = {1 << 20: 50.0, 1 << 24: 400.0}
    table = {
        "version": 3,
        "start_time": "2026-07-10 10:00:00",
        "args": ["/opt/nccl-tests/build/all_gather_perf", "-J", "out.json"],
        "env": ["TOKEN=hf_abcdefghijklmnopqrstuvwxyz012345"],
        "nccl_version": 22907,
        "config": {"nthreads": 1, "ngpus": gpus},
        "devices": [
            {"rank": rank, "group": 0, "pid": 40, "hostname": f"host{rank // 2}", "device": rank % 2,
             "device_hex": "0000:10:00", "device_info": "NVIDIA Z100"}
            for rank in range(0, 4, gpus)
        ],
        "results": [
            {"size": size, "count": size // 4, "type": "float", "redop": "none", "root": "    -1",
             "out_of_place": {time: us, "alg_bw": size / us / 1e3, "bus_bw": 0.75 * size / us / 1e3, "nwrong": None},
             "in_place": {time: 2 * us, "alg_bw": size / us / 2e3, "bus_bw": 0.75 * size / us / 2e3, "nwrong": 0.0},
             "actual_iterations": 20, "experiment_name": ""}
            for size, us in sizes.items()
        ],
    }  # fmt: skip
    return json.dumps({**table, **changes}, indent=changes.get("indent"))


@pytest.mark.parametrize("habits", [{}, {"time": "cpu_time"}, {"processes": 2}, {"indent": 2}])
def test_the_json_of_a_benchmark_says_what_its_table_says(habits, tmp_path):
    path = tmp_path / "nodes2.json"
    path.write_text(report(**habits))
    parsed = read_file(path)
    assert parsed.source.kind is SourceKind.NCCL_TESTS
    samples = parsed.link_samples
    assert samples["op"].to_list() == ["all_gather"] * 2
    assert samples["bytes"].to_list() == [1 << 20, 1 << 24]
    assert samples["time_us"].to_list() == [50.0, 400.0]
    assert samples["busbw_gbps"].to_list() == pytest.approx([0.75 * 2**20 / 50e3, 0.75 * 2**24 / 4e5])
    assert (samples["group_size"].to_list(), samples["num_nodes"].to_list()) == ([4, 4], [2, 2])
    assert (parsed.header.gpus_per_node, parsed.header.device_name) == (2, "NVIDIA Z100")


@pytest.mark.parametrize(
    ("spoilt", "kept"),
    [
        ({"out_of_place": None}, [50.0, 800.0]),
        ({"out_of_place": {"time": "nan", "alg_bw": "nan", "bus_bw": "nan"}}, [50.0]),
        ({"out_of_place": {"time": 1.0, "alg_bw": 1.0, "bus_bw": 1.0}}, [50.0]),
    ],
)
def test_rows_of_a_benchmarks_json_count_where_their_numbers_agree(spoilt, kept, tmp_path):
    path = tmp_path / "out.json"
    first, second = json.loads(report())["results"]
    path.write_text(report(results=[first, {**second, **spoilt}]))
    assert read_file(path).link_samples["time_us"].to_list() == kept


@pytest.mark.parametrize("form", ["table", "json"])
def test_wrong_results_of_a_benchmark_are_told(form, tmp_path):
    """Its times are as good as ever; whoever trains there trains on corrupted data."""
    row = table_row(1 << 24, 400.0, 0.75, "none")
    content = f"# Collective test starting: all_gather_perf\n{RANKS}{COLUMNS}{row}\n{row[:-1]}7\n"
    first, second = json.loads(report())["results"]
    second["in_place"]["nwrong"] = 7.0
    path = tmp_path / ("out.json" if form == "json" else "out.log")
    path.write_text(content if form == "table" else report(results=[first, second]))
    parsed = read_file(path)
    assert len(parsed.link_samples) == 2
    (told,) = [notice.message for notice in parsed.notices if notice.code == "Q224"]
    assert "wrong results in 1 row" in told


def test_a_cut_report_of_a_benchmark_is_refused(tmp_path):
    path = tmp_path / "out.json"
    path.write_text(report()[:-30])
    with pytest.raises(BrokenInputError, match="must be whole JSON"):
        read_file(path)


def test_all_reduce_and_its_group_size_follow_from_the_ratio():
    content = COLUMNS + "0: " + table_row(1 << 30, 4000.0, 2 * 15 / 16) + "\n"
    parsed = read(nccl_tests, content)
    assert parsed.link_samples.row(0)[:4] == ("all_reduce", 1 << 30, 16, None)
    assert "Q221" in codes(parsed)


def test_ambiguous_benchmark_stays_unknown_and_contradictions_are_left_out():
    wrong = table_row(1 << 24, 400.0, 0.75, "none").replace("41.94", "99.99")
    content = RANKS + COLUMNS + table_row(1 << 24, 400.0, 0.75, "none") + "\n" + wrong + "\n"
    parsed = read(nccl_tests, content)
    assert parsed.link_samples["op"].to_list() == ["unknown"]
    assert {"Q220", "Q222"} <= set(codes(parsed))


def test_no_bandwidth_is_told_of_a_collective_that_nobody_names(tmp_path):
    """An all-gather's and an all-to-all's ratio is the same; what the bus carries differs from what is measured."""
    rows = [table_row(1 << power, 50.0 + 2 ** (power - 18), 0.75, "none") for power in range(20, 27)]
    (tmp_path / "bench.out").write_text(RANKS + COLUMNS + "\n".join(rows) + "\n")
    assert analyze(tmp_path / "bench.out").links == ()
    (tmp_path / "bench.out").write_text(
        f"# Collective test starting: all_gather_perf\n{RANKS}{COLUMNS}" + "\n".join(rows)
    )
    (link,) = analyze(tmp_path / "bench.out").links
    assert link.op == "all_gather"


def test_rows_torn_by_nccl_output_are_joined_and_checked():
    row = table_row(1 << 24, 400.0, 1.5)
    cut = row.index("-1") + 2
    half = cut + (len(row) - cut) // 2
    head, first, second = row[:cut], row[cut:half], row[half:]
    coll = COLL.format(n=0, r=0, op="AllReduce", seq="3", count=1 << 22, type=7, stream="0x1")
    content = (
        f"# Collective test starting: all_reduce_perf\n{RANKS}{COLUMNS}"
        f"{INIT.format(n=0, r=0)}{head}{coll}{coll}{first}{coll}{second}\n"
    )
    parsed = read(nccl_log, content)
    measured = parsed.link_samples.drop("group_name", "seq", "rank").rows()
    assert measured == [("all_reduce", 1 << 24, 4, 2, 400.0, round(2**24 / 4e5 * 1.5, 2))]
    assert parsed.collectives["bytes"].to_list() == [1 << 24] * 3
    assert {"Q211", "Q223"} <= set(codes(parsed))
    assert "Q210" not in codes(parsed)


# --- DeepSpeed, training logs, topology -----------------------------------------------------------


def test_comms_logger_table_recomputes_bandwidth():
    size, n, latency_ms = 64 * 2**20, 8, 2.0
    gbit = size * 8 / (latency_ms / 1e3) / 1e9
    head = "".join(
        f"{title: <20}"
        for title in ("Comm. Op", "Message Size", "Count", "Total Latency(ms)", "Avg Latency(ms)", "x", "y")
    )
    busbw = gbit * (n - 1) / n
    row = "".join(
        f"{cell: <20}" for cell in ("", "64.0 MB", "5", "10.0", f"{latency_ms}", f"{gbit:.2f}", f"{busbw:.2f}")
    )
    ops = ("reduce_scatter_tensor | [Caller Func: f]", "all_gather_into_tensor", "all_reduce")
    parsed = read(comms_logger, f"{head}\n" + "".join(f"{op}\n{row}\n" for op in ops))
    samples = {sample["op"]: sample for sample in parsed.link_samples.to_dicts()}
    assert samples["reduce_scatter"]["bytes"] == samples["all_reduce"]["bytes"] == size
    assert samples["all_gather"]["bytes"] == size * n
    assert {sample["group_size"] for sample in samples.values()} == {n}
    assert samples["reduce_scatter"]["busbw_gbps"] == pytest.approx(size / 2e-3 / 1e9 * 7 / 8)
    assert samples["all_reduce"]["busbw_gbps"] == pytest.approx(size / 2e-3 / 1e9 * 14 / 8)
    assert {"Q260", "Q261"} <= set(codes(parsed))


def test_training_log_facts():
    steps = "".join(
        f"sd-1:  iteration {i:8d}/     100 | elapsed time per iteration (ms): {time} | global batch size: 8\n"
        for i, time in enumerate([900.0, 200.0, 210.0], 1)
    )
    content = "using world size: 16, data-parallel-size: 4, tensor-model-parallel size: 4\n" + steps + steps[-60:]
    header = read(train_log, content).header
    assert header.world_size == 16
    assert header.remarks["median_iteration_ms"] == "210.000"
    assert header.remarks["iteration_count"] == "3"
    assert header.remarks["data_parallel_size"] == "4"
    assert codes(read(train_log, content)) == ["Q280"]
    with pytest.raises(UnknownFormatError) as caught:
        read(train_log, "hello\nworld\n")
    assert caught.value.exit_code == 3 and caught.value.hint


def test_deepspeeds_wall_clock_breakdown_tells_whose_it_is_and_how_long_a_step_takes():
    """The micro-steps' lines hold the same times once more; 1.2.3 is no number."""
    line = "[INFO] [Rank 0] time (ms) | fwd: {} | bwd: 880.8 | bwd_inner: 720.0 | bwd_allreduce: 160.4 | step: 60.6\n"
    micro = "[INFO] [Rank 0] time (ms) | fwd_microstep: 100.1 | bwd_microstep: 220.2 | step_microstep: 0.05\n"
    header = read(train_log, micro * 4 + line.format("400.4") + line.format("1.2.3") + line.format("402.4")).header
    assert header.remarks["median_passes_and_update_ms"] == f"{(400.4 + 402.4) / 2 + 880.8 + 60.6:.3f}"
    assert header.framework.value == "DeepSpeed"


TOPOLOGY = (
    '<system version="1"><cpu numaid="0" host_hash="0x1">{}'
    '<pci busid="2" link_speed="16.0 GT/s PCIe" link_width="16"><nic>'
    '<net name="mlx5_0" speed="200000"/></nic></pci></cpu></system>'
)
GPU = '<pci busid="1"><gpu dev="0" sm="90"><nvlink target="x" count="18"/></gpu></pci>'


def test_topology_counts_gpus_and_ports():
    header = read(nccl_topology, TOPOLOGY.format(GPU * 8)).header
    assert header.gpus_per_node == 8
    assert header.remarks["nvlinks_per_gpu"] == ",".join(["18"] * 8)
    assert header.remarks["network_port_mbps"] == "200000"
    cut = read(nccl_topology, TOPOLOGY.format(GPU * 8)[:-40])
    assert cut.header.gpus_per_node == 8 and "Q201" in codes(cut)


@pytest.mark.parametrize(
    "content",
    [
        '<!DOCTYPE a [<!ENTITY b "bbbb"><!ENTITY c "&b;&b;&b;">]>' + TOPOLOGY.format("&c;"),
        '<!DOCTYPE system SYSTEM "file:///etc/passwd">' + TOPOLOGY.format(GPU),
        "<system>" + "<cpu>" * 1000,
    ],
)
def test_xml_bombs_are_refused(content):
    with pytest.raises(HostileInputError):
        read(nccl_topology, content)


@pytest.mark.distributed
def test_our_own_probe_is_read_as_a_benchmark(tmp_path):
    pytest.importorskip("torch")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*command, "-m", "paro_advise.runtime.probe"],
        capture_output=True,
        text=True,
        timeout=120,
        env=environment,
        check=True,
    )
    (tmp_path / "probe.txt").write_text(done.stdout)
    links = {link.op: link for link in analyze(tmp_path / "probe.txt").links}
    assert set(links) == {"all_gather", "reduce_scatter"}
    assert all((link.group_size, link.span) == (2, "intra") for link in links.values())
    assert all(link.busbw_gbps > 0 for link in links.values())
