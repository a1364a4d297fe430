"""What an FSDP2 script that starts on the meta device takes from its start to its steps, plain and under plans.

    python benchmarks/bench_start.py [STRATEGY ...]

Four ranks, no network. A CPU has no allocator that counts, so the process is measured: the peak of each phase, the
most of all ranks, beyond what the process held before. The runs alternate, plain first. The last line is JSON.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

from paro_advise.core.documents import to_json
from paro_advise.policies.plan import Plan, Verdict, read_plan, with_id

RANKS, GROUP, ROUNDS = 4, 2, 3
SCRIPT = Path(__file__).parent / "start_ranks.py"
STRATEGIES = ("GGG", "IGG", "NNG")


def run(*words: str) -> str:
    """Run the job, under the command line's verb if there is one; return its output."""
    job = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={RANKS}", str(SCRIPT)]
    command = [sys.executable, "-m", "paro_advise", *words, "--", *job] if words else job
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "PYTHONWARNINGS": "ignore",
        "MALLOC_MMAP_THRESHOLD_": "65536",
    }
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"{words or 'plain'} failed:\n{done.stderr[-3000:]}")
    return done.stdout


def planned(folder: Path) -> Plan:
    """Capture the job and make a plan."""
    run("capture", "-o", str(folder / "before"), "--steps", "3:5")
    command = [sys.executable, "-m", "paro_advise", "recommend", str(folder / "before")]
    subprocess.run([*command, "-o", str(folder / "plan.json"), "-q"], check=True)
    return read_plan(str(folder / "plan.json"))


def peaks(text: str) -> dict[str, int]:
    """Return the peaks that rank 0 printed."""
    found: dict[str, int] = json.loads(next(line for line in reversed(text.splitlines()) if line.startswith("{")))
    return found


def main() -> None:
    strategies = sys.argv[1:] or list(STRATEGIES)
    least: dict[str, dict[str, int]] = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        plan = planned(folder)
        for triple in strategies:
            chosen = next(
                choice
                for choice in plan.candidates
                if (choice.triple, choice.collectives, choice.variant) == (triple, "ho_ring", "")
                and choice.group_size in {None, GROUP}
            )
            changed = with_id(replace(plan, chosen=chosen, verdict=Verdict.CHANGE))
            (folder / f"{triple}.json").write_bytes(to_json(changed))
        for _ in range(ROUNDS):
            for system in ("plain", *strategies):
                words = () if system == "plain" else ("run", "--plan", str(folder / f"{system}.json"))
                found = peaks(run(*words))
                known = least.setdefault(system, found)
                least[system] = {point: min(known[point], value) for point, value in found.items()}
    print(f"MiB beyond the start, the least of {ROUNDS} runs of the most of {RANKS} ranks")
    print(f"{'until':<12}" + "".join(f"{system:>8}" for system in least))
    for point in least["plain"]:
        print(f"{point:<12}" + "".join(f"{values[point] / 2**20:>8.0f}" for values in least.values()))
    highest = {system: max(values.values()) for system, values in least.items()}
    for system in strategies:
        print(f"{system}: the highest peak is {highest[system] / highest['plain']:.3f} of plain FSDP2's")
    print(json.dumps(least))


if __name__ == "__main__":
    main()
