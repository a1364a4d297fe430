"""A step beside a GPU: queues share links, and no step is shorter than what it asks of one."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from test_recommend import calibration, estimate

from paro_advise.advisor.prediction.candidates import candidates
from paro_advise.advisor.prediction.device_replay import Leg, Queues, UnitWork, micro_batch_us
from paro_advise.advisor.prediction.recommend import recommend
from paro_advise.advisor.prediction.scoring import Limits
from paro_advise.advisor.prediction.step_replay import demand_us, measured_links, step_us
from paro_advise.core.framework import Framework

AT_ONCE = Queues(overlaps_gathers=True, overlaps_reductions=True, separate=True, gathers_once=False)


def on_port(us):
    return (Leg(alone=us, port=us, fabric=0.0),)


def inside(us):
    return (Leg(alone=us, port=0.0, fabric=us),)


def units(number, *, gather=(), again=(), reduce=(), between=(), compute=30.0):
    return [UnitWork(gather=gather, again=again, reduce=reduce, between=between, compute=compute)] * number


def test_two_queues_do_not_each_get_the_whole_link():
    # Four units, each 10 us of gather twice (the last once) and 10 us of reduction through one port, next to no compute.
    work = units(4, gather=on_port(10), again=on_port(10), reduce=on_port(10), compute=0.03)
    assert micro_batch_us(work, AT_ONCE) >= 4 * 10 + 3 * 10 + 4 * 10


def test_what_stays_inside_nodes_runs_beside_what_crosses_them():
    # Gathers inside nodes and reductions between them: 7 * 10 us and 4 * 10 us at the same time.
    work = units(4, gather=inside(10), again=inside(10), between=on_port(10), compute=0.03)
    assert micro_batch_us(work, AT_ONCE) == pytest.approx(7 * 10 + 10, abs=1)  # the last reduction follows


def test_the_all_reduce_of_hybrid_sharding_does_not_hold_up_gathers():
    # Per unit 20 us forward, 40 us backward; gathers and scatters of 10 us inside, all-reduces of 30 us between nodes.
    work = units(4, gather=inside(10), again=inside(10), reduce=inside(10), between=on_port(30), compute=60.0)
    # Gather, 4 * 20 forward, 4 * 40 backward; then the last scatter and all-reduce.
    assert micro_batch_us(work, AT_ONCE._replace(separate=False)) == pytest.approx(10 + 80 + 160 + 10 + 30, abs=1)


def test_backward_waits_for_reductions_that_block():
    work = units(4, reduce=on_port(10), compute=30.0)
    beside = micro_batch_us(work, AT_ONCE)
    blocking = micro_batch_us(work, AT_ONCE._replace(overlaps_reductions=False))
    assert (beside, blocking) == (pytest.approx(4 * 30 + 10), pytest.approx(4 * 30 + 4 * 10))


def random_run(generator):
    """Any run beside GPUs: nodes, ranks, units, links, micro-batches."""
    nodes, local = int(generator.choice([1, 2, 4, 8])), int(generator.choice([2, 4, 8]))
    sizes = tuple(float(size) for size in sorted(generator.uniform(1e6, 4e8, size=generator.integers(2, 9))))
    return calibration(
        world_size=nodes * local,
        ranks_per_node=local,
        micro_batches=int(generator.integers(1, 5)),
        unit_bytes=sizes,
        element_bytes=2,
        gather_width=2,
        reduce_width=int(generator.choice([2, 4])),
        compute_us=float(generator.uniform(1e3, 1e6)),
        wait_group_size=nodes * local,
        is_gpu=True,
        native_reduce_scatter_is_all_reduce=False,
        baseline_group_size=local,
        framework=Framework.FSDP2,
        inter_alpha_us=estimate(float(generator.uniform(1, 30))),
        inter_gbps=estimate(float(generator.uniform(1, 400))),
        intra_alpha_us=estimate(float(generator.uniform(1, 5))),
        intra_gbps=estimate(float(generator.uniform(20, 450))),
        pod_gbps=estimate(10.0),
        compute_slowing=estimate(float(generator.uniform(1, 1.3)), 0.05),
    )


@pytest.mark.parametrize("seed", range(40))
def test_no_step_is_shorter_than_what_it_asks_of_a_link_or_of_compute(seed):
    made = random_run(np.random.default_rng(seed))
    links = measured_links(made)
    for candidate in candidates(made):
        total = float(step_us(made, candidate, links))
        assert total >= float(demand_us(made, candidate, links)) * (1 - 1e-9), candidate
    quick = replace(links, inter_gbps=2 * links.inter_gbps, intra_gbps=2 * links.intra_gbps)
    for candidate in candidates(made)[:8]:
        assert float(step_us(made, candidate, quick)) <= float(step_us(made, candidate, links)) * (1 + 1e-9)


@pytest.mark.parametrize("seed", range(3))
def test_less_memory_is_never_predicted_faster(seed):
    made = random_run(np.random.default_rng(100 + seed))
    roomy = recommend(made, Limits())
    held = roomy.chosen.predicted.memory_bytes
    tight = recommend(made, Limits(device_memory_bytes=held))
    fits = [choice.predicted.step_time_us.p50 for choice in tight.candidates if choice.feasible]
    assert min(fits, default=float("inf")) >= min(c.predicted.step_time_us.p50 for c in roomy.candidates if c.feasible)
