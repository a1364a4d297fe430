"""The memory that a plan expects of each strategy beside what training under it takes: four ranks, no network.

    python benchmarks/bench_memory.py [--first]

FSDP2's ZeRO-3 is the run that a plan starts from: its measured peak tells what the activations take. A
CPU has no allocator that counts, so the process is measured: freed tensors leave it at once, and what
it held before the model is taken off. The first model was looked at while the counts of buffers were
made (--first), the second one judges. The last line of the output is JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from paro_advise.policies import memory
from paro_advise.policies.strategy import KEPT, Strategy
from paro_advise.policies.traffic import Shape

RANKS, GROUP = 4, 2
WIDTHS = memory.Widths(parameter_bytes=4.0, gradient_bytes=4.0, optimizer_bytes=8.0)
SHAPE = Shape(group_size=GROUP, num_groups=RANKS // GROUP)
BASELINE = "fsdp2_zero3"


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """Bytes of a rank: states, and buffers beside them as any runtime needs, as expected, at the most."""

    states: float
    least: float
    usual: float
    bound: float


def measured(system: str, model: str) -> dict[str, int]:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={RANKS}"]
    command += [str(Path(__file__).parent / "memory_ranks.py"), system, model]
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


def parts_of(strategy: Strategy, found: dict[str, int]) -> Parts:
    buffers = (memory.least_transient_bytes, memory.usual_transient_bytes, memory.transient_bytes)
    least, usual, bound = (count(strategy, SHAPE, found["largest_unit"], 4.0, 4.0) for count in buffers)
    states = memory.state_bytes(strategy, SHAPE, found["parameters"], widths=WIDTHS).total
    return Parts(states=states, least=least, usual=usual, bound=bound)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--first", action="store_true", help="the model that the counts were made with")
    model = "first" if parser.parse_args().first else "second"
    base = measured(BASELINE, model)
    parts = parts_of(Strategy.parse("GGG"), base)
    other = base["peak_bytes"] - parts.states - parts.least
    print(f"{base['parameters'] / 1e6:.1f} million parameters, the largest unit {base['largest_unit'] / 1e6:.1f}")
    print(f"FSDP2, ZeRO-3: {base['peak_bytes'] / 2**20:.0f} MiB, {other / 2**20:.0f} of them activations and the like")
    print(f"{'strategy':<10}{'states MiB':>11}{'expected':>10}{'at most':>9}{'measured':>10}{'error':>8}{'room':>8}")
    errors, rooms = [], []
    for strategy in KEPT:
        found = measured(f"ours_{strategy}_{GROUP}", model)
        parts = parts_of(strategy, found)
        expected, bound = parts.states + parts.usual + other, parts.states + parts.bound + other
        errors.append(expected / found["peak_bytes"] - 1)
        rooms.append(bound / found["peak_bytes"] - 1)
        mib = [value / 2**20 for value in (parts.states, expected, bound, found["peak_bytes"])]
        row = f"{strategy!s:<10}{mib[0]:>11.0f}{mib[1]:>10.0f}{mib[2]:>9.0f}{mib[3]:>10.0f}"
        print(f"{row}{errors[-1]:>8.1%}{rooms[-1]:>8.1%}", flush=True)
    figures = {
        "median_pct": round(100 * statistics.median(map(abs, errors)), 1),
        "worst_pct": round(100 * max(map(abs, errors)), 1),
        "least_room_pct": round(100 * min(rooms), 1),
    }
    targets = {"worst_pct": "<= 10", "least_room_pct": ">= 0"}
    met = figures["worst_pct"] <= 10 and figures["least_room_pct"] >= 0
    print(json.dumps({"name": "memory", "figures": figures, "targets": targets, "met": met}))


if __name__ == "__main__":
    main()
