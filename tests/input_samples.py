"""One small, sound input of every format that the product reads, to be damaged."""

from __future__ import annotations

import bz2
import contextlib
import gzip
import io
import json
import lzma
import pickle
import tarfile
import tempfile
import zipfile
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

from conftest import DATA, SHARED
from test_side_dumps import flight_dump, inspector_record, make_nsys, metric_lines, plugin_events
from test_side_formats import COLUMNS, GPU, RANKS, TOPOLOGY, nccl_sample, table_row
from trace_builder import LAYOUTS, TraceBuilder, fsdp_rank

from paro_advise.advisor.cli import run
from paro_advise.policies.plan import _hash as body_id
from paro_advise.trace_parsers.tables import SourceKind

NUM_STEPS = 6
CONTAINERS = ("gz", "zst", "tar", "tar.gz", "tar.bz2", "tar.xz", "zip")
# Other people's files, read where ../shared is there.
_SHARED_FILES = (
    "corpus/facebookresearch+HolisticTraceAnalysis/tests/data/cpu_only/rank-34.Jul_15_10_52_41.1074.pt.trace.json.gz",
    "corpus/facebookresearch+HolisticTraceAnalysis/tests/data/amd_trace/mi250_minitoy_train_ROCm6_2_kineto.json.gz",
    "corpus/NVIDIA+nvidia-resiliency-ext/tests/attribution/unit/fr_traces/gpu_error_1st/_dump_12",
    "corpus/aws-samples+awsome-distributed-training/micro-benchmarks/nccl-tests/README.md",
    "corpus/issue_excerpts/pytorch_98432_unescaped_backslash.json",
    "corpus/Timez-zx+nccl-tests/nccl_topo_dump.xml",
    "corpus/deepspeedai+DeepSpeed/docs/_tutorials/comms-logging.md",
    "nccl_like/ddp-big/traces/rank0_trace.json.gz",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """An input of one format.

    Attributes:
        kind: the format, as tables name it.
        name: of the file.
        data: its content before it is packed.
        container: what the content is packed in, "" for nothing.
        beside: names and contents of other files of the same folder.
        verb: the command that reads it.
        words: the arguments of that command, where "{file}" stands for the file and "{dir}" for its folder.
        is_strict: a document of which nothing is read when any part is damaged.
    """

    kind: str
    name: str
    data: bytes
    container: str = ""
    beside: tuple[tuple[str, bytes], ...] = ()
    verb: str = "analyze"
    words: tuple[str, ...] = ("{file}",)
    is_strict: bool = False

    @property
    def file_name(self) -> str:
        """Return the name of the file on disk."""
        return f"{self.name}.{self.container}" if self.container in ("gz", "zst") else self._packed_name()

    def _packed_name(self) -> str:
        return f"run.{self.container}" if self.container else self.name

    def packed(self, data: bytes) -> bytes:
        """Return content as it lies on disk."""
        return _pack(self.container, self.name, data)


def _pack(container: str, name: str, data: bytes) -> bytes:
    match container:
        case "":
            return data
        case "gz":
            return gzip.compress(data, 1, mtime=0)
        case "zst":
            import zstandard

            return zstandard.ZstdCompressor(level=1, write_checksum=True).compress(data)
        case "zip":
            buffer = io.BytesIO()
            with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
                archive.writestr(zipfile.ZipInfo(name), data)
            return buffer.getvalue()
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        # Two ranks, of which the second may be lost with the header before it.
        for member, content in ((f"run/{name}", data), ("run/rank1.json", _rank(1))):
            info = tarfile.TarInfo(member)
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))
    raw = buffer.getvalue()
    pack = {"tar": bytes, "tar.gz": lambda raw: gzip.compress(raw, 1, mtime=0), "tar.bz2": bz2.compress,
            "tar.xz": lambda raw: lzma.compress(raw, preset=0)}  # fmt: skip
    return pack[container](raw)


@cache
def _rank(rank: int, world: int = 2) -> bytes:
    return fsdp_rank(rank, world, steps=NUM_STEPS).text().encode()


def _own_runtime_rank() -> bytes:
    """Return a CPU trace with the ranges of our own runtime."""
    trace = TraceBuilder(0, 4)
    for step in range(NUM_STEPS):
        base = 1000.0 * step
        trace.step(step, base, 1000.0)
        trace.row("cpu_op", "aten::mm", base + 10, 300.0)
        trace.row("cpu_op", f"paro_advise::all_gather Float {8 + step}->{32 + 4 * step} ranks 0:4:1", base + 320, 80.0)
        trace.backward(base + 410, 200, sequence=10 * step + 9, tid=1)
        trace.row("cpu_op", "paro_advise::reduce_scatter Float 32->8 ranks 0,1,2,3", base + 620, 90.0, tid=3)
        trace.row("user_annotation", "paro_advise::gradient (blocks.0) 4000 GGG/4", base + 615, 100.0, tid=3)
        trace.row("user_annotation", "paro_advise::optimizer (blocks.0) 4000 GGG/4", base + 720, 50.0, tid=3)
        trace.annotation("Optimizer.step#AdamW.step", base + 800, 50)
    head = trace.head() | {"deviceProperties": []}
    head["distributedInfo"]["backend"] = "gloo"
    return LAYOUTS["torch213"](head, trace.events).encode()


def _kineto() -> list[Sample]:
    trace = fsdp_rank(0, steps=NUM_STEPS)
    plain = [Sample(kind="kineto", name="rank0.json", data=trace.text(layout).encode()) for layout in LAYOUTS]
    packed = [
        Sample(kind=f"kineto {container}", name="rank0.json", data=_rank(0), container=container)
        for container in CONTAINERS
    ]
    recorded = [
        Sample(kind=kind, name="rank0.json", data=gzip.decompress((DATA / path).read_bytes()), container=container)
        for kind, path, container in (
            ("kineto gpu", "nccl_like/fsdp2-inter-bw/traces/rank0_trace.json.gz", "gz"),
            ("kineto gpu", "nccl_like/ds-zero3/traces/rank0_trace.json.gz", ""),
            ("kineto gloo", "zero_runs/fsdp2_ggg_acc1/rank0.json.gz", ""),
            ("kineto gloo", "zero_runs/ddp_acc4/rank0.json.gz", "gz"),
        )
    ]
    ranks = tuple((f"rank{rank}.json", _rank(rank, 4)) for rank in range(4))
    folder = Sample(kind="kineto folder", name="rank0.json", data=ranks[0][1], beside=ranks[1:], words=("{dir}",))
    own = Sample(kind="kineto own runtime", name="rank0.json", data=_own_runtime_rank())
    return [*plain, *packed, *recorded, folder, own]


def _comms_table() -> str:
    titles = ("Comm. Op", "Message Size", "Count", "Total Latency(ms)", "Avg Latency(ms)", "tput_avg", "busbw_avg")
    row = ("", "64.0 MB", "5", "10.0", "2.0", "268.44", "234.88")
    lines = ["".join(f"{cell: <20}" for cell in cells) + "\n" for cells in (titles, row)]
    ops = ("reduce_scatter_tensor | [Caller Func: f]", "all_gather_into_tensor", "all_reduce")
    verbose = (
        "[2026-03-01 10:00:00,123] [INFO] [logging.py:96:log_dist] [Rank 0] comm op: all_reduce | time (ms): 2.50 "
        "| msg size: 64.0 MB | algbw (Gbps): 214.75  | busbw (Gbps): 375.81\n"
    )
    return lines[0] + "".join(f"{op}\n{lines[1]}" for op in ops) + verbose * 20


def _logs() -> list[Sample]:
    rows = [table_row(1 << power, 50.0 + (1 << power) / 41e3, 0.75, "none") for power in range(16, 28)]
    benchmark = f"# Collective test starting: all_gather_perf\n{RANKS}{COLUMNS}" + "\n".join(rows) + "\n"
    steps = "".join(
        f"sd-1:  iteration {step:8d}/     100 | elapsed time per iteration (ms): {900 / (1 + step % 3):.1f} "
        "| global batch size: 8\n"
        for step in range(40)
    )
    training = (
        "using world size: 16, data-parallel-size: 4, tensor-model-parallel size: 4\n"
        "torchrun --nproc-per-node=8 --nnodes 2 train.py --zero-stage 3\n"
        "[Rank 0] step: 5 loss: 7.1 tps: 1,204 mfu: 31.2%\n"
        "Fault ranks: [1, 2]\nRank 1, fault_type: GPU_HANG\n"
        " 40%|####      | 40/100 [00:10<00:15,  4.00it/s]\n"
        "{'train_runtime': 12.5, 'train_loss': 1.0}\n"
    )
    found = {
        SourceKind.NCCL_LOG: ("nccl.log", nccl_sample() * 3),
        SourceKind.NCCL_TESTS: ("all_gather.txt", benchmark),
        SourceKind.COMMS_LOGGER: ("comms.log", _comms_table()),
        SourceKind.TRAIN_LOG: ("train.log", training + steps),
        SourceKind.NCCL_TOPOLOGY: ("topology.xml", TOPOLOGY.format(GPU * 8)),
    }
    mixed = benchmark + nccl_sample() + _comms_table() + training + steps
    nodes = tuple((f"nccl.node{node}.log", nccl_sample().replace("node0", f"node{node}").encode()) for node in (2, 3))
    return [
        *(Sample(kind=kind.value, name=name, data=text.encode()) for kind, (name, text) in found.items()),
        Sample(kind="mixed log", name="job.out", data=mixed.encode()),
        Sample(kind="node logs", name="nccl.node0.log", data=nccl_sample().encode(), beside=nodes, words=("{dir}",)),
    ]


@cache
def _nsys() -> bytes:
    rows = "".join(
        f"INSERT INTO CUPTI_ACTIVITY_KIND_KERNEL VALUES ({1000 * row}, {1000 * row + 700}, 0, 7, {100 + row}, 16777216, 2, 2);"
        for row in range(10, 400)
    )
    with tempfile.TemporaryDirectory() as folder:
        return make_nsys(Path(folder) / "report.sqlite", extra=rows).read_bytes()


def _metrics() -> str:
    return "\n".join(
        metric_lines(collective=op, sizes=f"{size}-{size + 1}MB", ranks=ranks, busbw=40.0 + size, time_us=900.0 * size)
        for op in ("AllGather", "AllReduce", "ReduceScatter")
        for ranks in (8, 32)
        for size in (1, 4, 16, 64)
    )


def _dumps() -> list[Sample]:
    inspector = "\n".join(
        json.dumps(inspector_record(coll=op, coll_sn=number))
        for number in range(30)
        for op in ("AllGather", "AllReduce", "ReduceScatter")
    )
    perf = inspector_record()
    verbose = {"event_trace_ts": {"coll_start_ts": 1_700_000_000_000_010, "kernel_events": [{"kernel_start_ts": 7}]}}
    marker = {"header": perf["header"], "metadata": perf["metadata"], "dump_stats": {"coll_dropped_total": 12}}
    newer = [marker, *({"coll_perf": perf["coll_perf"] | {"coll_sn": number} | verbose} for number in range(40))]
    events = [event for index in range(30) for event in plugin_events(index, 100.0 * index, kernel=index % 3 > 0)]
    lifecycle = {"type": "ProfilerLifecycle", "commId": 7, "details": {"nranks": 4}}
    flat = [lifecycle, *(_flat_record(number) for number in range(40))]
    flight = flight_dump()
    flight["entries"] = [flight_dump(collective_seq_id=number)["entries"][0] for number in range(30)]
    flight["pg_status"] = {"7": {"last_completed_collective": 28, "last_enqueued_collective": 30}}
    return [
        Sample(kind="nccl_inspector", name="h.log", data=inspector.encode()),
        Sample(kind="nccl_inspector", name="h.json", data="\n".join(map(json.dumps, newer)).encode()),
        Sample(kind="nccl_inspector", name="nccl_inspector_metrics_GPU-1.prom", data=_metrics().encode()),
        Sample(kind="nccl_profiler_plugin", name="p.json", data=("[\n" + ",\n".join(map(json.dumps, events))).encode()),
        Sample(kind="nccl_profiler_plugin", name="p.jsonl", data="\n".join(map(json.dumps, flat)).encode()),
        Sample(kind="flight_recorder", name="_dump_5", data=pickle.dumps(flight, 2)),
        Sample(kind="flight_recorder", name="_dump_3", data=pickle.dumps(flight, 5)),
        Sample(kind="flight_recorder", name="nccl_trace_rank_5.json", data=json.dumps(flight).encode()),
        Sample(kind="nsys_sqlite", name="report.sqlite", data=_nsys()),
    ]


def _flat_record(number: int) -> dict[str, object]:
    start = 100.0 * number
    return {
        "type": "ncclProfileColl", "commId": 7, "rank": 1, "start": {"ts": start}, "stop": {"ts": start + 50.0},
        "eventAddr": f"0x{number:x}",
        "details": {"func": "AllReduce", "count": 64, "dtype": "ncclFloat32", "seq": number, "algo": "RING"},
    }  # fmt: skip


def step_log(rank: int = 0, num_steps: int = 30) -> bytes:
    """Return what a capture logs of a rank's steps."""
    header = {
        "format": "paro-advise/steps", "format_version": "1.2", "rank": rank, "world_size": 2, "local_world_size": 2,
        "backend": "nccl", "host": "node0", "machine": "m0", "cores": 8, "steps": [5, 7],
        "inputs": [[[2, 64], "torch.int64"]], "autocast": "torch.bfloat16", "device_memory_bytes": 80 << 30,
    }  # fmt: skip
    rows = [
        {
            "step": step, "step_us": 1000.0 + step % 5, "overhead_us": 3.0, "cpu_us": 800.0, "profiled": 5 <= step < 7,
            "micro_batches": 1, "loss": 8.0 - 0.1 * step, "gradient_norm_squared": 2.5, "peak_memory_bytes": 1 << 30,
        }
        for step in range(num_steps)
    ]  # fmt: skip
    return "\n".join(map(json.dumps, [header, *rows])).encode() + b"\n"


@cache
def _documents() -> dict[str, bytes]:
    """Return the product's own files: an analysis, its page, a plan from it, and a comparison."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for rank in range(2):
            (folder / f"rank{rank}.json").write_bytes(_rank(rank))
        traces = [str(folder / f"rank{rank}.json") for rank in range(2)]
        out = {what: str(folder / what) for what in ("analysis.json", "run.html", "plan.json", "comparison.json")}
        calls = (
            ["analyze", *traces, "--json", out["analysis.json"], "-o", out["run.html"], "--no-cache", "-q"],
            ["recommend", out["analysis.json"], "-o", out["plan.json"], "-q"],
            ["compare", out["analysis.json"], out["analysis.json"], "--json", out["comparison.json"], "-q"],
        )
        for call in calls:
            with contextlib.redirect_stdout(io.StringIO()):
                code = run(call)
            if code:
                raise RuntimeError(f"a sound input could not be read: {call}")
        return {what: Path(path).read_bytes() for what, path in out.items()}


def _own_files() -> list[Sample]:
    made = _documents()
    traces = tuple((f"rank{rank}.json", _rank(rank)) for rank in range(2))
    logs = Sample(
        kind="step log", name="steps.rank0.jsonl", data=step_log(), words=("{dir}",),
        beside=(*traces, ("steps.rank1.jsonl", step_log(1))),
    )  # fmt: skip
    analysis, plan, config = (
        made["analysis.json"],
        made["plan.json"],
        b"[parallelism]\ndata_parallel_shard_degree = 2\n",
    )
    documents = [
        Sample(kind="analysis", name="a.json", data=analysis, verb="recommend"),
        Sample(kind="analysis", name="a.json", data=analysis, verb="show"),
        Sample(kind="analysis", name="a.json", data=analysis, verb="compare", words=("{file}", "{dir}/b.json"), beside=(("b.json", analysis),)),
        Sample(kind="page", name="run.html", data=made["run.html"], verb="show"),
        Sample(kind="comparison", name="c.json", data=made["comparison.json"], verb="show"),
        Sample(kind="plan", name="plan.json", data=plan, verb="apply", words=("{file}", "{dir}/job.toml"), beside=(("job.toml", config),)),
        Sample(kind="config", name="job.toml", data=config, verb="apply", words=("{dir}/plan.json", "{file}"), beside=(("plan.json", plan),)),
    ]  # fmt: skip
    return [logs, *(replace(document, is_strict=document.kind != "config") for document in documents)]


def sealed(plan: bytes) -> bytes:
    """Return a changed plan with the id of its body, without which it would be refused at once."""
    try:
        body = json.loads(plan)
        body["plan_id"] = body_id(body)
        return json.dumps(body).encode()
    except (ValueError, TypeError, RecursionError):
        return plan


def _shared() -> list[Sample]:
    found = []
    for name in _SHARED_FILES:
        path = SHARED / name
        if path.exists():
            data = path.read_bytes()
            sample = Sample(kind="shared file", name=path.name.removesuffix(".gz"), data=data)
            is_packed = data.startswith(b"\x1f\x8b")
            found.append(replace(sample, data=gzip.decompress(data), container="gz") if is_packed else sample)
    return found


@cache
def samples() -> tuple[Sample, ...]:
    """Return a sample or more of every format, always in the same order; files of ../shared come last."""
    return (*_kineto(), *_logs(), *_dumps(), *_own_files(), *_shared())
