"""Jobs of many ranks: pages stay small and name who is slow, nothing grows with the square of the ranks."""

from __future__ import annotations

import base64
import gzip
import io
import json
import random
import tracemalloc
from dataclasses import replace

import polars as pl
import pytest
from helpers import gathered, write_run
from test_report import Page
from trace_builder import fsdp_rank

from paro_advise.advisor.analysis.build import build_analysis
from paro_advise.advisor.analysis.model import Options
from paro_advise.advisor.cli import run
from paro_advise.advisor.ranks.clocks.clock_alignment import _ends_of, _find_clocks
from paro_advise.advisor.rendering.provenance import report_page, steps_by_rank
from paro_advise.advisor.rendering.ranks.rank_file import rank_file
from paro_advise.core.documents import PACKED_TYPE, document_bytes, to_json
from paro_advise.errors import ForeignDataError

SLOW = 43
PER_HOST = 8


def facts_of(tmp_path, num_ranks):
    """Facts of ranks that are alike but for one, which computes a third of a step longer in the second step."""
    fsdp_rank(0, 2, steps=3).write(tmp_path / "rank0.json")
    (one,) = gathered(tmp_path / "rank0.json").facts
    out = []
    for rank in range(num_ranks):
        steps = list(one.steps)
        if rank == SLOW:
            steps[1] = replace(steps[1], compute_us=steps[1].compute_us + steps[1].wall_us / 3)
        source = replace(one.source, path=f"run/rank{rank}.json", sha256=f"{rank:064x}")
        header = replace(one.header, rank=rank, world_size=num_ranks, host=f"node-{rank // PER_HOST}")
        out.append(replace(one, source=source, header=header, steps=tuple(steps)))
    return out


@pytest.fixture(scope="module")
def job(tmp_path_factory):
    facts = facts_of(tmp_path_factory.mktemp("job"), 1024)
    return build_analysis(facts, (), Options()), facts


def rows_of(page, table_id):
    """The texts of a table's cells, row by row."""
    text = page[page.index(f'id="{table_id}"') :]
    text = text[text.index("<tbody>") : text.index("</tbody>")]
    return [
        [cell.partition(">")[2].partition("<")[0] for cell in row.split("<td")[1:]] for row in text.split("<tr")[1:]
    ]


def test_the_slowest_host_stands_first_with_its_ranks(job):
    text = report_page(*job)
    hosts = rows_of(text, "table-hosts")
    assert len(hosts) == 20
    assert hosts[0][:2] == [f"node-{SLOW // PER_HOST}", "40-47"]
    assert hosts[0][4] == str(SLOW)
    assert [row[0] for row in rows_of(text, "table-host-0")] == [str(rank) for rank in range(40, 48)]


def test_the_map_shows_the_rank_and_the_step(job):
    text = report_page(*job)
    drawing = text[text.index("chart-map") :]
    drawing = drawing[: drawing.index("</svg>")]
    assert "1 rank computed longer than the others" in drawing
    # 1,024 ranks in 480 columns, the first 64 of 3 ranks; the second of three steps; a third of a step is the last level.
    assert drawing.count("<path") == 1
    assert f'class="late-4" d="M{SLOW // 3} 1h1v1h-1z"' in drawing


def test_a_page_of_many_ranks_is_small_complete_and_can_be_read_back(job, tmp_path, capsys):
    analysis, facts = job
    text = report_page(analysis, facts)
    assert len(text) < 500_000
    page = Page(text)
    assert len(page.ids) == len(set(page.ids))
    path = tmp_path / "run.html"
    path.write_text(text)
    assert json.loads(document_bytes(str(path))) == json.loads(to_json(analysis))
    assert run(["show", str(path)]) == 0
    assert "1,024" in (said := capsys.readouterr().out) or "1024" in said


def packed_page(data):
    return f'<html><script type="{PACKED_TYPE}" id="paro-data">{data}</script>'


@pytest.mark.parametrize(
    "data",
    ["not base64!", base64.b64encode(b"no gzip").decode(), base64.b64encode(gzip.compress(b"{}" * 999)[:-9]).decode()],
    ids=["no base64", "no gzip", "cut"],
)
def test_a_damaged_page_is_refused(data, tmp_path):
    (tmp_path / "run.html").write_text(packed_page(data))
    with pytest.raises(ForeignDataError, match="whole"):
        document_bytes(str(tmp_path / "run.html"))


def test_a_page_that_would_fill_memory_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr("paro_advise.core.documents.MAX_UNPACKED_BYTES", 1 << 20)
    bomb = base64.b64encode(gzip.compress(b" " * (1 << 22))).decode()
    (tmp_path / "run.html").write_text(packed_page(bomb))
    with pytest.raises(ForeignDataError, match="at most 1 MiB"):
        document_bytes(str(tmp_path / "run.html"))


def test_all_ranks_and_steps_stand_in_a_file_beside_the_page(job, tmp_path):
    analysis, facts = job
    rows = pl.read_parquet(io.BytesIO(rank_file(analysis.ranks, steps_by_rank(analysis, facts))))
    assert len(rows) == 1024 * 3
    slow = rows.filter(pl.col("rank") == SLOW)
    assert slow["host"].unique().to_list() == [f"node-{SLOW // PER_HOST}"]
    assert slow["compute_us"].to_list() == [step.compute_us for step in facts[SLOW].steps]


def test_the_file_is_written_beside_large_runs_only_and_not_over_another(tmp_path, capsys):
    for name, size in (("many", 64), ("few", 2)):
        write_run(tmp_path / name, [fsdp_rank(rank, size) for rank in range(size)])
    for name in ("many", "few"):
        words = ["analyze", str(tmp_path / name), "--no-cache", "-o", str(tmp_path / f"{name}.html")]
        assert run(words) == 0
    assert sorted(path.name for path in tmp_path.glob("*.*")) == ["few.html", "many.html", "many.ranks.parquet"]
    assert "many.ranks.parquet" in capsys.readouterr().err
    (tmp_path / "many.html").unlink()
    assert run(["analyze", str(tmp_path / "many"), "--no-cache", "-o", str(tmp_path / "many.html")]) == 1
    assert "E401" in capsys.readouterr().err
    assert not (tmp_path / "many.html").exists()


def collectives(offset_of, groups, num_each=6, *, key=None):
    """Collectives of groups of ranks, each on a clock of its own, that end on all their ranks at once."""
    draws = random.Random(1)
    rows = []
    for number, group in enumerate(groups):
        for each in range(num_each):
            end = 1000.0 * each + draws.uniform(0, 500)
            rows += [
                {"match": number * num_each + each, "rank": rank, "op": "all_reduce", "group_key": key or str(number),
                 "finish_us": end + offset_of[rank] + draws.gauss(0, 0.5)}
                for rank in group
            ]  # fmt: skip
    return pl.DataFrame(rows)


def offsets_of(num_ranks, groups, **options):
    draws = random.Random(0)
    true = [0.0] + [draws.uniform(-1e6, 1e6) for _ in range(num_ranks - 1)]
    clock_of = {rank: f"host {rank}" for rank in range(num_ranks)}
    index_of = {name: rank for rank, name in clock_of.items()}
    clocks = _find_clocks(_ends_of(collectives(true, groups, **options), clock_of, index_of), num_ranks)
    return true, clocks.offset_us, clocks.error_us


@pytest.mark.parametrize(
    "groups",
    [
        [range(300)],
        [range(first, first + 10) for first in range(0, 300, 10)] + [range(place, 300, 10) for place in range(10)],
        [(rank, rank + 1) for rank in range(299)],
        [(rank + 1, rank) for rank in reversed(range(299))],
    ],
    ids=["one group", "a grid of groups", "a chain of pairs", "a chain from its end"],
)
def test_clocks_of_hundreds_of_hosts_are_found_through_any_groups(groups):
    """Ends differ by 0.5 us at random: 6 collectives a pair, in a chain over 299 of them some 5 us."""
    true, found, error = offsets_of(300, groups)
    assert max(abs(one - other) for one, other in zip(true, found, strict=True)) < 25
    assert error < 2


def test_collectives_of_one_group_may_each_show_only_some_of_its_clocks():
    """Point-to-point inside one group: neighbours alone share collectives."""
    true, found, error = offsets_of(64, [(rank, rank + 1) for rank in range(63)], key="pipeline")
    assert max(abs(one - other) for one, other in zip(true, found, strict=True)) < 10
    assert error < 2


def test_clocks_that_nothing_joins_keep_offsets_of_their_own():
    true, found, _ = offsets_of(8, [range(4), range(4, 8)])
    assert found[0] == 0
    assert found[1] == pytest.approx(true[1], abs=5)
    assert found[5] - found[4] == pytest.approx(true[5] - true[4], abs=5)


def test_memory_of_clock_alignment_grows_with_the_ranks_not_their_square():
    peaks = []
    for num_ranks in (1000, 4000):
        groups = [range(first, first + 8) for first in range(0, num_ranks, 8)]
        table = collectives([0.0] * num_ranks, groups, 2)
        clock_of = {rank: f"host {rank}" for rank in range(num_ranks)}
        index_of = {name: rank for rank, name in clock_of.items()}
        tracemalloc.start()
        _find_clocks(_ends_of(table, clock_of, index_of), num_ranks)
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert peaks[1] < 8 * peaks[0]  # four times the ranks: 4 where it is linear, 16 where it is quadratic
