"""Checks on random runs what every prediction must keep (`make bench-invariants`).

- No predicted step is shorter than what it asks of a node's ports, of the links inside, or than its arithmetic.
- More bandwidth, between nodes or inside, never makes a step longer; more arithmetic never shorter.
- A smaller limit of memory never makes the fastest step that fits shorter (every tenth run: a whole plan each).

Runs are described at random: model, cluster, rates of links by nodes, parallel sizes, strategy, micro-batches. Half of
them have rates by group shape, half the tiers of traces.

Usage: bench_invariants.py [--runs 16000] [--seed 0] [--candidates 6]
"""

from __future__ import annotations

import argparse
import random
import sys
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from itertools import repeat
from typing import TYPE_CHECKING

import numpy as np

from paro_advise.advisor.description.calibrate import calibrate_described
from paro_advise.advisor.description.model import Cluster, DescribedRun, Description, Model, Parallel, RatesByNodes
from paro_advise.advisor.prediction.candidates import candidates
from paro_advise.advisor.prediction.recommend import recommend
from paro_advise.advisor.prediction.scoring import Limits
from paro_advise.advisor.prediction.step_replay import demand_us, measured_links, step_us
from paro_advise.errors import InputError

if TYPE_CHECKING:
    from paro_advise.advisor.prediction.calibration import Calibration
    from paro_advise.advisor.prediction.cluster_links import Links

NODES = (1, 2, 4, 8, 16, 32, 64)
EPSILON = 1e-6  # of a step, for rounding
GIB = float(1 << 30)


def random_description(generator: random.Random) -> Description:
    """Return a run that may be described, though its parts may contradict each other."""
    per_node = generator.choice((1, 2, 4, 8))
    nodes = generator.choice(NODES)

    def rates() -> dict[int, float]:
        rate = 10 ** generator.uniform(0.5, 2.7)
        found = {}
        for number in NODES:
            found[number] = rate
            rate *= generator.uniform(0.4, 1.05)
        return found

    links = (
        RatesByNodes(all_gather=rates(), reduce_scatter=rates(), all_reduce=rates())
        if generator.random() < 0.5
        else None
    )
    triple = generator.choice(("NNN", "NNG", "NGG", "GGG", "III", "IIG", "IGG", "NNI", "NII"))
    return Description(
        model=Model(
            parameters=10 ** generator.uniform(8, 11),
            layers=generator.randint(1, 40),
            sequence_length=2048,
            gradient_type=generator.choice(("fp32", "bf16")),
        ),
        cluster=Cluster(nodes=nodes, gpus_per_node=per_node, device=generator.choice(("A100", "H100")), links=links),
        parallel=Parallel(tensor=generator.choice((1, 1, 1, 2, 8))),
        run=DescribedRun(
            strategy=triple,
            micro_batches=generator.randint(1, 6),
            micro_batch_size=generator.randint(1, 4),
            compute_mfu_pct=(30, 60),
            reductions_beside_backward=generator.choice((None, None, (), ("NNN",))),
        ),
    )


def broken(calibration: Calibration, rng: random.Random, number: int) -> list[str]:
    """Return what predictions of a run break.

    Args:
        calibration: the run.
        rng: chooses candidates.
        number: of candidates.
    """
    found = []
    links = measured_links(calibration)
    everything = candidates(calibration)
    for candidate in rng.sample(everything, min(number, len(everything))):
        step = float(step_us(calibration, candidate, links))
        least = float(demand_us(calibration, candidate, links))
        if step < least * (1 - EPSILON):
            found.append(f"{candidate.name}: {step:.6g} us, it asks for {least:.6g}")
        for name in ("inter_gbps", "intra_gbps"):
            quicker = float(step_us(calibration, candidate, _faster(links, name, 2.0)))
            if quicker > step * (1 + EPSILON):
                found.append(f"{candidate.name}: {step:.6g} us, {quicker:.6g} with twice the {name}")
        slower = float(step_us(replace(calibration, compute_us=1.2 * calibration.compute_us), candidate, links))
        if slower < step * (1 - EPSILON):
            found.append(f"{candidate.name}: {step:.6g} us, {slower:.6g} with more arithmetic")
    return found


def broken_by_memory(calibration: Calibration, limits: tuple[float, float]) -> list[str]:
    """Return what plans of a run break under two limits of memory, the smaller one first (bytes)."""
    found = []
    tight, loose = (recommend(calibration, Limits(device_memory_bytes=limit)) for limit in limits)
    fits = [any(item.feasible and item.eligible for item in plan.candidates) for plan in (tight, loose)]
    if all(fits):
        times = [min(item.predicted.step_time_us.p50 for item in plan.candidates if item.feasible and item.eligible)
                 for plan in (tight, loose)]  # fmt: skip
        if times[0] < times[1] * (1 - EPSILON):
            found.append(f"with less memory {times[0]:.6g} us, with more {times[1]:.6g}")
    if fits[0] and not fits[1]:
        found.append("fits with less memory, not with more")
    return found


def _faster(links: Links, name: str, factor: float) -> Links:
    return replace(links, **{name: getattr(links, name) * factor})


def check(seed: int, number: int) -> tuple[bool, list[str]]:
    """Return whether the run of a seed can be, and what its predictions break."""
    generator = random.Random(seed)
    try:
        calibration = calibrate_described(random_description(generator))
    except InputError:
        return False, []
    if generator.random() < 0.5:
        passes = calibration.passes_us * 10 ** generator.uniform(-2, 1)
        calibration = replace(calibration, compute_us=passes + calibration.update.measured_us)
    limit = 10 ** generator.uniform(0, 3) * GIB
    found = broken(calibration, generator, number)
    if seed % 10 == 0:
        found += broken_by_memory(calibration, (limit, limit * generator.uniform(1, 8)))
    return True, found


def main() -> int:
    """Print what was broken, and how many runs were checked."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--runs", type=int, default=16_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--candidates", type=int, default=6)
    options = parser.parse_args()
    np.seterr(all="raise", under="ignore")
    checked = failed = 0
    seeds = range(options.seed, options.seed + options.runs)
    with ProcessPoolExecutor() as pool:
        for seed, (could_be, found) in zip(
            seeds, pool.map(check, seeds, repeat(options.candidates), chunksize=50), strict=True
        ):
            checked += could_be
            failed += bool(found)
            for line in found:
                print(f"seed {seed}: {line}", flush=True)
    print(f"{checked} runs of {options.runs} seeds could be; {failed} broke something")
    return min(1, failed)


if __name__ == "__main__":
    sys.exit(main())
