"""Who holds a job up, from the dumps of its ranks: worked out by hand, made on gloo, and two public incidents."""

from __future__ import annotations

import json
import pickle
import subprocess
import sys

import pytest
from conftest import ROOT, SHARED

from paro_advise.advisor.cli import run
from paro_advise.advisor.hangs.diagnosis import diagnose
from paro_advise.advisor.hangs.model import Cause
from paro_advise.advisor.hangs.reading import read_hang
from paro_advise.advisor.rendering.texts.hang_text import hang_text
from paro_advise.trace_parsers.bytes.blocks import SourceRef
from paro_advise.trace_parsers.dumps.rank_dump import read_dump

WORLD = ("0", "default_pg")
GATHER, REDUCE = "_all_gather_base", "all_reduce"


def entry(seq, name=REDUCE, *, done=False, group=WORLD, size=64, frames=(), thread="python", at=0):
    sizes = [[size]]
    return {
        "process_group": group, "pg_id": int(group[0]), "collective_seq_id": seq, "p2p_seq_id": seq, "is_p2p": "send" in name or "recv" in name,
        "profiling_name": f"nccl:{name}", "time_created_ns": 1_000 + 10 * seq + at, "state": "completed" if done else "scheduled",
        "input_sizes": sizes, "output_sizes": sizes, "input_dtypes": ["Float"], "output_dtypes": ["Float"], "retired": done,
        "frames": list(frames), "thread_name": thread,
    }  # fmt: skip


def dump(*entries, groups=((WORLD, (0, 1, 2, 3)),), enqueued=None, completed=None):
    config = {group[0]: {"name": group[0], "desc": group[1], "ranks": str(list(ranks))} for group, ranks in groups}
    status = {number: {"last_enqueued_collective": count} for number, count in (enqueued or {}).items()}
    for number, count in (completed or {}).items():
        status.setdefault(number, {})["last_completed_collective"] = count
    return {"version": "2.9", "pg_config": config, "pg_status": status, "entries": list(entries)}


def written(folder, dumps):
    folder.mkdir(exist_ok=True)
    for rank, content in dumps.items():
        (folder / f"nccl_trace_rank_{rank}").write_bytes(pickle.dumps(content, 2))
    return folder


def diagnosed(folder, dumps):
    found = written(folder, dumps)
    return diagnose({rank: read_dump(SourceRef(path=found / f"nccl_trace_rank_{rank}")) for rank in dumps})


def causes(hang):
    return {one.rank: one.cause for one in hang.culprits}


@pytest.mark.parametrize("names", [("attempt0", "attempt1"), ("attempt1", "attempt0")])
def test_of_two_dumps_of_a_rank_the_newer_one_counts(names, tmp_path, capsys):
    """A job that was started again leaves those of its first attempt; whatever folders are called."""
    hour_ns = 3600 * 10**9
    old = {rank: dump(entry(4, done=True), entry(5, name=GATHER)) for rank in range(4)}
    new = {rank: dump(entry(4, done=True, at=hour_ns), *[entry(5, at=hour_ns)] * (rank != 1)) for rank in range(4)}
    for name, dumps in zip(names, (old, new), strict=True):
        written(tmp_path / name, dumps)
    assert run(["hang", str(tmp_path)]) == 0
    out, err = capsys.readouterr()
    assert "Rank 1 holds the others up" in out
    assert err.count("which is newer" if names[0] == "attempt0" else "already") == 4
    assert "cannot be read" not in out


def test_entries_of_a_dump_that_cannot_be_read_are_told(tmp_path, capsys):
    dumps = {rank: dump(entry(4, done=True), *[entry(5)] * (rank != 1)) for rank in range(4)}
    dumps[0]["entries"] += [{"profiling_name": 7}, "x"]
    assert run(["hang", str(written(tmp_path, dumps))]) == 0
    out, err = capsys.readouterr()
    assert "Rank 1 holds the others up" in out
    assert "nccl_trace_rank_0: flight-recorder entries broken or out of range, left out: 2" in err


def test_the_rank_that_never_issued_what_others_wait_in_is_at_fault(tmp_path):
    before = entry(4, done=True)
    frames = [{"name": "__avg_scatter_contiguous_grads", "filename": "deepspeed/runtime/zero/stage3.py", "line": 1}]
    waits = entry(5, size=1 << 20, frames=frames)
    hang = diagnosed(
        tmp_path / "d", {0: dump(before, waits), 1: dump(before, waits), 2: dump(before), 3: dump(before, waits)}
    )
    assert causes(hang) == {2: Cause.HOST}
    assert hang.text == (
        "Rank 2 holds the others up. Rank 2 never issued all_reduce 5, 4 MiB (gradient; "
        "stage3.py:__avg_scatter_contiguous_grads) of group 0 (default_pg), in which ranks 0-1, 3 wait."
    )
    (wait,) = hang.waits
    assert (wait.waiting, wait.absent, wait.behind, wait.without_dump) == ((0, 1, 3), (2,), (), ())
    assert hang.culprits[0].last == "all_reduce 4, 256 B"


@pytest.mark.parametrize("completed", [4, None])
def test_a_rank_whose_buffer_is_empty_has_not_finished_all_that_it_issued(tmp_path, completed):
    """All have issued number 5, and none shows that it has finished it: nobody is to blame."""
    waits = entry(5)
    counters = {"enqueued": {"0": 5}, "completed": None if completed is None else {"0": completed}}
    hang = diagnosed(tmp_path / "d", {0: dump(waits), 1: dump(**counters), 2: dump(waits), 3: dump(waits)})
    assert causes(hang) == {}


def test_dumps_of_an_earlier_run_are_left_out_and_said(tmp_path):
    """Rank 3's dump is of two days before, and far ahead: it has not finished what its peers have just issued."""
    waits, two_days_ns = entry(5, at=10**18), 2 * 24 * 3600 * 10**9
    of_before = [entry(seq, done=seq < 900, at=10**18 - two_days_ns) for seq in range(890, 901)]
    folder = written(tmp_path / "d", {**{rank: dump(waits) for rank in range(3)}, 3: dump(*of_before)})
    refs = [SourceRef(path=path) for path in sorted(folder.iterdir())]
    hang, left_out = read_hang(refs, is_collection=True)
    assert causes(hang).keys() <= {3}
    assert "as of another run" in left_out[0]


def test_counters_tell_what_a_buffer_holds_no_more(tmp_path):
    """Rank 3 has an empty buffer, but has issued number 5 as the others have; rank 2 has not."""
    waits = entry(5)
    counted = {0: dump(waits, enqueued={"0": 5}), 1: dump(waits, enqueued={"0": 5}), 2: dump(enqueued={"0": 4})}
    hang = diagnosed(tmp_path / "d", {**counted, 3: dump(waits, enqueued={"0": 5})})
    assert causes(hang) == {2: Cause.HOST}


def test_who_is_waited_for_and_waits_itself_is_not_at_fault(tmp_path):
    """Ranks 0 and 1 wait for 2 in their pair's group with it, and 2 waits for 3."""
    first, second = ("1", "first"), ("2", "second")
    groups = ((WORLD, (0, 1, 2, 3)), (first, (0, 1, 2)), (second, (2, 3)))
    late = entry(7, group=first)
    hang = diagnosed(
        tmp_path / "d",
        {
            0: dump(late, groups=groups[:2]),
            1: dump(late, groups=groups[:2]),
            2: dump(entry(6, group=first, done=True), entry(3, GATHER, group=second), groups=groups),
            3: dump(entry(2, GATHER, group=second, done=True), groups=(groups[0], groups[2])),
        },
    )
    assert causes(hang) == {3: Cause.HOST}


def test_a_device_that_lacks_what_others_have_is_at_fault(tmp_path):
    """Its host went on; the others are stuck in what comes later."""
    stuck = [entry(5), entry(6), entry(7)]
    others = [entry(5, done=True), entry(6, done=True), entry(7)]
    hang = diagnosed(tmp_path / "d", {0: dump(*others), 1: dump(*stuck), 2: dump(*others), 3: dump(*others)})
    assert causes(hang) == {1: Cause.DEVICE}
    assert "has a device that has not finished all_reduce 5" in hang.text


def begun(one):
    return one | {"state": "started"}


def test_a_device_that_stands_before_what_others_wait_in_is_at_fault(tmp_path):
    """Hosts issue ahead. A kernel of rank 3's stands: in neither group has its next one begun, in which others wait."""
    pairs = {0: ("1", "first"), 1: ("1", "first"), 2: ("2", "second"), 3: ("2", "second")}
    members = {"1": (0, 1), "2": (2, 3)}

    def dump_of(rank):
        pair = pairs[rank]
        in_pair, in_world = entry(6, GATHER, group=pair), entry(9)
        # Ranks 0 and 1 are done with their pair and wait in the world; rank 2 waits for 3 in theirs.
        held = {0: (in_pair | {"state": "completed", "retired": True}, begun(in_world)), 2: (begun(in_pair), in_world)}
        return dump(
            *held.get(rank - rank % 2 if rank < 3 else 3, (in_pair, in_world)),
            groups=((WORLD, (0, 1, 2, 3)), (pair, members[pair[0]])),
        )

    hang = diagnosed(tmp_path / "d", {rank: dump_of(rank) for rank in range(4)})
    assert causes(hang) == {3: Cause.DEVICE}
    assert "Rank 3 has a device that has not begun" in hang.text


def test_a_recorder_that_times_nothing_blames_no_device(tmp_path):
    """Without timing all that is not done is told as scheduled."""
    hang = diagnosed(tmp_path / "d", {rank: dump(entry(5), entry(6)) for rank in range(4)})
    assert causes(hang) == {}
    assert "Cannot tell who is at fault" in hang.text


@pytest.mark.parametrize("left", [lambda whole: whole[: len(whole) // 2], lambda _whole: b""])
def test_a_dump_that_is_cut_is_no_sign_of_death(left, tmp_path, capsys):
    """Rank 2 never issued what 0 and 1 wait in; what rank 3 did nobody knows, but it lived to write its dump."""
    before = entry(4, done=True)
    waits = dump(before, entry(5))
    folder = written(tmp_path / "d", {0: waits, 1: waits, 2: dump(before), 3: waits})
    cut = folder / "nccl_trace_rank_3"
    cut.write_bytes(left(cut.read_bytes()))
    assert run(["hang", str(folder)]) == 0
    printed = capsys.readouterr()
    assert printed.out.startswith("Rank 2 holds the others up. Rank 2 never issued all_reduce 5")
    assert "The dump of rank 3 cannot be read." in printed.out
    assert str(cut) in printed.err


def test_a_dump_that_is_cut_blames_nobody_else(tmp_path, capsys):
    waits = dump(entry(4, done=True), entry(5))
    folder = written(tmp_path / "d", dict.fromkeys(range(4), waits))
    (folder / "nccl_trace_rank_3").write_bytes(b"")
    assert run(["hang", str(folder)]) == 0
    printed = capsys.readouterr().out
    assert printed.startswith("Cannot tell who is at fault")
    assert "The dump of rank 3 cannot be read." in printed


@pytest.mark.parametrize("name", ["_all_gather_base", "_reduce_scatter_base", "all_gather_into_tensor"])
def test_parts_of_one_tensor_are_equal_on_all_ranks(name, tmp_path):
    """Rank 1 gathers half as much as the others; lists of tensors may differ."""
    whole, half = entry(5, name, size=1 << 20), entry(5, name, size=1 << 19)
    hang = diagnosed(tmp_path / "d", {rank: dump(half if rank == 1 else whole) for rank in range(4)})
    assert causes(hang) == {1: Cause.MISMATCH}
    whole, half = entry(5, "all_gather", size=1 << 20), entry(5, "all_gather", size=1 << 19)
    assert not diagnosed(tmp_path / "e", {rank: dump(half if rank == 1 else whole) for rank in range(4)}).culprits


def test_a_rank_without_a_dump_is_named_if_others_wait_for_it(tmp_path):
    hang = diagnosed(tmp_path / "d", {0: dump(entry(5)), 1: dump(entry(5)), 3: dump(entry(5))})
    assert causes(hang) == {2: Cause.GONE}
    assert hang.ranks_missing == (2,)


def test_of_two_ranks_the_one_without_a_dump_is_named(tmp_path):
    hang = diagnosed(tmp_path / "d", {0: dump(entry(5), groups=((WORLD, (0, 1)),))})
    assert causes(hang) == {1: Cause.GONE}


def test_victims_of_a_rank_that_died_are_not_blamed(tmp_path):
    """Rank 1 ended with an error in a group with rank 2, which left no dump."""
    pair = ("1", "pair")
    groups = ((WORLD, (0, 1, 2, 3)), (pair, (1, 2)))
    failed = dump(entry(4, done=True), entry(3, group=pair, done=True, at=500), groups=groups)
    hang = diagnosed(tmp_path / "d", {0: dump(entry(5)), 1: failed, 3: dump(entry(5))})
    assert causes(hang) == {2: Cause.GONE}


def test_a_rank_that_stands_by_itself_is_named_beside_one_without_a_dump(tmp_path):
    """Rank 2's file was not given; rank 1 stands before number 5, which others issued after what they shared with it."""
    waits = dump(entry(4, done=True), entry(5))
    hang = diagnosed(tmp_path / "d", {0: waits, 1: dump(entry(4, done=True)), 3: waits})
    assert not hang.culprits
    assert hang.text.startswith("Cannot tell who is at fault: rank 1, or rank 2, of which nothing is here")
    assert "Rank 1 never issued all_reduce 5" in hang.text


def test_who_may_have_ended_because_of_a_rank_without_a_dump_is_not_blamed(tmp_path):
    """Rank 2 left none and nobody is seen to wait for it; rank 0 has issued nothing since what it shared with it."""
    pair = ("1", "pair")
    waits = entry(3, group=pair)
    groups = ((WORLD, (0, 1, 2, 3)), (pair, (0, 1)))
    hang = diagnosed(
        tmp_path / "d",
        {
            0: dump(entry(4, done=True), groups=groups),
            1: dump(entry(4, done=True), waits, groups=groups),
            3: dump(entry(4, done=True), groups=groups[:1]),
        },
    )
    assert hang.culprits == ()
    assert hang.text == (
        "Cannot tell who is at fault: rank 1 waits for rank 0; that may be because of rank 2, of which nothing is here."
    )


def test_who_is_late_is_named_beside_several_ranks_of_which_nothing_is_here(tmp_path):
    """That two died at once is no likelier than that somebody did not copy their dumps."""
    groups = ((WORLD, tuple(range(8))),)
    waits = dump(entry(1, done=True), entry(2), groups=groups)
    late = dump(entry(1, done=True), groups=groups)
    dumps = {rank: late if rank == 5 else waits for rank in range(8) if rank not in (1, 2)}
    hang = diagnosed(tmp_path, dumps)
    assert causes(hang) == {}
    assert hang.text.startswith("Cannot tell who is at fault: rank 5, or ranks 1-2, of which nothing is here")
    assert "Rank 5 never issued" in hang.text


def test_of_two_late_ranks_the_later_one_is_blamed(tmp_path):
    """Rank 0 may wait for 2 in what no dump shows; gloo's recorder leaves reduce-scatters out."""
    pair = ("1", "pair")
    groups = ((WORLD, (0, 1, 2, 3)), (pair, (0, 2)))
    before = entry(4, done=True)
    hang = diagnosed(
        tmp_path / "d",
        {
            0: dump(before, entry(9, group=pair, done=True), groups=groups),
            1: dump(before, entry(5), groups=groups[:1]),
            2: dump(before, entry(8, group=pair, done=True), groups=groups),
            3: dump(before, entry(5), groups=groups[:1]),
        },
    )
    assert causes(hang) == {2: Cause.HOST}


@pytest.mark.parametrize(
    ("others", "own"), [((REDUCE, 64), (GATHER, 64)), ((REDUCE, 64), (REDUCE, 128)), (("broadcast", 8), (REDUCE, 8))]
)
def test_who_issued_something_else_than_most_is_at_fault(tmp_path, others, own):
    most, one = (dump(entry(5, name, size=size)) for name, size in (others, own))
    hang = diagnosed(tmp_path / "d", {0: most, 1: most, 2: one, 3: most})
    assert causes(hang) == {2: Cause.MISMATCH}
    assert hang.mismatches[0].seq == 5


def test_of_two_that_differ_none_is_blamed(tmp_path):
    groups = ((WORLD, (0, 1)),)
    two = {0: dump(entry(5), groups=groups), 1: dump(entry(5, GATHER), groups=groups)}
    hang = diagnosed(tmp_path / "d", two)
    assert hang.culprits == ()
    assert hang.text.startswith("Cannot tell who is at fault: as number 5 of group 0 (default_pg), rank 0 all_reduce")


def test_sizes_that_differ_by_design_are_no_mismatch(tmp_path):
    """Experts get different numbers of tokens."""
    dumps = {rank: dump(entry(5, "all_to_all", size=64 + rank)) for rank in range(4)}
    assert diagnosed(tmp_path / "d", dumps).mismatches == ()


def test_ranks_in_a_circle_are_told_and_none_is_blamed(tmp_path):
    """Each has issued what the other one comes to later, as blocking collectives in different orders do."""
    one, other = ("1", "one"), ("2", "other")
    groups = ((one, (0, 1)), (other, (0, 1)))
    two = {0: dump(entry(5, group=one), groups=groups), 1: dump(entry(8, group=other), groups=groups)}
    hang = diagnosed(tmp_path / "d", two)
    assert (hang.culprits, hang.circle) == ((), (0, 1))
    assert "they issued collectives in different orders" in hang.text


def test_who_is_ahead_of_its_waiters_elsewhere_is_not_blamed(tmp_path):
    """Rank 1 left the pair's number 9 out: rank 0, which has done it, may wait for 1 in what no dump shows."""
    pair = ("1", "pair")
    groups = ((WORLD, (0, 1)), (pair, (0, 1)))
    hang = diagnosed(
        tmp_path / "d",
        {
            0: dump(entry(4, done=True), entry(9, "broadcast", group=pair, done=True), groups=groups),
            1: dump(entry(5), entry(8, "broadcast", group=pair, done=True), groups=groups),
        },
    )
    assert hang.culprits == ()
    assert "rank 1 waits for rank 0, ahead of them in another group" in hang.text


def test_what_cannot_have_finished_has_failed(tmp_path):
    """Rank 1 has done with an all-reduce that rank 2 never issued: it ended with an error, and is as late as others."""
    pair = ("1", "pair")
    groups = ((WORLD, (0, 1, 2)), (pair, (1, 2)))
    hang = diagnosed(
        tmp_path / "d",
        {
            0: dump(entry(5), groups=groups[:1]),
            1: dump(entry(8, group=pair, done=True), entry(5, done=True), groups=groups),
            2: dump(entry(4, done=True), entry(9, group=pair), groups=groups),
        },
    )
    assert (hang.culprits, hang.circle) == ((), (1, 2))


def test_where_all_have_issued_it_nobody_is_blamed(tmp_path):
    hang = diagnosed(tmp_path / "d", {rank: dump(entry(5)) for rank in range(4)})
    assert hang.culprits == ()
    assert "a device or the network between them is stuck" in hang.text


def test_a_rank_that_waits_in_something_unexplained_is_not_blamed(tmp_path):
    """Rank 3 waits for 2, which waits with 1 in a collective that both have issued."""
    pair = ("1", "pair")
    groups = ((WORLD, (2, 3)), (pair, (1, 2)))
    hang = diagnosed(
        tmp_path / "d",
        {
            1: dump(entry(9, group=pair), groups=groups[1:]),
            2: dump(entry(4, done=True), entry(9, group=pair), groups=groups),
            3: dump(entry(4, done=True), entry(5), groups=groups[:1]),
        },
    )
    assert hang.culprits == ()
    assert "of group 1 (pair)" in hang.text


def test_transfers_whose_other_end_was_never_issued(tmp_path):
    groups = ((WORLD, (0, 1)),)
    two = {0: dump(entry(5, "recv 0<-1"), groups=groups), 1: dump(entry(4, "send 1->0", done=True), groups=groups)}
    hang = diagnosed(tmp_path / "d", two)
    assert causes(hang) == {1: Cause.HOST}
    assert "never issued its end of recv 0<-1 5" in hang.text


def test_a_rank_that_stood_is_blamed_for_what_it_failed_to_issue_first(tmp_path):
    """Hosts run ahead: rank 0 has issued three receives and the reduction behind them when rank 1 stands."""
    groups = ((WORLD, (0, 1)),)
    ahead = [entry(number, "recv 0<-1") for number in (5, 6, 7)]
    hang = diagnosed(
        tmp_path / "d",
        {0: dump(*ahead, entry(9), groups=groups), 1: dump(entry(4, "send 1->0", done=True), groups=groups)},
    )
    assert "never issued its end of recv 0<-1 5" in hang.text
    waits = [line for line in hang_text(hang).splitlines() if line.startswith("  0 in ")]
    assert len(waits) == 2
    assert any("in recv 0<-1 5, 256 B and in 2 more of these, group 0 default_pg: for 1" in line for line in waits)


def test_a_job_that_finished_everything_does_not_wait(tmp_path):
    hang = diagnosed(tmp_path / "d", {rank: dump(entry(5, done=True)) for rank in range(4)})
    assert hang.text == "Nothing waits: every collective in these dumps is finished."


@pytest.mark.distributed
def test_jobs_that_were_made_to_hang_on_gloo(tmp_path):
    """A rank that sleeps, and one that also leaves no dump; torch's own recorder."""
    words = ("--hangs", "2", "--seed", "5", "--wait-s", "6", "--keep", str(tmp_path / "hangs"))
    done = subprocess.run(
        [sys.executable, ROOT / "benchmarks/bench_hang.py", *words], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    counts = json.loads(done.stdout.splitlines()[-1])
    assert counts["sleep"] == counts["gone"] == {"right": 1}, done.stderr


def test_public_incidents():
    """Injected in jobs of 16 ranks with tensor, pipeline and expert parallelism (nvidia-resiliency-ext's own tests)."""
    for log in sorted((SHARED / "corpus").glob("NVIDIA*/tests/attribution/unit/fr_traces/*/fault_injection.log")):
        faults = dict(line.split(", fault_type: ") for line in log.read_text().splitlines() if "fault_type" in line)
        wanted = {
            int(rank.removeprefix("Rank ")): Cause.DEVICE if kind == "GPU_ERROR" else Cause.HOST
            for rank, kind in faults.items()
        }
        dumps = {
            int(path.name.rpartition("_")[2]): read_dump(SourceRef(path=path)) for path in log.parent.glob("_dump_*")
        }
        assert len(dumps) == 16
        assert causes(diagnose(dumps)) == wanted


def test_the_command_writes_text_page_and_document(tmp_path, capsys):
    before = entry(4, done=True)
    waiting = dump(before, entry(5, "all_reduce<script>alert(1)</script>"))
    folder = written(tmp_path / "dumps", {0: waiting, 1: waiting, 2: dump(before), 3: waiting})
    (folder / "nccl_trace_rank_4").write_bytes(b"\x80\x02garbage pg_config")
    (folder / "train.log").write_text("step 1\n")
    page, data = tmp_path / "hang.html", tmp_path / "hang.json"
    assert run(["hang", str(folder), "-o", str(page), "--json", str(data)]) == 0
    printed = capsys.readouterr()
    assert printed.out.startswith("Rank 2 holds the others up.")
    assert "nccl_trace_rank_4: " in printed.err
    assert "train.log: no dump" in printed.err
    assert json.loads(data.read_text())["format"] == "paro-advise/hang"
    assert "Rank 2 holds the others up" in page.read_text()
    assert "<script>alert(1)" not in page.read_text()
    assert run(["hang", str(folder), "-o", str(page)]) == 1  # never overwritten
    assert run(["hang", str(folder), "--json", "-", "-q"]) == 0
    assert json.loads(capsys.readouterr().out)["culprits"][0]["rank"] == 2
    assert run(["schema", "hang"]) == 0


@pytest.mark.parametrize("content", [b"not a dump", b'{"entries": 3, "pg_config": {}}'])
def test_what_holds_no_dump_is_refused(tmp_path, capsys, content):
    path = tmp_path / "x"
    path.write_bytes(content)
    assert run(["hang", str(path)]) != 0
    assert "Traceback" not in capsys.readouterr().err


class Evil:
    def __reduce__(self):
        import os

        return os.system, ("touch evil_was_here",)


def test_a_pickle_that_runs_code_is_refused(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "nccl_trace_rank_0").write_bytes(pickle.dumps({"entries": [Evil()], "pg_config": {}}, 2))
    assert run(["hang", "nccl_trace_rank_0"]) != 0
    assert "evil_was_here" not in {path.name for path in tmp_path.iterdir()}
    assert "error[" in capsys.readouterr().err
