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
from paro_advise.advisor.ranks.topology import find_topology

WORLD = 8
PLACES = {
    "in a row": [rank // 4 for rank in range(WORLD)],
    "dealt out": [rank % 2 for rank in range(WORLD)],
}


def placed_run(folder, places):
    """Write a run of ZeRO-3 whose ranks are on the given hosts; gathers of four ranks in a row and of all.

    Args:
        places: of each rank; None for one without a trace, "" for one that does not name its host.
    """
    halves = [[0, 1, 2, 3], [4, 5, 6, 7]]
    builders = []
    for rank, place in enumerate(places):
        groups = [("0", "default_pg", list(range(WORLD))), ("1", "half", halves[rank // 4])]
        if place is None:
            continue
        host = f"host{place}" if place != "" else None
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


KNOWN = {  # hosts by rank, "-" where there is no trace, " " where it names none: with so many ranks a node
    "in a row": ("aaaabbbb", 4, "follow"),
    "dealt out": ("abababab", 4, "dealt out"),
    "dealt out by twos": ("aabbaabb", 4, "dealt out"),
    "two launchers on each machine": ("aabbaabb", 2, "follow"),
    "two containers on one node": ("abababab", 8, "one node"),
    "a container for each rank": ("abcdefgh", 4, "unknown"),
    "all of one name": ("aaaaaaaa", 4, "unknown"),
    "one without a name": ("aba abab", 4, "unknown"),
    "uneven nodes": ("abababaa", 4, "unknown"),
    "a part, dealt out": ("abab----", 4, "dealt out"),
    "a part, each on a host": ("ab------", 4, "unknown"),
    "a part, one a node, of one name": ("a---a---", 4, "unknown"),
    "a part, one a node": ("a---b---", 4, "follow"),
}


@pytest.mark.parametrize(("hosts", "per_node", "known"), KNOWN.values(), ids=KNOWN)
def test_hosts_overrule_only_where_they_are_nodes(tmp_path, hosts, per_node, known):
    """Names may be of containers, several to a node, or of machines of one name; the finding says what was decided."""
    places = [{"-": None, " ": ""}.get(name, name) for name in hosts]
    analysis = analyze(placed_run(tmp_path / "run", places), gpus_per_node=per_node)
    assert analysis.run.num_nodes == WORLD // per_node
    spans = spans_of(analysis)
    assert spans[4] == ("mixed" if known == "dealt out" or per_node == 2 else "intra")
    status, text = {
        "follow": ("does not apply", "the ranks of each node follow each other"),
        "one node": ("does not apply", "all ranks are on one node"),
        "dealt out": ("applies", "Groups of 4 ranks in a row cross the network"),
        "unknown": ("could not be judged", "do not tell which ranks share a node"),
    }[known]
    assert finding_of(analysis).status == status
    assert text in finding_of(analysis).text


def test_hosts_alone_tell_nodes(tmp_path):
    for hosts, status in (("aabbaabb", "applies"), ("aaaabbbb", "does not apply"), ("ababcdee", "applies")):
        analysis = analyze(placed_run(tmp_path / hosts, list(hosts)))
        assert finding_of(analysis).status == status
        assert [entry.node for entry in analysis.ranks] == [sorted(set(hosts)).index(name) for name in hosts]


def test_traces_that_do_not_say_their_rank_are_in_no_order(tmp_path):
    folder = placed_run(tmp_path / "run", PLACES["dealt out"])
    for path in folder.iterdir():
        told = json.loads(path.read_text())
        del told["distributedInfo"]["rank"]
        path.write_text(json.dumps(told))
        path.rename(path.with_name(f"{path.stem.translate(str.maketrans('01234567', 'hgfedcba'))[4:]}.json"))
    assert finding_of(analyze(folder)).status == "could not be judged"


def test_no_change_to_groups_is_recommended_for_ranks_that_are_dealt_out(tmp_path):
    plans = {}
    for name, places in PLACES.items():
        path = Path(tmp_path / f"{name}.json")
        assert command(["recommend", str(placed_run(tmp_path / name, places)), "-o", str(path)]) in (0, 3)
        plans[name] = json.loads(path.read_text())
    assert plans["in a row"]["verdict"] == "change"
    assert plans["dealt out"]["verdict"] == "measure first"
    assert "PARO033" not in plans["in a row"]["text"]
    assert "PARO033" in plans["dealt out"]["text"]
    assert "started node by node" in " ".join(plans["dealt out"]["probes"])


@pytest.mark.distributed
@pytest.mark.parametrize(
    ("hosts", "local", "found", "warned"),
    [
        ("aabb", "2", "2", ""),
        ("aabb", "unsaid", "2", ""),
        ("aaaa", "2", "2", ""),  # two launchers on one machine
        ("aabbaabb", "2", "2", ""),  # two launchers on each of two machines
        ("abcd", "2", "2", ""),  # containers with names of their own
        ("abab", "1", "1", ""),
        ("abab", "2", "2", "ranks 0 to 1 are on a, b"),
        ("abab", "unsaid", "one after the other, got [1, 1, 1, 1] on 2 hosts", ""),
        ("aaab", "unsaid", "one after the other, got [3, 1] on 2 hosts", ""),
    ],
)
def test_the_runtime_says_that_groups_will_cross_the_network(hosts, local, found, warned):
    """Results are the same, so nothing is refused that a launcher has laid out."""
    worker = Path(__file__).parent / "workers/places.py"
    done = run_ranks(worker, hosts, local, ranks=len(hosts), warnings="always")
    assert found in done.stdout, done.stderr
    assert done.stderr.count("do not follow each other") == bool(warned)
    assert warned in done.stderr
