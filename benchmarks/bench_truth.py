"""Holds predictions against synthetic NCCL runs whose outcome under every strategy is known (`make bench-truth`).

Each run is a folder with traces and a ``truth.json`` whose ``counterfactuals`` give the step time of each strategy,
group size and algorithm. Printed for each run: error of the predicted ratio to the step as it is, share of outcomes
inside the 80 % range, rank correlation, and what the chosen strategy costs over the best one: among all, among those
that a framework's own settings express, and by the rule of thumb "always hybrid sharding per node".

Usage: bench_truth.py [--own-ports] [--rows] [--seed N] [FOLDER...], by default the runs of ../shared/nccl_like. With --own-ports what
goes between groups does not share a node's port with the rest, which is no network's way but the simulator's.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from paro_advise.advisor.analysis.build import build_analysis
from paro_advise.advisor.analysis.model import Options
from paro_advise.advisor.facts.reading.all_inputs import read_all
from paro_advise.advisor.facts.reading.choice import EngineChoice
from paro_advise.advisor.prediction import device_replay
from paro_advise.advisor.prediction.device_replay import Leg, Queues, UnitWork, micro_batch_us
from paro_advise.advisor.prediction.fitting.calibrate import calibrate
from paro_advise.advisor.prediction.recommend import recommend
from paro_advise.advisor.prediction.scoring import Limits
from paro_advise.errors import ParoAdviseError
from paro_advise.trace_parsers.discover import find_inputs

if TYPE_CHECKING:
    from collections.abc import Sequence

    from paro_advise.policies.collective_cost import Draws

SHARED = Path(__file__).resolve().parents[2] / "shared" / "nccl_like"
ALGORITHMS = {"flat": "native", "horing": "ho_ring"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One candidate: ratio of its step to the measured step as it is."""

    triple: str
    group_size: int | None
    collectives: str
    predicted: float
    low: float
    high: float
    true: float

    @property
    def is_inside(self) -> bool:
        """Tell whether the range holds the outcome."""
        return self.low <= self.true <= self.high


def rows_of(folder: Path, seed: int = 0) -> tuple[list[Row], int]:
    """Return the candidates of a run whose outcome is known, and the ranks per node; seed: of the draws."""
    truth: dict[str, Any] = json.loads((folder / "truth.json").read_text(encoding="utf-8"))
    traces = sorted((folder / "traces" if (folder / "traces").is_dir() else folder).glob("rank*.json*"))
    refs, is_collection = find_inputs([str(path) for path in traces])
    read = read_all(refs, is_collection=is_collection, cache=None, choice=EngineChoice(jobs=1))
    analysis = build_analysis(read.facts, read.notices, Options())
    calibration = calibrate(analysis)
    # Without a limit of memory every strategy is compared.
    plan = recommend(calibration, Limits(allow_untested=True), seed)
    known = truth["counterfactuals"]
    true = {
        (item["triple"], item["group_size"] if "I" in item["triple"] else None, ALGORITHMS[item["algorithm"]]): (
            item["step_time_us_by_policy"]["default"] / calibration.step_us
        )
        for item in known["strategies"]
    }
    rows = []
    for choice in plan.candidates:
        key = (choice.triple, choice.group_size, str(choice.collectives))
        if choice.variant or choice.offload or key not in true:
            continue
        time = choice.predicted.step_time_us
        low, middle, high = (value / calibration.step_us for value in (time.p10, time.p50, time.p90))
        rows.append(
            Row(
                triple=key[0], group_size=key[1], collectives=key[2], predicted=middle, low=low, high=high,
                true=true[key],
            )
        )  # fmt: skip
    return rows, calibration.ranks_per_node


def regret(rows: list[Row]) -> float | None:
    """Return what the candidate of the shortest predicted step costs over the best one, None without any."""
    if not rows:
        return None
    return min(rows, key=lambda row: row.predicted).true / min(row.true for row in rows) - 1


def rank_correlation(rows: list[Row]) -> float:
    """Return Spearman's correlation of predicted and true step times."""
    order = [np.argsort(np.argsort([getattr(row, name) for row in rows])) for name in ("predicted", "true")]
    return float(np.corrcoef(order[0], order[1])[0, 1])


def own_ports(units: Sequence[UnitWork], queues: Queues) -> Draws:
    """Replay a micro-batch in which what goes between groups takes no link from anything else."""
    apart = [
        unit._replace(between=tuple(Leg(alone=leg.alone, port=0.0, fabric=0.0) for leg in unit.between))
        for unit in units
    ]
    return micro_batch_us(apart, queues)


def main() -> int:
    """Print the table."""
    parser = argparse.ArgumentParser()
    parser.add_argument("folders", nargs="*", type=Path)
    parser.add_argument("--own-ports", action="store_true")
    parser.add_argument("--seed", type=int, default=0, help="of the draws")
    parser.add_argument("--rows", action="store_true", help="each candidate too, the fastest first")
    options = parser.parse_args()
    if options.own_ports:
        device_replay.micro_batch_us = own_ports
    folders = options.folders or sorted(path for path in SHARED.glob("*") if path.is_dir())
    if not folders:
        print(f"no runs: {SHARED} is not there; pass folders that hold traces and truth.json")
        return 1
    print(
        f"{'run':20} {'rows':>5} {'median':>7} {'p90':>6} {'inside':>7} {'rho':>5} {'regret':>7} {'native':>7} {'hsdp':>6}"
    )
    everything: list[Row] = []
    regrets: dict[str, list[float]] = {"all": [], "native": [], "hybrid": []}
    correlations = []
    for folder in folders:
        try:
            rows, per_node = rows_of(folder, options.seed)
        except ParoAdviseError as error:
            print(f"{folder.name:20} refused: {error}")
            continue
        native = [row for row in rows if row.collectives == "native"]
        hybrid = [row for row in native if (row.triple, row.group_size) == ("III", per_node)]
        by_rule = hybrid[0].true / min(row.true for row in native) - 1 if hybrid else None
        found = {"all": regret(rows), "native": regret(native), "hybrid": by_rule}
        for name, value in found.items():
            regrets[name] += [] if value is None else [value]
        correlations.append(rank_correlation(rows))
        everything += rows
        print(_line(folder.name, rows, correlations[-1], [found[name] for name in regrets]))
        for row in sorted(rows, key=lambda row: row.true) if options.rows else ():
            group = row.group_size or "-"
            off = row.predicted / row.true - 1
            print(f"    {row.triple} {group:>4} {row.collectives:8} {row.predicted:6.3f} {row.true:6.3f} {off:+7.1%}")
    if everything:
        means = [float(np.mean(values)) if values else None for values in regrets.values()]
        print(_line("all", everything, float(np.mean(correlations)), means))
        worst = ", ".join(f"{name} {max(values):.1%}" for name, values in regrets.items() if values)
        print(f"worst regret: {worst}")
    return 0


def _line(name: str, rows: list[Row], rho: float, regrets: list[float | None]) -> str:
    errors = [abs(row.predicted / row.true - 1) for row in rows]
    inside = np.mean([row.is_inside for row in rows])
    shown = " ".join(f"{'-' if value is None else f'{value:.1%}':>7}" for value in regrets)
    return f"{name:20} {len(rows):>5} {np.median(errors):>7.1%} {np.quantile(errors, 0.9):>6.1%} {inside:>7.0%} {rho:>5.2f} {shown}"


if __name__ == "__main__":
    sys.exit(main())
