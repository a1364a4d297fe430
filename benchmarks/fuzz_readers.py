"""Damages inputs of every format at random, reads each through the command line, and counts what came of it.

    python benchmarks/fuzz_readers.py [--count N] [--seconds S] [--seed N] [--jobs N] [--only NUMBER]

What must hold whatever the damage is stands in tests/fuzz_case.py. Inputs that break a promise are kept in
.bench/fuzz; a seed and a number make each of them again. Exits with 1 if any did. The last line of the output is JSON.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import resource
import statistics
import sys
import tempfile
import time
from collections import Counter, defaultdict
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import TYPE_CHECKING

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

from fuzz_case import Outcome, make_case, run_case
from input_samples import samples

if TYPE_CHECKING:
    from multiprocessing.process import BaseProcess

KEPT = Path(".bench/fuzz")
MAX_WALL_S = 60.0  # s; a process that says nothing for so long is ended; six times the CPU time of a case
MAX_ADDRESSES = 16 << 30  # bytes; address space of a process, so that a runaway does not take the machine with it
RESULTS = ("read", "verdict said", "verdict unseen", "refused")


@dataclass(slots=True)
class Worker:
    """A process that runs one case after the other.

    Attributes:
        process: it.
        pipe: takes numbers, gives outcomes.
        number: of the case it is at, None when it waits for one.
        since: when it began that, by the monotonic clock (s).
    """

    process: BaseProcess
    pipe: Connection
    number: int | None = None
    since: float = 0.0


def serve(pipe: Connection, seed: int) -> None:
    """Run the cases whose numbers come through a pipe."""
    resource.setrlimit(resource.RLIMIT_AS, (MAX_ADDRESSES, MAX_ADDRESSES))
    while True:
        try:
            number = pipe.recv()
        except EOFError:
            return
        case = make_case(seed, number)
        with tempfile.TemporaryDirectory() as folder:
            outcome = run_case(case, Path(folder))
        if outcome.failures:
            place = KEPT / f"{seed}-{number}"
            place.mkdir(parents=True, exist_ok=True)
            (place / case.sample.file_name).write_bytes(case.content)
            (place / "why.txt").write_text("\n".join((*case.mutation.edits, *outcome.failures)), encoding="utf-8")
        pipe.send(outcome)


def start(seed: int) -> Worker:
    """Return a new process."""
    context = multiprocessing.get_context("spawn")
    mine, theirs = context.Pipe()
    process = context.Process(target=serve, args=(theirs, seed), daemon=True)
    process.start()
    theirs.close()
    return Worker(process=process, pipe=mine)


def dead(worker: Worker, why: str) -> Outcome:
    """Return the outcome of a case whose process is gone."""
    assert worker.number is not None
    kind = samples()[worker.number % len(samples())].kind
    seconds = time.monotonic() - worker.since
    return Outcome(number=worker.number, kind=kind, result="refused", failures=(why,), cpu_s=seconds, peak_mb=0.0)


def step(worker: Worker, *, is_ready: bool) -> Outcome | None:
    """Return what a process has to say, or that it is dead or hangs; None when it is still at work."""
    if is_ready:
        try:
            outcome: Outcome = worker.pipe.recv()
        except EOFError:
            worker.process.join()
            return dead(worker, f"the process died with {worker.process.exitcode}")
        return outcome
    if time.monotonic() - worker.since > MAX_WALL_S:
        worker.process.kill()
        worker.process.join()
        return dead(worker, f"no answer within {MAX_WALL_S:.0f} s")
    return None


def fuzz(numbers: list[int], seed: int, jobs: int, seconds: float) -> list[Outcome]:
    """Run cases until they are done or the time is up."""
    left = list(reversed(numbers))
    outcomes: list[Outcome] = []
    end = time.monotonic() + seconds
    workers = [start(seed) for _ in range(min(jobs, len(left)))]
    while True:
        for worker in workers:
            if worker.number is None and left and time.monotonic() < end:
                worker.number, worker.since = left.pop(), time.monotonic()
                worker.pipe.send(worker.number)
        busy = [worker for worker in workers if worker.number is not None]
        if not busy:
            break
        ready = wait([worker.pipe for worker in busy], timeout=1.0)
        for worker in busy:
            outcome = step(worker, is_ready=worker.pipe in ready)
            if outcome is None:
                continue
            outcomes.append(outcome)
            _tell(outcome, seed, len(outcomes), len(numbers))
            worker.number = None
            if not worker.process.is_alive():
                workers[workers.index(worker)] = start(seed)
    for worker in workers:
        worker.pipe.close()
        worker.process.join()
    return outcomes


def _tell(outcome: Outcome, seed: int, done: int, total: int) -> None:
    for failure in outcome.failures:
        print(f"{outcome.kind}: {failure}")
        print(f"  again: python benchmarks/fuzz_readers.py --seed {seed} --only {outcome.number}", flush=True)
    if done % 500 == 0:
        print(f"{done} of {total}", file=sys.stderr, flush=True)


def table(outcomes: list[Outcome]) -> list[str]:
    """Return counts by format and result, with the time and memory of the costliest case."""
    by_kind = defaultdict(list)
    for outcome in outcomes:
        by_kind[outcome.kind].append(outcome)
    lines = [f"{'format':24}{'cases':>7}" + "".join(f"{name:>16}" for name in RESULTS)
             + f"{'failed':>8}{'median s':>10}{'most s':>8}{'most MiB':>10}"]  # fmt: skip
    for kind, group in [*sorted(by_kind.items()), ("all", outcomes)]:
        counts = Counter(outcome.result for outcome in group)
        times = [outcome.cpu_s for outcome in group]
        failed = sum(bool(outcome.failures) for outcome in group)
        lines.append(
            f"{kind:24}{len(group):>7}" + "".join(f"{counts[name]:>16}" for name in RESULTS)
            + f"{failed:>8}{statistics.median(times):>10.3f}{max(times):>8.2f}"
            f"{max(outcome.peak_mb for outcome in group):>10.0f}"
        )  # fmt: skip
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=10_000, help="cases")
    parser.add_argument("--seconds", type=float, default=3600.0, help="after which no new case begins")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=min(4, os.cpu_count() or 1), help="processes")
    parser.add_argument("--only", type=int, help="one case by its number")
    options = parser.parse_args()
    begin = time.monotonic()
    numbers = list(range(options.count)) if options.only is None else [options.only]
    outcomes = fuzz(numbers, options.seed, options.jobs, options.seconds)
    print("\n".join(table(outcomes)))
    failed = sorted(outcome.number for outcome in outcomes if outcome.failures)
    if failed:
        print(f"{len(failed)} inputs are kept in {KEPT}")
    figures = {
        "cases": len(outcomes),
        "failures": len(failed),
        "most_cpu_s": round(max(outcome.cpu_s for outcome in outcomes), 2),
        "most_mb": round(max(outcome.peak_mb for outcome in outcomes)),
        "seconds": round(time.monotonic() - begin),
    }
    print(json.dumps({"name": "fuzz", "figures": figures, "targets": {"failures": "0"}, "met": not failed}))
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
