"""A step beside a GPU under FSDP2: what its gathers and reductions wait for, and what its copies take."""

from __future__ import annotations

from dataclasses import replace

import pytest
from helpers import analyze, write_run
from test_device_replay import AT_ONCE, on_port
from test_recommend import calibration, estimate
from trace_builder import fsdp_rank

from paro_advise.advisor.analysis.model import DeviceUpdate
from paro_advise.advisor.facts.model import KernelTime, Work
from paro_advise.advisor.prediction.candidates import candidates
from paro_advise.advisor.prediction.device_replay import UnitWork, micro_batch_us
from paro_advise.advisor.prediction.fitting.calibrate import calibrate
from paro_advise.advisor.prediction.moved_units import more_copies_us
from paro_advise.advisor.prediction.step_replay import measured_links, step_us
from paro_advise.core.framework import Framework
from paro_advise.policies.strategy import Strategy


def test_fsdp2_waits_behind_a_unit_for_the_reduction_of_the_unit_before():
    """Kept for backward: the last block is done at 180 us, its reduction at 250; the one before would be done at 220.

    The first, with 200 us of backward, begins at 250 in place of 220, and its own reduction takes 70.
    """
    block = UnitWork(gather=(), again=(), reduce=on_port(70), between=(), compute=60.0)
    work = [block._replace(compute=300.0), block, block]
    kept = AT_ONCE._replace(separate=False, gathers_once=True)
    assert micro_batch_us(work, kept._replace(holds_back=True)) == pytest.approx(250 + 200 + 70)
    assert micro_batch_us(work, kept) == pytest.approx(220 + 200 + 70)


def test_fsdp2_lays_gradients_out_once_the_reduction_before_is_done():
    """Of each backward pass the last 10 us do: reductions that set the pace are so far apart.

    The second block has computed at 210 us and waits for the reduction of the third until 250; its own begins at 260.
    The first, which has computed and waits until 330, begins its own at 340.
    """
    block = UnitWork(gather=(), again=(), reduce=on_port(70), between=(), compute=60.0, copied_in=10.0)
    kept = AT_ONCE._replace(separate=False, gathers_once=True, holds_back=True)
    assert micro_batch_us([block] * 3, kept) == pytest.approx(60 + 40 + 3 * 70 + 2 * 10)
    assert micro_batch_us([block] * 3, kept._replace(holds_back=False)) == pytest.approx(60 + 40 + 3 * 70)


def test_fsdp2_gathers_two_units_ahead_in_forward():
    """A gather waits until the unit before the last is laid out (torch's FSDPParamGroup.wait_for_unshard).

    Three units of 5 us to gather, and a last one of 30 us; forward computes 10 us in each. The second unit begins at 15
    us: then the last gather begins, and ends at 45; where it waits for the third unit, it ends at 55.
    """
    block = UnitWork(gather=on_port(5), again=(), reduce=(), between=(), compute=30.0)
    work = [block, block, block, block._replace(gather=on_port(30))]
    kept = AT_ONCE._replace(gathers_once=True)
    assert micro_batch_us(work, kept._replace(holds_back=True)) == pytest.approx(45 + 10 + 4 * 20)
    assert micro_batch_us(work, kept) == pytest.approx(55 + 10 + 4 * 20)


def on_fast_links(strategy, framework):
    """A run whose collectives take next to no time."""
    return calibration(
        is_gpu=True,
        baseline=Strategy.parse(strategy),
        framework=framework,
        gather_width=2,
        inter_gbps=estimate(1e6),
        intra_gbps=estimate(1e6),
        step_us=120_000.0,
    )


def test_from_ddp_the_copies_that_fsdp2_would_make_are_counted():
    """Arithmetic sets the pace: each gather lays elements of 2 bytes out, each reduction reads 2 and writes 4 bytes."""
    run = on_fast_links("NNN", Framework.DDP)
    copied, links = replace(run, copy_us_per_byte=0.001), measured_links(run)
    found = {str(item.strategy): item for item in candidates(run) if item.collectives == "native" and not item.variant}
    elements = 4e6 / 4
    gathers, reductions = 4 + 3, 4  # of a micro-batch; backward finds the last unit where it is
    expected = 2 * 0.001 * elements * (2 * gathers + (2 + 4) / 2 * reductions)
    more = step_us(copied, found["GGG"], links) - step_us(run, found["GGG"], links)
    assert float(more) == pytest.approx(expected, rel=0.01)
    assert step_us(copied, found["NNN"], links) == step_us(run, found["NNN"], links)


def test_from_fsdp1_the_copies_of_fsdp2_are_counted_where_only_that_keeps_a_second_copy():
    """FSDP1 gathers into the model's own memory; its own ways go on without copies."""
    run = on_fast_links("GGG", Framework.FSDP1)
    copied, links = replace(run, copy_us_per_byte=0.001), measured_links(run)
    found = [item for item in candidates(run) if item.collectives == "native" and not item.offload]
    assert {item.variant.keeps_copy for item in found} == {True, False}
    elements = 4e6 / 4
    expected = 2 * 0.001 * elements * (2 * (4 + 3) + (2 + 4) / 2 * 4)
    for item in found:
        more = float(step_us(copied, item, links) - step_us(run, item, links))
        assert more == pytest.approx(expected if item.variant.keeps_copy else 0.0, rel=0.01)


def test_what_lays_gradients_out_is_told_by_its_kernels(tmp_path):
    trace = [fsdp_rank(rank) for rank in range(2)]
    for rank in trace:
        for base in (0.0, 1000.0):
            rank.compute(
                base + 860, 30, name="void at::native::(anonymous namespace)::chunk_cat_cuda_kernel<float, float>"
            )
    found = analyze(write_run(tmp_path / "run", trace))
    assert (found.copied_in_us, found.copied_out_us) == (pytest.approx(30.0), 0.0)
    assert calibrate(found).copied_in_us == pytest.approx(30.0)


def test_gathered_parameters_are_laid_out_before_the_model_computes():
    """Copies of 7 us: three in forward, and two in backward, where the last unit is still there."""
    block = UnitWork(gather=on_port(5), again=on_port(5), reduce=on_port(10), between=(), compute=300.0, copy=7.0)
    plain = block._replace(copy=0.0)
    without = micro_batch_us([plain] * 3, AT_ONCE)
    assert micro_batch_us([block] * 3, AT_ONCE) == pytest.approx(without + 5 * 7)
    kept = AT_ONCE._replace(gathers_once=True)
    assert micro_batch_us([block] * 3, kept) == pytest.approx(micro_batch_us([plain] * 3, kept) + 3 * 7)


def test_what_lays_parameters_out_belongs_to_their_gathers(tmp_path):
    """Of 40 us a step in two gathers of a block and one of the root, kept parameters save one block's part."""
    trace = [fsdp_rank(rank) for rank in range(2)]
    for rank in trace:
        for base in (0.0, 1000.0):
            rank.compute(base + 860, 40, name="void fsdp::split_with_sizes_copy_out_contiguous_no_cast_kernel(char**)")
    found = analyze(write_run(tmp_path / "run", trace))
    assert found.copied_out_us == pytest.approx(40.0)
    run = calibrate(found)
    ways = {item.variant.label if item.variant else "": item for item in candidates(run)
            if str(item.strategy) == "GGG" and item.collectives == "native"}  # fmt: skip
    whole = next(item for item in candidates(run) if str(item.strategy) == "NNN" and item.collectives == "native")
    block, root = 128_000, 8_000
    each = 40 / (2 * block + root)
    assert more_copies_us(run, ways[""]) == pytest.approx(0.0)
    assert more_copies_us(run, ways["kept for backward"]) == pytest.approx(-block * each)
    assert more_copies_us(run, whole) == pytest.approx(-40.0)


@pytest.mark.parametrize(("parameters", "grows"), [(10**9, 50.0), (1_000, 0.0)])
def test_norms_of_gradients_take_longer_for_a_rank_that_holds_more_of_them(parameters, grows, tmp_path):
    """Of two shards a norm of 50 us took; of few parameters it took what a launch takes, whoever holds them."""
    found = analyze(write_run(tmp_path / "run", [fsdp_rank(rank) for rank in range(2)]))
    norm = KernelTime(name="multi_tensor_apply_kernel<LpNormFunctor>", kind="reduction", us=50.0, count=1.0)
    made = calibrate(
        replace(
            found,
            run=replace(found.run, device_name="NVIDIA A100-SXM4-80GB", parameter_count=parameters),
            work=Work(kind_us={}, kernels=(norm,)),
            update=DeviceUpdate(us=100.0, num_kernels=0.0),
        )
    )
    assert made.update.us(2) == pytest.approx(150.0)
    assert made.update.us(1) == pytest.approx(200.0 + 50.0 + grows, abs=0.01)
