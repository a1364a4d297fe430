"""Ten loops on the emulated cluster: capture, recommend, run, compare; and comparisons of known changes.

    python benchmarks/bench_loop.py [--loops N] [--steps N] [--keep FOLDER]

Each loop trains one of the scripts in examples/frameworks on 4 nodes of 2 ranks, unchanged, before and
under the plan that the capture alone gave, with half of plain data parallelism's memory. A loop counts
if the measured speed-up lies in the plan's 80 % range. The A/A and known-change comparisons cut the
steps of one long run into pairs; in the latter one side's steps are stretched by 5 %. What a capture
costs steps that are not profiled is timed in one run that captures stretches of its steps in turn. The last
line of the output is JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from paro_advise.advisor.comparison.bootstrap import change_between
from paro_advise.advisor.comparison.metrics import verdict_of
from paro_advise.advisor.comparison.model import ChangeVerdict
from paro_advise.runtime.capture.request import CaptureRequest
from paro_advise.runtime.job import PLAN_VARIABLE, job_environment
from paro_advise.runtime.lab import Isolation, Lab, LabSpec

SCRIPTS = Path(__file__).resolve().parent.parent / "examples/frameworks"
FRAMEWORKS = ("fsdp2", "fsdp1", "ddp", "zero1", "deepspeed")
MODEL = ("--width", "160", "--layers", "6", "--vocabulary", "1024", "--batch", "1", "--steps", "14")
PARAMETERS = 2_200_000
STEPS = "6:8"
LONG = ("--width", "128", "--layers", "4", "--vocabulary", "1024", "--micro-batches", "2")
PAIRS, SIDE = 100, 80


@dataclass(frozen=True, slots=True, kw_only=True)
class Loop:
    """What one loop gave."""

    framework: str
    triple: str
    predicted: float
    low: float
    high: float
    measured: float
    verdict: str
    loss_pct: float
    norm_pct: float


def advise(*words: object) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "paro_advise", *map(str, words)], capture_output=True, text=True, check=False
    )
    if done.returncode not in (0, 5):
        sys.exit(f"paro-advise {words[0]} failed:\n{done.stderr[-3000:]}")


def train(lab: Lab, framework: str, folder: Path, plan: Path | None) -> None:
    changes = CaptureRequest.of(folder, STEPS).to_environment() | ({PLAN_VARIABLE: str(plan)} if plan else {})
    command = ["torchrun", str(SCRIPTS / f"train_{framework}.py"), *MODEL]
    result = lab.run(command, folder / "logs", timeout_s=900, environment=job_environment({}, changes))
    if not result.ok:
        sys.exit(f"{framework} failed:\n{result.nodes[0].log.read_text()[-3000:]}")


def loop(lab: Lab, framework: str, folder: Path) -> Loop:
    train(lab, framework, folder / "before", None)
    plan, target = folder / "plan.json", folder / "comparison.json"
    budget = 16 * PARAMETERS * 7 / 8 / 2  # half of what plain data parallelism holds beyond GGG, fp32 and Adam
    advise("recommend", folder / "before", "-o", plan, "--redundancy-budget", f"{budget:.0f}B", "-q")
    train(lab, framework, folder / "after", plan)
    advise("compare", folder / "before", folder / "after", "--plan", plan, "--json", target, "-q")
    found = json.loads(target.read_text())
    speedup = next(item for item in found["predicted_vs_measured"] if item["name"] == "speedup")
    return Loop(
        framework=framework,
        triple=found["plan"]["chosen"]["triple"],
        predicted=speedup["predicted"],
        low=speedup["low"],
        high=speedup["high"],
        measured=speedup["measured"],
        verdict=found["verdict"],
        loss_pct=found["parity"]["loss_max_pct"],
        norm_pct=found["parity"]["gradient_norm_max_pct"],
    )


def all_loops(root: Path, count: int) -> list[Loop]:
    """Run the loops in one lab and print a line for each."""
    found: list[Loop] = []
    print(
        f"{'framework':<12}{'plan':<6}{'predicted':>10}{'80 % range':>16}{'measured':>10}{'':>9}{'loss %':>10}{'norm %':>10}"
    )
    with Lab(LabSpec(nodes=4, ranks_per_node=2, port_mbit=400.0)) as lab:
        if lab.isolation == Isolation.LOOPBACK:
            sys.exit(f"this machine forbids network namespaces ({lab.reason}): nothing to measure")
        for number in range(count):
            framework = FRAMEWORKS[number % len(FRAMEWORKS)]
            row = loop(lab, framework, root / f"{number}_{framework}")
            found.append(row)
            inside = "inside" if row.low <= row.measured <= row.high else "outside"
            print(
                f"{row.framework:<12}{row.triple:<6}{row.predicted:>9.2f}x{f'{row.low:.2f}..{row.high:.2f}':>16}"
                f"{row.measured:>9.2f}x{inside:>9}{row.loss_pct:>10.1e}{row.norm_pct:>10.1e}",
                flush=True,
            )
    return found


def long_run(folder: Path, steps: int) -> list[float]:
    """Return the unprofiled step times of one long run (us): two nodes, a core for each rank."""
    environment = job_environment({}, CaptureRequest.of(folder, "3:4").to_environment())
    command = ["torchrun", str(SCRIPTS / "train_ddp.py"), *LONG, "--steps", str(steps)]
    with Lab(LabSpec(nodes=2, ranks_per_node=1, port_mbit=400.0)) as lab:
        result = lab.run(command, folder / "logs", timeout_s=900, environment=environment)
    if not result.ok:
        sys.exit(f"the long run failed:\n{result.nodes[0].log.read_text()[-3000:]}")
    rows = [json.loads(line) for line in (folder / "steps.rank0.jsonl").read_text().splitlines()[1:]]
    return [row["step_us"] for row in rows if row["step"] > 6]


def capture_overhead() -> tuple[float, float]:
    """Return how much longer an unprofiled step takes in a capture, as a share, and its standard error."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    command += [str(Path(__file__).parent / "capture_ranks.py"), *LONG]
    done = subprocess.run(
        command, env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True, check=False
    )
    if done.returncode:
        sys.exit(f"capture_ranks.py failed:\n{done.stderr[-3000:]}")
    found = json.loads(done.stdout.splitlines()[-1])
    return found["share"], found["standard_error"]


def verdicts(times: list[float], factor: float) -> list[ChangeVerdict]:
    """Return the verdicts on 100 pairs of disjoint stretches of a run, one side slowed by a factor."""
    found = []
    generator = random.Random(0)
    for _ in range(PAIRS):
        first = generator.randrange(0, len(times) - 2 * SIDE)
        before, after = times[first : first + SIDE], times[first + SIDE : first + 2 * SIDE]
        found.append(verdict_of(change_between(before, [value * factor for value in after])))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--loops", type=int, default=10)
    parser.add_argument("--steps", type=int, default=1500, help="of the long run")
    parser.add_argument("--keep", type=Path, help="keep everything under this folder")
    options = parser.parse_args()
    os.environ["PYTHONWARNINGS"] = "ignore"
    with tempfile.TemporaryDirectory() as temporary:
        root = options.keep or Path(temporary)
        loops = all_loops(root, options.loops) if options.loops else []
        times = long_run(root / "long", options.steps)
        overhead, error = capture_overhead()
    print(f"\ncapture: {overhead:+.1%} (standard error {error:.1%}) on steps that are not profiled")
    same, slower = verdicts(times, 1.0), verdicts(times, 1.05)
    spread = statistics.stdev(times) / statistics.mean(times)
    print(
        f"\nA/A, {SIDE} steps a side, steps vary by {spread:.1%}: "
        + ", ".join(f"{same.count(v)} {v}" for v in sorted(set(same)))
    )
    print(f"5 % slower: {', '.join(f'{slower.count(v)} {v}' for v in sorted(set(slower)))}")
    figures = {
        "inside_of_10": round(10 * statistics.mean(row.low <= row.measured <= row.high for row in loops), 1)
        if loops
        else 0,
        "fsdp2_speedup": round(statistics.median([r.measured for r in loops if r.framework == "fsdp2"] or [0.0]), 2),
        "loss_max_pct": max((row.loss_pct for row in loops), default=0.0),
        "norm_max_pct": max((row.norm_pct for row in loops), default=0.0),
        "same_of_100": same.count(ChangeVerdict.SAME),
        "found_of_100": slower.count(ChangeVerdict.WORSE),
        "capture_overhead_pct": round(100 * overhead, 2),
    }
    targets = {"inside_of_10": ">= 8", "fsdp2_speedup": ">= 2", "loss_max_pct": "<= 1e-3", "norm_max_pct": "<= 1e-3",
               "same_of_100": ">= 95", "found_of_100": ">= 90", "capture_overhead_pct": "<= 3"}  # fmt: skip
    met = (
        figures["inside_of_10"] >= 8
        and figures["fsdp2_speedup"] >= 2
        and max(figures["loss_max_pct"], figures["norm_max_pct"]) <= 1e-3
        and figures["same_of_100"] >= 95
        and figures["found_of_100"] >= 90
        and figures["capture_overhead_pct"] <= 3
    )
    print(json.dumps({"name": "loop", "figures": figures, "targets": targets, "met": met}))


if __name__ == "__main__":
    main()
