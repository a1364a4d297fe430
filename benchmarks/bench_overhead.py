"""What `watch` and `export` take from the steps of the job that they look at.

    python benchmarks/bench_overhead.py [--blocks N] [--seconds S]

One DDP job of two ranks trains under `capture`. In every second block of time `watch` follows it, and `export` writes
its metrics once a minute, which is how often Prometheus scrapes if nobody says otherwise. Printed are the mean and the
median step of blocks with and without, their ratios with the range over pairs of neighbours, what the capture itself
took of a step, and the processor time of both verbs. The mean has the steps in it during which an export ran; on two
cores, which the two ranks keep busy, all that the verbs take is taken from the ranks. The last line of the output is
JSON.
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
SCRAPE_S = 60.0  # Prometheus' own default
SETTLE_S = 4.0  # of a block's begin that does not count: `watch` starts
ADVISE = [sys.executable, "-m", "paro_advise.advisor"]


def cpu_s() -> float:
    """Return the processor time (s) of the processes that have been started and have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def looked_at(folder: Path, seconds: float) -> tuple[float, float]:
    """Watch a job for a while and export once a minute; return the processor time (s) of each."""
    before = cpu_s()
    environment = {**os.environ, "PARO_ADVISE_CACHE": str(folder.parent / "cache")}
    with subprocess.Popen([*ADVISE, "watch", str(folder)], stdout=subprocess.DEVNULL, env=environment) as watch:
        exports_s, end = 0.0, time.monotonic() + seconds
        while time.monotonic() + SCRAPE_S / 2 < end:
            time.sleep(SCRAPE_S / 2)
            begin_s = cpu_s()
            words = ["export", str(folder), "--prometheus", str(folder.parent / "job.prom"), "--force"]
            subprocess.run([*ADVISE, *words], check=True, capture_output=True, env=environment)
            exports_s += cpu_s() - begin_s
            time.sleep(max(0.0, min(SCRAPE_S / 2, end - time.monotonic())))
        watch.terminate()
    return cpu_s() - before - exports_s, exports_s


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--blocks", type=int, default=6, help="pairs of one with and one without")
    parser.add_argument("--seconds", type=float, default=SCRAPE_S, help="of a block, 60 or more")
    args = parser.parse_args()
    if args.seconds < SCRAPE_S:
        parser.error("an export must come within a block")
    folder = Path(tempfile.mkdtemp(prefix="bench_overhead")) / "job"
    training = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(SCRIPT)]
    command = [*ADVISE, "capture", "-q", "-o", str(folder), "--", *training, *MODEL, "--steps", "1000000"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    spans, watch_s, exports_s = [], 0.0, 0.0
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
                    one, other = looked_at(folder, args.seconds)
                    watch_s, exports_s = watch_s + one, exports_s + other
                else:
                    time.sleep(args.seconds)
                spans.append((is_on, begin, newest(folder)))
        finally:
            job.send_signal(signal.SIGTERM)
    report(folder, spans, args, watch_s, exports_s)


def newest(folder: Path) -> int:
    """Return how many lines rank 0 has logged."""
    with (folder / "steps.rank0.jsonl").open("rb") as file:
        return sum(1 for _ in file)


def report(
    folder: Path, spans: list[tuple[bool, int, int]], args: argparse.Namespace, watch_s: float, exports_s: float
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
    looked_s = args.blocks * args.seconds
    print(f"the capture itself   {own:.3%} of a step (median)")
    print(f"watch                {watch_s / looked_s:.3%} of a core")
    print(f"export once a minute {exports_s / looked_s:.3%} of a core")
    cores = {"watch_core": watch_s / looked_s, "export_core": exports_s / looked_s}
    print(json.dumps({"ratios": ratios, "capture": own, **cores}))


if __name__ == "__main__":
    main()
