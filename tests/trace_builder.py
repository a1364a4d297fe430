"""Builds small legal traces whose right answer is known by construction.

One rank on one GPU: compute kernels on stream 7, collectives on stream 20, every collective
issued by `record_param_comms` inside `c10d::` inside the given annotations.
"""

from __future__ import annotations

import gzip
import json

BASE_NS = 1_700_000_000_000_000_000


class TraceBuilder:
    def __init__(self, rank=0, world=2, *, groups=None, clock_offset_us=0.0, gpus_per_node=8, host=None):
        self.rank, self.world = rank, world
        self.offset = 1_000_000.0 + clock_offset_us
        self.groups = groups or [("0", "default_pg", list(range(world)))]
        self.gpus_per_node = gpus_per_node
        self.host = host
        self.events = []
        self._id = 0

    def next_id(self):
        self._id += 1
        return self._id

    def row(self, cat, name, ts, dur, tid=1, **args):
        self.events.append(
            {
                "ph": "X",
                "cat": cat,
                "name": name,
                "pid": 1,
                "tid": tid,
                "ts": ts + self.offset,
                "dur": dur,
                "args": args,
            }
        )

    def step(self, number, ts, dur):
        self.row("user_annotation", f"ProfilerStep#{number}", ts, dur, **{"External id": self.next_id()})

    def annotation(self, name, ts, dur, tid=1):
        self.row("user_annotation", name, ts, dur, tid, **{"External id": self.next_id()})

    def backward(self, ts, dur, sequence, tid=2):
        name = "autograd::engine::evaluate_function: AddmmBackward0"
        self.row("cpu_op", name, ts, dur, tid, **{"External id": self.next_id(), "Sequence number": sequence})

    def compute(self, ts, dur, name="sm90_gemm", stream=7):
        self.row(
            "kernel",
            name,
            ts,
            dur,
            stream,
            stream=stream,
            correlation=self.next_id(),
            **{"External id": self.next_id()},
        )

    def memory(self, ts, allocated_bytes, device_type=1):
        """What is allocated from now on; of device type 1, CUDA, or 0, the host."""
        totals = {"Total Reserved": allocated_bytes, "Total Allocated": allocated_bytes}
        self.row("cpu_instant_event", "[memory]", ts, 0, **totals, Bytes=1, **{"Device Type": device_type})
        self.events[-1] |= {"ph": "i", "s": "t"}

    def copy(self, ts, dur):
        self.row("gpu_memcpy", "Memcpy HtoD (Pinned -> Device)", ts, dur, 7, stream=7, correlation=self.next_id())

    def collective(
        self,
        kind,
        ts,
        dur,
        *,
        nelems,
        issue,
        seq,
        owners=(),
        tid=1,
        group="0",
        dtype="BFloat16",
        stream=20,
        kernel=None,
        peer=None,
    ):
        """kind: AllGather, ReduceScatter, AllReduce, AllToAll, Send or Recv; nelems: elements of the full buffer.

        peer: the other end of a Send or Recv, as torch records it since 2.5 (torch/csrc/profiler/util.cpp).
        """
        name, desc, ranks = next(item for item in self.groups if item[0] == group)
        recorded = {
            "AllGather": "_allgather_base",
            "ReduceScatter": "_reduce_scatter_base",
            "AllReduce": "allreduce",
            "Send": "send",
            "Recv": "recv",
            "AllToAll": "all_to_allv",
        }[kind]
        shard = nelems // len(ranks)
        inputs = shard if kind == "AllGather" else nelems
        outputs = shard if kind == "ReduceScatter" else nelems
        operator = {
            "AllGather": "c10d::_allgather_base_",
            "ReduceScatter": "c10d::_reduce_scatter_base_",
            "AllReduce": "c10d::allreduce_",
            "Send": "c10d::send",
            "Recv": "c10d::recv_",
            "AllToAll": "c10d::alltoall_base_",
        }[kind]
        for depth, owner in enumerate(owners):
            self.annotation(owner, issue - 5 + depth * 0.1, 20 - depth * 0.2, tid)
        self.row("cpu_op", operator, issue, 8, tid, **{"External id": self.next_id()})
        external = self.next_id()
        comm = {
            "External id": external, "Collective name": recorded, "In msg nelems": inputs, "Out msg nelems": outputs,
            "Group size": len(ranks), "dtype": dtype, "Process Group Name": name, "Process Group Description": desc,
            "Process Group Ranks": str(ranks), "Seq": seq,
        }  # fmt: skip
        if peer is not None:
            comm["Src Rank" if kind == "Recv" else "Dst Rank"] = peer
        self.row("cpu_op", "record_param_comms", issue + 1, 6, tid, **comm)
        kernel = kernel or f"ncclDevKernel_{kind}_RING_LL(ncclDevKernelArgsStorage<4096ul>)"
        self.row("kernel", kernel, ts, dur, stream, stream=stream, correlation=self.next_id(), **comm)

    def head(self):
        device = {"id": 0, "name": "NVIDIA H100", "totalGlobalMem": 80 << 30, "numSms": 132}
        return {
            "schemaVersion": 1,
            "deviceProperties": [dict(device, id=index) for index in range(self.gpus_per_node)],
            "distributedInfo": {
                "backend": "nccl", "rank": self.rank, "world_size": self.world, "pg_count": len(self.groups),
                "pg_config": [
                    {"pg_name": name, "pg_desc": desc, "backend_config": "cuda:nccl", "pg_size": len(ranks), "ranks": ranks}
                    for name, desc, ranks in self.groups
                ],
                "nccl_version": "2.27.5",
            },
            **({"host_name": self.host} if self.host else {}),
            "displayTimeUnit": "ms",
            "baseTimeNanoseconds": BASE_NS,
        }  # fmt: skip

    def document(self):
        return {**self.head(), "traceEvents": self.events, "traceName": "t.json"}

    def text(self, layout="torch213"):
        return LAYOUTS[layout](self.head(), self.events)

    def write(self, path, layout="torch213"):
        data = self.text(layout).encode()
        path.write_bytes(gzip.compress(data, mtime=0) if path.suffix == ".gz" else data)
        return path


def _torch213(head, events):
    """One field a line and a lone comma after "dur", as torch 2.13 writes it."""
    out = json.dumps(head, indent=2)[:-2] + ',\n    "traceEvents": [\n    '
    rendered = []
    for event in events:
        args = ", ".join(f'"{key}": {json.dumps(value)}' for key, value in event["args"].items())
        rendered.append(
            f'\n  {{\n    "ph": "{event["ph"]}",\n    "cat": {json.dumps(event["cat"])},\n    "name": {json.dumps(event["name"])},\n'
            f'    "pid": {event["pid"]},\n    "tid": {event["tid"]},\n    "ts": {event["ts"]:.3f},\n    "dur": {event["dur"]:.3f}\n'
            f'    ,\n    "args": {{\n      {args}\n    }}\n  }}'
        )
    return out + ",".join(rendered) + '\n  ],\n  "traceName": "t.json"\n}'


def _torch2020(head, events):
    """Several fields a line, as torch wrote it from 2020 to 2025."""
    rendered = [
        f'  {{\n    "ph": "{event["ph"]}", "cat": {json.dumps(event["cat"])}, "name": {json.dumps(event["name"])}, "pid": {event["pid"]}, '
        f'"tid": {event["tid"]},\n    "ts": {event["ts"]:.3f}, "dur": {event["dur"]:.3f},\n    "args": {{\n      '
        + ", ".join(f'"{key}": {json.dumps(value)}' for key, value in event["args"].items())
        + "\n    }\n  }"
        for event in events
    ]
    return (
        "\n"
        + json.dumps(head)[:-1]
        + ',\n  "traceEvents": [\n'
        + ",\n".join(rendered)
        + '\n  ],\n  "traceName": "t.json"\n}\n'
    )


LAYOUTS = {
    "torch213": _torch213,
    "torch2020": _torch2020,
    "one_line": lambda head, events: json.dumps({**head, "traceEvents": events}),
    "compact": lambda head, events: json.dumps({**head, "traceEvents": events}, separators=(",", ":")),
    "indented": lambda head, events: json.dumps({**head, "traceEvents": events}, indent=2),
    "sorted_keys": lambda head, events: json.dumps({**head, "traceEvents": events}, sort_keys=True),
    "bare_list": lambda head, events: json.dumps(events),
    "bare_list_lines": lambda head, events: "[\n" + ",\n".join(map(json.dumps, events)) + "\n]",
}


def fsdp_rank(rank, world=2, *, late_us=0.0, clock_offset_us=0.0, steps=2):
    """An FSDP2 run with two units and hand-written times (us, per step of 1000 us).

    forward: all-gather root [10, 60) and block [70, 170), compute [60, 70) [170, 300);
    backward: all-gather [300, 400) under compute [300, 500); reduce-scatter [500, 600) of which
    [550, 600) under compute [550, 700); root reduce-scatter [700, 750); idle to 1000 but for the
    optimizer's kernel [800, 850). The last rank arrives `late_us` later at the block's gather.
    """
    trace = TraceBuilder(rank, world, clock_offset_us=clock_offset_us)
    for index in range(steps):
        base = index * 1000.0
        seq = index * 10
        trace.step(index + 5, base, 1000.0)
        trace.annotation("FSDP::root_pre_forward", base + 1, 100)
        trace.collective(
            "AllGather",
            base + 10,
            50,
            nelems=4000,
            issue=base + 5,
            seq=seq,
            owners=("FSDP::pre_forward", "FSDP::all_gather"),
        )
        trace.compute(base + 60, 10)
        trace.collective(
            "AllGather", base + 70 + late_us, 100 - late_us, nelems=64000, issue=base + 30, seq=seq + 1,
            owners=("FSDP::pre_forward (blocks.0)", "FSDP::all_gather (blocks.0)"),
        )  # fmt: skip
        trace.compute(base + 170, 130)
        trace.backward(base + 200, 400, sequence=100 * index + 50)
        trace.collective(
            "AllGather", base + 300, 100, nelems=64000, issue=base + 250, seq=seq + 2, tid=2,
            owners=("FSDP::pre_backward (blocks.0)", "FSDP::all_gather (blocks.0)"),
        )  # fmt: skip
        trace.compute(base + 300, 200)
        trace.collective(
            "ReduceScatter", base + 500, 100, nelems=64000, issue=base + 400, seq=seq + 3, tid=2,
            owners=("FSDP::post_backward_reduce (blocks.0)",),
        )  # fmt: skip
        trace.compute(base + 550, 150)
        trace.collective(
            "ReduceScatter", base + 700, 50, nelems=4000, issue=base + 620, seq=seq + 4,
            owners=("FSDP::root_post_backward_callback", "FSDP::post_backward_reduce"),
        )  # fmt: skip
        trace.annotation("Optimizer.step#AdamW.step", base + 760, 50)
        trace.compute(base + 800, 50)
    return trace
