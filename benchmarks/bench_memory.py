"""The memory that a plan states for each strategy beside what training under it takes: four ranks, no network.

    python benchmarks/bench_memory.py

FSDP2's ZeRO-3 is the run that a plan starts from: its measured peak tells what the activations take. A
CPU has no allocator that counts, so the process is measured: freed tensors leave it at once, and what
it held before the model is taken off. The last line of the output is JSON.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
from pathlib import Path

from paro_advise.policies.memory import Widths, least_transient_bytes, state_bytes, transient_bytes
from paro_advise.policies.strategy import KEPT, Strategy
from paro_advise.policies.traffic import Shape

RANKS, GROUP = 4, 2
WIDTHS = Widths(parameter_bytes=4.0, gradient_bytes=4.0, optimizer_bytes=8.0)
SHAPE = Shape(group_size=GROUP, num_groups=RANKS // GROUP)
BASELINE = "fsdp2_zero3"


def measured(system: str) -> dict[str, int]:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={RANKS}"]
    command += [str(Path(__file__).parent / "memory_ranks.py"), system]
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "PYTHONWARNINGS": "ignore",
        "MALLOC_MMAP_THRESHOLD_": "65536",
    }
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"{system} failed:\n{done.stderr[-3000:]}")
    found: dict[str, int] = json.loads(done.stdout.splitlines()[-1])
    return found


def states_and_transients(triple: str, found: dict[str, int]) -> float:
    strategy = Strategy.parse(triple)
    states = state_bytes(strategy, SHAPE, found["parameters"], widths=WIDTHS).total
    return states + transient_bytes(strategy, SHAPE, found["largest_unit"], 4.0, 4.0)


def main() -> None:
    base = measured(BASELINE)
    strategy = Strategy.parse("GGG")
    least = state_bytes(strategy, SHAPE, base["parameters"], widths=WIDTHS).total
    least += least_transient_bytes(strategy, SHAPE, base["largest_unit"], 4.0, 4.0)
    other = base["peak_bytes"] - least
    print(f"{base['parameters'] / 1e6:.1f} million parameters, the largest unit {base['largest_unit'] / 1e6:.1f}")
    print(f"FSDP2, ZeRO-3: {base['peak_bytes'] / 2**20:.0f} MiB, {other / 2**20:.0f} of them beside states")
    print(f"{'strategy':<10}{'states MiB':>11}{'stated MiB':>11}{'measured':>10}{'error':>8}")
    errors = []
    for strategy in KEPT:
        found = measured(f"ours_{strategy}_{GROUP}")
        states = state_bytes(strategy, SHAPE, found["parameters"], widths=WIDTHS).total
        stated = states_and_transients(str(strategy), found) + other
        errors.append(stated / found["peak_bytes"] - 1)
        mib = [value / 2**20 for value in (states, stated, found["peak_bytes"])]
        print(f"{strategy!s:<10}{mib[0]:>11.0f}{mib[1]:>11.0f}{mib[2]:>10.0f}{errors[-1]:>8.1%}", flush=True)
    figures = {
        "median_pct": round(100 * statistics.median(map(abs, errors)), 1),
        "worst_pct": round(100 * max(map(abs, errors)), 1),
        "least_pct": round(100 * min(errors), 1),
    }
    targets = {"worst_pct": "<= 10", "least_pct": ">= 0"}
    met = figures["worst_pct"] <= 10 and figures["least_pct"] >= 0
    print(json.dumps({"name": "memory", "figures": figures, "targets": targets, "met": met}))


if __name__ == "__main__":
    main()
