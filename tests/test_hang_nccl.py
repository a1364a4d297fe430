"""Who holds a job up, from dumps that NCCL's own ranks wrote (tests/data/README.md says what each rank did)."""

from __future__ import annotations

import pytest
from conftest import ROOT

from paro_advise.advisor.cli import run

DUMPS = ROOT / "tests/data/nccl_dumps"


@pytest.mark.parametrize(
    ("made_by", "told"),
    [
        ("skips", "Rank 1 never issued all_reduce 6, 256 KiB (train.py:<module>) of group 0 (default_pg), in which ranks 0, 2 wait."),
        ("order", "Rank 0 issued all_reduce 6, 256 KiB (train.py:<module>) of group 0 where ranks 1-2 issued broadcast 6"),
        ("size", "Rank 0 issued all_reduce 6, 400 B (train.py:<module>) of group 0 where ranks 1-2 issued all_reduce 6, 256 KiB"),
    ],
)  # fmt: skip
def test_dumps_named_by_a_prefix_of_the_jobs_own_are_read(made_by, told, capsys):
    assert run(["hang", str(DUMPS / made_by)]) == 0
    out, err = capsys.readouterr()
    assert told in out
    assert "Seen: 3 ranks." in out
    assert "left out" not in err


def test_a_number_that_is_no_rank_of_the_job_names_none(tmp_path, capsys):
    for rank, name in ((0, "run_7"), (1, "run_8")):
        (tmp_path / name).write_bytes((DUMPS / f"skips/dump_{rank}").read_bytes())
    assert run(["hang", str(tmp_path)]) != 0
    assert "neither the dump nor its name tells the rank" in capsys.readouterr().err


def some_of(made_by, folder, whole, cut=()):
    for rank in whole:
        (folder / f"nccl_trace_rank_{rank}").write_bytes((DUMPS / made_by / f"dump_{rank}").read_bytes())
    for rank in cut:
        (folder / f"nccl_trace_rank_{rank}").write_bytes((DUMPS / made_by / f"dump_{rank}").read_bytes()[:1000])
    return str(folder)


def test_ranks_of_which_nothing_is_known_are_blamed_alike(tmp_path, capsys):
    """Rank 1 is at fault; its dump is cut, and that of rank 2, which waits, was not given."""
    assert run(["hang", some_of("skips", tmp_path, [0], [1])]) == 0
    assert "Cannot tell who is at fault: others wait for ranks 1-2" in capsys.readouterr().out


def test_one_rank_whose_collectives_are_finished_does_not_speak_for_all(tmp_path, capsys):
    assert run(["hang", some_of("size", tmp_path, [0])]) == 0
    out = capsys.readouterr().out
    assert (
        "Cannot tell who is at fault: every collective in these dumps is finished. Give what ranks 1-2 left too." in out
    )
