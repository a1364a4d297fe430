"""Ranks that are dealt out over the nodes: where collectives run is told by hosts, and groups are not promised a node."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from helpers import analyze, gathered, write_run
from ranks import run_ranks
from trace_builder import TraceBuilder

from paro_advise.advisor.cli import run as command
from paro_advise.advisor.prediction.fitting.calibrate import calibrate
from paro_advise.advisor.ranks.links.latency import Fabric, backend_latency
from paro_advise.advisor.ranks.run import assemble_run
from paro_advise.advisor.ranks.source import decode
from paro_advise.advisor.ranks.topology import find_topology
from paro_advise.core.collective import Op
from paro_advise.core.span import GroupSpan

WORLD = 8
PLACES = {
    "in a row": [rank // 4 for rank in range(WORLD)],
    "dealt out": [rank % 2 for rank in range(WORLD)],
}


def traced_rank(rank, world, group, host, *, used=("1",), every_us=5000.0, devices=1):
    """Return a trace of ZeRO-3: four gathers and two reductions a step.

    Args:
        group: ranks of its process group "1", beside "0" of all.
        used: names of the groups that the collectives are in, in turn.
        every_us: from one collective to the next.
    """
    groups = [("0", "default_pg", list(range(world))), ("1", "part", group)]
    trace = TraceBuilder(rank, world, groups=groups, gpus_per_node=devices, host=host)
    for step in range(3):
        base = step * 40_000.0
        trace.step(step, base, 40_000.0)
        for number in range(6):
            at = base + 100 + number * every_us
            op, owners = (
                ("AllGather", ("FSDP::pre_forward", "FSDP::all_gather"))
                if number < 4
                else ("ReduceScatter", ("FSDP::post_backward_reduce",))
            )
            trace.collective(
                op, at, 2000.0, nelems=4_000_000, issue=at - 50, seq=step * 10 + number, owners=owners,
                group=used[number % len(used)],
            )  # fmt: skip
            # What ran beside nothing would block under other strategies, too.
            trace.compute(at + 1800.0, 2700.0)
    return trace


def placed_run(folder, places, used=("1", "0"), devices=1):
    """Write a run whose ranks are on the given hosts; groups of four ranks in a row and of all.

    Args:
        places: of each rank; None for one without a trace, "" for one that does not name its host.
        used: names of the groups, "1" of four ranks and "0" of all.
        devices: of each node, as its ranks see them.
    """
    halves = [[0, 1, 2, 3], [4, 5, 6, 7]]
    builders = [
        traced_rank(rank, WORLD, halves[rank // 4], f"host{place}" if place != "" else None, used=used, devices=devices)
        for rank, place in enumerate(places)
        if place is not None
    ]
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


@pytest.mark.parametrize(
    ("hosts", "devices", "per_node"),
    [
        ("a---b---", 4, 4),
        ("aa--bb--", 4, 4),
        ("abab----", 4, 4),
        ("a---b---", 1, None),  # a device each is what containers see
        ("ab------", 4, None),  # of one node, if these are its devices
        ("aa------", 4, 4),
    ],
)
def test_devices_tell_how_many_ranks_a_node_has_where_hosts_of_some_agree(hosts, devices, per_node, tmp_path):
    """As the page of questions advises: one trace of each node. Nodes were unknown then, and the job on one of them."""
    places = [None if name == "-" else name for name in hosts]
    analysis = analyze(placed_run(tmp_path / "run", places, ("0",), devices))
    assert analysis.run.gpus_per_node == per_node
    made = calibrate(analysis)
    if per_node:
        assert (made.ranks_per_node, made.unmodelled) == (4, "")
    else:
        assert "how many a node has is not known" in made.unmodelled
        assert any("8 ranks a node (guessed); --gpus-per-node" in note for note in made.assumptions)


def test_two_jobs_of_one_size_in_a_folder_are_told_apart(tmp_path, capsys):
    """Rank 0 of a job, and rank 1 of another one, whose collectives are ten times as large."""
    one, other = (
        write_run(tmp_path / str(nelems), [moving(rank, nelems) for rank in range(2)])
        for nelems in (400_000, 4_000_000)
    )
    (tmp_path / "mixed").mkdir()
    for folder, rank in ((one, 0), (other, 1)):
        (path,) = folder.glob(f"*{rank}*.json")
        path.rename(tmp_path / "mixed" / path.name)
    assert command(["recommend", str(tmp_path / "mixed"), "-q"]) in (0, 3)
    told = capsys.readouterr().err  # quietly as well: it makes a plan doubtful
    assert "disagree on those of 18: the traces are of several jobs" in told
    assert calibrate(analyze(tmp_path / "mixed")).unmodelled == "the traces are of several jobs"


def moving(rank, nelems):
    trace = TraceBuilder(rank, 2)
    for number in range(18):
        step, place = divmod(number, 6)
        at = step * 40_000.0 + 100 + place * 5000.0
        if place == 0:
            trace.step(step, step * 40_000.0, 40_000.0)
        op, owners = (
            ("AllGather", "FSDP::pre_forward") if place < 4 else ("ReduceScatter", "FSDP::post_backward_reduce")
        )
        trace.collective(op, at, 2000.0, nelems=nelems, issue=at - 50, seq=number, owners=(owners,))
        trace.compute(at + 1800.0, 2700.0)
    return trace


def test_hosts_alone_tell_nodes(tmp_path):
    for hosts, status in (("aabbaabb", "applies"), ("aaaabbbb", "does not apply"), ("ababcdee", "applies")):
        analysis = analyze(placed_run(tmp_path / hosts, list(hosts)))
        assert finding_of(analysis).status == status
        assert [entry.node for entry in analysis.ranks] == [sorted(set(hosts)).index(name) for name in hosts]


@pytest.mark.parametrize("options", [{}, {"gpus_per_node": 4}])
def test_traces_that_do_not_say_their_rank_are_in_no_order(tmp_path, options):
    folder = placed_run(tmp_path / "run", PLACES["dealt out"])
    for path in folder.iterdir():
        told = json.loads(path.read_text())
        del told["distributedInfo"]["rank"]
        path.write_text(json.dumps(told))
        path.rename(path.with_name(f"{path.stem.translate(str.maketrans('01234567', 'hgfedcba'))[4:]}.json"))
    assert finding_of(analyze(folder, **options)).status == "could not be judged"


def test_no_change_to_groups_is_recommended_for_ranks_that_are_dealt_out(tmp_path):
    plans = {}
    for name, places in PLACES.items():
        path = Path(tmp_path / f"{name}.json")
        assert command(["recommend", str(placed_run(tmp_path / name, places, ("0",))), "-o", str(path)]) in (0, 3)
        plans[name] = json.loads(path.read_text())
    assert plans["in a row"]["verdict"] == "change"
    assert plans["dealt out"]["verdict"] == "measure first"
    assert "PARO033" not in plans["in a row"]["text"]
    assert "PARO033" in plans["dealt out"]["text"]
    assert "started node by node" in " ".join(plans["dealt out"]["probes"])


LOG = "".join(
    f"h{rank % 2}:{100 + rank}:{100 + rank} [{rank // 2}] NCCL INFO comm 0x55 rank {rank} nRanks 8 nNodes 2 "
    f"localRanks 4 localRank {rank // 2} MNNVL 0\n"
    for rank in range(WORLD)
)


def test_a_log_that_counts_ranks_a_node_does_not_say_which(tmp_path):
    """Seen by a reader: with a log of NCCL beside seven traces, what crosses the network became intra-node."""
    folder = placed_run(tmp_path / "run", [0, 1, 0, 1, 0, 1, 0, None])
    (folder / "nccl.log").write_text(LOG)
    analysis = analyze(folder)
    assert analysis.run.gpus_per_node == 4
    assert spans_of(analysis)[4] == "mixed"
    assert finding_of(analysis).status == "applies"


def test_a_finding_names_a_host_whose_ranks_are_apart(tmp_path):
    found = finding_of(analyze(placed_run(tmp_path / "run", list("aabcbcdd"))))
    assert "hostb has 2, 4." in found.text


def test_what_fits_both_orders_is_not_called_one(tmp_path):
    """Ranks 0 and 5, four a node: on two nodes in a row as in turn."""
    run = analyze(placed_run(tmp_path / "run", [0, None, None, None, None, 1, None, None]), gpus_per_node=4)
    assert finding_of(run).status == "could not be judged"


def tensor_parallel_run(folder, host_of):
    """Write a run of 16 ranks of which pairs cut the model: each second rank shares the data."""
    builders = [
        traced_rank(rank, 16, list(range(rank % 2, 16, 2)), host_of(rank), every_us=6500.0) for rank in range(16)
    ]
    return write_run(folder, builders)


@pytest.mark.parametrize(("hosts", "doubted"), [(4, True), (2, False)], ids=["across nodes", "inside nodes"])
def test_beside_tensor_parallelism_groups_are_doubted_unless_they_were_seen(tmp_path, hosts, doubted):
    """Dealt out over four hosts, data-parallel ranks are on two; over two hosts, all of a group are on one."""
    folder, plan = tensor_parallel_run(tmp_path / "run", lambda rank: f"h{rank % hosts}"), tmp_path / "plan.json"
    assert command(["recommend", str(folder), "-o", str(plan), "--allow-untested"]) in (0, 3)
    told = json.loads(plan.read_text())
    assert any("PARO033" in text for text in told["assumptions"]) == doubted
    assert told["verdict"] != "change" or not doubted or not told["chosen"]["group_size"]


def test_who_asks_for_groups_is_told(tmp_path):
    folder, plan = placed_run(tmp_path / "run", PLACES["dealt out"]), tmp_path / "plan.json"
    assert command(["recommend", str(folder), "-o", str(plan), "--strategy", "III/4", "--allow-untested"]) in (0, 3)
    assert "PARO033" in json.loads(plan.read_text())["text"].partition("Without --strategy")[0]


def test_a_group_of_several_nodes_sends_something_between_them():
    """Of four ranks a node, a ring of four over two nodes has a slower hop than one inside a node."""
    fabric = Fabric(is_gloo=False, device_name=None, ranks_per_node=4)
    assert backend_latency(Op.ALL_GATHER, GroupSpan.MIXED, 4, fabric) > backend_latency(
        Op.ALL_GATHER, GroupSpan.INTRA, 4, fabric
    )


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
    done = run_ranks(worker, hosts, local, ranks=len(hosts))
    assert found in done.stdout, done.stderr
    assert done.stderr.count("do not follow each other") == bool(warned)
    assert warned in done.stderr
