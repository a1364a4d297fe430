"""Models that send themselves in one piece, hold experts or frozen parts, or whose optimizer gathers by itself."""

from __future__ import annotations

from typing import NamedTuple

import pytest
from helpers import analyze
from trace_builder import TraceBuilder

from paro_advise.advisor.prediction.fitting.calibrate import calibrate
from paro_advise.advisor.prediction.recommend import recommend
from paro_advise.advisor.prediction.scoring import Limits

WORLD, GATHER_US, COMPUTE_US = 16, 2000.0, 500.0
EVERYONE = ("0", "mesh_dp", list(range(WORLD)))
# Two of sixteen ranks hold the same experts.
OF_EXPERTS = ("1", "mesh_efsdp", [0, 8])


class Unit(NamedTuple):
    """A module that FSDP2 gathers at once; without a name the root."""

    name: str
    elements: int
    trains: bool = True
    group: str = "0"


def written(path, units, *, in_optimizer=0, groups=(EVERYONE,), kept=False):
    """Write three steps of FSDP2 on rank 0 of 16: each unit is gathered, computes, and is reduced, one after the other."""
    trace = TraceBuilder(0, WORLD, groups=list(groups))
    number = at = 0.0
    for step in range(3):
        begin = at

        def send(kind, unit, owners, tid=1):
            nonlocal at, number
            trace.collective(
                kind, at, GATHER_US, nelems=unit.elements, issue=at - 20, seq=int(number), group=unit.group, tid=tid,
                owners=[f"FSDP::{owner} ({unit.name})" if unit.name else f"FSDP::{owner}" for owner in owners],
                dtype="Float" if kind == "ReduceScatter" else "BFloat16",
            )  # fmt: skip
            at, number = at + GATHER_US, number + 1

        at += 100
        trace.annotation("FSDP::root_pre_forward", at, 50)
        for unit in units:
            send("AllGather", unit, ("pre_forward", "all_gather"))
            trace.compute(at, COMPUTE_US)
            at += COMPUTE_US
        back = at
        for unit in reversed(units):
            if unit.name and unit.trains and not kept:
                send("AllGather", unit, ("pre_backward", "all_gather"), tid=2)
            trace.compute(at, 2 * COMPUTE_US)
            at += 2 * COMPUTE_US
            if unit.trains:
                send("ReduceScatter", unit, ("post_backward_reduce",), tid=2)
        trace.backward(back - 30, at - back, sequence=step + 1)
        trace.annotation("Optimizer.step#Muon.step", at + 50, 100 + in_optimizer * GATHER_US)
        at += 100
        for _ in range(in_optimizer):
            trace.collective("AllGather", at, GATHER_US, nelems=units[0].elements, issue=at - 20, seq=int(number))
            at, number = at + GATHER_US, number + 1
        at += 200
        trace.step(step, begin, at - begin)
    return analyze(trace.write(path / "rank0.json"))


def finding(analysis, code):
    return next(item for item in analysis.findings if item.code == code)


BLOCKS = [Unit(f"layers.{place}", 20_000_000) for place in range(4)]
ROOT = Unit("", 5_000_000)


@pytest.mark.parametrize(
    ("units", "applies"),
    [
        ([Unit("", 80_000_000)], True),
        ([*BLOCKS, ROOT], False),
        ([Unit("", 2_000_000)], False),
        ([*(Unit(f"layers.{place}", 5_000_000) for place in range(4)), Unit("", 80_000_000)], False),
        ([*(Unit(f"layers.{place}", 20_000_000, trains=False) for place in range(4)), Unit("", 80_000_000)], False),
    ],
    ids=["one large unit", "blocks", "a small model", "blocks beside large embeddings", "all frozen but the root"],
)
def test_a_model_that_is_gathered_as_one_unit_is_told_to_be_wrapped_by_blocks(units, applies, tmp_path):
    """Nothing runs beside its gather of 2 ms and its reduction of 2 ms: all 4 ms could be hidden at most."""
    analysis = written(tmp_path, units)
    found = finding(analysis, "PARO023")
    assert (found.status == "applies") is applies
    wraps = [lever for lever in recommend(calibrate(analysis), Limits()).levers if "wrapped one by one" in lever.what]
    assert bool(wraps) is (len(units) == 1)
    if applies:
        assert "wrapped block by block" in found.text
        assert found.saving_us == pytest.approx(2 * GATHER_US, rel=0.01)
        assert wraps[0].speedup_now.p50 > 1.05
        assert wraps[0].more_bytes < 0


def test_gradients_in_one_bucket_are_told_to_be_cut(tmp_path):
    """DDP that reduces 80 MB, or 480 MB in six pieces, after the last of one or four backward passes."""
    for buckets, passes, applies in ((1, 1, True), (6, 1, False), (6, 4, False), (1, 4, True)):
        trace = TraceBuilder(0, WORLD)
        for step in range(3):
            base = step * 60_000.0
            trace.annotation("DistributedDataParallel.forward", base + 10, 100)
            trace.compute(base + 100, 20_000)
            for number in range(passes):
                trace.backward(base + 1000 + 6000 * number, 25_000 / passes, sequence=10 * step + number + 1)
            for place in range(buckets):
                at = base + 21_000 + place * 5000
                trace.collective(
                    "AllReduce", at, 4000, nelems=20_000_000, issue=base + 20_000 + place, tid=2, seq=10 * step + place,
                    owners=("torch.distributed.ddp.reducer::reduce_bucket",), dtype="Float",
                )  # fmt: skip
            trace.annotation("Optimizer.step#AdamW.step", base + 55_000, 300)
            trace.step(step, base, 60_000.0)
        found = finding(analyze(trace.write(tmp_path / "rank0.json")), "PARO023")
        assert (found.status == "applies") is applies
        assert ("bucket_cap_mb" in found.text) is applies


def test_experts_beside_dense_parameters_are_no_one_model_of_all_ranks(tmp_path):
    """Dense layers over 16 ranks, experts over 2: what one group size predicts is not to be changed to."""
    experts = [Unit(f"layers.{place}.experts", 60_000_000, group="1") for place in range(4)]
    units = [unit for pair in zip(BLOCKS, experts, strict=True) for unit in pair]
    plan = recommend(calibrate(written(tmp_path, [*units, ROOT], groups=(EVERYONE, OF_EXPERTS))), Limits())
    assert plan.verdict == "measure first"
    assert "over groups of 16 and of 2 ranks, as beside experts" in plan.text
    assert not calibrate(written(tmp_path, [*BLOCKS, ROOT])).unmodelled


def test_units_that_are_frozen_as_a_whole_are_no_roots(tmp_path):
    """A vision tower that backward does not reach is gathered once, as FSDP2's root is, which trains."""
    tower = [Unit(f"vision.{place}", 8_000_000, trains=False) for place in range(3)]
    for root in (ROOT, ROOT._replace(trains=False)):
        found = calibrate(written(tmp_path, [*(tower if root.trains else ()), *BLOCKS, root]))
        assert found.root_bytes == 2 * ROOT.elements
        assert found.unit_bytes[-1] == found.root_bytes


def test_the_root_of_a_run_that_keeps_its_units_is_known_by_its_embeddings(tmp_path):
    """Nothing is gathered in backward, where gathering again would spare the root: forward met it first."""
    large = Unit("", 60_000_000)
    found = calibrate(written(tmp_path, [large, *BLOCKS], kept=True))
    assert found.gathers_once
    assert found.root_bytes == found.unit_bytes[-1] == 2 * large.elements
    assert calibrate(written(tmp_path, [ROOT, *BLOCKS], kept=True)).root_bytes == 0.0  # as any other


def test_units_stand_in_the_order_in_which_forward_meets_them(tmp_path):
    """Embeddings in front, dense and sparse layers in turn, and no root as FSDP2 names it: none stays gathered."""
    sizes = (60, 20, 40, 20, 40)
    units = [Unit(f"layers.{place}", size * 1_000_000) for place, size in enumerate(sizes)]
    found = calibrate(written(tmp_path, units))
    assert found.unit_bytes == tuple(2e6 * size for size in sizes)
    assert (found.front_bytes, found.root_bytes) == (2e6 * sizes[0], 0.0)
    # As far as their bytes tell, all units compute alike where none in front is larger than the others.
    equal = calibrate(written(tmp_path, [Unit(unit.name, 20_000_000) for unit in units]))
    assert equal.front_bytes == 0.0


def test_what_an_optimizer_gathers_in_its_step_is_not_taken_to_stay(tmp_path):
    """Muon takes whole matrices of shards: in groups it would gather inside nodes."""
    analysis = written(tmp_path, [*BLOCKS, ROOT], in_optimizer=4)
    told = finding(analysis, "PARO013")
    assert told.status == "applies"
    assert told.text.startswith("what the optimizer gathers in its step")
    assert "no sharding changes" not in told.text
    assert "the optimizer gathers shards in its step" in calibrate(analysis).unmodelled


def test_what_batch_norm_reduces_is_no_gradient(tmp_path):
    """SyncBatchNorm's sums in backward, beside one bucket of DDP's."""
    trace = TraceBuilder(0, WORLD)
    for step in range(3):
        base = step * 10_000.0
        trace.annotation("DistributedDataParallel.forward", base + 10, 100)
        trace.compute(base + 100, 8000)
        trace.backward(base + 1000, 8000, sequence=step + 1)
        for place in range(5):
            trace.collective(
                "AllReduce", base + 2000 + 100 * place, 50, nelems=512, issue=base + 1900 + 100 * place, tid=2, seq=place,
                owners=("autograd::engine::evaluate_function: SyncBatchNormBackward",), dtype="Float",
            )  # fmt: skip
        trace.collective(
            "AllReduce", base + 5000, 1000, nelems=5_000_000, issue=base + 4900, tid=2, seq=9,
            owners=("torch.distributed.ddp.reducer::reduce_bucket",), dtype="Float",
        )  # fmt: skip
        trace.annotation("Optimizer.step#SGD.step", base + 9500, 300)
        trace.step(step, base, 10_000.0)
    analysis = analyze(trace.write(tmp_path / "rank0.json"))
    assert (analysis.states["gradient"].count, analysis.states["other"].count) == (1, 5)
    assert analysis.run.parameter_count == 5_000_000


@pytest.mark.parametrize("few", [2, 8])
def test_experts_that_fewer_ranks_share_are_said_to_be_more(few, tmp_path):
    """Eight ranks share 64,000 parameters; experts of 128,000 are sharded over two, and the other six have others."""
    groups = [
        ("0", "default_pg", list(range(8))),
        ("1", "mesh_dp_shard_mod_ep", list(range(few))),
        ("2", "mesh_ep", [0, 2, 4, 6]),
    ]
    trace = TraceBuilder(0, 8, groups=groups)
    for step in range(2):
        base = 10_000.0 * step
        trace.step(step + 3, base, 10_000.0)
        trace.backward(base + 5000, 4000, sequence=step + 1)
        for place, (unit, size) in enumerate((("dense", 64_000), ("experts", 128_000))):
            group, seq = str(place), 10 * step + place
            trace.collective(
                "AllGather", base + 100 + 300 * place, 200, nelems=size, issue=base + 50 + 300 * place, seq=seq,
                owners=(f"FSDP::pre_forward ({unit})", f"FSDP::all_gather ({unit})"), group=group,
            )  # fmt: skip
            trace.collective(
                "ReduceScatter", base + 6000 + 300 * place, 200, nelems=size, issue=base + 5900 + 300 * place, seq=seq + 5,
                tid=2, owners=(f"FSDP::post_backward_reduce ({unit})",), group=group,
            )  # fmt: skip
        trace.collective("AllToAll", base + 1000, 100, nelems=4096, issue=base + 950, seq=step, group="2")
    analysis = analyze(trace.write(tmp_path / "rank0.json"))
    (note,) = [item for item in analysis.data_quality if item.code == "Q327"]
    assert analysis.run.parameter_count == 64_000 + 128_000
    if few == 8:
        assert note.severity == "info"
    else:
        assert note.severity == "warning"
        assert "128000 of the 192000 parameters are sharded over 2 ranks" in note.message
        assert "the model has 576000 then" in note.message  # 64,000 and four times 128,000
