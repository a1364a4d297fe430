"""Who holds a job up, from what NCCL's RAS reports of its communicators."""

from __future__ import annotations

import json

import pytest
from test_hang import WORLD, dump, entry, written

from paro_advise.advisor.cli import run
from paro_advise.advisor.hangs.model import Cause
from paro_advise.advisor.hangs.reading import read_hang
from paro_advise.trace_parsers.discover import find_inputs

# As NCCL's user guide (troubleshooting/ras, JSON output) shows a communicator of two ranks of which one was stopped.
GUIDE = """{
  "nccl_version": "2.29.1", "cuda_runtime_version": 13000, "cuda_driver_version": 13000,
  "timestamp": "2025-12-19 13:06:53", "communicators_count": 1,
  "communicators": [{
    "hash": "0xae94423cfbb2ef4a", "secondary_hash": "0xb7e7187447156001:0xb8242ed28a71381e",
    "size": 2, "ranks_count": 1, "missing_ranks_count": 1,
    "ranks": [{
      "rank": 0, "host": "172.16.64.245", "pid": 1524344, "cuda_dev": 0, "nvml_dev": 0,
      "status": {"init_state": 0, "async_error": 0, "finalize_called": false, "destroy_flag": false, "abort_flag": false},
      "collective_counts": {"Broadcast": 0, "Reduce": 0, "AllGather": 0, "ReduceScatter": 0, "AllReduce": 0}
    }],
    "missing_ranks": [{
      "rank": 1, "host": "172.16.64.245", "pid": 1524345, "cuda_dev": 1, "nvml_dev": 1,
      "status": {"unresponsive": true, "considered_dead": false}
    }]
  }],
  "ras": {"collection_time_sec": 0.000, "timeouts_count": 0}
}"""
PER_NODE = 4


def member(rank, job_rank, counts=None, *, dead=None, **status):
    """A rank of a communicator, on the device of a rank of the job; of one that is missing, whether it is dead."""
    found = {
        "rank": rank, "host": f"10.0.0.{job_rank // PER_NODE}", "pid": 1000 + job_rank, "cuda_dev": job_rank % PER_NODE,
        "nvml_dev": job_rank % PER_NODE,
    }  # fmt: skip
    if counts is not None:
        running = {
            "init_state": 0,
            "async_error": 0,
            "finalize_called": False,
            "destroy_flag": False,
            "abort_flag": False,
        }
        return {**found, "status": running | status, "collective_counts": counts}
    return {**found, "status": {"unresponsive": dead is not None, "considered_dead": bool(dead)}}


def communicator(name, ranks, counts, *, missing=(), **status):
    """One whose ranks, of the job, have launched so many collectives each; `missing` maps to whether one is dead."""
    missing = dict(missing)
    return {
        "hash": name, "secondary_hash": "0x1:0x2", "size": len(ranks),
        "ranks": [
            member(place, rank, each, **status)
            for place, (rank, each) in enumerate(zip(ranks, counts, strict=True))
            if rank not in missing
        ],
        "missing_ranks": [member(ranks.index(rank), rank, dead=dead) for rank, dead in missing.items()],
    }  # fmt: skip


def report(*communicators, at="2026-11-25 10:00:00"):
    return json.dumps({"nccl_version": "2.29.1", "timestamp": at, "communicators": communicators})


def reduced(*counts):
    return [{"AllReduce": count, "AllGather": 7} for count in counts]


def found_in(folder, *texts):
    for number, text in enumerate(texts):
        (folder / f"ras{number}.json").write_text(text)
    refs, is_collection = find_inputs([str(folder)])
    return read_hang(refs, is_collection=is_collection)[0]


def stacked(folder, *ranks, late):
    """Stacks of ranks that wait in a collective, but for one, which reads."""
    for rank in ranks:
        calls = "read (data.py:5)" if rank == late else "all_reduce (torch/distributed/distributed_c10d.py:9)"
        text = f'Process {rank}: python\n\nThread 7 (idle): "MainThread"\n    {calls}\n    <module> (train.py:9)\n'
        (folder / f"stack_rank_{rank}.txt").write_text(text)


def causes(hang):
    return {one.rank: one.cause for one in hang.culprits}


def test_the_guides_stopped_process_is_named(tmp_path):
    hang = found_in(tmp_path, GUIDE)
    assert causes(hang) == {1: Cause.GONE}
    assert (hang.ranks, hang.ranks_missing) == ((0,), (1,))
    assert "Rank 1 (process 1524345 on 172.16.64.245, GPU 1) does not answer NCCL's RAS." in hang.text
    assert "dead" not in hang.text


def test_a_rank_that_launched_less_holds_the_others_up(tmp_path):
    """Rank 5 stands; 1 waits for it in the group of both, and rank 0 for 1 in another: only 5 waits for nobody."""
    hang = found_in(
        tmp_path,
        report(
            communicator("0xa", range(8), reduced(*[40] * 8)),
            communicator("0xb", [1, 5], reduced(9, 8)),
            communicator("0xc", [0, 1, 2, 3], reduced(21, 20, 21, 21)),
        ),
    )
    assert causes(hang) == {5: Cause.HOST}
    assert "process 1005 on 10.0.0.1, GPU 1" in hang.text
    assert "never launched AllReduce 9 of communicator 0xb, in which rank 1 waits" in hang.text
    assert "make a second report" in hang.text
    assert [(one.group, one.seq, one.waiting, one.absent) for one in hang.waits] == [
        ("0xb", 9, (1,), (5,)), ("0xc", 21, (0, 2, 3), (1,))
    ]  # fmt: skip


def test_a_second_report_tells_whether_the_job_stands(tmp_path):
    stands = communicator("0xa", range(4), reduced(641, 641, 640, 641))
    hang = found_in(tmp_path, report(stands), report(stands, at="2026-11-25 10:01:00"))
    assert causes(hang) == {2: Cause.HOST}
    assert "No count has changed between 2026-11-25 10:00:00 and 2026-11-25 10:01:00." in hang.text
    # What it did before it stood does not matter.
    moving = report(communicator("0xa", range(4), reduced(600, 600, 600, 600)), at="2026-11-25 09:59:00")
    hang = found_in(tmp_path, moving, report(stands), report(stands, at="2026-11-25 10:01:00"))
    assert causes(hang) == {2: Cause.HOST}
    assert "between 2026-11-25 10:00:00 and" in hang.text
    (tmp_path / "ras2.json").unlink()
    moves = communicator("0xa", range(4), reduced(650, 650, 649, 650))
    hang = found_in(tmp_path, report(stands), report(moves, at="2026-11-25 10:01:00"))
    assert (hang.culprits, hang.waits) == ((), ())
    assert hang.text.startswith("The job moved")


def test_a_communicator_that_came_in_between_is_movement(tmp_path):
    idle = communicator("0xa", range(4), reduced(3, 3, 3, 3))
    before = report(idle, communicator("0xb", [0, 1], reduced(9, 8)))
    after = report(idle, communicator("0xc", [0, 1], reduced(2, 1)), at="2026-11-25 10:01:00")
    hang = found_in(tmp_path, before, after)
    assert (hang.culprits, hang.text[:13]) == ((), "The job moved")


def test_a_rank_that_does_not_answer_in_a_job_that_moved_is_named_with_that(tmp_path):
    before = report(communicator("0xa", range(4), reduced(6, 6, 6, 6)))
    after = communicator("0xa", range(4), reduced(7, 7, 7, 7), missing={3: False})
    hang = found_in(tmp_path, before, report(after, at="2026-11-25 10:01:00"))
    assert causes(hang) == {3: Cause.GONE}
    assert "The job moved" in hang.text


def test_stacks_of_one_moment_do_not_outweigh_that_the_job_moved(tmp_path, capsys):
    stacked(tmp_path, 0, 1, 2, late=1)
    reports = [
        report(communicator("0xa", range(3), reduced(*[count] * 3)), at=f"2026-11-25 10:0{minute}:00")
        for minute, count in enumerate((6, 7))
    ]
    hang = found_in(tmp_path, *reports)
    assert (hang.culprits, hang.text[:13]) == ((), "The job moved")
    assert run(["hang", str(tmp_path)]) == 0
    assert "left out the stacks: collectives were launched meanwhile" in capsys.readouterr().err


def test_stacks_are_not_put_beside_ranks_that_ras_does_not_tell(tmp_path):
    stacked(tmp_path, 0, 1, 2, 3, late=3)
    pairs = [communicator("0xa", [0, 1], reduced(5, 5)), communicator("0xb", [4, 5], reduced(5, 4))]
    hang = found_in(tmp_path, report(*pairs))
    assert causes(hang) == {3: Cause.HOST}
    assert (hang.culprits[0].stack, hang.places) == ("", {})


def test_reports_of_two_jobs_do_not_tell_that_one_stands(tmp_path):
    before = report(communicator("0xf", range(4), reduced(641, 641, 640, 641)), at="2026-11-25 09:00:00")
    hang = found_in(tmp_path, before, report(communicator("0xa", range(4), reduced(641, 641, 640, 641))))
    assert "make a second report" in hang.text


def test_few_that_are_ahead_of_many_blame_nobody(tmp_path):
    """As in NVIDIA/nccl issue 1911: 2 of 32 ranks have launched one more. The others are listed."""
    counts = [641 if rank in (12, 13) else 640 for rank in range(32)]
    hang = found_in(tmp_path, report(communicator("0xa", range(32), reduced(*counts))))
    assert hang.culprits == ()
    assert "ranks 12-13 wait in AllReduce 641 of communicator 0xa, which ranks 0-11, 14-31 never launched" in hang.text


def test_ranks_that_launched_different_collectives_wait_for_each_other(tmp_path):
    counts = [{"AllReduce": 4, "AllGather": 7}, {"AllReduce": 3, "AllGather": 8}]
    hang = found_in(tmp_path, report(communicator("0xa", range(2), counts)))
    assert (hang.culprits, hang.circle) == ((), (0, 1))


def test_what_cannot_be_told_is_not(tmp_path):
    """All alike; a communicator that comes or goes; one that a rank has left while RAS asked."""
    equal = found_in(tmp_path, report(communicator("0xa", range(4), reduced(5, 5, 5, 5))))
    assert equal.culprits == ()
    assert "1 communicator all ranks have launched the same number" in equal.text
    assert "sends and receives, collectives in CUDA graphs" in equal.text
    for changing, what in (
        (communicator("0xa", range(4), reduced(5, 5, 5, 4), finalize_called=True), "is tearing it down"),
        (communicator("0xa", range(4), reduced(5, 5, 5, 4), init_state=7), "is initializing it"),
        (communicator("0xa", range(4), reduced(5, 5, 5, 4), abort_flag=True), "has aborted it"),
        (communicator("0xa", range(4), reduced(5, 5, 5, 4), missing={2: None}), "rank 2 does not know it"),
    ):
        hang = found_in(tmp_path, report(changing))
        assert hang.culprits == ()
        assert "all ranks have launched" not in hang.text
        assert what in hang.text
    assert "no communicator in this report" in found_in(tmp_path, report()).text


def test_errors_and_the_dead_are_named(tmp_path):
    counts = reduced(5, 5, 5, 5)
    whole = communicator("0xa", range(4), counts, missing={3: True}, async_error=6)
    hang = found_in(tmp_path, report(whole))
    assert causes(hang) == {3: Cause.GONE}
    assert "takes it for dead" in hang.text
    assert "NCCL reports error 6 (remote error) on ranks 0-2." in hang.text


def test_without_a_communicator_of_all_the_ranks_are_counted_and_it_is_said(tmp_path):
    pairs = [communicator("0xa", [0, 1], reduced(5, 4)), communicator("0xb", [4, 5], reduced(5, 5))]
    hang = found_in(tmp_path, report(*pairs))
    assert causes(hang) == {1: Cause.HOST}
    assert hang.ranks == (0, 1, 2, 3)
    assert "ranks are counted by host and GPU" in hang.text


def test_ranks_whose_process_is_unknown_are_only_named_where_their_number_is(tmp_path):
    unknown = communicator("0xa", range(4), reduced(5, 5, 5, 5), missing={2: False, 3: False})
    for one in unknown["missing_ranks"]:
        one |= {"host": "unknown", "pid": -1}
    assert causes(found_in(tmp_path, report(unknown))) == {2: Cause.GONE, 3: Cause.GONE}


def test_processes_of_containers_that_look_alike_are_told_by_the_communicators_ranks(tmp_path):
    """Each container sees one GPU and counts its processes from 1; their host is one."""
    alike = communicator("0xa", range(4), reduced(5, 5, 4, 5))
    for one in alike["ranks"]:
        one |= {"host": "10.0.0.1", "pid": 1, "nvml_dev": 0}
    hang = found_in(tmp_path, report(alike))
    assert (causes(hang), hang.ranks) == ({2: Cause.HOST}, (0, 1, 2, 3))
    pair = communicator("0xb", [0, 1], reduced(7, 8))
    for one in pair["ranks"]:
        one |= {"host": "10.0.0.1", "pid": 1, "nvml_dev": 0}
    assert (
        "0xb was not compared: rank 0 is a process that RAS does not tell"
        in found_in(tmp_path, report(alike, pair)).text
    )


def test_a_silent_rank_without_a_number_is_said(tmp_path):
    pair = communicator("0xa", [0, 1], reduced(5, 5))
    other = communicator("0xb", [4, 5], reduced(5, 5), missing={5: True})
    other["missing_ranks"][0] |= {"host": "unknown", "pid": -1}
    hang = found_in(tmp_path, report(pair, other))
    assert hang.text.startswith("Rank 1 of communicator 0xb does not answer NCCL's RAS.")
    assert "all ranks have launched" not in hang.text


def test_ras_tells_where_dumps_and_stacks_do_not(tmp_path):
    stacked(tmp_path, 1, late=1)
    hang = found_in(tmp_path, report(communicator("0xa", range(3), reduced(5, 4, 5))))
    assert causes(hang) == {1: Cause.HOST}
    assert hang.culprits[0].stack.startswith("read")


@pytest.mark.parametrize("counts", [(4, 5, 4, 5), (5, 5, 5, 5)])
def test_a_rank_whose_dump_is_elsewhere_is_not_gone_where_ras_hears_it(counts, tmp_path):
    """Rank 0 stands behind a collective with rank 1; rank 2 waits for it in a pair, the others in the group of all.

    Where RAS blames nobody (it counts what is launched, not what is done), nobody is.
    """
    pair, other = ("1", "pair"), ("2", "other")
    world = (WORLD, (0, 1, 2, 3))
    own = {0: (world, (pair, (0, 2)), (other, (0, 1))), 2: (world, (pair, (0, 2))), 3: (world,)}
    written(
        tmp_path,
        {
            0: dump(entry(4, done=True), entry(3, group=other, done=True, at=500), groups=own[0]),
            2: dump(entry(4, done=True), entry(1, group=pair, at=500), groups=own[2]),
            3: dump(entry(5), groups=own[3]),
        },
    )
    refs, is_collection = find_inputs([str(tmp_path)])
    assert causes(read_hang(refs, is_collection=is_collection)[0]) == {1: Cause.GONE}
    seen = (communicator("0xa", range(4), reduced(*counts)), communicator("0xb", [0, 2], reduced(counts[0] - 4, 1)))
    hang = found_in(tmp_path, report(*seen), report(*seen, at="2026-11-25 10:00:05"))
    assert causes(hang) == ({0: Cause.HOST} if counts[0] == 4 else {})


@pytest.mark.parametrize(
    "text",
    [
        GUIDE[:900],
        '{"nccl_version": "2.29.1", "communicators": 7}',
        '{"nccl_version": "2.29.1", "communicators": [{"hash": 5, "size": []}]}',
        '{"nccl_version": "2.29.1", "communicators": [' + "[" * 5000,
    ],
)
def test_a_broken_report_is_an_error(tmp_path, capsys, text):
    (tmp_path / "ras.json").write_text(text)
    assert run(["hang", str(tmp_path / "ras.json")]) == 3
    assert "a report of NCCL's RAS must be whole" in capsys.readouterr().err


def test_numbers_beyond_all_reason_are_left_out(tmp_path):
    odd = communicator("0xa", range(2), [{"AllReduce": 3, "AllGather": -5}, {"AllReduce": 3, "AllGather": -6}])
    odd["ranks"].append(member(1 << 40, 0, {}))
    huge = communicator("0xb", range(2), reduced(5, 4)) | {"size": 1 << 60}
    assert found_in(tmp_path, report(odd, huge)).culprits == ()


def test_its_text_is_refused_with_what_to_give(tmp_path, capsys):
    text = "NCCL version 2.26.2 compiled with CUDA 12.6\n\nJob summary\n===========\n\nCommunicators... (0.00s)\n============="
    (tmp_path / "ras.txt").write_text(text)
    assert run(["hang", str(tmp_path)]) == 3
    assert "ncclras -f json" in capsys.readouterr().err
