"""Does it matter which nodes share a group when some of them have slow ports?

    python benchmarks/bench_placement.py [--rounds N] [--port MBIT] [--slow MBIT]

Four nodes of two ranks, groups of two nodes, so that a group's collectives cross ports. Of the nodes, no port is
slow, one is, two of one group are (what putting slow nodes together gives), or one of each group is. One job runs
all the time; the ports change between rounds, the cases in turn. Shown is the median step by strategy and case, and
what slow nodes apart take beside slow nodes together. The last line of the output is JSON.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import threading
import time
from collections import defaultdict
from pathlib import Path

from paro_advise.runtime.lab import Isolation, Lab, LabSpec

WORKER = Path(__file__).resolve().parent / "training_ranks.py"
NODES, RANKS_PER_NODE, GROUP = 4, 2, 4  # a group is two nodes
CASES = {"none": (), "one": (3,), "together": (2, 3), "apart": (1, 3)}
TRIPLES = ("III", "IIG", "IGG", "NIG")
STEPS = 3  # of a turn, as in the worker; the first does not count
POLL_S = 0.05
WORK = ("--width", "256", "--layers", "5", "--micro-batches", "2")


def rows_of(log: Path) -> list[dict[str, float]]:
    """Return the steps that the job has told so far."""
    lines = log.read_text().splitlines() if log.exists() else []
    return [json.loads(line) for line in lines if line.startswith('{"kind": "step"') and line.endswith("}")]


def change_ports(lab: Lab, log: Path, rates: tuple[float, float], ended: threading.Event) -> None:
    """Set the ports of each round as soon as the round before has told its last step."""
    names = list(CASES)
    current = 0
    while not ended.is_set():
        number = len(rows_of(log)) // (STEPS * len(TRIPLES))
        if number != current:
            current = number
            slow = CASES[names[number % len(names)]]
            for node in range(NODES):
                lab.set_port(node, rates[1] if node in slow else rates[0])
        time.sleep(POLL_S)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=16, help="a multiple of the cases")
    parser.add_argument("--port", type=float, default=400.0)
    parser.add_argument("--slow", type=float, default=200.0)
    options = parser.parse_args()
    systems = [f"ours_{triple}_{GROUP}" for triple in TRIPLES]
    command = ["torchrun", str(WORKER), *systems, "--rounds", str(options.rounds), *WORK]
    spec = LabSpec(nodes=NODES, ranks_per_node=RANKS_PER_NODE, port_mbit=options.port)
    with tempfile.TemporaryDirectory() as made, Lab(spec) as lab:
        if lab.isolation == Isolation.LOOPBACK:
            sys.exit(f"this machine forbids network namespaces ({lab.reason}): nothing to measure")
        log = Path(made) / "node0.log"
        ended = threading.Event()
        changing = threading.Thread(
            target=change_ports, args=(lab, log, (options.port, options.slow), ended), daemon=True
        )
        changing.start()
        result = lab.run(command, Path(made), timeout_s=3600, environment={"PYTHONWARNINGS": "ignore"})
        ended.set()
        changing.join()
        if not result.ok:
            sys.exit(f"the ranks failed:\n{log.read_text()[-4000:]}")
        rows = rows_of(log)
    times: dict[tuple[str, str], list[float]] = defaultdict(list)
    for number, row in enumerate(rows):
        case = list(CASES)[number // (STEPS * len(TRIPLES)) % len(CASES)]
        if row["step"]:
            times[TRIPLES[number // STEPS % len(TRIPLES)], case].append(row["seconds"])
    print(f"port {options.port:g} Mbit/s, slow {options.slow:g} Mbit/s, medians in ms; {options.rounds} rounds")
    print("".join(f"{word:>10}" for word in ("strategy", *CASES, "apart/tog.", "p10", "p90")))
    figures = {}
    for triple in TRIPLES:
        middle = {case: statistics.median(times[triple, case]) * 1e3 for case in CASES}
        ratios = sorted(
            apart / together
            for apart, together in zip(times[triple, "apart"], times[triple, "together"], strict=True)
        )  # fmt: skip
        tenth = len(ratios) // 10
        ratio = middle["apart"] / middle["together"]
        shown = "".join(f"{middle[case]:10.0f}" for case in CASES)
        print(f"{triple:>10}{shown}{ratio:10.3f}{ratios[tenth]:10.3f}{ratios[-1 - tenth]:10.3f}")
        figures[f"apart_over_together_{triple}"] = round(ratio, 3)
        figures[f"together_over_none_{triple}"] = round(middle["together"] / middle["none"], 3)
    print(json.dumps({"name": "bench-placement", "figures": figures}))


if __name__ == "__main__":
    main()
