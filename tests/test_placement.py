"""Ranks that are dealt out over the nodes: where collectives run is told by hosts, and groups are not promised a node."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from helpers import analyze, gathered, write_run
from ranks import run_ranks
from trace_builder import TraceBuilder

from paro_advise.advisor.cli import run as command
from paro_advise.advisor.ranks.run import assemble_run
from paro_advise.advisor.ranks.source import decode
from paro_advise.advisor.ranks.topology import find_topology, parted_host

WORLD = 8
PLACES = {
    "in a row": [rank // 4 for rank in range(WORLD)],
    "dealt out": [rank % 2 for rank in range(WORLD)],
}


def placed_run(folder, places, *, named=True):
    """Write a run of ZeRO-3 whose ranks are on the given hosts; gathers of four ranks in a row and of all."""
    halves = [[0, 1, 2, 3], [4, 5, 6, 7]]
    builders = []
    for rank, place in enumerate(places):
        groups = [("0", "default_pg", list(range(WORLD))), ("1", "half", halves[rank // 4])]
        host = f"host{place}" if named else None
        trace = TraceBuilder(rank, WORLD, groups=groups, gpus_per_node=1, host=host)
        for step in range(3):
            base = step * 40_000.0
            trace.step(step, base, 40_000.0)
            for number in range(6):
                at = base + 100 + number * 5000.0
                op, owners = (
                    ("AllGather", ("FSDP::pre_forward", "FSDP::all_gather"))
                    if number < 4
                    else ("ReduceScatter", ("FSDP::post_backward_reduce",))
                )
                group = "0" if number % 2 else "1"
                trace.collective(
                    op, at, 2000.0, nelems=4_000_000, issue=at - 50, seq=step * 10 + number, owners=owners, group=group
                )
                trace.compute(at + 2000.0, 2500.0)
        builders.append(trace)
    return write_run(folder, builders)


def assembled(folder):
    return assemble_run([decode(item) for item in gathered(folder).facts])


def spans_of(analysis):
    return {entry.group_size: entry.span for entry in analysis.collectives}


def finding_of(analysis):
    (finding,) = [item for item in analysis.findings if item.code == "PARO033"]
    return finding


@pytest.mark.parametrize(
    ("hosts", "parted"),
    [
        ({0: "a", 1: "a", 2: "b", 3: "b"}, None),
        ({0: "a", 1: "b", 2: "a", 3: "b"}, "a"),
        ({3: "b", 2: "b", 1: "a", 0: "a"}, None),  # the order of ranks counts, not of the mapping
        ({0: "a", 1: "a", 64: "c", 65: "a"}, "a"),
        ({0: "a"}, None),
        ({}, None),
    ],
)
def test_a_host_is_parted_when_it_comes_back(hosts, parted):
    assert parted_host(hosts) == parted


@pytest.mark.parametrize("options", [{}, {"gpus_per_node": 4}])
def test_groups_in_a_row_cross_the_network_when_ranks_are_dealt_out(tmp_path, options):
    for name, places in PLACES.items():
        analysis = analyze(placed_run(tmp_path / name, places), **options)
        assert analysis.run.gpus_per_node == 4
        assert [entry.node for entry in analysis.ranks] == places
        assert spans_of(analysis) == {4: "intra" if name == "in a row" else "mixed", 8: "mixed"}


@pytest.mark.parametrize("places", PLACES.values(), ids=PLACES)
def test_a_launcher_says_how_many_ranks_a_node_has_and_hosts_say_which(tmp_path, places):
    run = assembled(placed_run(tmp_path / "run", places))
    assert [find_topology(run, None, 4).node_of[rank] for rank in range(WORLD)] == places


def test_hosts_with_more_ranks_than_the_user_says_are_no_nodes(tmp_path):
    """Two nodes that call themselves by one name, say containers on one machine: the user knows better."""
    run = assembled(placed_run(tmp_path / "run", PLACES["dealt out"]))
    assert [find_topology(run, 2).node_of[rank] for rank in range(WORLD)] == [0, 0, 1, 1, 2, 2, 3, 3]


def test_a_finding_names_a_host_and_its_ranks(tmp_path):
    found = finding_of(analyze(placed_run(tmp_path / "a", PLACES["dealt out"])))
    assert found.status == "applies"
    assert "host0 has 0, 2, 4, 6." in found.text
    found = finding_of(analyze(placed_run(tmp_path / "b", PLACES["in a row"])))
    assert (found.status, found.text) == ("does not apply", "the ranks of 2 hosts follow each other")
    found = finding_of(analyze(placed_run(tmp_path / "c", PLACES["in a row"], named=False)))
    assert (found.status, found.text) == ("could not be judged", "the traces do not name their hosts")


def test_on_one_node_there_is_nothing_to_deal_out(tmp_path):
    run = analyze(placed_run(tmp_path / "run", PLACES["in a row"], named=False), gpus_per_node=8)
    assert (finding_of(run).status, finding_of(run).text) == ("does not apply", "all ranks are on one node")


def test_no_change_is_recommended_for_ranks_that_are_dealt_out(tmp_path):
    verdicts = {}
    for name, places in PLACES.items():
        plan = Path(tmp_path / f"{name}.json")
        assert command(["recommend", str(placed_run(tmp_path / name, places)), "-o", str(plan)]) in (0, 3)
        verdicts[name] = json.loads(plan.read_text())
    assert not any("PARO033" in text for text in verdicts["in a row"]["assumptions"])
    assert any("PARO033" in text for text in verdicts["dealt out"]["assumptions"])
    assert verdicts["in a row"]["verdict"] == "change"
    assert verdicts["dealt out"]["verdict"] == "measure first"


@pytest.mark.distributed
@pytest.mark.parametrize(
    ("hosts", "local", "found"),
    [
        ("aabb", "2", "2"),
        ("aabb", "unsaid", "2"),
        ("aaaa", "2", "2"),  # two launchers on one machine
        ("abab", "2", "one after the other, got [1, 1, 1, 1] on 2 hosts"),
        ("abab", "unsaid", "one after the other, got [1, 1, 1, 1] on 2 hosts"),
        ("aaab", "unsaid", "one after the other, got [3, 1] on 2 hosts"),
    ],
)
def test_the_runtime_refuses_ranks_that_are_dealt_out(hosts, local, found):
    """Groups would cross the network that the plan spares."""
    pytest.importorskip("torch")
    done = run_ranks(Path(__file__).parent / "workers/places.py", hosts, local, ranks=4)
    assert found in done.stdout, done.stderr
