"""One step of all ranks in one file for Perfetto: on one clock, with arrows between the ranks of a collective."""

from __future__ import annotations

import gzip
import json
import tarfile
from collections import defaultdict

import pytest
from conftest import DATA
from helpers import write_run
from trace_builder import fsdp_rank

from paro_advise.advisor.cli import run
from paro_advise.advisor.slices.constants import MAX_MERGED_RANKS, PIDS_PER_RANK

CLOCKS_US = (0.0, 2_500.0, -40_000.0, 700.0)  # of each rank's host, against rank 0's
LATE_US = 60.0  # rank 2 arrives at the block's first gather


def four_ranks(folder):
    ranks = [
        fsdp_rank(rank, world=4, late_us=LATE_US if rank == 2 else 0.0, clock_offset_us=CLOCKS_US[rank])
        for rank in range(4)
    ]
    for builder in ranks:
        builder.gpus_per_node = 1  # a host each
    return write_run(folder, ranks)


def merged(folder, target, *words):
    assert run(["slice", str(folder), "-o", str(target), *words]) == 0
    data = target.read_bytes()
    return json.loads(gzip.decompress(data) if target.suffix == ".gz" else data)["traceEvents"]


def spans_of_ours(events):
    return [event for event in events if event.get("cat") == "paro_advise" and event["ph"] == "X"]


def test_every_rank_is_on_one_clock(tmp_path):
    """Hand-written times: the root's gather runs from 10 to 60 us of the step on every rank, whatever its host's clock."""
    events = merged(four_ranks(tmp_path / "run"), tmp_path / "merged.json", "--step", "1")
    ours = spans_of_ours(events)
    assert {event["pid"] // PIDS_PER_RANK for event in ours} == {0, 1, 2, 3}
    root = [event for event in ours if event["args"]["bytes"] == 4000 * 2 and event["args"]["op"] == "all_gather"]
    assert [event["ts"] for event in root] == pytest.approx([10.0] * 4, abs=0.01)
    assert [event["dur"] for event in root] == pytest.approx([50.0] * 4)
    kernels = [event for event in events if event.get("cat") == "kernel" and event["name"].startswith("ncclDev")]
    assert len(kernels) == 4 * 5
    # A rank's own kernels and our marks of them lie one over the other.
    starts = {(event["pid"] // PIDS_PER_RANK, round(event["ts"], 1)) for event in kernels}
    assert {(event["pid"] // PIDS_PER_RANK, round(event["ts"], 1)) for event in ours} == starts


def test_ranks_of_one_machine_keep_its_clock_where_step_logs_tell(tmp_path):
    """Two ranks that share a GPU, as two hosts by their names: their kernels take turns, which is no clock's doing."""
    folder = DATA / "gpu_loops/ddp"

    def begun(events):  # on the host, whose steps are no device's
        marks = (event for event in events if event.get("name") == "ProfilerStep#10")
        return {event["pid"]: event["ts"] for event in marks if event["cat"] == "user_annotation"}.values()

    own = [
        next(iter(begun(json.loads(gzip.decompress((folder / f"rank{rank}.json.gz").read_bytes()))["traceEvents"])))
        for rank in (0, 1)
    ]
    first, second = begun(merged(folder, tmp_path / "merged.json", "--step", "1"))
    assert second - first == pytest.approx(own[1] - own[0], abs=0.01)


def test_a_neighbouring_step_that_touches_the_window_stays_out(tmp_path):
    """Steps of ranks begin some us apart: a slice of one is no picture three steps wide."""
    folder = four_ranks(tmp_path / "run")
    for number, path in enumerate(sorted(folder.iterdir())):
        data = json.loads(gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes())
        for event in data["traceEvents"]:
            if str(event.get("name")).startswith("ProfilerStep"):
                event["ts"] -= 3.0 * number
        text = json.dumps(data).encode()
        path.write_bytes(gzip.compress(text) if path.suffix == ".gz" else text)
    events = merged(folder, tmp_path / "merged.json", "--step", "1")
    steps = {event["name"] for event in events if str(event.get("name")).startswith("ProfilerStep")}
    assert len(steps) == 1
    assert min(event["ts"] for event in events if "ts" in event) > -10.0


def test_arrows_lead_to_the_rank_that_arrives_last(tmp_path):
    events = merged(four_ranks(tmp_path / "run"), tmp_path / "merged.json", "--step", "0")
    arrows = defaultdict(list)
    for event in events:
        if event.get("cat") == "paro_advise" and event["ph"] in "stf":
            arrows[event["id"]].append(event)
    assert len(arrows) == 5  # collectives of a step
    boxes = spans_of_ours(events)
    for parts in arrows.values():
        assert [part["ph"] for part in parts] == ["s", "t", "t", "f"]
        assert [part["ts"] for part in parts] == sorted(part["ts"] for part in parts)
        for part in parts:  # Perfetto binds an arrow to the box that holds its time on the same track
            assert any(
                (box["pid"], box["tid"]) == (part["pid"], part["tid"])
                and box["ts"] <= part["ts"] <= box["ts"] + box["dur"]
                for box in boxes
            )
    late = [parts for parts in arrows.values() if parts[-1]["ts"] - parts[0]["ts"] > LATE_US / 2]
    assert [parts[-1]["pid"] // PIDS_PER_RANK for parts in late] == [2]


def test_steps_that_are_in_the_inputs_twice_make_one_picture(tmp_path):
    """A file that holds all its events twice, as one that was written twice: once is enough for a picture."""
    folder = four_ranks(tmp_path / "run")
    data = json.loads((folder / "rank3.json").read_text())
    data["traceEvents"] *= 2
    (folder / "rank3.json").write_text(json.dumps(data))
    assert merged(folder, tmp_path / "merged.json", "--step", "0")


def test_processes_and_ids_of_different_ranks_never_meet(tmp_path):
    events = merged(four_ranks(tmp_path / "run"), tmp_path / "merged.json.gz")
    names = {event["pid"]: event["args"]["name"] for event in events if event["name"] == "process_name"}
    assert all(name.startswith(f"rank {pid // PIDS_PER_RANK}: ") for pid, name in names.items())
    assert {event["pid"] for event in spans_of_ours(events)} <= set(names)


def test_a_small_file_keeps_what_a_viewer_needs_first(tmp_path, capsys):
    folder = four_ranks(tmp_path / "run")
    whole = merged(folder, tmp_path / "whole.json")
    capsys.readouterr()
    small = merged(folder, tmp_path / "small.json", "--max-mb", "0.1")
    assert len(spans_of_ours(small)) == len(spans_of_ours(whole))
    target = tmp_path / "small.json"
    assert target.stat().st_size <= 0.1 * (1 << 20) + 100
    left = len(whole) - len(small)
    assert (f"{left} events beyond --max-mb were left out" in capsys.readouterr().err) == bool(left)


def test_an_archive_of_traces_is_read_in_place(tmp_path):
    folder = four_ranks(tmp_path / "run")
    place = tmp_path / "archived"
    place.mkdir()
    with tarfile.open(place / "run.tar", "w") as archive:
        archive.add(folder, "run")
    plain = merged(folder, tmp_path / "plain.json")
    assert len(merged(place, tmp_path / "merged.json")) == len(plain)


def test_more_ranks_than_a_viewer_can_compare(tmp_path, capsys):
    """The slowest and the fastest are shown, and that is said."""
    world = MAX_MERGED_RANKS + 2
    folder = write_run(tmp_path / "run", [fsdp_rank(rank, world=world, steps=1) for rank in range(world)])
    events = merged(folder, tmp_path / "merged.json")
    assert len({event["pid"] // PIDS_PER_RANK for event in events}) == MAX_MERGED_RANKS
    assert f"{MAX_MERGED_RANKS} of {world} ranks are shown" in capsys.readouterr().err
