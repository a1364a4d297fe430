"""Large jobs: what joining up to 10,000 ranks costs, and one analysis by every engine.

    python benchmarks/bench_fleet.py scale [--most 10000]
    python benchmarks/bench_fleet.py engines [--ranks 512] [--mb 20] [--engine NAME ...]

`scale` makes facts of many ranks from those of a recorded job of 16 (tests/data/nccl_like), each with a
ninth of its collectives, those of one step of three; one rank of the first 16 computes longer, as recorded. Each size is a process of its own; its memory is
the whole process's at its peak, with page and JSON written.

`engines` puts traces into an S3 server of this machine (moto's) and analyses them by each engine: in processes, by
Ray with two raylets, by Dask, and by Slurm where `sbatch` is there. The JSON must be the same, byte for byte. Ray runs
once more, and loses one raylet on the way.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import logging
import os
import resource
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paro_advise.advisor.facts.frames import read_table, table_bytes
from paro_advise.trace_parsers.rank_lists import ranks_text

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from paro_advise.advisor.facts.model import RankFacts

ROOT = Path(__file__).resolve().parents[1]
RECORDED = ROOT / "tests/data/nccl_like/fsdp2-straggler/traces"
SIZES = (64, 256, 1024, 4096, 10_000)
RANKS_PER_NODE = 8
SLOW_RANK = 11  # of the recorded job; copies of it are taken from its neighbour
EVERY = 3  # collectives of the last step of which one is kept


def main() -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    kinds = parser.add_subparsers(dest="kind", required=True)
    scale = kinds.add_parser("scale")
    scale.add_argument("--most", type=int, default=SIZES[-1])
    scale.add_argument("--one", type=int, help=argparse.SUPPRESS)
    engines = kinds.add_parser("engines")
    engines.add_argument("--ranks", type=int, default=512)
    engines.add_argument("--mb", type=float, default=20.0)
    engines.add_argument("--engine", action="append")
    args = parser.parse_args()
    if args.kind == "engines":
        return compare_engines(args.ranks, args.mb, args.engine)
    if args.one:
        print(json.dumps(joined(args.one)))
        return 0
    print(
        f"{'ranks':>7} {'facts of a rank':>16} {'joining CPU':>12} {'a rank':>9} {'peak memory':>12} {'page':>8} {'computes longest':>17}"
    )
    for size in (size for size in SIZES if size <= args.most):
        words = [sys.executable, __file__, "scale", "--one", str(size)]
        told = json.loads(subprocess.run(words, check=True, capture_output=True, text=True).stdout)
        print(
            f"{size:>7,} {told['facts_kb']:>13.1f} KB {told['cpu_s']:>10.2f} s {1e3 * told['cpu_s'] / size:>6.2f} ms "
            f"{told['peak_mb']:>9.0f} MB {told['page_kb']:>5.0f} KB {'rank ' + str(told['slowest']):>17}",
            flush=True,
        )
    return 0


def joined(num_ranks: int) -> dict[str, Any]:
    """Join the facts of so many ranks; return what it took."""
    import msgspec

    from paro_advise.advisor.analysis.build import build_analysis
    from paro_advise.advisor.analysis.model import Options
    from paro_advise.advisor.rendering.provenance import report_page
    from paro_advise.core.documents import to_json

    facts = list(copies(recorded(), num_ranks))
    begin = time.process_time()
    analysis = build_analysis(facts, [], Options())
    cpu_s = time.process_time() - begin
    to_json(analysis)
    return {
        "facts_kb": len(msgspec.msgpack.encode(facts[0])) / 1e3,
        "cpu_s": cpu_s,
        "page_kb": len(report_page(analysis, facts)) / 1e3,
        "peak_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
        "slowest": max(analysis.ranks, key=lambda entry: entry.compute_us).rank,
    }


def recorded() -> list[RankFacts]:
    """Return the facts of the recorded job, by rank."""
    from paro_advise.advisor.facts.rank_facts import rank_facts
    from paro_advise.trace_parsers.bytes.blocks import SourceRef
    from paro_advise.trace_parsers.read import read_source

    facts = [rank_facts(read_source(SourceRef(path=path))) for path in sorted(RECORDED.glob("*.json.gz"))]
    return sorted(facts, key=lambda item: item.header.rank or 0)


def copies(facts: Sequence[RankFacts], num_ranks: int) -> Iterator[RankFacts]:
    """Give so many ranks of one job; groups of all recorded ranks become groups of all."""
    import polars as pl

    world = facts[0].header.world_size or len(facts)
    before, after = ranks_text(range(world)), ranks_text(range(num_ranks))
    last = [len(item.steps) - 1 for item in facts]
    tables = [
        read_table(item.collectives_ipc).filter(pl.col("step") == step).with_columns(step=pl.lit(0, pl.Int64))
        for item, step in zip(facts, last, strict=True)
    ]
    tables = [table.gather_every(EVERY) for table in tables]
    by_rank = {item.header.rank: place for place, item in enumerate(facts)}
    for rank in range(num_ranks):
        place = by_rank.get(rank, by_rank.get(rank % world, rank % len(facts)))
        if rank >= world and facts[place].header.rank == SLOW_RANK:
            place = (place + 1) % len(facts)
        item = facts[place]
        of_all = pl.col("group_ranks") == before
        table = tables[place].with_columns(
            pl.when(of_all).then(num_ranks).otherwise("group_size").cast(pl.Int64).alias("group_size"),
            pl.when(of_all).then(pl.lit(after)).otherwise("group_ranks").alias("group_ranks"),
        )
        groups = tuple(replace(group, size=num_ranks) if group.size == world else group for group in item.header.groups)
        header = replace(
            item.header, rank=rank, world_size=num_ranks, groups=groups, host=f"host{rank // RANKS_PER_NODE}"
        )
        source = replace(
            item.source, path=f"run/rank{rank}.json.gz", sha256=hashlib.sha256(str(rank).encode()).hexdigest()
        )
        yield replace(
            item,
            source=source,
            header=header,
            steps=item.steps[-1:],
            typical_step=0,
            compute_spans={0: item.compute_spans[len(item.steps) - 1]},
            collectives_ipc=table_bytes(table),
        )


def compare_engines(num_ranks: int, megabytes: float, names: Sequence[str] | None) -> int:
    """Analyse one run by each engine; return 1 where any tells something else."""
    wanted = list(names or ["local", "ray", "ray, one raylet lost", "dask"])
    if not names and shutil.which("sbatch"):
        wanted.append("slurm")
    with tempfile.TemporaryDirectory() as text:
        folder = Path(text)
        address = serve(folder, num_ranks, megabytes)
        told = {name: analysed(name, address, folder) for name in wanted}
    print(f"{'engine':<24} {'wall':>8} {'JSON':>18}")
    for name, (wall_s, digest) in told.items():
        print(f"{name:<24} {wall_s:>6.1f} s {digest:>18}")
    return int(len({digest for _, digest in told.values()}) > 1)


def serve(folder: Path, num_ranks: int, megabytes: float) -> str:
    """Make traces, put them into an S3 server that lives as long as this process; return the run's address."""
    import boto3
    from moto.server import ThreadedMotoServer

    words = [sys.executable, str(ROOT / "benchmarks/make_traces.py"), str(folder / "run"), "--mb", str(megabytes)]
    subprocess.run([*words, "--ranks", str(num_ranks), "--world", str(num_ranks)], check=True, capture_output=True)
    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    os.environ |= {
        "AWS_ACCESS_KEY_ID": "none", "AWS_SECRET_ACCESS_KEY": "none", "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_ENDPOINT_URL": f"http://{host}:{port}", "RAY_USAGE_STATS_ENABLED": "0",
    }  # fmt: skip
    client = boto3.client("s3")
    client.create_bucket(Bucket="runs")
    size = 0
    for path in sorted((folder / "run").iterdir()):
        client.upload_file(str(path), "runs", f"run/{path.name}")
        size += path.stat().st_size
    print(f"{num_ranks} traces of {megabytes:g} MB of JSON, {size / 1e6:.0f} MB compressed, in a bucket", flush=True)
    return "s3://runs/run/"


def analysed(name: str, address: str, folder: Path) -> tuple[float, str]:
    """Analyse by an engine; return the wall time in s, and what the JSON's digest begins with."""
    target = folder / "analysis.json"
    words = [sys.executable, "-m", "paro_advise", "analyze", address, "--no-cache", "--force", "-q"]
    words += ["--engine", name.partition(",")[0], "--json", str(target), "--max-array", "4"]
    cluster, env = None, dict(os.environ)
    if name.startswith("ray"):
        from ray.cluster_utils import Cluster

        cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1})
        second = cluster.add_node(num_cpus=1)
        env["RAY_ADDRESS"] = cluster.address
        if "lost" in name:
            threading.Timer(15.0, lambda: cluster.remove_node(second, allow_graceful=False)).start()
    begin = time.monotonic()
    try:
        subprocess.run(words, check=True, env=env, stdout=subprocess.DEVNULL, cwd=folder)
    finally:
        if cluster is not None:
            cluster.shutdown()
    wall_s = time.monotonic() - begin
    return wall_s, hashlib.sha256(target.read_bytes()).hexdigest()[:16]


if __name__ == "__main__":
    sys.exit(main())
