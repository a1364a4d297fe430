"""What hides communication: arithmetic of the model's own passes, told apart by what launched it."""

from __future__ import annotations

from dataclasses import replace

import pytest
from helpers import analyze, facts_of, write_run
from test_recommend import MB, calibration, estimate
from trace_builder import TraceBuilder

from paro_advise.advisor.prediction.candidates import baseline_candidate, candidates
from paro_advise.advisor.prediction.fitting.calibrate import calibrate
from paro_advise.advisor.prediction.fitting.model_units import Pieces
from paro_advise.advisor.prediction.fitting.observed_queues import observed_queues
from paro_advise.advisor.prediction.step_replay import measured_links, step_us
from paro_advise.core.framework import Framework
from paro_advise.policies.strategy import Strategy

UNITS = 3


def ddp_rank(
    rank, world=2, *, encoder_us=0.0, micro_batches=1, is_marked=True, recomputed_us=0.0, gathers_features=False,
    steps=3, longer=None, updates=lambda step: True, update_us=30.0,
):  # fmt: skip
    """DDP on a host far ahead of its device: per micro-batch an encoder, three layers of 40 us forward, 80 us backward.

    The host launches a micro-batch in 100 us: the encoder from 5 us on, the model from 20 us on, backward from 50 us
    on. An optimizer of 30 us, an average of weights of 20 us after it; each unit's gradients are reduced in 10 us.

    Args:
        longer: by step, how much longer the encoder and each unit's backward take.
    """
    trace = TraceBuilder(rank, world)
    now, usual_us = 0.0, encoder_us
    for step in range(steps):
        host = now
        more_us, back_us = (longer or {}).get(step, (0.0, 0.0))
        encoder_us = usual_us + more_us
        length = micro_batches * (encoder_us + UNITS * (120.0 + recomputed_us + back_us) + 10.0) + update_us + 30.0
        trace.step(step, now, length)
        for micro_batch in range(micro_batches):
            if encoder_us:
                trace.compute(now, encoder_us, name="encoder_gemm")
            now += encoder_us
            if is_marked:
                trace.annotation("DistributedDataParallel.forward", host + 20, 25)
            for _ in range(UNITS):
                trace.compute(now, 40.0)
                now += 40.0
            if gathers_features:
                trace.collective("AllGather", now, 3, nelems=64, issue=host + 45, seq=90 + step, dtype="Float")
            for unit in range(UNITS):
                at = host + 50 + 10 * unit
                trace.backward(at, 8, sequence=1000 * (step * micro_batches + micro_batch) + 500 - unit)
                trace.compute(now, 80.0 + recomputed_us + back_us)
                now += 80.0 + recomputed_us + back_us
                if micro_batch == micro_batches - 1:
                    trace.collective(
                        "AllReduce", now, 10, nelems=1_000_000, issue=at + 2, seq=3 * step + unit, tid=2, dtype="Float"
                    )  # fmt: skip
            trace.backward(host + 80, 2, sequence=1)
            now += 10.0
            host += 100.0
        if updates(step):
            trace.row("user_annotation", "Optimizer.step#AdamW.step", host, 8, 1, **{"External id": trace.next_id()})
            trace.row("gpu_user_annotation", "Optimizer.step#AdamW.step", now, update_us, 7)
            trace.compute(now, update_us, name="multi_tensor_apply_kernel<FusedAdamMathFunctor>")
            trace.annotation("ema", host + 10, 5)
            trace.compute(now + update_us, 20.0, name="lerp")
        now += update_us + 30.0
    return trace


def analysis_of(folder, **changes):
    return analyze(write_run(folder, [ddp_rank(rank, **changes) for rank in range(2)]))


@pytest.mark.parametrize("micro_batches", [1, 2])
def test_a_frozen_encoder_is_none_of_the_models_passes(tmp_path, micro_batches):
    analysis = analysis_of(tmp_path / "run", encoder_us=100.0, micro_batches=micro_batches)
    assert analysis.breakdown_us.compute == pytest.approx(micro_batches * (100 + 3 * 120) + 50)
    assert analysis.passes.forward == pytest.approx(micro_batches * 3 * 40)
    assert analysis.passes.backward == pytest.approx(micro_batches * 3 * 80)
    made = calibrate(analysis)
    assert made.aside_us == pytest.approx(micro_batches * 100 + 20)  # the encoder, and the average of weights
    assert made.backward_share == pytest.approx(2 / 3)
    assert any("not launched by the model's passes" in note for note in made.assumptions)


def test_where_nothing_shows_where_the_model_begins_all_before_backward_is_forward(tmp_path):
    analysis = analysis_of(tmp_path / "run", encoder_us=100.0, is_marked=False)
    assert analysis.passes.forward == pytest.approx(100 + 3 * 40)
    assert calibrate(analysis).aside_us == pytest.approx(20)


def test_a_gather_before_the_loss_is_no_entrance_of_the_model(tmp_path):
    """A contrastive loss gathers features; where the model begins nothing shows."""
    trace = ddp_rank(0, is_marked=False, gathers_features=True)
    (first, *_) = facts_of(trace.write(tmp_path / "rank0.json")).steps
    assert first.forward_us == pytest.approx(3 * 40)


def test_what_backward_computes_again_is_backward(tmp_path):
    """Checkpointed layers run forward once more: three quarters of the arithmetic."""
    made = calibrate(analysis_of(tmp_path / "run", recomputed_us=40.0))
    assert made.backward_share == pytest.approx(3 / 4)


def test_operators_whose_numbers_do_not_follow_time_tell_nothing(tmp_path):
    trace = ddp_rank(0)
    rows = [event for event in trace.events if event["cat"] != "kernel"]
    for event, number in zip(rows, reversed(range(1, 1 + len(rows))), strict=True):
        event["args"]["External id"] = number
    facts = facts_of(trace.write(tmp_path / "rank0.json"))
    assert [(step.forward_us, step.backward_us) for step in facts.steps] == [(None, None)] * 3


def test_kernels_that_carry_the_number_of_their_launch_tell_nothing(tmp_path):
    """As profilers wrote it before 2022; the number is another operator's."""
    trace = ddp_rank(0)
    for event in (event for event in trace.events if event["cat"] == "kernel"):
        event["args"]["External id"] = event["args"]["correlation"]
    facts = facts_of(trace.write(tmp_path / "rank0.json"))
    assert [(step.forward_us, step.backward_us) for step in facts.steps] == [(None, None)] * 3


def test_a_frozen_encoder_makes_every_strategy_slower_by_its_own_time():
    """It runs before the first gather and long before the first reduction, so that it hides none of them."""
    links = {"inter_gbps": estimate(1.0), "intra_gbps": estimate(100.0)}
    plain = calibration(is_gpu=True, native_reduce_scatter_is_all_reduce=False, backward_share=0.7, **links)
    with_encoder = replace(
        plain, compute_us=plain.compute_us + 70_000.0, aside_us=70_000.0, step_us=plain.step_us + 70_000.0
    )
    measured = measured_links(plain)
    for candidate in candidates(plain):
        longer = step_us(with_encoder, candidate, measured) - step_us(plain, candidate, measured)
        assert longer == pytest.approx(70_000.0), candidate


def test_backward_hides_as_much_as_it_was_seen_to_take():
    """Reductions alone, no gathers: all but the last hide while backward is long enough."""
    fast = {"inter_gbps": estimate(0.5), "intra_gbps": estimate(100.0)}
    made = calibration(is_gpu=True, native_reduce_scatter_is_all_reduce=False, **fast)
    ddp = next(item for item in candidates(made) if str(item.strategy) == "NNN" and item.collectives == "native")
    links = measured_links(made)
    short, long = (float(step_us(replace(made, backward_share=share), ddp, links)) for share in (0.05, 0.95))
    assert long < short - 1_000.0


def test_embeddings_in_front_are_gathered_first_and_reduced_last():
    """Nothing hides their first gather and their last reduction; how much they compute is not told by their bytes."""
    fast = {"inter_gbps": estimate(50.0), "intra_gbps": estimate(100.0), "is_gpu": True, "micro_batches": 1}
    rest = {"framework": Framework.DEEPSPEED, "native_reduce_scatter_is_all_reduce": False, "aside_us": 0.0}
    made = calibration(**fast, **rest, unit_bytes=(40 * MB, 4 * MB, 4 * MB, 4 * MB), front_bytes=40 * MB)
    links = measured_links(made)
    # Eight ranks on four nodes: 3 hops of 100 us between nodes, 4 of 50 inside, 7/8 of the bytes over 50 GB/s.
    front, block = (3 * 100.0 + 4 * 50.0 + 7 * size * MB / 8 / 50_000 for size in (40, 4))
    step = step_us(made, baseline_candidate(made), links)
    assert step == pytest.approx(100_000.0 + 2 * front + 5_000.0, rel=1e-4)
    last = replace(made, unit_bytes=tuple(reversed(made.unit_bytes)), front_bytes=0.0)
    assert step_us(last, baseline_candidate(last), links) == pytest.approx(100_000.0 + 2 * block + 5_000.0, rel=1e-4)
    # Where they only look rows up, they hide neither the next block's gather nor its reduction.
    looked_up = replace(links, root_share=0.0)
    assert step_us(made, baseline_candidate(made), looked_up) == pytest.approx(step + 2 * block, rel=1e-4)


@pytest.mark.parametrize(("exposed_share", "is_ahead"), [(0.3, True), (0.85, True), (1.0, False)])
def test_updated_parameters_come_back_beside_a_forward_pass_that_is_shorter(exposed_share, is_ahead, tmp_path):
    """Gathers of 100 ms beside a forward pass of 15 are exposed for most of that, and Megatron's overlap is on."""
    run = analyze(write_run(tmp_path / "run", [ddp_rank(rank) for rank in range(2)]))
    updates = replace(run.states["optimizer"], count=8.0, total_us=100_000.0, exposed_us=exposed_share * 100_000.0)
    run = replace(run, states={**run.states, "optimizer": updates})
    units = Pieces(unit_bytes=(4 * MB,) * UNITS, bucket_bytes=None, element_bytes=4)
    assert observed_queues(run, units, (), 1, own_way=False).publishes_ahead is is_ahead


def test_updated_parameters_that_come_back_beside_forward_expose_the_first_unit_only():
    """Megatron's overlap_param_gather: four units, each gathered one ahead of its compute, as in the traced run."""
    fast = {"inter_gbps": estimate(50.0), "intra_gbps": estimate(100.0), "is_gpu": True, "micro_batches": 1}
    rest = {
        "framework": Framework.MEGATRON,
        "baseline": Strategy.parse("NNG"),
        "native_reduce_scatter_is_all_reduce": False,
    }
    ring = 3 * 100.0 + 4 * 50.0 + 7 * 4 * MB / 8 / 50_000
    for micro_batches in (1, 3):
        fast["micro_batches"] = micro_batches
        behind = calibration(**fast, **rest)
        ahead = replace(behind, publishes_ahead=True)
        serial, beside = (step_us(run, baseline_candidate(run), measured_links(run)) for run in (behind, ahead))
        assert serial - beside == pytest.approx(3 * ring, rel=1e-6)
        if micro_batches == 1:
            assert beside == pytest.approx(100_000.0 + 2 * ring + 5_000.0, rel=1e-4)
    of_plan = {
        str(item.strategy): item for item in candidates(ahead) if item.collectives == "native" and not item.variant
    }
    assert of_plan["NNG"].publishes_ahead
    assert not of_plan["IIG"].publishes_ahead


@pytest.mark.parametrize(("exposed_us", "is_ahead"), [(30.0, True), (100.0, False)])
def test_whether_updated_parameters_come_back_beside_forward_the_traces_tell(exposed_us, is_ahead, tmp_path):
    analysis = analysis_of(tmp_path / "run")
    moved = replace(analysis.states["gradient"], total_us=100.0, exposed_us=exposed_us, hidden_us=100.0 - exposed_us)
    strategy = replace(analysis.run.strategy, triple="NNG", triple_at_rest="NNG")
    run = replace(analysis.run, framework=Framework.MEGATRON, strategy=strategy)
    assert (
        calibrate(replace(analysis, run=run, states=analysis.states | {"optimizer": moved})).publishes_ahead is is_ahead
    )
    assert not calibrate(analysis).publishes_ahead
