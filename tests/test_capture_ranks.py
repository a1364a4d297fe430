"""Few ranks of a large job record, and between them every node and process group is seen."""

from __future__ import annotations

import json

import pytest
from loop import SCRIPTS, paro
from ranks import forked

from paro_advise.errors import UsageError
from paro_advise.runtime.capture.rank_choice import RankChoice
from paro_advise.runtime.capture.request import CaptureRequest


def chosen(text, world, per_node, groups):
    """The ranks that record, each asked by itself with the groups that it is of."""
    choice = RankChoice.of(text)
    return {
        rank for rank in range(world) if choice.records(rank, per_node, [group for group in groups if rank in group])
    }


@pytest.mark.parametrize(
    ("world", "per_node", "groups", "most"),
    [
        (64, 8, [range(64)], 15),
        (64, 8, [range(64), *(range(first, first + 8) for first in range(0, 64, 8))], 15),
        (64, 8, [range(64), *(range(place, 64, 8) for place in range(8))], 15),
        # Pipeline stages of two nodes, tensor parallel pairs in them.
        (
            64,
            8,
            [*(range(first, first + 16) for first in range(0, 64, 16)), *((r, r + 1) for r in range(0, 64, 2))],
            43,
        ),
        (8, 8, [range(8)], 8),
    ],
    ids=["one group", "groups inside nodes", "groups across nodes", "pipeline and pairs", "one node"],
)
def test_auto_sees_every_node_and_every_group(world, per_node, groups, most):
    ranks = chosen("auto", world, per_node, groups)
    assert len(ranks) <= most
    assert {rank // per_node for rank in ranks} == set(range(world // per_node))
    assert all(ranks & set(group) for group in groups)
    assert set(range(per_node)) <= ranks


def test_without_a_launcher_that_tells_nodes_all_record():
    assert chosen("auto", 16, None, [range(16)]) == set(range(16))


def test_lists_name_ranks():
    assert chosen("0-2,7", 16, 8, [range(16)]) == {0, 1, 2, 7}


@pytest.mark.parametrize("text", ["", "some", "1-", "-1", "1;2", "1,,2", "99999999"])
def test_what_is_no_choice_is_refused(text):
    with pytest.raises(UsageError, match="ranks must be"):
        RankChoice.of(text)


def test_the_environment_carries_the_choice():
    request = CaptureRequest.of("out", ranks="0-2,7")
    assert CaptureRequest.from_environment(request.to_environment()).ranks == request.ranks


@pytest.mark.distributed
def test_only_the_chosen_ranks_write_traces_and_all_log_their_steps(tmp_path):
    folder = tmp_path / "run"
    job = forked(SCRIPTS / "train_fsdp2.py")
    done = paro("capture", "-o", folder, "--steps", "4:6", "--ranks", "0,3", job=job)
    assert done.returncode == 0, done.stderr[-3000:]
    assert sorted(path.name for path in folder.glob("*.json.gz")) == ["rank0.json.gz", "rank3.json.gz"]
    slowed = []
    for rank in range(4):
        rows = [json.loads(line) for line in (folder / f"steps.rank{rank}.jsonl").read_text().splitlines()[1:]]
        slowed.append([row["step"] for row in rows if row["profiled"]])
    assert slowed[0] == slowed[1] == slowed[2] == slowed[3]
    assert {4, 5} <= set(slowed[1])
    assert "traces of 2 of 4 ranks" in done.stderr
    told = paro("analyze", folder, "--json", "-")
    assert json.loads(told.stdout)["run"]["ranks"] == [0, 3]
