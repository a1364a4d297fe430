"""What a script marks as one step may hold several steps of its optimizer, or means of parameters."""

from __future__ import annotations

from dataclasses import replace

import pytest
from helpers import analyze, write_run
from trace_builder import TraceBuilder, fsdp_rank

from paro_advise.advisor.analysis.judgement.operations import operations_text
from paro_advise.advisor.analysis.model import CollectiveEntry
from paro_advise.advisor.prediction.fitting.calibrate import calibrate
from paro_advise.core.model_state import State
from paro_advise.core.span import GroupSpan

PASS_US = 10_000.0
IN_REDUCER = ("torch.distributed.ddp.reducer::reduce_bucket",)


def written(path, updates, *, buckets=(20_000, 30_000), reduces=lambda _: True, averages=()):
    """Write DDP's steps of some updates each, one backward pass before each update."""
    trace = TraceBuilder(0, 2)
    for step in range(3):
        begin = step * PASS_US * updates
        trace.step(step, begin, PASS_US * updates)
        for number in range(updates):
            base = begin + number * PASS_US
            trace.annotation("DistributedDataParallel.forward", base + 10, 100)
            trace.compute(base + 100, 5000)
            trace.backward(base + 1000, 5000, sequence=step * updates + number + 1)
            for place, elements in enumerate(buckets if reduces(number) else ()):
                trace.collective(
                    "AllReduce", base + 2000 + 500 * place, 300, nelems=elements, issue=base + 1500 + 500 * place, tid=2,
                    seq=10 * number + place, owners=IN_REDUCER, dtype="Float",
                )  # fmt: skip
            trace.annotation("Optimizer.step#AdamW.step", base + 6500, 300)
        for place, elements in enumerate(averages):
            at = begin + PASS_US * updates - 2500 + 500 * place
            trace.collective("AllReduce", at, 300, nelems=elements, issue=at - 50, seq=90 + place, dtype="Float")
    return analyze(trace.write(path / "rank0.json"))


@pytest.mark.parametrize("updates", [1, 2, 3])
def test_steps_of_an_optimizer_are_no_micro_batches(updates, tmp_path):
    analysis = written(tmp_path, updates)
    run = analysis.run
    assert (run.micro_batches, run.parameter_count, run.strategy.triple) == (1, 50_000, "NNN")
    told = [notice.message for notice in analysis.data_quality if notice.code == "Q326"]
    assert len(told) == (updates > 1)
    assert all(f"holds {updates} steps of the optimizer" in message for message in told)
    assert bool(calibrate(analysis).unmodelled) is (updates > 1)


def marked_passes(path, marked, **options):
    return analyze(write_marked(path, marked, **options))


def write_marked(path, marked, *, rank=0, reduces_all=True, without_pass=()):
    """Write a pass of DDP in each marked step, and an optimizer's step in some; others may reduce no gradients."""
    path.mkdir(exist_ok=True)
    trace = TraceBuilder(rank, 2)
    for step, is_updated in enumerate(marked):
        base = step * PASS_US
        trace.step(step, base, PASS_US)
        trace.annotation("DistributedDataParallel.forward", base + 10, 100)
        trace.compute(base + 100, 5000)
        if step not in without_pass:
            trace.backward(base + 1000, 5000, sequence=step + 1)
        if is_updated or reduces_all:
            trace.collective(
                "AllReduce", base + 2000, 300, nelems=50_000, issue=base + 1500, tid=2, seq=step, owners=IN_REDUCER,
                dtype="Float",
            )  # fmt: skip
        if is_updated:
            trace.annotation("Optimizer.step#AdamW.step", base + 6500, 300)
    return trace.write(path / f"rank{rank}.json")


@pytest.mark.parametrize(
    ("marked", "left_out"),
    [((0, 1, 0, 1), 0), ((1, 0, 1, 0, 1), 1), ((0, 0, 0, 1, 0, 0, 0, 1), 0), ((0, 1, 0, 0, 1, 0, 0, 1, 0), 3)],
)
def test_micro_batches_that_a_script_marks_as_steps_are_joined(marked, left_out, tmp_path):
    """Most marked steps of no_sync() reduce nothing: alone they would be a run without a strategy."""
    analysis = marked_passes(tmp_path, marked, reduces_all=False)
    length = len(marked) // sum(marked) if left_out != 1 else 2
    run = analysis.run
    assert (run.strategy.triple, run.micro_batches, run.parameter_count) == ("NNN", length, 50_000)
    assert analysis.step_time_us.values == pytest.approx([length * PASS_US] * ((len(marked) - left_out) // length))
    (told,) = [notice.message for notice in analysis.data_quality if notice.code == "Q127"]
    assert f"spans {length} marked steps" in told
    assert (f"{left_out} other" in told) is (left_out > 0)
    assert not calibrate(analysis).unmodelled


@pytest.mark.parametrize(
    ("marked", "without_pass", "is_told"),
    [
        ((1, 1, 1), (), False), ((0, 0, 0, 1), (), True), ((0, 1, 0, 0, 0, 1), (), True), ((1, 0, 0, 1), (), True),
        ((0, 1, 0, 0, 0, 1, 0, 0, 1), (), True),
        ((0, 0, 1, 0, 0, 1), (0, 1), True), ((0, 0, 0, 0), (), False),
    ],
)  # fmt: skip
def test_marked_steps_without_an_optimizers_are_told(marked, without_pass, is_told, tmp_path):
    """One step alone has no known beginning, others have no fixed length, or passes; without an optimizer's mark
    nothing is known.
    """
    analysis = marked_passes(tmp_path, marked, without_pass=without_pass)
    told = [notice.message for notice in analysis.data_quality if notice.code == "Q326"]
    assert ["hold no step of the optimizer" in message for message in told] == [True] * is_told
    assert bool(calibrate(analysis).unmodelled) is is_told


def test_ranks_that_train_by_themselves_in_between_follow_no_strategy(tmp_path):
    run = written(tmp_path, 4, reduces=lambda number: number == 3).run
    assert (run.strategy.triple, run.micro_batches) == (None, 1)


def test_what_is_averaged_after_the_step_is_no_gradient(tmp_path):
    """Local SGD reduces no gradients; all-reduces after the update average parameters."""
    analysis = written(tmp_path, 1, buckets=(), averages=(20_000, 30_000))
    assert analysis.states["gradient"].count == 0
    told = operations_text(analysis.collectives, State.OTHER)
    assert told == "2 all-reduces of 78.1 KiB to 117 KiB a step to average parameters"
    assert analysis.run.strategy.triple is None


def test_operations_that_are_named_stand_for_all_the_time_that_is_told():
    """HSDP: one all-reduce is exposed, eight reduce-scatters hide; both take the state's time."""
    usual = CollectiveEntry(
        state="gradient", detail="", op="all_reduce", bytes=100 << 20, group_size=2, span=GroupSpan.INTER, count=1.0,
        p50_us=3000.0, p95_us=3000.0, p99_us=3000.0, exposed_us=3000.0, evidence="phase",
    )  # fmt: skip
    scattered = replace(usual, op="reduce_scatter", bytes=200 << 20, count=8.0, p50_us=1900.0, exposed_us=0.0)
    norm = replace(usual, op="all_gather", bytes=4, count=1.0, p50_us=20.0, exposed_us=20.0)
    sent, got = (replace(usual, op=op, count=4.0, p50_us=300.0, exposed_us=1000.0) for op in ("send", "recv"))
    for entries, wanted in (
        ((usual, scattered, norm), "1 all-reduce of 100 MiB and 8 reduce-scatters of 200 MiB a step for gradients"),
        ((usual, norm), "1 all-reduce of 100 MiB a step for gradients"),
        ((usual, sent, got), "1 all-reduce of 100 MiB, 4 recvs of 100 MiB and others a step for gradients"),
    ):
        assert operations_text(entries, State.GRADIENT) == wanted


@pytest.mark.parametrize(
    ("name", "starts_us"), [("two after each other", (760, 790)), ("inside of backward", (450, 610, 760))]
)
def test_optimizers_that_no_backward_pass_parts_step_once(tmp_path, name, starts_us):
    """Muon beside AdamW; one optimizer a layer, as torchtitan has it: cut at each, four steps would look like eleven."""
    for marked in (False, True):
        traces = [fsdp_rank(rank, steps=4) for rank in range(2)]
        for trace in traces:
            left_out = ("Optimizer.step",) if marked else ("Optimizer.step", "ProfilerStep")
            trace.events = [row for row in trace.events if not row["name"].startswith(left_out)]
            for step in range(4):
                for start in starts_us:
                    trace.annotation("Optimizer.step#AdamW.step", 1000 * step + start, 15)
        found = analyze(write_run(tmp_path / f"{name} {marked}", traces))
        assert [round(us, 3) for us in found.step_time_us.values] == [1000.0] * (4 if marked else 3)
        assert found.run.strategy.triple == "GGG"
        assert not {"Q326"} & {notice.code for notice in found.data_quality}


def test_ranks_of_which_some_record_too_little_to_join_their_steps_are_told(tmp_path):
    """Rank 1 has recorded one step of the optimizer, from which no length shows."""
    joined = marked_passes(tmp_path / "a", (0, 1, 0, 1), reduces_all=False)
    assert not calibrate(joined).unmodelled
    folder = tmp_path / "both"
    folder.mkdir()
    for rank, marked in enumerate(((0, 1, 0, 1, 0, 1), (0, 1, 0))):
        write_marked(folder, marked, rank=rank, reduces_all=False)
    found = analyze(folder)
    (told,) = [notice.message for notice in found.data_quality if notice.code == "Q326"]
    assert told.startswith("1 of 2 ranks mark micro-batches as steps")
    assert calibrate(found).unmodelled
