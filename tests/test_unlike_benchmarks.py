"""Benchmarks of one collective that reach unlike bandwidths: what they are taken for, and what is said of it."""

from __future__ import annotations

import pytest
from helpers import analyze

COLUMNS = "#       size         count      type   redop    root     time   algbw   busbw #wrong     time   algbw   busbw #wrong\n"


def written(path, rate_gbps, ranks=4, *, nodes=None, sizes=(1 << 20, 1 << 24, 1 << 28, 1 << 32)):
    """Write an all-gather's table in which every size reaches a bus bandwidth: time = bytes / algbw (PERFORMANCE.md)."""
    rows = []
    for num_bytes in sizes:
        algbw = rate_gbps * ranks / (ranks - 1)
        row = f"{num_bytes / algbw / 1e3:.2f} {algbw:.2f} {rate_gbps:.2f} 0"
        rows.append(f"{num_bytes} {num_bytes // 4} float none -1 {row} {row}")
    names = "".join(
        f"#  Rank {i} Group 0 Pid 1 on node{i % (nodes or ranks)} device {i} [0x00] NVIDIA H100\n" for i in range(ranks)
    )
    head = "# nThread 1 nGpus 1\n# Collective test starting: all_gather_perf\n"
    path.write_text(head + names + COLUMNS + "\n".join(rows) + "\n", encoding="utf-8")


def of_rates(folder, *rates_gbps):
    for place, rate_gbps in enumerate(rates_gbps):
        written(folder / f"pair{place}.log", rate_gbps)
    return analyze(folder)


def test_the_middle_of_unlike_benchmarks_is_taken_and_told(tmp_path):
    """What differs between them are nodes and settings, not waiting, of which the quickest would have the least."""
    analysis = of_rates(tmp_path, 3.2, 20.0, 9.0, 8.0, 11.0)
    (link,) = analysis.links
    assert link.busbw_gbps == pytest.approx(9.0, rel=0.02)
    (note,) = [item for item in analysis.data_quality if item.code == "Q341"]
    assert note.message.startswith("5 benchmarks of all_gather over 4 ranks move 3.2 to 20 GB/s at one size, ")
    assert "3 of them less than half of the fastest" in note.message


def test_benchmarks_that_agree_need_no_word(tmp_path):
    analysis = of_rates(tmp_path, 9.0, 10.0, 11.0)
    assert analysis.links[0].busbw_gbps == pytest.approx(10.0, rel=0.02)
    assert "Q341" not in {item.code for item in analysis.data_quality}


def test_benchmarks_of_other_nodes_or_other_sizes_are_not_compared(tmp_path):
    written(tmp_path / "inside.log", 40.0, nodes=1)
    written(tmp_path / "between.log", 10.0)
    written(tmp_path / "small.log", 3.0, nodes=1, sizes=(1 << 10, 1 << 12))
    assert "Q341" not in {item.code for item in analyze(tmp_path).data_quality}


def test_a_list_of_ranks_that_was_cut_does_not_tell_how_many_there_are(tmp_path):
    """Of 72 ranks a page shows the last line; bus over algorithm bandwidth, 2 * 71 / 72, tells the rest."""
    rows = []
    for num_bytes in (1 << 28, 1 << 30, 1 << 33):
        algbw = 400.0
        row = f"{num_bytes / algbw / 1e3:.2f} {algbw:.2f} {algbw * 2 * 71 / 72:.2f} 0"
        rows.append(f"{num_bytes} {num_bytes // 4} float sum -1 {row} {row}")
    last = "#  Rank 71 Group  0 Pid  14840 on node17 device  3 [0x01] NVIDIA GB200\n"
    text = f"# Benchmarks of DeepSpeed nodes\n{last}{COLUMNS}" + "\n".join(rows) + "\n"
    (tmp_path / "README.md").write_text(text, encoding="utf-8")
    analysis = analyze(tmp_path / "README.md")
    (link,) = analysis.links
    assert (link.op, link.group_size, link.num_nodes) == ("all_reduce", 72, None)
    assert analysis.run.world_size in (None, 72)
    assert analysis.run.framework == "unknown"
