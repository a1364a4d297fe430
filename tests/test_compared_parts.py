"""Parts of a step, compared between two runs: as sure as the ranks and the steps they are means of."""

from __future__ import annotations

from dataclasses import replace

import pytest
from helpers import analyze, write_run
from trace_builder import fsdp_rank

from paro_advise.advisor.comparison.compare import Terms, compare
from paro_advise.advisor.rendering.texts.comparison_text import comparison_text
from paro_advise.errors import UnlikeRunsError


def run_of(folder, stretches, world=4):
    """A rank's steps are equally long but for these factors; all ranks slow down together."""
    builders = [fsdp_rank(rank, world, steps=len(stretches)) for rank in range(world)]
    for builder in builders:
        for event in builder.events:
            step, at = divmod(event["ts"] - builder.offset, 1000.0)
            begin = 1000.0 * sum(stretches[: int(step)])
            event["ts"] = builder.offset + begin + at * stretches[int(step)]
            event["dur"] *= stretches[int(step)]
    return analyze(write_run(folder, builders))


def part(comparison, name):
    (found,) = [metric for metric in comparison.metrics if metric.name == name]
    return found


def test_one_slow_step_of_four_is_no_change_of_computing(tmp_path):
    """All ranks show it alike, so that their means say nothing of what steps do."""
    before, after = run_of(tmp_path / "before", [1.0] * 4), run_of(tmp_path / "after", [1.0, 1.0, 1.8, 1.0])
    found = part(compare(before, after, None), "compute")
    assert found.change_pct == pytest.approx(20.0)
    assert found.low_pct < 0 < found.high_pct
    assert found.verdict == "unclear"


def test_equally_longer_steps_are_a_change(tmp_path):
    before, after = run_of(tmp_path / "before", [1.0] * 4), run_of(tmp_path / "after", [1.2] * 4)
    found = part(compare(before, after, None), "compute")
    assert (found.low_pct, found.high_pct) == (pytest.approx(20.0), pytest.approx(20.0))
    assert found.verdict == "worse"


def test_ranks_that_nothing_is_alike_of_have_a_range_too(tmp_path):
    """Exposed times of 0.01 us to a second: the range of their ratio goes down to nothing."""
    before, after = run_of(tmp_path / "before", [1.0] * 4), run_of(tmp_path / "after", [1.0, 1.1, 1.0, 1.0])
    first, second = [
        replace(run, ranks=tuple(replace(rank, idle_us=idle) for rank, idle in zip(run.ranks, times, strict=True)))
        for run, times in ((before, [0.01, 1e5, 1e6, 1e5]), (after, [0.001, 1e6, 0.01, 1.0]))
    ]
    assert part(compare(first, second, None), "idle").verdict == "unclear"


def test_equal_means_of_ranks_that_differ_widely_are_not_the_same(tmp_path):
    """By less than a thousandth of the step, and anything from half to twice as much by what ranks differ."""
    run = run_of(tmp_path / "run", [1.0, 1.1, 1.0, 0.9])
    first, second = [
        replace(run, ranks=tuple(replace(rank, compute_us=time) for rank, time in zip(run.ranks, times, strict=True)))
        for times in ([900.0, 300.0, 500.0, 700.0], [300.0, 899.0, 701.0, 500.1])
    ]
    assert part(compare(first, second, None), "compute").verdict == "unclear"


def test_what_is_not_attributed_has_not_gone_away(tmp_path):
    """A recording that names no purpose of its collectives, as Nsight Systems makes it."""
    run = run_of(tmp_path / "run", [1.0] * 4)
    states = run.states
    told = {name: entry for name, entry in states.items() if name in ("parameter", "gradient", "optimizer")}
    moved = states["parameter"]
    unknown = replace(
        run,
        states=states
        | {name: replace(entry, count=0.0, exposed_us=0.0) for name, entry in told.items()}
        | {"unknown": moved},
        ranks=tuple(replace(rank, state_exposed_us=dict.fromkeys(rank.state_exposed_us, 0.0)) for rank in run.ranks),
    )
    found = part(compare(run, unknown, None), "parameter_exposed")
    assert found.change_pct is None
    assert found.verdict == "unclear"


@pytest.mark.parametrize(
    ("waits", "verdict"),
    [
        ((0.0, 1.5e-11), "same"),
        ((1.5e-11, 0.0), "same"),
        ((0.0, 0.0), "same"),
        ((0.0, 3.0), "worse"),
        ((3.0, 0.0), "better"),
    ],
)
def test_what_sums_of_differences_leave_over_is_no_change(waits, verdict, tmp_path):
    run = run_of(tmp_path / "run", [1.0] * 4)
    before, after = [
        replace(run, ranks=tuple(replace(rank, wait_us=wait_us) for rank in run.ranks)) for wait_us in waits
    ]
    found = part(compare(before, after, None), "waiting")
    assert found.verdict == verdict
    assert found.before in (0.0, 3.0)


@pytest.mark.parametrize(
    ("ranks", "compute", "words"),
    [
        ((range(8), range(4, 8)), ("same", 0.0), "parts of a step are those of the 4 ranks in both"),
        ((range(4), range(4, 8)), ("unclear", None), "The recordings have no rank in common"),
        ((range(8), range(8)), ("same", 0.0), ""),
    ],
)
def test_recordings_of_some_ranks_each_are_compared_over_those_in_both(ranks, compute, words, tmp_path):
    """Ranks 4 to 7 of one run compute for a shorter time than the first four, which is no change."""
    builders = [fsdp_rank(rank, 8) for rank in range(8)]
    for builder in builders[4:]:
        for event in builder.events:
            if event.get("cat") == "kernel" and "nccl" not in event["name"].lower():
                event["dur"] *= 0.7
    before, after = (
        analyze(write_run(tmp_path / name, [builders[rank] for rank in chosen]))
        for name, chosen in zip(("before", "after"), ranks, strict=True)
    )
    found = compare(before, after, None)
    assert part(found, "compute").verdict == compute[0]
    assert compute[1] is None or part(found, "compute").change_pct == pytest.approx(compute[1])
    # What the missing ranks are waited for cannot be seen.
    assert part(found, "waiting").verdict == ("same" if ranks[0] == ranks[1] else "unclear")
    assert words in found.text
    assert ("recordings h" in found.text) == bool(words)
    assert "size of a batch" not in found.text or not set(ranks[0]) & set(ranks[1])


def test_more_ranks_whose_steps_are_of_unknown_work_neither_gain_nor_lose(tmp_path):
    before, after = run_of(tmp_path / "before", [1.0] * 6, world=2), run_of(tmp_path / "after", [1.0] * 6)
    found = compare(before, after, None, Terms(allow_unlike=("world_size", "data_parallel_ranks", "parameters")))
    assert part(found, "device_hours").verdict == part(found, "throughput").verdict == "unclear"


@pytest.mark.parametrize(("share_of_step", "verdict"), [(0.0008, "same"), (0.0012, "worse")])
@pytest.mark.parametrize("first_us", [0.0, 4.0])
def test_a_part_that_grows_by_less_than_a_thousandth_of_the_step_is_the_same(
    share_of_step, verdict, first_us, tmp_path
):
    """4 us of idle that become 5 are 25 % more, and nobody's step."""
    run = run_of(tmp_path / "run", [1.0] * 4)
    times_us = sorted(run.step_time_us.values)
    quarter = len(times_us) // 4
    step_us = sum(times_us[quarter : len(times_us) - quarter]) / (len(times_us) - 2 * quarter)
    before, after = [
        replace(run, ranks=tuple(replace(rank, idle_us=idle_us) for rank in run.ranks))
        for idle_us in (first_us, first_us + share_of_step * step_us)
    ]
    assert part(compare(before, after, None), "idle").verdict == verdict


def gathered_in(analysis, num_bytes):
    """Return a run whose forward pass gathers so many bytes of each parameter, as bytes."""
    width = num_bytes / sum(
        entry.count * entry.bytes / analysis.run.parameter_count
        for entry in analysis.collectives
        if entry.state == "parameter" and entry.detail == "forward"
    )
    cut = [
        replace(entry, dtype="Byte", bytes=round(width * entry.bytes)) if entry.state == "parameter" else entry
        for entry in analysis.collectives
    ]
    return replace(analysis, collectives=tuple(cut))


def test_what_they_leave_over_of_a_state_is_no_change_either(tmp_path):
    """5e-10 us of waiting that became 150: 29,831,467,622,432 % were printed."""
    run = run_of(tmp_path / "run", [1.0] * 4)
    first, second = [
        replace(run, states={**run.states, "parameter": replace(run.states["parameter"], wait_us=wait)})
        for wait in (5e-10, 150.0)
    ]
    found = part(compare(first, second, None), "parameter_wait")
    assert (found.before, found.after, found.change_pct) == (0.0, 150.0, None)


def test_columns_are_as_wide_as_what_stands_in_them(tmp_path):
    run = run_of(tmp_path / "run", [1.0] * 4)
    text = comparison_text(compare(run, run, None, Terms(watts_per_gpu=400.0)))
    (energy,) = [line for line in text.splitlines() if line.startswith("energy")]
    assert energy.count("  0.") == 2


def test_parameters_gathered_in_fewer_bits_are_another_precision(tmp_path):
    """As float8 that FSDP2 gathers: bytes name no type, and there are half as many."""
    found = analyze(write_run(tmp_path / "run", [fsdp_rank(rank, 2) for rank in range(2)]))
    usual = gathered_in(found, 2)
    with pytest.raises(UnlikeRunsError, match="2-byte parameters gathered before and 1-byte parameters gathered after"):
        compare(usual, gathered_in(found, 1), None)
    assert compare(usual, gathered_in(found, 2.1), None).unlike == ()
    assert compare(usual, gathered_in(found, 1.4), None).unlike == ()  # what else is gathered does not tell


def test_a_model_in_more_parts_is_trained_on_fewer_samples(tmp_path):
    """Twice the tensor parallelism leaves half the ranks to share the data; a part is then half as large."""
    found = analyze(write_run(tmp_path / "run", [fsdp_rank(rank, 2) for rank in range(2)]))
    two, four = (
        replace(
            found,
            run=replace(found.run, world_size=16, data_parallel_ranks=16 // parts, parameter_count=6_000_000 // parts),
        )
        for parts in (2, 4)
    )
    with pytest.raises(UnlikeRunsError, match="data_parallel_ranks 8 before and 4 after"):
        compare(two, four, None)
    assert len(compare(two, four, None, Terms(allow_unlike=("data_parallel_ranks",))).unlike) == 1
    larger = replace(four, run=replace(four.run, parameter_count=3_000_000))
    with pytest.raises(UnlikeRunsError, match="parameters 6000000 before and 12000000 after"):
        compare(two, larger, None, Terms(allow_unlike=("data_parallel_ranks",)))
