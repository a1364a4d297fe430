"""Which rank left the program that all ranks run: by third ranks, and by its own steps before."""

from __future__ import annotations

import pytest
from test_hang import GATHER, REDUCE, WORLD, causes, diagnosed, dump, entry

from paro_advise.advisor.hangs.model import Cause
from paro_advise.advisor.hangs.programs import expected

PAIR, TRIO = ("1", "pair"), ("2", "trio")
GROUPS = ((WORLD, (0, 1, 2, 3)), (PAIR, (2, 3)), (TRIO, (1, 2, 3)))


def program(rank, *calls):
    """Return a rank's dump: calls of (group, number, name) in their order, the last one of which is not finished."""
    groups = tuple(group for group in GROUPS if rank in group[1])
    entries = [
        entry(seq, name, group=group, done=place < len(calls) - 1) | {"time_created_ns": 1_000 + place}
        for place, (group, seq, name) in enumerate(calls)
    ]
    return dump(*entries, groups=groups)


def test_who_leaves_out_what_two_others_issue_is_at_fault(tmp_path):
    """Rank 2 leaves out number 7 of the trio: ranks 1 and 3 wait for it there, and it waits for them."""
    before = [(TRIO, 6, GATHER), (WORLD, 4, REDUCE)]
    hang = diagnosed(
        tmp_path / "d",
        {
            0: program(0, (WORLD, 4, REDUCE), (WORLD, 5, REDUCE)),
            1: program(1, *before, (TRIO, 7, GATHER)),
            2: program(2, *before, (WORLD, 5, REDUCE)),
            3: program(3, *before, (TRIO, 7, GATHER)),
        },
    )
    assert causes(hang) == {2: Cause.MISMATCH}
    assert hang.text == (
        "Rank 2 holds the others up. Rank 2 issued all_reduce 5, 256 B of group 0 where ranks 1, 3 issued "
        "_all_gather_base 7, 256 B of group 2."
    )


def test_sizes_that_round_alike_are_told_to_the_byte(tmp_path):
    """Rank 2 reduces 4 elements more than the others: 16,400 bytes for 16,384, both 16 KiB."""
    sizes = {rank: 4100 if rank == 2 else 4096 for rank in range(4)}
    hang = diagnosed(
        tmp_path / "d",
        {
            rank: dump(entry(5, done=True, size=4096), entry(6, size=size), groups=GROUPS[:1])
            for rank, size in sizes.items()
        },
    )
    assert causes(hang) == {2: Cause.MISMATCH}
    assert "issued all_reduce 6, 16,400 bytes" in hang.text
    assert "ranks 0-1, 3 issued all_reduce 6, 16,384 bytes" in hang.text


def test_orders_that_part_and_meet_again_blame_nobody(tmp_path):
    """A thread of rank 2 issues the trio's own; long after, rank 3 never issues what all wait in."""
    calls = {rank: [(TRIO, 6, GATHER), (WORLD, 4, REDUCE), (TRIO, 7, GATHER)] for rank in (1, 2, 3)}
    calls[2] = [(TRIO, 6, GATHER), (TRIO, 7, GATHER), (WORLD, 4, REDUCE)]
    last = [(WORLD, 5, REDUCE), (WORLD, 6, REDUCE)]
    hang = diagnosed(
        tmp_path / "d",
        {
            0: program(0, (WORLD, 4, REDUCE), *last),
            1: program(1, *calls[1], *last),
            2: program(2, *calls[2], *last),
            3: dump(
                *[one | {"state": "completed"} for one in program(3, *calls[3], last[0])["entries"]], groups=GROUPS
            ),
        },
    )
    assert causes(hang) == {3: Cause.HOST}


def test_what_a_full_buffer_no_longer_holds_parts_no_orders(tmp_path):
    """Rank 1's own traffic has pushed the trio's only call out of its buffer; rank 3 stands."""
    trio = [(TRIO, 1, REDUCE)]
    world = [(WORLD, number, REDUCE) for number in range(20, 26)]
    hang = diagnosed(
        tmp_path / "d",
        {
            0: program(0, *world),
            1: program(1, *world),
            2: program(2, *trio, *world),
            3: dump(
                *[one | {"state": "completed"} for one in program(3, *trio, *world[:-1])["entries"]], groups=GROUPS
            ),
        },
    )
    assert causes(hang) == {3: Cause.HOST}


def test_groups_of_one_name_and_different_ranks_are_told_apart(tmp_path):
    """Torch may name the pairs of a mesh alike: rank 2 waits for 3, and the other pair is further on."""
    first, second = ((WORLD, (0, 1, 2, 3)), (PAIR, (0, 1))), ((WORLD, (0, 1, 2, 3)), (PAIR, (2, 3)))
    done = entry(40, group=PAIR, done=True)
    hang = diagnosed(
        tmp_path / "d",
        {
            0: dump(done, groups=first),
            1: dump(done, groups=first),
            2: dump(entry(12, group=PAIR), groups=second),
            3: dump(entry(11, group=PAIR, done=True), groups=second),
        },
    )
    assert causes(hang) == {3: Cause.HOST}
    assert "group 1 of ranks 2-3 (pair)" in hang.text


def steps(rank, *, num_steps, leaves_out=()):
    """Return a rank's calls: a step is an all-reduce of all ranks and four calls of the pair, then of all ranks again.

    Args:
        leaves_out: places of calls of the last step that are not issued, after which the rank waits.
    """
    calls, numbers = [], {WORLD: 0, PAIR: 0}
    for step in range(num_steps):
        for place, (group, name) in enumerate(
            [(WORLD, REDUCE), *[(PAIR, GATHER), (PAIR, REDUCE)] * 2, (WORLD, GATHER)]
        ):
            if (group == PAIR and rank not in (2, 3)) or (step == num_steps - 1 and place in leaves_out):
                continue
            numbers[group] += 1
            calls.append((group, numbers[group], name))
    return calls


def test_of_two_that_differ_the_one_that_breaks_with_its_steps_before_is_at_fault(tmp_path):
    """Rank 3 leaves out the last call of the pair and waits in the gather of all ranks; rank 2 waits for it."""
    hang = diagnosed(
        tmp_path / "d",
        {
            0: program(0, *steps(0, num_steps=3)),
            1: program(1, *steps(1, num_steps=3)),
            2: program(2, *steps(2, num_steps=3)[:-1]),
            3: program(3, *steps(3, num_steps=3, leaves_out=(4,))),
        },
    )
    assert causes(hang) == {3: Cause.MISMATCH}
    assert "where rank 2 and its own steps before issued all_reduce 12" in hang.text


@pytest.mark.parametrize(("num_steps", "named"), [(1, {}), (4, {0: Cause.MISMATCH})])
def test_in_a_circle_without_two_orders_that_part_steps_before_tell(tmp_path, num_steps, named):
    """Three pairs of three ranks; rank 0 changes the order of its two, which no other rank is in both of."""
    pairs = [(("1", "a"), (0, 1)), (("2", "b"), (1, 2)), (("3", "c"), (0, 2))]
    dumps = {}
    for rank in range(3):
        order = [(pair, name) for pair, ranks in pairs for name in (GATHER, REDUCE) if rank in ranks]
        calls = [(pair, name, step) for step in range(num_steps) for pair, name in order]
        last = [(pair, name, num_steps) for pair, name in (order if rank else order[2:])]
        entries = [
            entry(2 * step + (name == REDUCE) + 1, name, group=pair, done=step < num_steps) | {"time_created_ns": at}
            for at, (pair, name, step) in enumerate([*calls, last[0]])
        ]
        dumps[rank] = dump(*entries, groups=tuple(item for item in pairs if rank in item[1]))
    assert causes(diagnosed(tmp_path / "d", dumps)) == named


@pytest.mark.parametrize("num_steps", [1, 2])
def test_of_two_that_differ_without_steps_before_none_is_blamed(tmp_path, num_steps):
    """In a first step the pair has never met; a second one may differ from the first by design."""
    hang = diagnosed(
        tmp_path / "d",
        {
            0: program(0, *steps(0, num_steps=num_steps)),
            1: program(1, *steps(1, num_steps=num_steps)),
            2: program(2, *steps(2, num_steps=num_steps)[:-1]),
            3: program(3, *steps(3, num_steps=num_steps, leaves_out=(4,))),
        },
    )
    assert hang.culprits == ()
    assert hang.text.startswith("Cannot tell who is at fault")


def test_buffers_that_begin_at_different_calls_are_compared_where_both_have_some(tmp_path):
    calls = {rank: steps(rank, num_steps=4) for rank in range(4)}
    calls[2] = calls[2][:-1]
    calls[3] = steps(3, num_steps=4, leaves_out=(4,))[3:]
    hang = diagnosed(tmp_path / "d", {rank: program(rank, *issued) for rank, issued in calls.items()})
    assert causes(hang) == {3: Cause.MISMATCH}


@pytest.mark.parametrize(
    ("before", "next_one"),
    [
        ("abcdefgh" * 2 + "abc", "d"),
        ("xyz" + "abcdefgh" * 2, "a"),
        ("aaaabaaaac" * 2 + "aaaa", "b"),
        ("abcdefgh" + "abc", None),  # no step is repeated whole
        ("a" * 6, None),
        ("", None),
    ],
)
def test_what_steps_before_had_in_a_place(before, next_one):
    found = expected([(mark, "") for mark in before])
    assert found == (None if next_one is None else (next_one, ""))
