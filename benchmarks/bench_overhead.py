"""What `watch` and `export` take from the steps of the job that they look at.

    python benchmarks/bench_overhead.py [--blocks N] [--seconds S]

One DDP job of two ranks trains under `capture`. In every second block of time `watch` follows it and writes its metrics
every five seconds, and `export` writes those of the recorded steps once. Printed are the processor time of both, the
mean and the median step of blocks with and without, their ratios with the range over pairs of neighbours, and what the
capture itself took of a step. On two cores, which the two ranks keep busy, all that the verbs take is taken from the
ranks; elsewhere it is a core's that has nothing else to do. The last line of the output is JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from paro_advise.trace_parsers.bytes.blocks import SourceRef
from paro_advise.trace_parsers.logs.step_log import read_step_logs

SCRIPT = Path(__file__).resolve().parent.parent / "examples/frameworks/train_ddp.py"
MODEL = ("--width", "192", "--layers", "4", "--vocabulary", "512", "--micro-batches", "1", "--batch", "2")
BLOCK_S = 60.0
SETTLE_S = 5.0  # of a block's begin that does not count: `watch` starts
ADVISE = [sys.executable, "-m", "paro_advise"]


def cpu_s() -> float:
    """Return the processor time (s) of the processes that have been started and have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def looked_at(folder: Path, seconds: float) -> tuple[float, float]:
    """Watch a job for a while and export in between; return the processor time (s) of each, without the watch's start."""
    environment = {**os.environ, "PARO_ADVISE_CACHE": str(folder.parent / "cache")}
    following = [*ADVISE, "watch", str(folder), "--prometheus", str(folder.parent / "live.prom"), "--force"]
    end = time.monotonic() + seconds
    with subprocess.Popen(following, stdout=subprocess.DEVNULL, env=environment) as watch:
        time.sleep(SETTLE_S)
        begin_s, begun = cpu_of_s(watch.pid), time.monotonic()
        time.sleep(seconds / 2)
        before_s = cpu_s()
        words = ["export", str(folder), "--prometheus", str(folder.parent / "run.prom"), "--force"]
        subprocess.run([*ADVISE, *words], check=True, capture_output=True, env=environment)
        export_s = cpu_s() - before_s
        time.sleep(max(0.0, end - time.monotonic()))
        watch_share = (cpu_of_s(watch.pid) - begin_s) / (time.monotonic() - begun)
        watch.terminate()
    return watch_share, export_s


def cpu_of_s(pid: int) -> float:
    """Return the processor time (s) of a process that runs, as Linux counts it."""
    fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")  # utime and stime, proc(5)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--blocks", type=int, default=6, help="pairs of one with and one without")
    parser.add_argument("--seconds", type=float, default=BLOCK_S, help="of a block, 20 or more")
    args = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="bench_overhead")) / "job"
    training = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(SCRIPT)]
    command = [*ADVISE, "capture", "-q", "-o", str(folder), "--", *training, *MODEL, "--steps", "1000000"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    spans, taken = [], []
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=environment) as job:
        try:
            while not list(folder.glob("rank*.json.gz")):  # the profiled steps are over
                if job.poll() is not None:
                    sys.exit("the job ended before its trace was written")
                time.sleep(0.5)
            time.sleep(SETTLE_S)
            for block in range(2 * args.blocks):
                is_on = (block + block // 2) % 2 == 1  # off, on, on, off: a drift favours neither
                begin = newest(folder)
                if is_on:
                    taken.append(looked_at(folder, args.seconds))
                else:
                    time.sleep(args.seconds)
                spans.append((is_on, begin, newest(folder)))
        finally:
            job.send_signal(signal.SIGTERM)
    report(folder, spans, args, taken)


def newest(folder: Path) -> int:
    """Return how many lines rank 0 has logged."""
    with (folder / "steps.rank0.jsonl").open("rb") as file:
        return sum(1 for _ in file)


def report(
    folder: Path, spans: list[tuple[bool, int, int]], args: argparse.Namespace, taken: list[tuple[float, float]]
) -> None:
    """Print what was measured."""
    log = read_step_logs([SourceRef(path=folder / "steps.rank0.jsonl")])[0][0]
    blocks: dict[bool, list[list[float]]] = {True: [], False: []}
    for is_on, begin, end in spans:
        steps_us = [row.step_us for row in log.rows[begin:end] if row.step_us is not None]
        blocks[is_on].append(steps_us[int(len(steps_us) * SETTLE_S / args.seconds) :])
    ratios = {}
    for name, average in (("mean", statistics.fmean), ("median", statistics.median)):
        with_us, without_us = ([average(steps_us) for steps_us in blocks[is_on]] for is_on in (True, False))
        found = ratios[name] = sorted(on / off for on, off in zip(with_us, without_us, strict=True))
        print(
            f"{name:6} step  {statistics.median(without_us) / 1e3:.2f} ms without, {statistics.median(with_us) / 1e3:.2f} "
            f"ms with; ratio of neighbours {statistics.median(found):.4f} ({found[0]:.4f} to {found[-1]:.4f})"
        )
    own = statistics.median(row.overhead_us / row.step_us for row in log.rows if row.step_us)
    watch, export_s = (statistics.median(values) for values in zip(*taken, strict=True))
    print(f"the capture itself   {own:.3%} of a step (median)")
    print(f"watch                {watch:.3%} of a core (median of {len(taken)} blocks)")
    print(f"export               {export_s:.2f} s of a core each time")
    print(json.dumps({"ratios": ratios, "capture": own, "watch_core": watch, "export_s": export_s}))


if __name__ == "__main__":
    main()
