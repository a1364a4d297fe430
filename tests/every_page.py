"""One page of every kind, made by the commands from runs that this repository holds."""

from __future__ import annotations

import os
import pickle
from contextlib import chdir
from pathlib import Path

from test_hang import dump, entry
from trace_builder import fsdp_rank

from paro_advise.advisor.cli import run

DATA = Path(__file__).parent / "data"
RUNS, NCCL = DATA / "zero_runs", DATA / "nccl_like"
LOG = "h:1:1 [0] NCCL INFO Bootstrap : Using eth0\nh:1:1 [0] NCCL INFO NCCL version 2.27.5+cuda12.8\n"
WHEN = 1_750_000_000  # seconds since the epoch, of files whose age a page shows


def make_pages(folder: Path) -> dict[str, Path]:
    """Write one page of each kind into a folder; return them by name."""
    large = folder / "large"
    large.mkdir(parents=True)
    for rank in range(64):
        builder = fsdp_rank(rank, 64, late_us=40 if rank == 43 else rank % 7, steps=3)
        for time_us, gib in ((20, 31), (180, 52), (350, 61), (520, 64 + rank % 3), (720, 40), (820, 35)):
            builder.memory(time_us, gib << 30)
        builder.write(large / f"rank{rank}.json")
    (folder / "nccl.txt").write_text(LOG)
    dumps = folder / "dumps"
    dumps.mkdir()
    done, waits = entry(4, done=True), entry(5)
    for rank in range(4):
        content = dump(done) if rank == 2 else dump(done, waits)
        (dumps / f"nccl_trace_rank_{rank}").write_bytes(pickle.dumps(content, 2))
    (folder / "runs").symlink_to(RUNS)
    (folder / "nccl_runs").symlink_to(NCCL)
    history = folder / "history"
    history.mkdir()
    words = {
        "analysis": ["analyze", "nccl_runs/fsdp2-straggler"],
        "analysis of a large job": ["analyze", "large"],
        "analysis of a log": ["analyze", "nccl.txt"],
        "plan": ["recommend", "nccl_runs/fsdp2-inter-bw"],
        "plan to measure first": ["recommend", "nccl_runs/fsdp2-straggler"],
        "comparison": ["compare", "runs/fsdp2_ggg_acc1", "runs/ds_z3_acc1"],
        "hang": ["hang", "dumps"],
    }
    pages = {}
    with chdir(folder):
        for name, command in words.items():
            file = f"{name.replace(' ', '_')}.html"
            option = "--html" if command[0] == "recommend" else "-o"
            code = run([*command, option, file, "-q", *(["--no-cache"] if command[0] == "analyze" else [])])
            assert code in (0, 5), (name, code)
            pages[name] = folder / file
        for place, sides in enumerate((("fsdp2_ggg_acc1", "ds_z3_acc1"), ("ds_z3_acc1", "fsdp2_ggg_acc1"))):
            file = f"history/{place}.html"
            run(["compare", *(f"runs/{side}" for side in sides), "-o", file, "-q"])
            os.utime(file, (WHEN + place * 86_400,) * 2)
        run(["index", "history", "-o", "history/index.html"])
        pages["history"] = folder / "history" / "index.html"
    return pages
