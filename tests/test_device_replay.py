"""A step beside a GPU: queues share links, and no step is shorter than what it asks of one."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from helpers import analyze, write_run
from test_recommend import calibration, estimate
from trace_builder import TraceBuilder, fsdp_rank

from paro_advise.advisor.prediction.advice.levers import larger_units
from paro_advise.advisor.prediction.candidates import candidates
from paro_advise.advisor.prediction.constants import NUM_DRAWS
from paro_advise.advisor.prediction.device_replay import Leg, Queues, UnitWork, micro_batch_us, slowed_micro_batch_us
from paro_advise.advisor.prediction.fitting.calibrate import calibrate
from paro_advise.advisor.prediction.moved_units import updates_us
from paro_advise.advisor.prediction.recommend import recommend
from paro_advise.advisor.prediction.sampler import Sampler
from paro_advise.advisor.prediction.scoring import Limits
from paro_advise.advisor.prediction.step_replay import demand_us, link_demand_us, measured_links, step_us
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


def test_a_model_that_runs_several_times_gathers_each_time():
    """Three passes forward of four units before one backward, which keeps the last: 15 gathers, 4 reductions."""
    thrice = AT_ONCE._replace(forwards=3.0)
    work = units(4, gather=on_port(10), again=on_port(10), reduce=on_port(10), compute=0.03)
    assert micro_batch_us(work, thrice) == pytest.approx((3 * 4 + 3 + 4) * 10, abs=1)
    # Nothing to send: the same arithmetic, whichever of its parts is backward's.
    assert micro_batch_us(units(4), thrice) == pytest.approx(4 * 30.0)


def test_the_root_is_gathered_first_and_reduced_last():
    """FSDP2's own order (a recorded step: tests/data/zero_runs/fsdp2_ggg_acc1). Two blocks, no arithmetic but theirs."""
    block = UnitWork(gather=on_port(10), again=on_port(10), reduce=on_port(20), between=(), compute=300.0)
    root = UnitWork(gather=on_port(40), again=on_port(40), reduce=on_port(80), between=(), compute=0.0)
    with_root = AT_ONCE._replace(separate=False, has_root=True)
    # The root's gather, the first block's, 2 blocks of 300 us, of the last again in backward, reductions of first and root.
    assert micro_batch_us([block, block, root], with_root) == pytest.approx(40 + 10 + 600 + 10 + 20 + 80)
    # Its arithmetic, a head over the vocabulary, lies between forward and backward and hides that gather.
    head = root._replace(compute=90.0)
    assert micro_batch_us([block, block, head], with_root) == pytest.approx(40 + 10 + 600 + 90 + 20 + 80)


def test_without_prefetch_a_gather_waits_behind_the_reduction_of_the_unit_before():
    """FSDP1 with backward_prefetch=None on one communicator: what is exposed is the gather, and the reduction before it.

    Three blocks of 20 us of forward and 40 of backward, gathers of 10, reductions of 25. Backward ends with 40 + 25 + 10
    of the second block and of the first, and 40 + 25 of that.
    """
    work = units(3, gather=on_port(10), again=on_port(10), reduce=on_port(25), compute=60.0)
    behind = AT_ONCE._replace(separate=False, prefetches=False)
    forward = 10 + 3 * 20
    assert micro_batch_us(work, behind) == pytest.approx(forward + 2 * (40 + 25 + 10) + 40 + 25)
    # Gathers issued ahead hide beneath compute, and reductions beneath that of the next unit.
    assert micro_batch_us(work, behind._replace(prefetches=True)) == pytest.approx(forward + 3 * 40 + 25)
    # Parameters kept for backward leave nothing to wait for.
    kept = behind._replace(gathers_once=True)
    assert micro_batch_us(work, kept) == pytest.approx(forward + 3 * 40 + 25)


def test_backward_passes_frozen_units_by_that_lie_in_front():
    """A frozen unit of 30 us of forward, two trained ones of 100 and 200: 30 + 200 forward, 400 backward, one reduction left.

    With backward's share 2/3 of what it reaches, a trained unit of 300 us has 100 of them in forward.
    """
    frozen = UnitWork(gather=on_port(5), again=(), reduce=(), between=(), compute=30.0, is_passed_by=True)
    block = UnitWork(gather=on_port(5), again=on_port(5), reduce=on_port(10), between=(), compute=300.0)
    assert micro_batch_us([frozen, block, block], AT_ONCE) == pytest.approx(5 + 30 + 200 + 400 + 10)
    # All three trained: the first has its two thirds in backward as well, and a reduction.
    first = block._replace(compute=30.0)
    assert micro_batch_us([first, block, block], AT_ONCE) == pytest.approx(5 + 10 + 200 + 400 + 20 + 10)


def multimodal_rank(rank):
    """A frozen tower of two units of 64,000 elements in front of two trained ones as large, and a root of 4,000."""
    trace = TraceBuilder(rank, 2)
    for step in range(2):
        base = step * 3000.0
        trace.step(step + 3, base, 3000.0)
        names = ["", "tower.0", "tower.1", "blocks.0", "blocks.1"]
        for place, name in enumerate(names):
            owners = (
                (f"FSDP::pre_forward ({name})", f"FSDP::all_gather ({name})")
                if name
                else ("FSDP::pre_forward", "FSDP::all_gather")
            )
            size, at = 64000 if name else 4000, base + 10 + 100 * place
            trace.collective("AllGather", at, 50, nelems=size, issue=at - 5, seq=place, owners=owners)
            trace.compute(at + 50, 100)
        trace.backward(base + 700, 1500, sequence=100 * step + 50)
        for place, name in enumerate(["blocks.1", "blocks.0"]):
            at = base + 720 + 500 * place
            owners = (f"FSDP::pre_backward ({name})", f"FSDP::all_gather ({name})")
            trace.collective("AllGather", at, 50, nelems=64000, issue=at - 5, seq=10 + place, owners=owners, tid=2)
            trace.compute(at + 50, 300)
            reduced = (f"FSDP::post_backward_reduce ({name})",)
            trace.collective(
                "ReduceScatter", at + 350, 50, nelems=64000, issue=at + 340, seq=20 + place, owners=reduced, tid=2
            )
        last = ("FSDP::root_post_backward_callback", "FSDP::post_backward_reduce")
        trace.collective("ReduceScatter", base + 1900, 20, nelems=4000, issue=base + 1890, seq=30, owners=last)
        trace.annotation("Optimizer.step#AdamW.step", base + 2300, 50)
        trace.compute(base + 2350, 600)
    return trace


def test_units_that_forward_alone_gathers_are_passed_by_in_backward(tmp_path):
    """260,000 parameters of which 132,000 train; what fits a plan of them gathers the tower once."""
    found = analyze(write_run(tmp_path / "run", [multimodal_rank(rank) for rank in range(2)]))
    assert (found.run.parameter_count, found.run.total_parameter_count) == (132_000, 260_000)
    run = calibrate(found)
    assert run.unit_bytes == (128_000.0,) * 4 + (8_000.0,)
    assert run.passed_by == (True, True, False, False, False)
    assert run.trained_share == pytest.approx(132 / 260)
    # Bytes of a step: 5 gathers in forward, 2 in backward, 3 reductions; half of a buffer goes to the other rank.
    links = replace(measured_links(run), inter_gbps=1e9, intra_gbps=1.0, intra_alpha_us=0.0, inter_alpha_us=0.0)
    base = next(
        item
        for item in candidates(run)
        if str(item.strategy) == "GGG" and item.collectives == "native" and not item.variant
    )
    moved = (4 * 128_000 + 8_000 + 2 * 128_000 + 2 * 128_000 + 8_000) / 2
    assert float(link_demand_us(run, base, links)) == pytest.approx(moved / 1e3 + sum(updates_us(run, base)), rel=0.01)


def test_the_root_is_what_backward_does_not_gather_again(tmp_path):
    """A block of 64,000 elements of 2 bytes, gathered in forward and in backward, and a root of 4,000, gathered once."""
    run = calibrate(analyze(write_run(tmp_path / "run", [fsdp_rank(rank) for rank in range(2)])))
    assert (run.unit_bytes, run.root_bytes) == ((128_000.0, 8_000.0), 8_000.0)


def made_up(seed):
    """Return units, some many times in a row, queues, and how much longer they compute beside collectives."""
    rng = np.random.default_rng(seed)
    draws = int(rng.choice([0, 20]))

    def time_us(middle):
        middle *= rng.uniform(0.1, 2)
        return middle * np.exp(rng.normal(0, 0.2, draws)) if draws else float(middle)

    def legs(share):
        alone = [time_us(100) for _ in range(rng.integers(1, 3))] if rng.random() < share else []
        on_links = [(rng.random() < 0.7, rng.random() < 0.6) for _ in alone]
        return tuple(
            Leg(alone=us, port=0.7 * us if port else 0.0, fabric=0.5 * us if fabric else 0.0)
            for us, (port, fabric) in zip(alone, on_links, strict=True)
        )

    kinds = [
        UnitWork(
            gather=legs(0.8),
            again=legs(0.8),
            reduce=legs(0.9),
            between=legs(0.5),
            compute=time_us(300),
            copy=time_us(5),
            copied_in=time_us(3),
        )
        for _ in range(rng.integers(1, 4))
    ]
    kinds.append(UnitWork(legs(1.0), again=(), reduce=(), between=(), compute=time_us(100), is_passed_by=True))
    flags = [name for name in Queues._fields if name not in ("forwards", "backward")]
    queues = Queues(**{name: bool(rng.random() < 0.6) for name in flags}, forwards=float(rng.integers(1, 3)))
    work = [kind for kind in rng.permutation(len(kinds)) for _ in range(rng.choice([1, 5, 12, 40]))]
    return [kinds[kind] for kind in work], queues, 1.2 if not draws else 1 + 0.3 * rng.random(draws)


@pytest.mark.parametrize("first_seed", range(0, 400, 100))
def test_units_that_stand_many_times_in_a_row_take_as_long_as_if_each_were_looked_at(first_seed):
    """Copies of a unit are units of their own, each of which is replayed."""
    for seed in range(first_seed, first_seed + 100):
        work, queues, slowing = made_up(seed)
        each = slowed_micro_batch_us([unit._replace() for unit in work], queues, slowing)
        assert slowed_micro_batch_us(work, queues, slowing) == pytest.approx(each, rel=1e-9), (seed, queues)


def test_a_pace_that_only_seems_to_go_on_is_followed_step_by_step():
    """``main`` rises by 3 for four steps, then by 1, until ``compute_end`` meets, ten steps later, the line of the 3."""
    from paro_advise.advisor.prediction.device_replay import _Backward, _repeat

    def step(now):
        return _Backward(
            main=max(now.ready, now.compute_end),
            reductions=now.main,
            between=now.reductions,
            ready=max(now.ready + 1, now.done),
            compute_end=now.compute_end + 5,
            done=now.waiting,
            waiting=now.port,
            port=now.port - 100,
            fabric=now.fabric,
        )

    moments = start = _Backward(
        main=-3.0,
        reductions=-6.0,
        between=-9.0,
        ready=0.0,
        compute_end=-28.0,
        done=3.0,
        waiting=6.0,
        port=9.0,
        fabric=0.0,
    )
    for _ in range(16):
        moments = step(moments)
    assert _repeat(step, start, 16) == moments


def test_units_that_never_end_are_not_taken_to_settle():
    forever = (Leg(alone=math.inf, port=0.0, fabric=0.0),)
    assert micro_batch_us(units(30, gather=on_port(10), again=forever, reduce=forever), AT_ONCE) == math.inf


def test_few_of_the_units_that_stand_many_times_in_a_row_are_looked_at(monkeypatch):
    """By the calls that units make of the links, of 1,000 which wait for links and of 1,000 which compute."""
    from paro_advise.advisor.prediction import device_replay

    sends = []
    send = device_replay._send

    def counted(legs, *moments):
        sends.append(legs)
        return send(legs, *moments)

    monkeypatch.setattr(device_replay, "_send", counted)
    for us in (10, 100):
        micro_batch_us(units(1000, gather=on_port(us), again=on_port(us), reduce=on_port(us), compute=90.0), AT_ONCE)
    assert len(sends) < 100


def test_what_takes_longer_beside_collectives_is_hidden_where_they_set_the_pace():
    """Arithmetic takes half as long again beside a collective; four units, gathered twice and reduced once."""
    long = units(4, gather=on_port(100), again=on_port(100), reduce=on_port(100), compute=30.0)
    alone_us = micro_batch_us(long, AT_ONCE)
    # All 120 us run beside, but the last unit's alone, 20 us in backward, is waited for.
    assert slowed_micro_batch_us(long, AT_ONCE, 1.5) == pytest.approx(alone_us, abs=0.5 * 30)
    short = units(4, gather=on_port(1), again=on_port(1), reduce=on_port(1), compute=300.0)
    beside_us = 4 + 3 + 4 - (micro_batch_us(short, AT_ONCE) - 4 * 300)
    assert slowed_micro_batch_us(short, AT_ONCE, 1.5) == pytest.approx(micro_batch_us(short, AT_ONCE) + 0.5 * beside_us)


def test_draws_that_replay_the_measured_step_count_most():
    """Of draws that miss the step by 0, 3 and 12 % (sigma 3 %) the first is taken exp(0.5) times as often as the second."""
    errors = np.repeat([0.0, 0.03, 0.12], 1000)
    counts = np.zeros(3)
    for seed in range(50):
        taken = Sampler(seed).pick_likely(errors, NUM_DRAWS)
        counts += np.bincount(taken // 1000, minlength=3)
    assert counts[0] / counts[1] == pytest.approx(math.exp(0.5), rel=0.1)
    assert counts[2] < 0.01 * counts[0]


def test_what_stays_inside_nodes_runs_beside_what_crosses_them():
    # Gathers inside nodes and reductions between them: 7 * 10 us and 4 * 10 us at the same time.
    work = units(4, gather=inside(10), again=inside(10), between=on_port(10), compute=0.03)
    assert micro_batch_us(work, AT_ONCE) == pytest.approx(7 * 10 + 10, abs=1)  # the last reduction follows


def test_what_one_collective_leaves_of_a_port_another_one_uses():
    """Scatters that keep a port busy for 8 of their 10 us, all-reduces of 5 us on another stream: 13 us a unit."""
    scatter = (Leg(alone=10.0, port=8.0, fabric=0.0),)
    work = units(20, reduce=scatter, between=on_port(5), compute=0.03)
    assert micro_batch_us(work, AT_ONCE) == pytest.approx(20 * (8 + 5), rel=0.05)
    # Nothing else to do: the scatter alone takes its 10 us.
    assert micro_batch_us(units(20, reduce=scatter, compute=0.03), AT_ONCE) == pytest.approx(20 * 10, rel=0.02)


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


@pytest.mark.parametrize("is_on_device", [True, False], ids=["span of the device", "span of the host"])
def test_a_device_updates_what_its_rank_holds(is_on_device, tmp_path):
    """Two kernels of 42 us of an optimizer whose states lie on one of two ranks each: 40 us of them are its share.

    Profilers may leave out the spans of the device: what the host's span launched tells as well.
    """
    traces = [fsdp_rank(rank) for rank in range(2)]
    for trace in traces:
        for step in range(2):
            base = 1000.0 * step
            for start in (base + 880, base + 930):
                trace.compute(start, 42, name="multi_tensor_apply_kernel<FusedAdamMathFunctor>")
                launched = trace.events[-1]["args"]["correlation"]
                trace.row(
                    "cuda_runtime", "cudaLaunchKernel", base + 850 + (start - base) / 100, 1, 1, correlation=launched
                )
            trace.annotation("Optimizer.step#ZeroRedundancyOptimizer.step", base + 850, 20)
            trace.annotation("Optimizer.step#AdamW.step", base + 855, 4)
            if is_on_device:
                trace.row("gpu_user_annotation", "Optimizer.step#AdamW.step", base + 880, 92, 7)
                trace.row("gpu_user_annotation", "FSDP::root_post_backward_callback", base + 300, 600, 7)
    analysis = analyze(write_run(tmp_path / "run", traces))
    assert (analysis.update.us, analysis.update.num_kernels) == (pytest.approx(84), 2)
    made = calibrate(analysis)
    assert made.baseline.optimizer == "G"
    assert made.update.us(2) == pytest.approx(84)
    assert made.update.us(1) == pytest.approx(4 + 2 * 80)  # a kernel takes 2 us at least
    native = {
        str(item.strategy): item for item in candidates(made) if item.collectives == "native" and not item.variant
    }
    whole, parts = (sum(updates_us(made, native[name])) for name in ("NNN", "NNG"))
    assert (whole, parts) == (pytest.approx(164), pytest.approx(84))


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
        rail_gain=estimate(float(generator.uniform(1, 1.3)), 0.05),
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


def test_ranges_are_wider_where_less_was_seen():
    """One rank of 32, one step of many: the same prediction with less certainty."""
    made = random_run(np.random.default_rng(5))

    def spans(**changes):
        plan = recommend(replace(made, **changes), Limits())
        steps = [choice.predicted.step_time_us for choice in plan.candidates]
        return np.mean([math.log(step.p90 / step.p10) for step in steps]), [step.p50 for step in steps]

    whole, middle = spans()
    for changes in ({"seen_share": 1 / 32}, {"num_steps": 1}):
        wider, same = spans(**changes)
        assert wider > whole
        assert sorted(same) == pytest.approx(sorted(middle), rel=0.02)


@pytest.mark.parametrize("seed", range(3))
def test_less_memory_is_never_predicted_faster(seed):
    made = random_run(np.random.default_rng(100 + seed))
    roomy = recommend(made, Limits())
    held = roomy.chosen.predicted.memory_bytes
    tight = recommend(made, Limits(device_memory_bytes=held))
    fits = [choice.predicted.step_time_us.p50 for choice in tight.candidates if choice.feasible]
    assert min(fits, default=float("inf")) >= min(c.predicted.step_time_us.p50 for c in roomy.candidates if c.feasible)


GROUPS = [("0", "default_pg", list(range(8))), ("1", "mesh_fsdp", [0, 2, 4, 6]), ("2", "mesh_tp", [0, 1])]


def device_rank(rank, *, group="1", gather="BFloat16", scatter="BFloat16", trained=64_000, parallel=True):
    """FSDP2 of one unit of 64,000 parameters over every second of 8 ranks on two nodes; tensor parallelism of two."""
    trace = TraceBuilder(rank, 8, groups=GROUPS, gpus_per_node=4)
    for step in range(3):
        base, seq = step * 1000.0, 10 * step
        trace.step(step, base, 1000)
        trace.annotation("FSDP::root_pre_forward", base + 1, 100)
        for number, unit in enumerate(("blocks.0", "blocks.1", "blocks.2", "blocks.3", "")):
            owners = (f"FSDP::pre_forward ({unit})", f"FSDP::all_gather ({unit})")
            trace.collective(
                "AllGather", base + 10 + 40 * number, 20, nelems=64_000, issue=base + 5 + 40 * number,
                seq=seq + number, owners=owners, group=group, dtype=gather,
            )  # fmt: skip
            trace.compute(base + 30 + 40 * number, 20)
        trace.backward(base + 300, 600, sequence=step + 1)
        for number in range(5):
            trace.collective(
                "ReduceScatter", base + 400 + 60 * number, 30, nelems=trained, issue=base + 350 + 60 * number, tid=2,
                seq=seq + 5 + number, owners=("FSDP::post_backward_reduce (x)",), group=group, dtype=scatter,
            )  # fmt: skip
            if parallel:
                trace.collective(
                    "AllReduce", base + 380 + 60 * number, 10, nelems=4000, issue=base + 340 + 60 * number, tid=2,
                    seq=seq + number, owners=(), group="2", stream=30,
                )  # fmt: skip
        trace.compute(base + 400, 500)
    return trace


def calibrated(tmp_path, **changes):
    ranks = (0, 2, 4, 6) if changes.get("group", "1") == "1" else range(8)
    return calibrate(analyze(write_run(tmp_path / "run", [device_rank(rank, **changes) for rank in ranks])))


def test_tensor_parallel_ranks_do_not_share_the_model_states(tmp_path):
    made = calibrated(tmp_path)
    assert (made.job_world_size, made.world_size) == (8, 4)
    assert (made.job_ranks_per_node, made.ranks_per_node) == (4, 2)
    assert made.parameters == 5 * 64_000
    assert any("4 of 8 ranks share the data" in note for note in made.assumptions)
    plan = recommend(made, Limits())
    assert (plan.preconditions.world_size, plan.preconditions.gpus_per_node) == (8, 4)


def test_gradients_may_be_wider_than_parameters(tmp_path):
    made = calibrated(tmp_path, scatter="Float")
    assert (made.gather_width, made.reduce_width, made.element_bytes) == (2, 4, 2)
    assert made.parameters == 5 * 64_000


def test_frozen_parameters_have_no_gradients_and_no_optimizer_states(tmp_path):
    made = calibrated(tmp_path, trained=6_400)
    assert made.parameters == 5 * 64_000
    assert made.trained_share == pytest.approx(0.1)
    rows = {choice.triple: choice.predicted.terms for choice in recommend(made, Limits()).candidates}
    # Replicated in bf16: 2 bytes a parameter; fp32 masters and two moments are 12 bytes of a tenth of them.
    assert rows["NNN"]["parameter"] == pytest.approx(2 * 320_000)
    assert rows["NNN"]["optimizer"] == pytest.approx(12 * 32_000)


def test_a_job_without_model_parallelism_shards_over_all_ranks(tmp_path):
    made = calibrated(tmp_path, group="0", parallel=False)
    assert (made.job_world_size, made.world_size, made.ranks_per_node) == (8, 8, 4)


def test_what_traces_of_deepspeed_leave_open_is_said(tmp_path):
    """With one micro-batch ZeRO-1 sends what ZeRO-2 does; gathers over groups of two sizes are hpZ's."""
    analysis = analyze(write_run(tmp_path / "run", [fsdp_rank(rank) for rank in range(2)]))
    run = replace(analysis.run, framework=Framework.DEEPSPEED)
    for triple, told in (("NGG", "with one micro-batch a step ZeRO-1 sends the same"), ("GGG", "")):
        strategy = replace(run.strategy, triple=triple, triple_at_rest=triple)
        said = " ".join(calibrate(replace(analysis, run=replace(run, strategy=strategy))).assumptions)
        assert (told in said) if told else ("ZeRO-1" not in said)
    entry = next(item for item in analysis.collectives if item.state == "parameter")
    more = replace(analysis, run=run, collectives=(*analysis.collectives, replace(entry, group_size=8)))
    assert any("gathered over 2 and 8 ranks: hpZ's second copy" in item for item in calibrate(more).assumptions)


def test_the_root_stays_a_unit_of_its_own_where_blocks_are_merged():
    """8 blocks in pairs, and the root: 5 units; merged with blocks it would hold up the first pass and the last reduction."""
    blocks = (4e6,) * 8
    made = calibration(is_gpu=True, unit_bytes=(*blocks, 10e6), root_bytes=10e6)
    (change,) = [change for change in larger_units(made) if "units of 2 blocks" in change.what]
    assert change.calibration.unit_bytes == (8e6, 8e6, 8e6, 8e6, 10e6)
    (change,) = [change for change in larger_units(made) if "units of 4 blocks" in change.what]
    assert change.calibration.unit_bytes == (16e6, 16e6, 10e6)
