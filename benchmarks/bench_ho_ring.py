"""Compares HO-Ring with gloo's own collectives, a plain ring and two hops on the emulated cluster.

    python benchmarks/bench_ho_ring.py [--quick] [--port-mbit 400]

All kinds take turns in one run (A B C A B C ...); a time is the median of the slowest rank's. The
bound is what a node's port must carry at least: (n-1)/n * V / B for all-gather and reduce-scatter,
twice that for all-reduce. V is the whole buffer. Where the calibration chose native, both columns of
the second table are the same code and their ratio is the noise of the machine: it is a figure of its
own. The last line of the output is JSON.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

from paro_advise.runtime.lab import Isolation, Lab, LabSpec

WORKER = Path(__file__).resolve().parent / "ho_ring_ranks.py"
SHAPES = ((2, 4), (4, 2))
BOUND_LIMIT = {"all_gather": 1.10, "reduce_scatter": 1.10, "all_reduce": 1.15}
MIN_SPEEDUP, MAX_SLOWER = 1.4, 1.05


def measure(nodes: int, ranks: int, port_mbit: float, arguments: list[str]) -> list[dict[str, Any]]:
    """Run the ranks in a lab and return what rank 0 printed.

    Raises:
        SystemExit: the machine forbids namespaces, or a rank failed.
    """
    with (
        Lab(LabSpec(nodes=nodes, ranks_per_node=ranks, port_mbit=port_mbit)) as lab,
        tempfile.TemporaryDirectory() as logs,
    ):
        if lab.isolation == Isolation.LOOPBACK:
            sys.exit(f"this machine forbids network namespaces ({lab.reason}): nothing to measure")
        result = lab.run(["torchrun", str(WORKER), *arguments], Path(logs), timeout_s=1200)
        text = (Path(logs) / "node0.log").read_text()
        if not result.ok:
            sys.exit(f"the ranks failed:\n{text[-3000:]}")
    return [json.loads(line) for line in text.splitlines() if line.startswith('{"kind"')]


def bound_s(operation: str, num_bytes: int, nodes: int, port_mbit: float) -> float:
    """Return the least seconds that the ports allow."""
    trips = 2 if operation == "all_reduce" else 1
    return trips * (nodes - 1) / nodes * num_bytes / (port_mbit * 1e6 / 8)


def show_large(rows: list[dict[str, Any]], nodes: int, ranks: int, port_mbit: float) -> dict[str, tuple[float, float]]:
    """Print the table of large messages; return (time / bound, speed-up over native) by figure."""
    print(f"\n{nodes} nodes x {ranks} ranks, {port_mbit:g} mbit per port: milliseconds, and HO-Ring against the others")
    print(
        f"{'operation':<16}{'MB':>5}{'bound':>8}{'native':>9}{'two-hop':>9}{'ring':>9}{'HO-Ring':>9}{'/bound':>8}{'native/':>9}{'ring/':>7}"
    )
    found = {}
    for row in rows:
        if row["kind"] != "large":
            continue
        seconds, size = row["seconds"], row["num_bytes"]
        bound, ours = bound_s(row["operation"], size, nodes, port_mbit), seconds["ho_ring"]
        print(
            f"{row['operation']:<16}{size >> 20:>5}{bound * 1e3:>8.0f}{seconds['native'] * 1e3:>9.0f}{seconds['two_hop'] * 1e3:>9.0f}"
            f"{seconds['plain_ring'] * 1e3:>9.0f}{ours * 1e3:>9.0f}{ours / bound:>8.2f}{seconds['native'] / ours:>9.2f}{seconds['plain_ring'] / ours:>7.2f}"
        )
        found[f"{nodes}x{ranks}_{row['operation']}_{size >> 20}mb"] = (ours / bound, seconds["native"] / ours)
    return found


def show_sweep(rows: list[dict[str, Any]], nodes: int, ranks: int) -> dict[str, float]:
    """Print chosen against native at all sizes; return the ratios."""
    calibration = next(row["seconds"] for row in rows if row["kind"] == "calibration")
    print(f"\n{nodes} x {ranks}: the algorithm that a calibration of {calibration:.1f} s chose, against native")
    print(f"{'operation':<16}{'KB':>7}  {'chosen':<9}{'native ms':>10}{'chosen ms':>10}{'ratio':>7}{'repeats':>8}")
    found = {}
    for row in rows:
        if row["kind"] != "sweep":
            continue
        native, chosen = row["seconds"]["native"], row["seconds"]["chosen"]
        print(
            f"{row['operation']:<16}{row['num_bytes'] >> 10:>7}  {row['algorithm']:<9}{native * 1e3:>10.2f}{chosen * 1e3:>10.2f}"
            f"{chosen / native:>7.2f}{row['repeats']:>8}"
        )
        kind = "noise" if row["algorithm"] == "native" else "chosen"
        found[f"{kind}_{nodes}x{ranks}_{row['operation']}_{row['num_bytes'] >> 10}kb"] = chosen / native
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--port-mbit", type=float, default=400.0)
    parser.add_argument("--quick", action="store_true", help="16 MB and three sizes only, fewer repeats")
    options = parser.parse_args()
    arguments = (
        ["--repeats", "3", "--large-mb", "16", "--sweep-kb", "4", "512", "16384", "--sweep-s", "0.5"]
        if options.quick
        else []
    )
    figures: dict[str, float] = {}
    targets: dict[str, str] = {}
    met = True
    for nodes, ranks in SHAPES:
        rows = measure(nodes, ranks, options.port_mbit, arguments)
        for name, (over, speedup) in show_large(rows, nodes, ranks, options.port_mbit).items():
            limit = next(value for operation, value in BOUND_LIMIT.items() if operation in name)
            figures |= {f"{name}_over_bound": round(over, 3), f"{name}_speedup": round(speedup, 3)}
            targets |= {f"{name}_over_bound": f"<= {limit}", f"{name}_speedup": f">= {MIN_SPEEDUP}"}
            met = met and over <= limit and speedup >= MIN_SPEEDUP
        ratios = show_sweep(rows, nodes, ranks)
        for kind in ("chosen", "noise"):
            worst = max((name for name in ratios if name.startswith(kind)), key=lambda name: ratios[name], default=None)
            if worst:
                figures[f"{nodes}x{ranks}_worst_against_native_{kind}"] = round(ratios[worst], 3)
                print(f"worst: {worst} {ratios[worst]:.2f}")
        targets[f"{nodes}x{ranks}_worst_against_native_chosen"] = f"<= {MAX_SLOWER}"
        met = met and figures.get(f"{nodes}x{ranks}_worst_against_native_chosen", 0.0) <= MAX_SLOWER
    print(json.dumps({"name": "ho_ring", "figures": figures, "targets": targets, "met": met}))


if __name__ == "__main__":
    main()
