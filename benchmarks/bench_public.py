"""Holds predictions from descriptions against public measurements on H100 clusters (`make bench-public`).

Rows are runs of nanotron (DDP with gradients added up and reduced in fp32; ZeRO-1 scatters them and gathers the
parameters after the step), from the Ultra-Scale Playbook's benchmark page. Nothing but a row's own description, its
step time and the table of link rates enters a prediction. Three questions, each beside a model of 20 lines (all bytes
exposed, three bandwidths, no group shapes):

1. ZeRO-1 from ZeRO-0 of the same configuration.
2. Throughput on more nodes, from the smallest row of a series (model, micro-batch, tensor parallelism, stage).
3. Memory of a GPU, with activations from one row of each model.

Rows with an MFU below 3 % are left out and counted, so are rows with pipeline parallelism. Of rows that describe the
same run the faster one counts.

Usage: bench_public.py [ROWS.csv LINKS.csv] [--plot FILE.svg], by default the files of ../shared/public_truth. The
plot shows predicted against measured changes of the step time.
"""

from __future__ import annotations

import argparse
import csv
import math
import sys
from collections import defaultdict
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from paro_advise.advisor.description.calibrate import calibrate_described
from paro_advise.advisor.description.links import link_rates
from paro_advise.advisor.description.model import (
    BytesPerParameter,
    Cluster,
    DescribedRun,
    Description,
    Model,
    Parallel,
    RatesByNodes,
)
from paro_advise.advisor.prediction.advice.questions import Question
from paro_advise.advisor.prediction.candidates import baseline_candidate
from paro_advise.advisor.prediction.recommend import recommend, step_range
from paro_advise.advisor.prediction.scoring import Limits, score
from paro_advise.core.collective import Op
from paro_advise.errors import ParoAdviseError
from paro_advise.policies.strategy import CollectiveBackend, Strategy

if TYPE_CHECKING:
    from paro_advise.advisor.prediction.calibration import Calibration
    from paro_advise.policies.link_rates import LinkRates
    from paro_advise.policies.plan import Quantiles

SHARED = Path(__file__).resolve().parents[2] / "shared" / "public_truth"
SEQUENCE = 4096
GPUS_PER_NODE = 8
LEAST_MFU_PCT = 3.0
SAME_SHARE = 0.03  # speeds that differ by less are equal
# Layers by 1e9 parameters, of Llama models of these sizes; they set how many messages the bytes are sent in.
LAYERS = {1.34: 16, 3.57: 28, 8.86: 32, 80.0: 80}
STAGES = {0: "NNN", 1: "NNG"}
TICKS, WIDE_TICKS = (0.7, 0.8, 0.9, 1.0, 1.1, 1.2), (0.5, 1.0, 2, 5, 10, 20)  # of the plot
# By question: measured and predicted speed-up of each row.
Points = dict[str, list[tuple[float, float]]]
# nanotron holds 16-bit gradients beside the fp32 buffer that it adds them up in, Adam's states in fp32.
BYTES = BytesPerParameter(parameter=2, gradient=6, optimizer=12)


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One public run."""

    model_billion: float
    nodes: int
    micro_batch: int
    micro_batches: int
    dp: int
    pp: int
    tp: int
    zero_stage: int
    mfu_pct: float
    tokens_per_s: float
    memory_gb: float

    @property
    def step_s(self) -> float:
        """Return the time of a step."""
        return self.micro_batch * self.micro_batches * self.dp * SEQUENCE / self.tokens_per_s

    @property
    def configuration(self) -> tuple[float, ...]:
        """Return everything but the stage."""
        return self.model_billion, self.nodes, self.micro_batch, self.micro_batches, self.dp, self.tp

    @property
    def series(self) -> tuple[float, ...]:
        """Return what a series of node counts shares."""
        return self.model_billion, self.micro_batch, self.tp, self.zero_stage


def read_rows(path: Path) -> list[Row]:
    """Return the rows of a file."""
    import msgspec

    with path.open(encoding="utf-8") as file:
        return [
            msgspec.convert({name: line[name] for name in Row.__annotations__}, Row, strict=False)
            for line in csv.DictReader(file)
        ]


def read_links(path: Path) -> RatesByNodes:
    """Return the link rates of a file."""
    rates: dict[str, dict[int, float]] = defaultdict(dict)
    with path.open(encoding="utf-8") as file:
        for line in csv.DictReader(file):
            rates[line["collective"]][int(line["nodes"])] = float(line["busbw_gb_s"])
    return RatesByNodes(**rates, message="256MB")


def described(
    row: Row, links: RatesByNodes, tokens_per_s: float | None = None, stage: int | None = None
) -> Description:
    """Return a row as a user would describe it; the speed of another row where that is what is known."""
    return Description(
        model=Model(
            parameters=row.model_billion * 1e9,
            layers=LAYERS.get(row.model_billion),
            sequence_length=SEQUENCE,
            gradient_type="fp32",
            bytes_per_parameter=BYTES,
        ),
        cluster=Cluster(nodes=row.nodes, gpus_per_node=GPUS_PER_NODE, device="H100", links=links),
        parallel=Parallel(tensor=row.tp, pipeline=row.pp),
        run=DescribedRun(
            strategy=STAGES[row.zero_stage if stage is None else stage],
            micro_batches=row.micro_batches,
            micro_batch_size=row.micro_batch,
            tokens_per_s=tokens_per_s or row.tokens_per_s,
            reductions_beside_backward=("NNN",),
        ),
    )


def changed(calibration: Calibration, triple: str) -> Quantiles:
    """Return the predicted step (us) of a run under another strategy, by the framework's own means."""
    strategy = Strategy.parse(triple)
    beside = calibration.beside_backward or frozenset()
    candidate = replace(
        baseline_candidate(calibration),
        strategy=strategy,
        collectives=CollectiveBackend.NATIVE,
        overlaps_reductions=triple in beside,
    )
    return step_range(calibration, candidate)


def moved(small: Row, row: Row, links: RatesByNodes) -> Quantiles:
    """Return the step (us) of a row as `recommend --what-if nodes=N,micro-batches=M` predicts it from a smaller one.

    One data-parallel rank sends nothing, and `recommend` takes no such run: from it the larger one is calibrated.

    Raises:
        ParoAdviseError: what is asked cannot be.
    """
    if small.dp > 1:
        asked = Question.parse(f"nodes={row.nodes},micro-batches={row.micro_batches}")
        plan = recommend(calibrate_described(described(small, links)), Limits(), questions=(asked,))
        found = plan.answers[0].baseline_step_us
        assert found is not None
        return found
    # The row's own speed is not looked at.
    wide = calibrate_described(described(row, links, tokens_per_s=1.0), 1.0)
    passes_us = small.step_s * 1e6 - wide.update.whole_us  # all states are updated
    wide = calibrate_described(described(row, links, tokens_per_s=1.0), passes_us / small.micro_batches)
    return step_range(wide, baseline_candidate(wide), doublings=math.log2(row.nodes / small.nodes))


def simple_s(row: Row, rates: LinkRates, stage: int) -> float:
    """Return the exposed time of the model of 20 lines: every byte at the rate of whole nodes."""
    if row.dp == 1:
        return 0.0
    grads, share = 4e9 * row.model_billion / row.tp, (row.dp - 1) / row.dp
    speed = {op: 1e9 * rates.busbw_gbps(op, row.nodes, GPUS_PER_NODE) for op in rates.gbps}
    if stage == 0:
        return 2 * grads * share / speed[Op.ALL_REDUCE]
    return grads * share / speed[Op.REDUCE_SCATTER] + grads / 2 * share / speed[Op.ALL_GATHER]


def quality(errors: list[float]) -> str:
    """Return median and 90th percentile of errors."""
    return f"{np.median(np.abs(errors)):7.1%} {np.quantile(np.abs(errors), 0.9):7.1%}"


def fastest(rows: list[Row]) -> list[Row]:
    """Return one row of each configuration and stage."""
    best: dict[tuple[float, ...], Row] = {}
    for row in sorted(rows, key=lambda row: -row.tokens_per_s):
        best.setdefault((*row.configuration, row.zero_stage), row)
    return sorted(best.values(), key=lambda row: (*row.configuration, row.zero_stage))


def stages(rows: list[Row], links: RatesByNodes, rates: LinkRates, points: Points) -> None:
    """Print how well ZeRO-1 follows from ZeRO-0."""
    by_stage = {(row.configuration, row.zero_stage): row for row in rows}
    found: dict[str, list[tuple[Row, float, float, float, bool]]] = {"ours": [], "20 lines": [], "stay": []}
    for row in rows:
        other = by_stage.get((row.configuration, 1))
        if row.zero_stage or other is None:
            continue
        try:
            predicted = changed(calibrate_described(described(row, links)), "NNG")
        except ParoAdviseError as error:
            print(f"refused: {row.configuration}: {error}")
            continue
        inside = predicted.p10 <= other.step_s * 1e6 <= predicted.p90
        simple = row.step_s - simple_s(row, rates, 0) + simple_s(row, rates, 1)
        for name, step_s in (("ours", predicted.p50 / 1e6), ("20 lines", simple), ("stay", row.step_s)):
            found[name].append((row, row.step_s, other.step_s, step_s, inside))
    print(f"\nZeRO-1 from ZeRO-0, {len(found['ours'])} pairs{'':8} median     p90  direction  inside 80 %")
    for name, pairs in found.items():
        errors = [true / step - 1 for _, _, true, step, _ in pairs]
        clear = [(before / step > 1) == (before / true > 1)
                 for _, before, true, step, _ in pairs if abs(before / true - 1) > SAME_SHARE]  # fmt: skip
        held = f"{np.mean([pair[4] for pair in pairs]):8.0%}" if name == "ours" else ""
        print(f"  {name:34} {quality(errors)}  {sum(clear)} of {len(clear)} {np.mean(clear):4.0%} {held}")
    points["ZeRO-1 from ZeRO-0"] = [(row.step_s / true, row.step_s / step) for row, _, true, step, _ in found["ours"]]
    for size in sorted({row.model_billion for row in rows}):
        part = [true / step - 1 for row, _, true, step, _ in found["ours"] if row.model_billion == size]
        if part:
            print(f"    ours, {size:5} billion parameters   {quality(part)}  of {len(part)}")


def scaling(rows: list[Row], links: RatesByNodes, rates: LinkRates, points: Points) -> None:
    """Print how well larger jobs follow from smaller ones."""
    groups: dict[tuple[float, ...], list[Row]] = defaultdict(list)
    shown = points.setdefault("more nodes from the smallest row", [])
    for row in rows:
        groups[row.series].append(row)
    found: dict[str, list[tuple[Row, float, bool]]] = {"ours": [], "20 lines": []}
    for series in groups.values():
        small = min(series, key=lambda row: (row.nodes, -row.tokens_per_s))
        larger = [row for row in series if row.nodes > small.nodes and row.dp > 1]
        for row in larger:
            try:
                predicted = moved(small, row, links)
            except ParoAdviseError as error:
                print(f"refused: {row.configuration} from {small.nodes} nodes: {error}")
                continue
            shown.append((small.step_s / row.step_s, small.step_s / (predicted.p50 / 1e6)))
            inside = predicted.p10 <= row.step_s * 1e6 <= predicted.p90
            found["ours"].append((row, row.step_s / (predicted.p50 / 1e6) - 1, inside))
            arithmetic = (small.step_s - simple_s(small, rates, small.zero_stage)) / small.micro_batches
            simple = arithmetic * row.micro_batches + simple_s(row, rates, row.zero_stage)
            found["20 lines"].append((row, row.step_s / simple - 1, inside))
    batch = [row.dp * row.micro_batch * row.micro_batches for row, _, _ in found["ours"]]
    print(f"\nmore nodes from the smallest row, {len(batch)} rows  median     p90  above 25 %  inside 80 %")
    for name, values in found.items():
        errors = [error for _, error, _ in values]
        held = f"{np.mean([item[2] for item in values]):8.0%}" if name == "ours" else ""
        print(f"  {name:34} {quality(errors)}  {sum(abs(error) > 0.25 for error in errors):6} {held:>14}")
    usual = [error for (_, error, _), size in zip(found["ours"], batch, strict=True) if size == 256]
    print(f"    ours, rows of 256 samples a step {quality(usual)}  of {len(usual)}")


def memory(rows: list[Row], links: RatesByNodes) -> None:
    """Print how well memory follows, with activations from the first row of each model."""
    errors: dict[float, list[float]] = defaultdict(list)
    other: dict[tuple[float, int], float] = {}
    for row in sorted(rows, key=lambda row: (row.nodes, row.zero_stage)):
        if row.tp > 1 or row.dp < 2:
            continue
        calibration = calibrate_described(described(row, links, tokens_per_s=1.0))  # speed tells nothing of memory
        states = score(calibration, baseline_candidate(calibration), Limits(), np.ones(1)).memory.total / (1 << 30)
        key = (row.model_billion, row.micro_batch)
        if key not in other:
            other[key] = row.memory_gb - states
            continue
        errors[row.model_billion].append((states + other[key]) / row.memory_gb - 1)
    every = [error for values in errors.values() for error in values]
    if every:
        print(f"\nmemory of a GPU, {len(every)} rows{'':20} {quality(every)}")


def plot(points: Points) -> str:
    """Return an SVG of predicted against measured speed-ups, one panel a question, both axes logarithmic."""
    side, left, top = 300, 60, 40
    panels = []
    for place, (title, pairs) in enumerate(points.items()):
        values = [value for pair in pairs for value in pair]
        low, high = math.log(min(values)), math.log(max(values))
        offset = left + place * (side + 90)

        def at(value: float, low: float = low, high: float = high) -> float:
            return (math.log(value) - low) / (high - low) * side

        dots = "".join(
            f'<circle cx="{offset + at(true):.1f}" cy="{top + side - at(step):.1f}" r="3.5"/>' for true, step in pairs
        )
        ticks = "".join(
            f'<text x="{offset + at(value):.1f}" y="{top + side + 16}" text-anchor="middle">{value:g}</text>'
            f'<text x="{offset - 6}" y="{top + side - at(value) + 4:.1f}" text-anchor="end">{value:g}</text>'
            for value in (WIDE_TICKS if high - low > math.log(4) else TICKS)
            if low <= math.log(value) <= high
        )
        panels.append(
            f'<g class="panel"><rect x="{offset}" y="{top}" width="{side}" height="{side}" fill="none" stroke="#888"/>'
            f'<path d="M{offset} {top + side}L{offset + side} {top}" stroke="#888" stroke-dasharray="4 4"/>'
            f'<g fill="#1f6feb" fill-opacity="0.55">{dots}</g><g fill="#666">{ticks}'
            f'<text x="{offset + side / 2}" y="{top + side + 34}" text-anchor="middle">measured</text>'
            f'<text x="{offset}" y="{top - 10}">{title}: predicted speed-up</text></g></g>'
        )
    width = left + len(points) * (side + 90)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {top + side + 50}" '
        f'font-family="sans-serif" font-size="13">{"".join(panels)}</svg>\n'
    )


def main() -> int:
    """Print the tables."""
    parser = argparse.ArgumentParser()
    parser.add_argument("paths", nargs="*", type=Path)
    parser.add_argument("--plot", type=Path)
    options = parser.parse_args()
    paths = options.paths or [SHARED / "ultrascale_h100.csv", SHARED / "ultrascale_h100_links.csv"]
    if not all(path.is_file() for path in paths) or len(paths) != 2:
        print(f"no rows: {SHARED} is not there; pass ROWS.csv LINKS.csv")
        return 1
    everything, links = read_rows(paths[0]), read_links(paths[1])
    plain = [row for row in everything if row.pp == 1 and row.zero_stage in STAGES]
    well = [row for row in plain if row.mfu_pct >= LEAST_MFU_PCT]
    rows = fastest(well)
    print(
        f"{len(everything)} rows; {len(everything) - len(plain)} with pipeline parallelism, {len(plain) - len(well)} with "
        f"an MFU below {LEAST_MFU_PCT:g} % and {len(well) - len(rows)} slower repeats left out"
    )
    rates = link_rates(described(rows[0], links))
    if rates is None:
        return 1
    points: Points = {}
    stages(rows, links, rates, points)
    scaling(rows, links, rates, points)
    memory(rows, links)
    if options.plot:
        options.plot.write_text(plot(points), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
