"""Which ranks and steps a timeline shows, and what pages say beside it."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from helpers import analyze, gathered, write_run
from trace_builder import fsdp_rank

from paro_advise.advisor.analysis.build import build_analysis
from paro_advise.advisor.analysis.model import Options
from paro_advise.advisor.cli import run
from paro_advise.advisor.rendering.analyses.network_picture import network_picture
from paro_advise.advisor.rendering.comparisons.waterfall import waterfall
from paro_advise.advisor.rendering.timelines.explorer import explorer
from paro_advise.advisor.timelines.of_run import timeline_of


def timeline(folder, **options):
    found = gathered(folder)
    return timeline_of(build_analysis(found.facts, found.notices, Options(**options)), found.facts)


def test_boxes_are_those_of_the_hand_written_step(tmp_path):
    """Of trace_builder's step: it lasts 1,000 us, and its first all-gather begins with it."""
    drawn = timeline(write_run(tmp_path / "run", [fsdp_rank(rank, 2, steps=3) for rank in range(2)]))
    assert (drawn.ranks, len(drawn.steps), drawn.is_aligned) == ((0, 1), 3, True)
    step = drawn.of(0, drawn.step)
    assert step.wall_us == pytest.approx(1000)
    assert {box.lane for box in step.boxes} == {"compute", "parameter", "gradient"}
    assert all(0 <= box.start_us < box.end_us <= step.wall_us for box in step.boxes)


def test_steps_that_are_left_out_are_not_shown(tmp_path):
    folder = write_run(tmp_path / "run", [fsdp_rank(0, 2, steps=4)])
    assert len(timeline(folder).steps) == 3
    assert timeline(folder, skip_steps=3).steps == (timeline(folder).steps[-1],)


def test_traces_that_do_not_say_their_rank_are_drawn(tmp_path):
    folder = tmp_path / "run"
    folder.mkdir()
    for rank in range(2):
        document = fsdp_rank(rank, 2).document()
        del document["distributedInfo"]
        (folder / f"some{'ab'[rank]}.json").write_text(json.dumps(document))
    assert {item.header.rank for item in gathered(folder).facts} == {None}
    assert timeline(folder).ranks == (0, 1)


def test_the_rank_looked_at_first_has_the_step(tmp_path):
    folder = write_run(tmp_path / "run", [fsdp_rank(rank, 2, steps=2) for rank in range(2)])
    found = gathered(folder)
    odd = [
        replace(item, steps=tuple(replace(step, label=f"{step.label} of its own") for step in item.steps))
        if item.header.rank == 0
        else item
        for item in found.facts
    ]
    drawn = timeline_of(build_analysis(odd, (), Options()), odd)
    assert drawn.of(drawn.first, drawn.step) is not None


def test_each_step_has_its_own_unit(tmp_path):
    """So that a short step beside a long one is as fine as alone."""
    drawn = timeline(write_run(tmp_path / "run", [fsdp_rank(0, 2, steps=2)]))
    told = explorer(drawn)
    assert len(told["unit_us"]) == len(drawn.steps)
    for item in told["shown"]:
        assert item["wall"] + item["shift"] == pytest.approx(50_000, abs=1)


def test_a_network_picture_counts_all_nodes_or_is_left_out(tmp_path):
    analysis = analyze(write_run(tmp_path / "run", [fsdp_rank(rank, 12) for rank in range(12)]))
    assert "2 nodes of up to 8 ranks" in network_picture(replace(analysis, run=replace(analysis.run, gpus_per_node=8)))
    mixed = tuple(replace(entry, host=f"host{entry.rank % 2}") for entry in analysis.ranks)
    assert network_picture(replace(analysis, ranks=mixed, run=replace(analysis.run, gpus_per_node=6))) == ""


def test_a_waterfall_names_the_largest_change():
    before = [("compute", 100.0), ("exposed", 100.0), ("idle", 10.0)]
    after = [("compute", 60.0), ("exposed", 70.0), ("idle", 60.0)]
    assert "idle changed most: +50 us" in waterfall("w", before, after)
    assert "No part changed" in waterfall("w", before, before)


def test_links_of_an_index_lead_from_where_it_lies(tmp_path, monkeypatch):
    from every_page import RUNS

    monkeypatch.chdir(tmp_path)
    (tmp_path / "history").mkdir()
    (tmp_path / "site").mkdir()
    sides = [str(RUNS / name) for name in ("fsdp2_ggg_acc1", "ds_z3_acc1")]
    assert run(["compare", *sides, "-o", "history/a b.html", "-q"]) == 0
    assert run(["index", "history", "-o", "site/index.html"]) == 0
    assert 'href="./../history/a%20b.html"' in (tmp_path / "site" / "index.html").read_text()
