"""The checks of `make gpu` that train a script of `gpu_scripts.py` for longer: a plan's prediction, and `attach`."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import gpu_jobs as jobs

if TYPE_CHECKING:
    from collections.abc import Sequence

LARGE = ("--width", "1024", "--layers", "8", "--steps", "24")  # 69 million parameters: links decide, not the host
STEPS = "8:11"  # to record; the others are timed without a profiler
DAEMON = {"KINETO_USE_DAEMON": "1", "KINETO_LOG_LEVEL": "5"}


def closed_loop(
    framework: str, strategies: Sequence[str], ranks: int, *, hosts: bool, keep: Path | None
) -> dict[str, Any]:
    """Record a script, let plans be made of that, train under each, and hold predictions against what was measured.

    Args:
        framework: of `gpu_scripts.py`.
        strategies: to train under.
        ranks: how many share the GPU.
        hosts: each is a host of its own.
        keep: a folder for the recordings.
    """
    script = [str(jobs.SCRIPTS), framework, *LARGE]
    job = partial(jobs.run, script, ranks=ranks, hosts=hosts, limit_s=jobs.LIMIT_S)
    told: dict[str, Any] = {}
    holds = True
    with tempfile.TemporaryDirectory() as folder:
        before, steps = Path(folder) / "before", ["--steps", STEPS, "--"]
        recorded = job(under=[*jobs.PARO_ADVISE, "capture", "-o", str(before), *steps])
        if recorded.code != 0:
            return {"holds": False, "failed": f"recorded: {recorded.reason}"}
        for strategy in strategies:
            after, plan, compared = (Path(folder) / f"{strategy}{end}" for end in ("", ".plan.json", ".found.json"))
            made = jobs.advise("recommend", before, "--strategy", strategy, "--allow-untested", "-q", "-o", plan)
            if not plan.exists():
                return {**told, **jobs.why_nothing(made)}
            trained = job(under=[*jobs.PARO_ADVISE, "run", "--plan", str(plan), "--capture", str(after), *steps])
            if trained.code != 0:
                return {**told, "holds": False, "failed": f"{strategy}: {trained.reason}"}
            made = jobs.advise("compare", before, after, "--plan", plan, "-q", "--json", compared)
            if not compared.exists():
                return {**told, **jobs.why_nothing(made)}
            found = json.loads(compared.read_text(encoding="utf-8"))
            speedup = {one["name"]: one for one in found["predicted_vs_measured"]}.get("speedup")
            if speedup is None:  # too noisy, say
                told[strategy], holds = found["text"], False
                continue
            expected = f"{speedup['predicted']:.2f}x ({speedup['low']:.2f} to {speedup['high']:.2f})"
            told[strategy] = f"predicted {expected}, measured {speedup['measured']:.2f}x"
            holds = holds and speedup["inside"]
        if keep is not None:
            shutil.copytree(folder, keep / f"loop_{framework}", dirs_exist_ok=True)
    return {**told, "holds": holds}


def attach(ranks: int, *, hosts: bool) -> dict[str, Any]:
    """Record a job that knows nothing of ours, while it trains, and read what it wrote."""
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(1) as beside:
        begun, end, target, report = (Path(folder) / name for name in ("begun", "end", "now", "found.json"))
        script = [str(jobs.SCRIPTS), "ddp", "--steps", "1000000", "--begun", str(begun), "--until", str(end)]
        job = beside.submit(jobs.run, script, ranks=ranks, hosts=hosts, limit_s=jobs.LIMIT_S, variables=DAEMON)
        try:
            while not begun.exists() and not job.done():
                time.sleep(0.1)
            made = jobs.advise("attach", "-o", target, "--seconds", "2", "--pid", os.getpid())
        finally:
            end.touch()
        ended = job.result()
        if made.returncode or ended.code != 0:
            return {"holds": False, "failed": ended.reason or made.stderr.splitlines()[-3:]}
        read = jobs.advise("analyze", target, "-q", "--json", report)
        if not report.exists():
            return jobs.why_nothing(read)
        found = json.loads(report.read_text(encoding="utf-8"))
    num_ranks, steps = len(found["ranks"]), found["run"]["num_steps"]
    return {"ranks read": num_ranks, "steps": steps, "holds": num_ranks == ranks and bool(steps)}
