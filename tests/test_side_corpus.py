"""What the readers make of whole logs and dumps of each kind: written here, and other people's where they are.

The first half writes its files itself. The second asks the same of the files in ../shared/corpus;
where that folder is absent it has nothing to ask and passes.
"""

from __future__ import annotations

import json
import pickle

import pytest
from conftest import SHARED
from test_side_dumps import flight_dump, inspector_record, make_nsys, plugin_events
from test_side_formats import COLL, COLUMNS, GPU, INIT, RANKS, TOPOLOGY, nccl_sample, table_row

from paro_advise.errors import UnknownFormatError
from paro_advise.trace_parsers import nsys
from paro_advise.trace_parsers.bytes.readable import Readable
from paro_advise.trace_parsers.dumps import flight_recorder
from paro_advise.trace_parsers.logs import comms_logger, nccl_log, nccl_tests, train_log
from paro_advise.trace_parsers.nccl import inspector, profiler_plugin
from paro_advise.trace_parsers.nccl import topology as nccl_topology
from paro_advise.trace_parsers.tables import SourceFile, SourceKind

STREAMED = (
    flight_recorder,
    nccl_topology,
    profiler_plugin,
    inspector,
    nccl_log,
    nccl_tests,
    comms_logger,
    train_log,
)


def source(path):
    return SourceFile(path=path, bytes=0, sha256="", kind=SourceKind.NCCL_LOG)


def codes(parsed):
    return [notice.code for notice in parsed.notices]


def reader_of(path):
    """Return the reader that recognises a file."""
    head = path.read_bytes()[:65536]
    if nsys.looks_like(head):
        return nsys
    for module in STREAMED:
        if module.looks_like(head):
            return module
    raise AssertionError(f"nobody recognises {path}")


def parse_any(path):
    module = reader_of(path)
    if module is nsys:
        return nsys.parse(path, source(str(path)))
    return module.parse(Readable([path.read_bytes()], 1 << 30), source(str(path)))


def assert_reads_twice_alike(path):
    first, second = parse_any(path), parse_any(path)
    assert first.collectives.equals(second.collectives) and first.link_samples.equals(second.link_samples)
    assert (first.header, first.notices) == (second.header, second.notices)
    assert first.collectives.height or first.link_samples.height or first.events or first.header.remarks


# --- written here ---------------------------------------------------------------------------------

COMMS_TITLES = ("Comm. Op", "Message Size", "Count", "Total Latency(ms)", "Avg Latency(ms)", "tput_avg", "busbw_avg")
# 64 MiB in 2 ms over 8 ranks: 268.44 Gbit/s, of which 7/8 cross a link.
COMMS_CELLS = ("", "64.0 MB", "5", "10.0", "2.0", "268.44", "234.88")
COMMS_TABLE = "\n".join(
    [
        "".join(f"{cell: <20}" for cell in COMMS_TITLES),
        "all_reduce",
        "".join(f"{cell: <20}" for cell in COMMS_CELLS),
        "",
    ]
)


def iteration(number, elapsed_ms, prefix=""):
    return (
        f"{prefix} iteration {number:8d}/    1000 | consumed samples: {64 * number} | "
        f"elapsed time per iteration (ms): {elapsed_ms} | global batch size:    64 | lm loss: 9.1E+00 |\n"
    )


def torn_benchmark():
    """Return (text, element counts of all calls): rows of nccl-tests, torn by NCCL's own lines."""
    init = "".join(INIT.format(n=0, r=r).replace("nranks 4", "nranks 2") for r in range(2))
    parts, counts = [f"# Collective test starting: all_reduce_perf\n{init}{COLUMNS}"], []
    for power in range(11):
        size = 8 << 20 << power
        row = table_row(size, size / 216.6e3, 1.0)
        cut = row.index("-1") + 2
        half = cut + (len(row) - cut) // 2  # between the two measurements, out of place and in place
        calls = "".join(
            COLL.format(n=0, r=r, op="AllReduce", seq=f"{power:x}", count=size // 4, type=7, stream="0x1").replace(
                "nranks=4", "nranks=2"
            )
            for r in range(2)
        )
        tuning = (
            f"node0:70:70 [0] NCCL INFO AllReduce: {size} Bytes -> Algo RING proto SIMPLE channel{{Lo..Hi}}={{0..23}}\n"
        )
        parts += [row[:cut], calls, tuning, row[cut:half], calls, row[half:] + "\n"]
        counts += [size // 4] * 4
    return "".join(parts), counts


MEGATRON_LOG = (
    "+ torchrun --nproc_per_node 2 --nnodes 1 pretrain_gpt.py --deepspeed --zero-stage 1\n"
    "using world size: 8, data-parallel-size: 2, tensor-model-parallel size: 2, pipeline-model-parallel size: 2\n"
    + "".join(iteration(index, time, "sd-1:") for index, time in enumerate([9000.5, 5668.2, 5600.1, 5700.3], 1))
)
TRAINER_LOG = (
    "[2021-05-25 06:38:26,360] [INFO] [config.py:752:print]   zero_optimization_stage ...... 3\n"
    "[INFO|trainer.py:1149] 2021-05-25 06:38:26,285 >>   Total optimization steps = 16\n"
    "100%|##########| 16/16 [02:08<00:00,  8.00s/it]\n"
    "{'train_runtime': 128.0, 'train_samples_per_second': 0.5, 'epoch': 1.0}\n"
)
SIXTEEN_NODES_LOG = (
    "+ LAUNCHER='python -u -m torch.distributed.launch --nproc_per_node 4 --nnodes 16 --master_port 6000'\n"
    "using world size: 64 and model-parallel size: 4\n"
    "  zero_stage ...................................... 0\n"
    + "".join(iteration(index, time) for index, time in enumerate([159.5, 141.0, 137.0, 137.5], 1))
)
RESUMED_LOG = (
    "  Continuing training from global step 12\n" + TRAINER_LOG.partition("\n")[2]  # 4 of 16 steps in 128 s
)
SAMPLES = {
    "_dump_5": (flight_recorder, pickle.dumps(flight_dump(), 2)),
    "dump.json": (flight_recorder, json.dumps(flight_dump())),
    "topology.xml": (nccl_topology, TOPOLOGY.format(GPU * 8)),
    "plugin.jsonl": (profiler_plugin, "[\n" + "".join(json.dumps(row) + ",\n" for row in plugin_events(0, 1.0)) + "{}]\n"),
    "inspector.log": (inspector, json.dumps(inspector_record()) + "\n"),
    "nccl.log": (nccl_log, nccl_sample()),
    "torn.log": (nccl_log, torn_benchmark()[0]),
    "table.out": (
        nccl_tests,
        f"# Collective test starting: all_gather_perf\n{RANKS}{COLUMNS}{table_row(1 << 20, 50.0, 0.75, 'none')}\n",
    ),
    "comms.txt": (comms_logger, COMMS_TABLE),
    "megatron.log": (train_log, MEGATRON_LOG),
    "trainer.out": (train_log, TRAINER_LOG),
}  # fmt: skip


def written(path, content):
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


@pytest.mark.parametrize("name", SAMPLES)
def test_every_kind_is_recognised_and_reads_twice_alike(name, tmp_path):
    module, content = SAMPLES[name]
    path = written(tmp_path / name, content)
    assert reader_of(path) is module
    assert_reads_twice_alike(path)


def test_a_database_is_recognised_and_reads_twice_alike(tmp_path):
    path = make_nsys(tmp_path / "report.sqlite")
    assert reader_of(path) is nsys
    assert_reads_twice_alike(path)


def test_a_log_about_something_else_is_refused(tmp_path):
    path = written(tmp_path / "output.log", "2025-12-22 20:48:57,725 - INFO - Created plot all_gather.png\n" * 20)
    with pytest.raises(UnknownFormatError):
        parse_any(path)


def test_inspector_bandwidth_equals_what_inspector_prints(tmp_path):
    """bus bandwidth = full bytes / time * (n - 1) / n, twice that for an all-reduce (n = 4)."""
    records = []
    for index, (op, size, time_us) in enumerate(
        [
            ("AllGather", 1024, 44),
            ("AllGather", 4 << 20, 90),
            ("ReduceScatter", 1 << 20, 33),
            ("AllReduce", 7 << 20, 512),
        ]
    ):
        whole = size if op == "AllReduce" else 4 * size
        busbw = whole / time_us / 1e3 * (2 if op == "AllReduce" else 1) * 3 / 4
        perf = {"coll_msg_size_bytes": size, "coll_exec_time_us": time_us, "coll_busbw_gbs": round(busbw, 6)}
        records.append(inspector_record(coll=op, coll_sn=index, **perf))
    path = written(tmp_path / "inspector.log", "".join(json.dumps(record) + "\n" for record in records))
    printed = [record["coll_perf"]["coll_busbw_gbs"] for record in records]
    assert parse_any(path).link_samples["busbw_gbps"].to_list() == pytest.approx(printed, abs=1e-6)


def test_nccl_log_volume_and_torn_table(tmp_path):
    text, counts = torn_benchmark()
    parsed = parse_any(written(tmp_path / "nccl.log", text))
    assert parsed.collectives["bytes"].sum() == 4 * sum(counts)
    assert parsed.link_samples["busbw_gbps"].to_list() == [216.60] * 11
    assert parsed.link_samples["bytes"].to_list() == [8 << 20 << power for power in range(11)]
    assert parsed.header.remarks["tuning_AllReduce_RING_SIMPLE"] == "11"


def test_flight_recorder_ranks_and_open_entries(tmp_path):
    """16 ranks, of which rank 3 left a collective open."""
    config = {"0": {"name": "0", "desc": "default_pg", "ranks": str(list(range(16)))}}
    for rank in range(16):
        first, last = flight_dump()["entries"][0], flight_dump(profiling_name="nccl:all_reduce")["entries"][0]
        entries = [first, last | {"state": "scheduled" if rank == 3 else "completed"}]
        raw = flight_dump() | {"pg_config": config, "entries": entries}
        parsed = parse_any(written(tmp_path / f"_dump_{rank}", pickle.dumps(raw, 2)))
        assert (parsed.header.rank, parsed.header.world_size) == (rank, 16)
        assert parsed.collectives["name"].to_list() == ["nccl:_all_gather_base", "nccl:all_reduce"]
        assert ("Q250" in codes(parsed)) == (rank == 3)


def test_training_logs(tmp_path):
    megatron = parse_any(written(tmp_path / "a.log", MEGATRON_LOG)).header
    assert megatron.remarks["median_iteration_ms"] == "5684.250"  # between 5668.2 and 5700.3
    assert (megatron.remarks["zero_stage"], megatron.world_size) == ("1", 8)
    resumed = parse_any(written(tmp_path / "r.log", RESUMED_LOG)).header
    assert (resumed.mean_iteration_us, resumed.remarks["iteration_count"]) == (pytest.approx(32e6), "4")
    trainer = parse_any(written(tmp_path / "b.log", TRAINER_LOG)).header
    assert "median_iteration_ms" not in trainer.remarks
    assert (trainer.remarks["zero_stage"], trainer.remarks["mean_iteration_ms"]) == ("3", "8000.000")
    nodes = parse_any(written(tmp_path / "c.log", SIXTEEN_NODES_LOG)).header
    assert (nodes.world_size, nodes.num_nodes, nodes.gpus_per_node) == (64, 16, 4)
    assert (nodes.remarks["zero_stage"], nodes.remarks["iteration_count"]) == ("0", "4")


# --- other people's, where they are ---------------------------------------------------------------


def corpus():
    """Return (path, kind) of the logs and dumps in ../shared/corpus, none where it is absent."""
    index = SHARED / "corpus" / "INDEX.tsv"
    if not index.is_file():
        return []
    rows = [line.split("\t") for line in index.read_text(encoding="utf-8").splitlines()[1:]]
    return [(SHARED / "corpus" / row[0], row[5]) for row in rows if row[5] not in {"a", "f"}]


def public(*endings):
    """Return the files of the corpus with these endings, in this order; none where it is absent."""
    files = corpus()
    found = [[path for path, _ in files if str(path).endswith(ending)] for ending in endings]
    assert all(len(paths) == bool(files) for paths in found)
    return [path for paths in found for path in paths]


@pytest.mark.corpus
def test_every_public_file_parses_or_says_why():
    for path, _ in corpus():
        if path.name == "output.log":  # a plotting tool's own log, though the index calls it nccl-tests output
            with pytest.raises(UnknownFormatError):
                parse_any(path)
        else:
            assert_reads_twice_alike(path)


@pytest.mark.corpus
def test_public_inspector_bandwidth_equals_what_inspector_printed():
    for path in public("stone-pid3326096.log"):
        printed = [json.loads(line)["coll_perf"]["coll_busbw_gbs"] for line in path.read_text().splitlines()]
        assert parse_any(path).link_samples["busbw_gbps"].to_list() == pytest.approx(printed, abs=1e-6)


@pytest.mark.corpus
def test_public_nccl_log_volume_and_torn_table():
    for path in public("Timez-zx+nccl-tests/nccl.log"):
        parsed = parse_any(path)
        counts = [int(part.split()[0]) for part in path.read_text().split(" count ")[1:] if part[:1].isdigit()]
        assert parsed.collectives["bytes"].sum() == 4 * sum(counts)
        assert parsed.link_samples["busbw_gbps"][-1] == 216.60
        assert parsed.link_samples["bytes"].to_list() == [8 << 20 << power for power in range(11)]
        assert parsed.header.remarks["tuning_AllReduce_RING_SIMPLE"] == str(
            path.read_text().count("-> Algo RING proto SIMPLE")
        )


def test_public_flight_recorder_ranks_and_open_entries():
    for path in sorted((SHARED / "corpus").glob("NVIDIA*/tests/attribution/unit/fr_traces/*/_dump_*")):
        with path.open("rb") as file:
            raw = pickle.load(file)  # a file of known origin, as the oracle
        parsed = parse_any(path)
        assert parsed.header.rank == int(path.name.removeprefix("_dump_"))
        assert parsed.header.world_size == 16
        assert parsed.collectives["name"].to_list() == [entry["profiling_name"] for entry in raw["entries"]]
        has_open = any(entry["state"] != "completed" for entry in raw["entries"])
        assert ("Q250" in codes(parsed)) == has_open


@pytest.mark.corpus
def test_public_training_logs():
    expected = {
        "093732_sd-1.log": ("5668.200", "1"),
        "1832555.out": (None, "3"),
        "meg_ds_3d_gpt2_perf_n16-ds-on.out": ("137138.400", "0"),
    }
    for path, (median, stage) in zip(public(*expected), expected.values(), strict=True):
        header = parse_any(path).header
        assert header.remarks.get("median_iteration_ms") == median
        assert header.remarks["zero_stage"] == stage
    for path in public("meg_ds_zero_gpt2_perf_n16-1999616.out"):
        zero = parse_any(path).header
        assert (zero.world_size, zero.num_nodes, zero.gpus_per_node) == (64, 16, 4)
        assert zero.remarks["iteration_count"] == "4"
