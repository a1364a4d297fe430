"""Inputs of several jobs: one is analysed, the others are listed to choose from."""

from __future__ import annotations

import json
import shutil
import tarfile

import pytest
from helpers import analyze, write_run
from test_pace import log as write_log
from trace_builder import TraceBuilder, fsdp_rank

from paro_advise.advisor.cli import run

TRAIN_LOG = "".join(
    f" iteration {number:8d}/     100 | elapsed time per iteration (ms): {time_ms:.1f} | learning rate: 1.0E-4 |\n"
    for number, time_ms in enumerate([400.0] * 8, start=1)
)


def job_note(analysis):
    (note,) = [item for item in analysis.data_quality if item.code == "Q304"]
    return note.message


def test_jobs_of_one_world_and_time_in_two_folders_are_not_mixed(tmp_path):
    write_run(tmp_path / "a", [fsdp_rank(rank, 2) for rank in range(2)])
    write_run(tmp_path / "b", [fsdp_rank(rank, 2, steps=4) for rank in range(2)])
    analysis = analyze(tmp_path)
    note = job_note(analysis)
    assert "of 2 different jobs" in note
    assert str(tmp_path / "a") in note
    assert str(tmp_path / "b") in note
    assert analysis.run.num_steps in (2, 4)
    assert {item.num_steps for item in analysis.ranks} == {analysis.run.num_steps}
    assert not [item for item in analysis.data_quality if item.code in ("Q305", "Q311")]


def test_jobs_in_one_folder_are_told_apart_by_the_names_of_their_files(tmp_path):
    for name, steps in (("before", 2), ("after", 3)):
        for rank in range(2):
            fsdp_rank(rank, 2, steps=steps).write(tmp_path / f"{name}_rank{rank}.json")
    analysis = analyze(tmp_path)
    assert "of 2 different jobs" in job_note(analysis)
    assert "with after_rank0.json" in job_note(analysis)
    assert "with before_rank0.json" in job_note(analysis)
    assert len({item.num_steps for item in analysis.ranks}) == 1


def test_a_stray_trace_or_a_wrong_clock_makes_no_two_jobs_of_one(tmp_path):
    """Folders of nodes hold different ranks of one job, whatever else lies there or when their clocks say it was."""
    for rank in range(4):
        folder = tmp_path / "nodes" / f"node{rank // 2}"
        folder.mkdir(parents=True, exist_ok=True)
        fsdp_rank(rank, 4).write(folder / f"rank{rank}.json")
        (tmp_path / "clocks").mkdir(exist_ok=True)
        fsdp_rank(rank, 4, clock_offset_us=700e6 * (rank > 1)).write(tmp_path / "clocks" / f"rank{rank}.json")
    fsdp_rank(0, 4, late_us=3).write(tmp_path / "nodes" / "node1" / "rank0.json")
    for folder in ("nodes", "clocks"):
        analysis = analyze(tmp_path / folder)
        assert [item.rank for item in analysis.ranks] == [0, 1, 2, 3]
        assert "Q304" not in {item.code for item in analysis.data_quality}


def test_a_trace_that_tells_nothing_joins_the_job_beside_it(tmp_path):
    fsdp_rank(0, 4).write(tmp_path / "a.json")
    (tmp_path / "b.json").write_text(fsdp_rank(1, 4).text("bare_list"))
    assert [item.rank for item in analyze(tmp_path).ranks] == [0, 1]


@pytest.mark.parametrize("place", ["node{node}/iteration_{number}", "run!{number}/node{node}"])
@pytest.mark.parametrize("packed", [False, True])
def test_recordings_of_several_nodes_are_whole(tmp_path, place, packed):
    """A recording is what lies in the folders of one iteration on all nodes, in an archive too."""
    for number in (5, 10):
        for rank in range(4):
            folder = tmp_path / "job" / place.format(node=rank // 2, number=number)
            folder.mkdir(parents=True, exist_ok=True)
            # The larger file of a rank is of another recording from rank to rank.
            steps = 2 if (rank + number) % 2 else 3
            fsdp_rank(rank, 4, steps=steps, late_us=number).write(folder / f"rank{rank}.json")
    path = tmp_path / "job"
    if packed:
        path = tmp_path / "job.tar"
        with tarfile.open(path, "w") as archive:
            archive.add(tmp_path / "job", "job")
    analysis = analyze(path)
    assert "of 2 different jobs" in job_note(analysis)
    assert [item.rank for item in analysis.ranks] == [0, 1, 2, 3]
    assert "Q305" not in {item.code for item in analysis.data_quality}


def test_a_log_goes_with_the_traces_beside_it(tmp_path):
    write_run(tmp_path / "a", [fsdp_rank(rank, 2) for rank in range(2)])
    write_run(tmp_path / "b", [fsdp_rank(rank, 2) for rank in range(2)])
    fsdp_rank(0, 2, steps=5).write(tmp_path / "b" / "rank0.json")
    for folder in ("a", "b", "c"):
        (tmp_path / folder).mkdir(exist_ok=True)
    (tmp_path / "a" / "train.log").write_text(TRAIN_LOG)
    (tmp_path / "c" / "train.log").write_text(TRAIN_LOG.replace("400.0", "900.0"))
    note = job_note(analyze(tmp_path))
    assert "of 3 different jobs" in note
    assert note.index(str(tmp_path / "a")) < note.index(str(tmp_path / "c"))  # the one with a log is the larger


def test_a_log_elsewhere_belongs_to_the_only_job(tmp_path):
    traces = write_run(tmp_path / "traces", [fsdp_rank(rank, 2) for rank in range(2)])
    (tmp_path / "logs").mkdir()
    log = tmp_path / "logs" / "train.log"
    log.write_text(TRAIN_LOG)
    analysis = analyze(traces, log)
    assert not [item for item in analysis.data_quality if item.code == "Q304"]
    assert len(analysis.run.inputs) == 3


def test_training_logs_of_several_jobs_are_not_one(tmp_path):
    for name, time_ms in (("a", "400.0"), ("b", "900.0")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "train.log").write_text(TRAIN_LOG.replace("400.0", time_ms))
    analysis = analyze(tmp_path)
    assert "of 2 different jobs" in job_note(analysis)
    assert ("400 ms" in analysis.verdict.text) != ("900 ms" in analysis.verdict.text)


def test_what_decides_is_said_first_and_repeated_notes_once(tmp_path, capsys):
    for number in range(5):
        document = fsdp_rank(0, 2).document()
        del document["distributedInfo"]
        (tmp_path / f"trace_{number}.json").write_text(json.dumps(document))
    write_run(tmp_path / "other", [fsdp_rank(0, 16)])
    assert run(["analyze", str(tmp_path)]) == 0
    notes = [line for line in capsys.readouterr().err.splitlines() if "[Q" in line]
    assert "[Q304]" in notes[0]
    assert sum("[Q306]" in line for line in notes) <= 1


def test_traces_of_other_times_are_of_other_runs(tmp_path):
    folder = write_run(tmp_path / "run", [fsdp_rank(rank, 2) for rank in range(2)])
    for number in range(2):
        document = fsdp_rank(0, 2).document()
        document["baseTimeNanoseconds"] += (number + 1) * 3600 * 10**9  # one hour later each
        (folder / f"trace_{number}.json").write_text(json.dumps(document))
    analysis = analyze(folder)
    assert analysis.run.ranks == (0, 1)
    (note,) = [item for item in analysis.data_quality if item.code == "Q304"]
    assert "of 3 different jobs" in note.message
    assert all(f"trace_{number}.json" in note.message for number in range(2))


DAY_NS = 86_400 * 10**9


def recorded(rank, *, passes=1, later_ns=0, world=4):
    """Return the document of a rank whose steps hold some backward passes, each with a gather and a reduction."""
    trace = TraceBuilder(rank, world)
    for step in range(3):
        base = 20_000.0 * step
        trace.step(step, base, 20_000.0)
        for number in range(passes):
            at, seq = base + 1000 + 4000 * number, 10 * step + number
            trace.collective("AllGather", at, 200, issue=at - 50, nelems=4000, seq=2 * seq)
            trace.compute(at + 300, 1500)
            trace.backward(at + 2000, 1500, sequence=100 * step + number)
            trace.collective("ReduceScatter", at + 2500, 200, issue=at + 2450, nelems=4000, seq=2 * seq + 1, tid=2)
        trace.annotation("Optimizer.step#AdamW.step", base + 18_500, 500)
    document = trace.document()
    document["baseTimeNanoseconds"] += later_ns
    return document


def written(folder, documents):
    folder.mkdir(exist_ok=True)
    for name, document in documents.items():
        (folder / f"{name}.json").write_text(json.dumps(document))
    return folder


def test_halves_of_two_runs_are_not_mixed(tmp_path):
    """A day apart, and with other numbers of micro-batches: no rank of one job trains like that."""
    old = {f"rank{rank}": recorded(rank) for rank in range(2)}
    new = {f"rank{rank}": recorded(rank, passes=4, later_ns=DAY_NS) for rank in (2, 3)}
    analysis = analyze(written(tmp_path / "run", old | new))
    assert "of 2 different jobs" in job_note(analysis)
    assert (analysis.run.ranks, analysis.run.micro_batches) in {((0, 1), 1), ((2, 3), 4)}


def test_ranks_recorded_far_apart_are_told(tmp_path):
    """Clocks may differ, or they are of two runs: only a reader knows."""
    documents = {f"rank{rank}": recorded(rank, later_ns=DAY_NS * (rank > 1)) for rank in range(4)}
    analysis = analyze(written(tmp_path / "run", documents))
    (note,) = [item.message for item in analysis.data_quality if item.code == "Q328"]
    assert note == "ranks 0-1 and ranks 2-3 were recorded 24.0 h apart and count as one run"
    near = analyze(written(tmp_path / "near", {f"rank{rank}": recorded(rank) for rank in range(4)}))
    assert "Q328" not in {item.code for item in near.data_quality}


def test_of_two_traces_of_a_rank_that_of_the_others_job_is_taken(tmp_path):
    """The stray one is longer, and of another job."""
    documents = {f"rank{rank}": recorded(rank) for rank in range(4)}
    stray = {"rank0_again": recorded(0, passes=4)}
    analysis = analyze(written(tmp_path / "run", documents | stray))
    assert analysis.run.micro_batches == 1
    (note,) = [item.message for item in analysis.data_quality if item.code == "Q305"]
    assert note == "1 trace left out of a rank that has another one: rank0_again.json (rank 0)"


@pytest.fixture
def captures(tmp_path):
    """Two captures: of 2 steps that take 100 ms without a profiler, and of 4 that take 200 ms."""
    for name, steps, step_us in (("a", 2, 1e5), ("b", 4, 2e5)):
        write_run(tmp_path / name, [fsdp_rank(rank, 2, steps=steps) for rank in range(2)])
        for rank in range(2):
            rows = [{"step": number, "step_us": step_us, "profiled": False} for number in range(8)]
            write_log(tmp_path / name, rows, rank, world_size=2)
    return tmp_path


def unprofiled_step_us(*paths, beside):
    target = beside / "found.json"
    assert run(["analyze", *map(str, paths), "--json", str(target), "--force", "-q"]) == 0
    found = json.loads(target.read_text())
    captured = found["captured"]
    return found["run"]["num_steps"], captured and captured["median_step_us"]


def test_a_job_has_the_step_logs_that_lie_beside_its_traces(captures, tmp_path):
    own = {2: 1e5, 4: 2e5}
    for paths in ([captures], [captures / "a", captures / "b"], [captures / "b", captures / "a"]):
        num_steps, step_us = unprofiled_step_us(*paths, beside=tmp_path)
        assert step_us == own[num_steps]


def test_step_logs_of_a_job_that_is_left_out_are_not_anothers(captures, tmp_path):
    for name in ("a", "b"):
        alone = tmp_path / f"without {name}"
        shutil.copytree(captures / "a", alone / "a")
        shutil.copytree(captures / "b", alone / "b")
        for path in (alone / name).glob("steps.*"):
            path.unlink()
        num_steps, step_us = unprofiled_step_us(alone, beside=tmp_path)
        is_told = num_steps == {"a": 4, "b": 2}[name]
        assert step_us == ({2: 1e5, 4: 2e5}[num_steps] if is_told else None)


def moved_logs(captures, name, to):
    to.mkdir(parents=True)
    for path in (captures / name).glob("steps.*"):
        path.rename(to / path.name)
    return to


def test_step_logs_apart_from_traces_are_used_where_they_are_of_one_job(captures, tmp_path, capsys):
    moved = moved_logs(captures, "a", tmp_path / "moved")
    assert unprofiled_step_us(captures / "a", moved, beside=tmp_path) == (2, 1e5)
    shutil.copytree(moved, tmp_path / "copied")
    assert unprofiled_step_us(captures / "a", moved, tmp_path / "copied", beside=tmp_path) == (2, 1e5)
    other = moved_logs(captures, "b", tmp_path / "other")
    assert unprofiled_step_us(captures / "a", moved, other, beside=tmp_path) == (2, None)
    run(["analyze", *(str(path) for path in (captures / "a", moved, other))])
    assert "ranks 0-1 have several step logs, none beside their traces" in capsys.readouterr().err


def num_logs(*paths, beside):
    target = beside / "found.json"
    assert run(["analyze", *map(str, paths), "--json", str(target), "--force", "-q"]) == 0
    return json.loads(target.read_text())["captured"]["num_ranks"]


def test_logs_of_ranks_without_a_trace_beside_them_count_with_those_that_have_one(captures, tmp_path, monkeypatch):
    """A node whose ranks wrote step logs only; logs in a folder of their own; both ways to name one folder."""
    folder = captures / "a"
    nodes = tmp_path / "nodes"
    for rank in range(2):
        (nodes / f"n{rank}").mkdir(parents=True)
        shutil.copy(folder / f"steps.rank{rank}.jsonl", nodes / f"n{rank}")
    shutil.copy(folder / "rank0.json", nodes / "n0")
    assert num_logs(nodes, beside=tmp_path) == 2
    shutil.copy(folder / "rank1.json", nodes / "n1")
    (nodes / "n1" / "logs").mkdir()
    (nodes / "n1" / "steps.rank1.jsonl").rename(nodes / "n1" / "logs" / "steps.rank1.jsonl")
    assert num_logs(nodes, beside=tmp_path) == 2
    monkeypatch.chdir(folder)
    both = ["./rank0.json", "rank1.json", "steps.rank0.jsonl", str(folder / "steps.rank1.jsonl")]
    assert num_logs(*both, beside=tmp_path) == 2
