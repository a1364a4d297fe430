"""Durations for the compiler's overlap scheduling, as the compiler itself reads them."""

from __future__ import annotations

import json
import statistics

import pytest
from conftest import DATA
from helpers import write_run
from trace_builder import TraceBuilder, fsdp_rank

from paro_advise.advisor.cli import run

LATE_US = 60.0  # rank 2 arrives at the block's gather in forward
RUN = DATA / "nccl_like/fsdp2-inter-bw"


def profile_of(path):
    """Return a profile by the compiler's own reader."""
    pytest.importorskip("torch")
    from torch._inductor.fx_passes.profile_guided_estimation import ProfileData

    profile = ProfileData()
    profile.load(str(path))
    return profile


def exported(traces, target):
    assert run(["export", str(traces), "--inductor", str(target), "-q"]) == 0
    return profile_of(target)


def ranks_with_operators(folder, ranks):
    """Four ranks of the same product of matrices, which took 10 and 30 us in two steps."""
    for builder in ranks:
        for index, duration in enumerate((10.0, 30.0)):
            own = {"External id": builder.next_id()}
            shapes = {
                "Input Dims": [[8, 16], [16, 4]],
                "Input Strides": [[16, 1], [4, 1]],
                "Input type": ["c10::BFloat16", "c10::BFloat16"],
            }
            builder.row("cpu_op", "aten::mm", index * 1000.0 + 900, 5, 1, **own, **shapes)
            builder.row("kernel", "gemm", index * 1000.0 + 910, duration, 7, stream=7, correlation=1, **own)
    return write_run(folder, ranks)


def test_a_collective_takes_as_long_as_its_data_moves(tmp_path):
    """By hand: the block is gathered twice a step, in 40 us once rank 2 is there and in 100 us; torch itself reads 100."""
    folder = write_run(tmp_path / "run", [fsdp_rank(rank, 4, late_us=LATE_US * (rank == 2)) for rank in range(4)])
    everyone = (0, 1, 2, 3)
    raw = profile_of(folder / "rank0.json").lookup_collective("all_gather_into_tensor", everyone, 64000, "BFloat16")
    assert raw[0] == pytest.approx(0.100)
    profile = exported(folder, tmp_path / "profile.json")
    moved = profile.lookup_collective("all_gather_into_tensor", everyone, 64000, "BFloat16")
    assert moved == (pytest.approx((0.040 + 0.100) / 2), "profile")
    scattered = profile.lookup_collective("reduce_scatter_tensor", everyone, 64000 // 4, "BFloat16")
    assert scattered == (pytest.approx(0.100), "profile")


def test_durations_are_those_that_the_simulator_knows(tmp_path):
    truth = json.loads((RUN / "truth.json").read_text())
    column = {name: place for place, name in enumerate(truth["collective_columns"])}
    everyone = tuple(range(truth["run"]["world_size"]))
    profile = exported(RUN / "traces", tmp_path / "profile.json")
    sizes = {(row[column["op"]], row[column["bytes_full"]]) for row in truth["collectives"]}
    judged = 0
    for op, size in sizes & {(op, size) for op, size in sizes if op in ("all_gather", "reduce_scatter")}:
        known = [
            row[column["transfer_us"]]
            for row in truth["collectives"]
            if (row[column["op"]], row[column["bytes_full"]]) == (op, size)
        ]
        elements = size // 2 // (len(everyone) if op == "reduce_scatter" else 1)
        found = profile.lookup_collective(op, everyone, elements, "BFloat16")
        assert found is not None
        assert found[0] * 1000 == pytest.approx(statistics.median(known), rel=0.01)
        judged += 1
    assert judged >= 3


def test_every_rank_finds_the_same_estimate(tmp_path):
    """Ranks of other groups than rank 0's find theirs by stride and size, and must find the same number."""

    def rank_of_nodes(rank, duration):
        trace = TraceBuilder(rank, 4)
        first = rank // 2 * 2
        trace.groups.append(("1", "node", [first, first + 1]))
        for index in range(2):
            trace.step(index, index * 1000.0, 1000.0)
            trace.compute(index * 1000.0 + 10, 50)
            trace.collective(
                "AllReduce",
                index * 1000.0 + 100,
                duration,
                nelems=1000,
                issue=index * 1000.0 + 50,
                seq=index,
                group="1",
            )
        return trace

    # By hand: of both nodes, of which the second is slower, the median.
    durations = (100.0, 100.0, 300.0, 300.0)
    folder = write_run(tmp_path / "run", [rank_of_nodes(rank, durations[rank]) for rank in range(4)])
    profile = exported(folder, tmp_path / "profile.json")
    nodes = ((0, 1), (2, 3))
    found = [profile.lookup_collective("all_reduce", node, 1000, "BFloat16") for node in nodes]
    assert found[0] == found[1] == (pytest.approx(0.200), "profile")
    beyond = [profile.lookup_collective("all_reduce", node, 10_000, "BFloat16") for node in nodes]
    assert beyond[0] == beyond[1]
    assert beyond[0][1] == "pg_bandwidth"


def test_operators_are_found_by_shapes_strides_and_type(tmp_path):
    torch = pytest.importorskip("torch")
    folder = ranks_with_operators(tmp_path / "run", [fsdp_rank(rank, 4) for rank in range(4)])
    profile = exported(folder, tmp_path / "profile.json")
    shapes, strides = ((8, 16), (16, 4)), ((16, 1), (4, 1))
    assert profile.lookup_op("aten::mm", shapes, strides, torch.bfloat16) == pytest.approx(0.020)
    assert profile.lookup_op("aten::mm", shapes, strides, torch.float32) is None


@pytest.fixture
def one_of_four_ranks():
    """The last rank of four whose others are not there."""
    pytest.importorskip("torch")
    from torch import distributed
    from torch.testing._internal.distributed.fake_pg import FakeStore

    distributed.init_process_group("fake", store=FakeStore(), rank=3, world_size=4)
    yield distributed.group.WORLD.group_name
    distributed.destroy_process_group()


def test_the_compiler_estimates_a_node_of_its_graph(tmp_path, one_of_four_ranks):
    """A traced gather of 64,000 elements, by the estimator that Inductor makes of its setting."""
    import torch
    from torch._inductor.fx_passes.profile_guided_estimation import ProfileGuidedEstimator
    from torch.fx.experimental.proxy_tensor import make_fx

    def gather(shard):
        whole = torch.ops._c10d_functional.all_gather_into_tensor(shard, 4, one_of_four_ranks)
        return torch.ops._c10d_functional.wait_tensor(whole)

    folder = write_run(tmp_path / "run", [fsdp_rank(rank, 4) for rank in range(4)])
    assert run(["export", str(folder), "--inductor", str(tmp_path / "profile.json"), "-q"]) == 0
    graph = make_fx(gather, tracing_mode="fake")(torch.zeros(16_000, dtype=torch.bfloat16)).graph
    node = next(node for node in graph.nodes if "all_gather" in str(node.target))
    assert ProfileGuidedEstimator(str(tmp_path / "profile.json"))(node) == pytest.approx(0.100)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["export", "run", "--inductor", "p.json.gz"], "must not be compressed"),
        (["export", "run", "--inductor", "p.json"], "traces of a GPU"),
        (["export", "run", "--inductor", "p.json", "--prometheus", "p.json.prom"], "traces of a GPU"),
        (["export", "--inductor", "p.json"], "no PATH given"),
        (["export", "run", "--inductor", "run/p.json"], "must not lie among the traces"),
        (["export", "gpu/rank0.json", "--inductor", "p.json"], "must come from several ranks"),
    ],
)
def test_what_the_compiler_could_not_use_is_refused(words, said, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run").symlink_to(DATA / "zero_runs/ddp_acc4")
    write_run(tmp_path / "gpu", [fsdp_rank(rank, 4) for rank in range(4)])
    assert run(words) in (2, 3)
    assert said in capsys.readouterr().err
    assert not list(tmp_path.glob("**/p.json*"))


def groups_of(folder, groups, durations):
    """A run in which each group, all of one dimension of a mesh, reduces once a step."""
    ranks = []
    for rank in sorted(rank for group in groups for rank in group):
        trace = fsdp_rank(rank, sum(map(len, groups)))
        number = next(place for place, group in enumerate(groups) if rank in group)
        trace.groups.append(("1", "mesh", groups[number]))
        for index in range(2):
            begin = index * 1000.0
            trace.collective(
                "AllReduce", begin + 860, durations[number], nelems=999, issue=begin + 855, seq=index, group="1"
            )
        ranks.append(trace)
    return write_run(folder, ranks)


@pytest.mark.parametrize("groups", [([0, 3], [1, 2]), ([0, 1, 5], [2, 3, 4])], ids=["folded", "half in strides"])
def test_ranks_that_would_find_other_estimates_find_none(tmp_path, capsys, groups):
    """Two groups of one dimension that torch tells apart by their strides: ranks would order them in two ways."""
    profile = exported(groups_of(tmp_path / "run", groups, (20.0, 90.0)), tmp_path / "profile.json")
    found = [profile.lookup_collective("all_reduce", tuple(group), 999, "BFloat16") for group in groups]
    assert found == [None, None]
    assert "left out of groups of a kind that not every rank has" in capsys.readouterr().err


def test_a_rank_without_a_trace_is_told(tmp_path, capsys):
    folder = write_run(tmp_path / "run", [fsdp_rank(rank, 4) for rank in range(3)])
    exported(folder, tmp_path / "profile.json")
    assert "waiting for such a rank counts as moving data" in capsys.readouterr().err


@pytest.mark.parametrize("duration", ["abc", [1], {"a": 1}, "inf", 1e308, 10**400, -5.0], ids=repr)
def test_durations_that_are_none_do_not_reach_the_compiler(tmp_path, capsys, duration):
    torch = pytest.importorskip("torch")
    ranks = [fsdp_rank(rank, 4) for rank in range(4)]
    folder = ranks_with_operators(tmp_path / "run", ranks)
    document = json.loads((folder / "rank0.json").read_text())
    kernel = next(event for event in document["traceEvents"] if event["name"] == "gemm")
    kernel["dur"] = duration
    (folder / "rank0.json").write_text(json.dumps(document))
    profile = exported(folder, tmp_path / "profile.json")
    assert "null" not in (tmp_path / "profile.json").read_text()
    found = profile.lookup_op("aten::mm", ((8, 16), (16, 4)), ((16, 1), (4, 1)), torch.bfloat16)
    assert found in (None, pytest.approx(0.030))  # the other step's
    capsys.readouterr()


@pytest.mark.parametrize(
    "arguments",
    [
        {"Input Dims": 5},
        {"Input Dims": [[{"a": 1}]]},
        {"Input type": 5},
        {"Input type": {"a": 1}},
        {"Input type": [["a"]]},
    ],
    ids=repr,
)
def test_arguments_that_torch_could_not_read_are_left_out_and_told(tmp_path, capsys, arguments):
    ranks = [fsdp_rank(rank, 4) for rank in range(4)]
    own = {"External id": 77_777}
    usual = {"Input Dims": [[2]], "Input Strides": [[1]], "Input type": ["float"]}
    ranks[0].row("cpu_op", "aten::odd", 900, 5, 1, **own, **(usual | arguments))
    ranks[0].row("kernel", "odd", 910, 5, 7, stream=7, correlation=1, **own)
    profile = exported(write_run(tmp_path / "run", ranks), tmp_path / "profile.json")
    assert profile.op_count == 0
    assert "1 operator or kernel left out whose record is damaged" in capsys.readouterr().err
