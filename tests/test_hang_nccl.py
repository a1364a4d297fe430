"""Who holds a job up, from dumps that NCCL's own ranks wrote (tests/data/README.md says what each rank did)."""

from __future__ import annotations

import pytest
from conftest import ROOT

from paro_advise.advisor.cli import run

DUMPS = ROOT / "tests/data/nccl_dumps"


@pytest.mark.parametrize(
    ("made_by", "told"),
    [
        ("skips", "Rank 1 never issued all_reduce 6, 256 KiB (train.py:<module>) of group 0 (default_pg), in which ranks 0, 2 wait."),
        ("order", "Rank 0 issued all_reduce 6, 256 KiB (train.py:<module>) of group 0 where ranks 1-2 issued broadcast 6"),
        ("size", "Rank 0 issued all_reduce 6, 400 B (train.py:<module>) of group 0 where ranks 1-2 issued all_reduce 6, 256 KiB"),
    ],
)  # fmt: skip
def test_dumps_named_by_a_prefix_of_the_jobs_own_are_read(made_by, told, capsys):
    assert run(["hang", str(DUMPS / made_by)]) == 0
    out, err = capsys.readouterr()
    assert told in out
    assert "Seen: 3 ranks." in out
    assert "left out" not in err


def test_a_number_that_is_no_rank_of_the_job_names_none(tmp_path, capsys):
    for rank, name in ((0, "run_7"), (1, "run_8")):
        (tmp_path / name).write_bytes((DUMPS / f"skips/dump_{rank}").read_bytes())
    assert run(["hang", str(tmp_path)]) != 0
    assert "neither the dump nor its name tells the rank" in capsys.readouterr().err


def some_of(made_by, folder, whole, cut=()):
    for rank in whole:
        (folder / f"nccl_trace_rank_{rank}").write_bytes((DUMPS / made_by / f"dump_{rank}").read_bytes())
    for rank in cut:
        (folder / f"nccl_trace_rank_{rank}").write_bytes((DUMPS / made_by / f"dump_{rank}").read_bytes()[:1000])
    return str(folder)


def test_ranks_of_which_nothing_is_known_are_blamed_alike(tmp_path, capsys):
    """Rank 1 is at fault; its dump is cut, and that of rank 2, which waits, was not given."""
    assert run(["hang", some_of("skips", tmp_path, [0], [1])]) == 0
    assert "Cannot tell who is at fault: others wait for ranks 1-2" in capsys.readouterr().out


def test_one_rank_whose_collectives_are_finished_does_not_speak_for_all(tmp_path, capsys):
    assert run(["hang", some_of("size", tmp_path, [0])]) == 0
    out = capsys.readouterr().out
    assert (
        "Cannot tell who is at fault: every collective in these dumps is finished. Give what ranks 1-2 left too." in out
    )


def watchdog(
    rank, *, done, issued, place="[PG 0 (default_pg) Rank {}]", what="OpType=ALLREDUCE, NumelIn=8, NumelOut=8"
):
    """Return the two lines that a rank's watchdog writes (torch 2.4: ProcessGroupNCCL.cpp)."""
    prefix = f"[rank{rank}]:[E1003 18:37:01.832 ProcessGroupNCCL.cpp:607] "
    work = f"WorkNCCL(SeqNum={done + 1}, {what}, Timeout(ms)=1800000)"
    counters = f"last enqueued NCCL work: {issued}, last completed NCCL work: {done}."
    at = f"{place.format(rank)} Exception (either an error or timeout) detected by watchdog at work: {done + 1}"
    return [
        f"{prefix}[Rank {rank}] Watchdog caught collective operation timeout: {work} ran for 1800017 milliseconds",
        f"{prefix}{at}, {counters}",
    ]


def told_of(tmp_path, capsys, lines, world_size=None):
    """Return what is told of a log; where NCCL_DEBUG=INFO was set, its ranks are numbered in it."""
    nccl = "node0:100:200 [{0}] NCCL INFO ncclCommInitRank comm 0x55 rank {0} nranks {1} cudaDev {0} - Init COMPLETE"
    known = [nccl.format(rank, world_size) for rank in range(world_size or 0)]
    (tmp_path / "job.log").write_text("\n".join([*known, *lines]) + "\n")
    run(["hang", str(tmp_path / "job.log")])
    return capsys.readouterr().out


def test_the_watchdog_of_torch_2_4_is_read(tmp_path, capsys):
    lines = [line for rank in (0, 1, 3) for line in watchdog(rank, done=16, issued=17)]
    assert told_of(tmp_path, capsys, lines, 4).startswith("Rank 2 holds the others up.")


def test_of_several_silent_ranks_of_a_log_none_is_blamed(tmp_path, capsys):
    """A launcher ends all when the first has given up, so that most have no time to tell that they waited."""
    lines = [line for rank in (0, 1, 2, 4, 5) for line in watchdog(rank, done=16, issued=17)]
    text = told_of(tmp_path, capsys, lines, 8)
    assert text.startswith("Cannot tell who is at fault: others wait for ranks 3, 6-7, of which nothing is here.")


def test_one_rank_alone_in_a_log_blames_no_other(tmp_path, capsys):
    assert told_of(tmp_path, capsys, watchdog(1, done=16, issued=17)).startswith("Cannot tell who is at fault")


def test_a_rank_that_is_stuck_in_what_others_have_finished_is_blamed_before_silent_ones(tmp_path, capsys):
    lines = [
        *watchdog(1, done=6, issued=8),
        *(line for rank in (4, 5, 6) for line in watchdog(rank, done=20, issued=21)),
    ]
    text = told_of(tmp_path, capsys, lines, 8)
    assert text.startswith("Rank 1 holds the others up. Rank 1 has a device that has not finished all_reduce 7")
    assert "nothing of 0, 2-3, 7" in text


def test_a_root_that_has_finished_first_makes_no_culprits_of_the_others(tmp_path, capsys):
    lines = [
        *watchdog(0, done=20, issued=21),
        *(line for rank in (1, 4, 5) for line in watchdog(rank, done=6, issued=8)),
    ]
    assert told_of(tmp_path, capsys, lines, 8).startswith("Cannot tell who is at fault")


@pytest.mark.parametrize(
    ("what", "missing"),
    [
        ("OpType=_REDUCE_SCATTER_BASE, NumelIn=64, NumelOut=8", "ranks 0, 5"),
        ("OpType=_ALLGATHER_BASE, NumelIn=8, NumelOut=64", "ranks 0, 5"),
    ],
)
def test_the_buffers_of_a_gather_tell_how_many_ranks_its_group_has(what, missing, tmp_path, capsys):
    """Of a group of 8 ranks that is not the default one the log shows 6; 0 and 5 are none of the others' either."""
    place = "[PG 1 Rank {}]"
    lines = [line for rank in (1, 2, 3, 4, 6, 7) for line in watchdog(rank, done=16, issued=17, place=place, what=what)]
    text = told_of(tmp_path, capsys, lines)
    assert text.startswith(f"Cannot tell who is at fault: others wait for {missing}, of which nothing is here.")


def test_one_silent_rank_is_not_blamed_for_what_another_is_stuck_in(tmp_path, capsys):
    lines = [line for rank in range(6) for line in watchdog(rank, done=16, issued=17)]
    text = told_of(tmp_path, capsys, [*lines, *watchdog(6, done=6, issued=9)], 8)
    assert text.startswith("Rank 6 holds the others up. Rank 6 has a device that has not finished all_reduce 7")
    assert "nothing of 7" in text


def test_a_job_that_went_on_with_fewer_ranks_lacks_none(tmp_path, capsys):
    """An elastic job of 8 ranks began again with 7: no rank 7 is missing in the second run."""
    nccl = "node0:1:2 [{0}] NCCL INFO ncclCommInitRank comm 0x55 rank {0} nranks 7 cudaDev {0} - Init COMPLETE"
    lines = [nccl.format(rank) for rank in range(7)]
    lines += [line for rank in range(7) for line in watchdog(rank, done=16, issued=17)]
    assert "Rank 7" not in told_of(tmp_path, capsys, lines, 8)
