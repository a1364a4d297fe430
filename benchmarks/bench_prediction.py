"""Predicts step times from one trace of ZeRO-3 and measures them on the emulated cluster.

    python benchmarks/bench_prediction.py [--only NAME ...] [--developed] [--rounds N]

In each configuration unmodified FSDP2 (GGG) is captured over ten steps, three of them profiled, and
every system, FSDP2 included, takes unprofiled steps in turn (see training_ranks.py). The plan sees the
trace and a memory limit of half of what DDP holds; predicted is the speed-up over FSDP2, judged by the
medians of unprofiled steps. The configurations under DEVELOPED were looked at while the model was made,
are run only when named or with --developed, and are shown apart; figures count those under JUDGED only.
The last line of the output is JSON.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paro_advise.advisor.analysis.load import load_analysis
from paro_advise.advisor.analysis.model import Options
from paro_advise.advisor.commands.progress import Progress
from paro_advise.advisor.prediction.fitting.calibrate import calibrate
from paro_advise.advisor.prediction.recommend import recommend
from paro_advise.advisor.prediction.scoring import Limits, baseline_bytes
from paro_advise.runtime.lab import Isolation, Lab, LabSpec

if TYPE_CHECKING:
    from paro_advise.policies.plan import Choice, Plan

WORKER = Path(__file__).resolve().parent / "training_ranks.py"
RECORDED = Path(__file__).resolve().parents[2] / "shared/zero_runs"
BASELINE = "fsdp2_zero3"
RUNTIME = ("GGG", "IGG", "IIG", "III", "NGG", "NIG")


@dataclass(frozen=True, slots=True, kw_only=True)
class Configuration:
    """A cluster and a training run."""

    name: str
    spec: LabSpec
    work: dict[str, int] = field(default_factory=dict)


def _lab(nodes: int, ranks: int, mbit: float, **changes: Any) -> LabSpec:
    return LabSpec(nodes=nodes, ranks_per_node=ranks, port_mbit=mbit, **changes)


DEVELOPED = (
    Configuration(name="4x2_400", spec=_lab(4, 2, 400.0)),
    Configuration(name="2x4_400", spec=_lab(2, 4, 400.0)),
    Configuration(name="2x2_200_small", spec=_lab(2, 2, 200.0), work={"width": 192, "micro_batches": 2}),
    Configuration(name="2x2_400_straggler", spec=_lab(2, 2, 400.0, slow_rank=3, slow_factor=1.5), work={"width": 256}),
    Configuration(name="2x4_500", spec=_lab(2, 4, 500.0), work={"width": 288}),
    Configuration(name="4x2_300_wide", spec=_lab(4, 2, 300.0), work={"width": 384, "layers": 4}),
    Configuration(name="3x2_400_micro8", spec=_lab(3, 2, 400.0), work={"width": 224, "micro_batches": 8}),
    Configuration(name="4x1_200", spec=_lab(4, 1, 200.0), work={"width": 256, "micro_batches": 2}),
    Configuration(
        name="3x2_400_slow_port", spec=_lab(3, 2, 400.0, slow_node=1, slow_port_mbit=200.0), work={"width": 256}
    ),
    Configuration(
        name="2x3_400_straggler",
        spec=_lab(2, 3, 400.0, slow_rank=4, slow_factor=1.4),
        work={"width": 288, "layers": 5},
    ),
    Configuration(name="4x2_600", spec=_lab(4, 2, 600.0), work={"width": 256}),
    Configuration(name="3x3_400", spec=_lab(3, 3, 400.0), work={"width": 256, "layers": 5}),
    Configuration(name="2x4_300_micro2", spec=_lab(2, 4, 300.0), work={"width": 320, "micro_batches": 2}),
    Configuration(name="2x2_300_wide", spec=_lab(2, 2, 300.0), work={"width": 384, "layers": 5}),
    Configuration(
        name="4x2_400_slow_port", spec=_lab(4, 2, 400.0, slow_node=2, slow_port_mbit=250.0), work={"width": 224}
    ),
    Configuration(name="3x2_500_straggler", spec=_lab(3, 2, 500.0, slow_rank=2, slow_factor=1.5), work={"width": 256}),
    Configuration(name="4x2_350", spec=_lab(4, 2, 350.0), work={"width": 288}),
    Configuration(name="2x3_500", spec=_lab(2, 3, 500.0), work={"width": 320, "layers": 4}),
    Configuration(name="3x2_250_micro2", spec=_lab(3, 2, 250.0), work={"width": 256, "micro_batches": 2}),
    Configuration(name="4x1_300_wide", spec=_lab(4, 1, 300.0), work={"width": 352, "layers": 5}),
    Configuration(
        name="2x4_400_slow_port", spec=_lab(2, 4, 400.0, slow_node=1, slow_port_mbit=250.0), work={"width": 224}
    ),
    Configuration(name="2x2_500_straggler", spec=_lab(2, 2, 500.0, slow_rank=1, slow_factor=1.4), work={"width": 288}),
    Configuration(name="4x2_250", spec=_lab(4, 2, 250.0), work={"width": 320, "layers": 5}),
    Configuration(name="3x2_600_wide", spec=_lab(3, 2, 600.0), work={"width": 384, "layers": 4}),
    Configuration(name="2x4_600_micro2", spec=_lab(2, 4, 600.0), work={"width": 256, "micro_batches": 2}),
    Configuration(name="2x3_300_micro8", spec=_lab(2, 3, 300.0), work={"width": 224, "micro_batches": 8}),
    Configuration(
        name="3x3_500_slow_port", spec=_lab(3, 3, 500.0, slow_node=1, slow_port_mbit=250.0), work={"width": 224}
    ),
    Configuration(name="4x2_400_straggler", spec=_lab(4, 2, 400.0, slow_rank=5, slow_factor=1.5), work={"width": 256}),
)
JUDGED = (
    Configuration(name="4x2_500", spec=_lab(4, 2, 500.0), work={"width": 288, "layers": 4}),
    Configuration(name="2x4_350_wide", spec=_lab(2, 4, 350.0), work={"width": 384, "layers": 4}),
    Configuration(name="3x3_300_micro2", spec=_lab(3, 3, 300.0), work={"width": 256, "micro_batches": 2}),
    Configuration(name="2x2_250_micro8", spec=_lab(2, 2, 250.0), work={"width": 256, "micro_batches": 8}),
    Configuration(
        name="3x2_350_slow_port", spec=_lab(3, 2, 350.0, slow_node=2, slow_port_mbit=200.0), work={"width": 288}
    ),
    Configuration(name="4x2_300_straggler", spec=_lab(4, 2, 300.0, slow_rank=3, slow_factor=1.4), work={"width": 288}),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One prediction beside its measurement."""

    system: str
    low: float
    middle: float
    high: float
    measured: float

    @property
    def error(self) -> float:
        """Return the relative error of the step-time ratio."""
        return self.measured / self.middle - 1


def systems_of(spec: LabSpec) -> list[str]:
    """Return what is measured: FSDP2's own strategies, and ours in groups of a node."""
    group = spec.ranks_per_node if spec.ranks_per_node > 1 else 2
    return [BASELINE, "fsdp2_hsdp_gated", *(f"ours_{triple}_{group}" for triple in RUNTIME)]


def measure(configuration: Configuration, rounds: int, folder: Path) -> dict[str, float]:
    """Train in a lab; leave the trace in a folder and return median seconds by system.

    Raises:
        SystemExit: the machine forbids namespaces, or a rank failed.
    """
    spec = configuration.spec
    words = [word for name, value in configuration.work.items() for word in (f"--{name.replace('_', '-')}", str(value))]
    systems = [s for s in systems_of(spec) if spec.ranks_per_node > 1 or s != "fsdp2_hsdp_gated"]
    command = ["torchrun", str(WORKER), *systems, "--rounds", str(rounds), "--traces", str(folder / "traces"), *words]
    with Lab(spec) as lab:
        if lab.isolation == Isolation.LOOPBACK:
            sys.exit(f"this machine forbids network namespaces ({lab.reason}): nothing to measure")
        result = lab.run(command, folder / "logs", timeout_s=1800, environment={"PYTHONWARNINGS": "ignore"})
    text = (folder / "logs/node0.log").read_text()
    if not result.ok:
        sys.exit(f"the ranks failed:\n{text[-4000:]}")
    times: dict[str, list[float]] = {}
    for line in text.splitlines():
        row = json.loads(line) if line.startswith('{"kind": "step"') else {}
        if row.get("step"):
            times.setdefault(row["system"], []).append(row["seconds"])
    return {name: statistics.median(values) for name, values in times.items()}


def predict(configuration: Configuration, folder: Path) -> Plan:
    """Return the plan that the trace alone gives, with half of DDP's memory."""
    options = Options(gpus_per_node=configuration.spec.ranks_per_node)
    analysis, _ = load_analysis([str(folder / "traces")], options, Progress(quiet=True))
    calibration = calibrate(analysis)
    half = 16 * calibration.parameters / 2
    # The limit is on states; the plan's own account adds transients and keeps a fifth free.
    largest = baseline_bytes(calibration)
    return recommend(calibration, Limits(device_memory_bytes=(half + largest) / 0.8))


def choice_of(plan: Plan, system: str) -> Choice:
    """Return the plan's entry of a measured system."""
    if system == BASELINE:
        return plan.baseline
    triple, group, collectives = (
        ("III", None, "native") if system == "fsdp2_hsdp_gated" else (*system.split("_")[1:], "ho_ring")
    )
    fitting = [c for c in plan.candidates if (c.triple, c.collectives, c.variant) == (triple, collectives, "")]
    group_size = plan.preconditions.gpus_per_node if group is None else int(group)
    return next(c for c in fitting if c.group_size in (None, group_size))


def compare(plan: Plan, measured: dict[str, float]) -> list[Row]:
    """Return predicted and measured step-time ratios to the baseline."""
    rows = []
    for system, seconds in measured.items():
        if system == BASELINE:
            continue
        speedup = choice_of(plan, system).predicted.speedup
        ratio = seconds / measured[BASELINE]
        rows.append(
            Row(system=system, low=1 / speedup.p90, middle=1 / speedup.p50, high=1 / speedup.p10, measured=ratio)
        )
    return rows


def regret(plan: Plan, measured: dict[str, float]) -> float:
    """Return what the plan loses against the best measured system that fits, as a share."""
    feasible = {s: t for s, t in measured.items() if s == BASELINE or choice_of(plan, s).feasible}
    predicted = {s: choice_of(plan, s).predicted.step_time_us.p50 for s in feasible}
    chosen = min(predicted, key=lambda system: predicted[system])
    return feasible[chosen] / min(feasible.values()) - 1


def rank_correlation(rows: list[Row]) -> float:
    """Return Spearman's correlation of predicted and measured order."""
    count = len(rows)
    predicted = sorted(range(count), key=lambda place: rows[place].middle)
    measured = sorted(range(count), key=lambda place: rows[place].measured)
    distance = sum((predicted.index(place) - measured.index(place)) ** 2 for place in range(count))
    return 1 - 6 * distance / (count * (count**2 - 1))


def recorded_replays(folder: Path) -> dict[str, float]:
    """Return the error of the replay (%) of each recorded run in a folder of runs."""
    found = {}
    for run in sorted(path for path in folder.iterdir() if path.is_dir()) if folder.is_dir() else ():
        analysis, _ = load_analysis([str(run)], Options(), Progress(quiet=True))
        found[run.name] = recommend(calibrate(analysis), Limits()).confidence.replay_error_pct
    return found


def show(configuration: Configuration, plan: Plan, rows: list[Row], lost: float) -> None:
    print(f"\n{configuration.name}: replay of the trace {plan.confidence.replay_error_pct:+.1f} %, regret {lost:.1%}")
    print(f"{'system':<20}{'predicted ratio':>16}{'80 % range':>16}{'measured':>10}{'error':>8}")
    for row in rows:
        print(
            f"{row.system:<20}{row.middle:>16.3f}{f'{row.low:.2f}..{row.high:.2f}':>16}{row.measured:>10.3f}{row.error:>8.1%}"
        )


def quantile(values: list[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, math.ceil(share * len(ordered)) - 1)]


def figures_of(results: list[tuple[Plan, list[Row], float]], recorded: dict[str, float]) -> dict[str, float]:
    errors = [abs(row.error) for _, rows, _ in results for row in rows]
    replays = [abs(plan.confidence.replay_error_pct) for plan, _, _ in results] + [abs(v) for v in recorded.values()]
    inside = [row.low <= row.measured <= row.high for _, rows, _ in results for row in rows]
    lost = [value for _, _, value in results]
    return {
        "replay_median_pct": round(statistics.median(replays), 2),
        "replay_worst_pct": round(max(replays), 2),
        "ratio_error_median_pct": round(100 * statistics.median(errors), 2),
        "ratio_error_p90_pct": round(100 * quantile(errors, 0.9), 2),
        "rank_correlation": round(statistics.mean(rank_correlation(rows) for _, rows, _ in results), 3),
        "regret_mean_pct": round(100 * statistics.mean(lost), 2),
        "regret_worst_pct": round(100 * max(lost), 2),
        "inside_80_pct_range_pct": round(100 * statistics.mean(inside), 1),
    }


TARGETS = {
    "replay_median_pct": ("<=", 3.0),
    "replay_worst_pct": ("<=", 8.0),
    "ratio_error_median_pct": ("<=", 5.0),
    "ratio_error_p90_pct": ("<=", 15.0),
    "rank_correlation": (">=", 0.9),
    "regret_mean_pct": ("<=", 2.0),
    "regret_worst_pct": ("<=", 5.0),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", help="names of configurations")
    parser.add_argument("--developed", action="store_true", help="run those of the development as well")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument(
        "--keep", type=Path, help="keep traces and logs here; what lies here already is not measured again"
    )
    options = parser.parse_args()
    judged: list[tuple[Plan, list[Row], float]] = []
    developed: list[tuple[Plan, list[Row], float]] = []
    wanted = {configuration.name for configuration in (*(DEVELOPED if options.developed else ()), *JUDGED)}
    for configuration in (*DEVELOPED, *JUDGED):
        if configuration.name not in (options.only or wanted):
            continue
        with tempfile.TemporaryDirectory() as temporary:
            folder = (options.keep or Path(temporary)) / configuration.name
            kept = folder / "measured.json"
            if options.keep and kept.is_file():
                measured = json.loads(kept.read_text())
            else:
                measured = measure(configuration, options.rounds, folder)
                kept.write_text(json.dumps(measured))
            plan = predict(configuration, folder)
        rows, lost = compare(plan, measured), regret(plan, measured)
        show(configuration, plan, rows, lost)
        (judged if configuration in JUDGED else developed).append((plan, rows, lost))
    for title, results in (("developed on", developed), ("judged on", judged)):
        if results:
            print(f"\n{title}: {json.dumps(figures_of(results, {}))}")
    recorded = recorded_replays(RECORDED)
    print("\nreplay of recorded runs: " + ", ".join(f"{name} {error:+.1f} %" for name, error in recorded.items()))
    figures = figures_of(judged, recorded) if judged else {}
    met = bool(judged) and all(
        figures[name] <= limit if sign == "<=" else figures[name] >= limit for name, (sign, limit) in TARGETS.items()
    )
    met = met and 70.0 <= figures["inside_80_pct_range_pct"] <= 90.0
    targets = {name: f"{sign} {limit:g}" for name, (sign, limit) in TARGETS.items()}
    targets["inside_80_pct_range_pct"] = "70 to 90"
    print(json.dumps({"name": "prediction", "figures": figures, "targets": targets, "met": met}))


if __name__ == "__main__":
    main()
