"""Damage and hostile shapes: said, bounded, never silent."""

from __future__ import annotations

import gzip
import io
import json
import os
import pickle
import re
import tarfile

import pytest
from conftest import DATA
from helpers import analyze, read
from test_hostile import SECONDS_EACH, deadline
from trace_builder import fsdp_rank

from paro_advise.advisor.cli import run
from paro_advise.errors import HostileInputError
from paro_advise.trace_parsers.discover import find_inputs
from paro_advise.trace_parsers.read import read_source

CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")


def test_a_broken_name_does_not_make_its_whole_neighbourhood_be_searched_again(tmp_path):
    # One replaced byte merges events; each name in the merged text once made the rest of it be searched.
    names = ", ".join('{"name": "aten::add", "x": 1}' for _ in range(16_000))
    events = [json.dumps(event) for event in fsdp_rank(0).events]
    events.insert(10, '{"ph": "X", "broken": [' + names)
    path = tmp_path / "rank0.json"
    path.write_text('{"traceEvents": [' + ",\n".join(events) + "]}")
    with deadline(SECONDS_EACH):
        parsed = read(path)
    assert {"Q102", "Q104", "Q105"} & {notice.code for notice in parsed.notices}


@pytest.mark.parametrize("is_packed", [False, True])
@pytest.mark.parametrize("place", [0.3, 0.5])
def test_a_hole_is_counted_and_carries_no_verdict(tmp_path, place, is_packed):
    whole = sorted((DATA / "nccl_like" / "fsdp2-inter-bw" / "traces").iterdir())[0]
    data = bytearray(gzip.decompress(whole.read_bytes()))
    begin, size = int(len(data) * place), len(data) // 10
    data[begin : begin + size] = bytes(size)
    path = tmp_path / f"{whole.name.partition('.')[0]}.json{'.gz' if is_packed else ''}"
    path.write_bytes(gzip.compress(bytes(data)) if is_packed else bytes(data))
    analysis = analyze(path)
    notes = {item.code: item.message for item in analysis.data_quality}
    assert analysis.verdict.regime == "unknown"
    assert "No verdict" in analysis.verdict.text
    assert "Q108" in notes
    lost = int(re.search(r"(\d+) events could not be read", notes["Q104"]).group(1))
    total = len(json.loads(gzip.decompress(whole.read_bytes()))["traceEvents"])
    assert 0.05 * total < lost < 0.2 * total  # a tenth of the bytes


def packed(path, members, mode):
    with tarfile.open(path, mode) as archive:
        for name, content in members:
            info = tarfile.TarInfo(name)
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))
    return path


@pytest.mark.parametrize("mode", ["gz", "bz2", "xz"])
def test_a_packed_archive_is_unpacked_once(tmp_path, mode):
    members = [(f"run/rank{rank}.json", fsdp_rank(rank, 4).text().encode()) for rank in range(4)]
    path = packed(tmp_path / f"run.tar.{mode}", members, f"w:{mode}")
    refs, is_collection = find_inputs([str(path)])
    path.write_bytes(b"gone")  # whoever opened it again would read this
    assert is_collection
    parsed = [read_source(ref) for ref in refs]
    assert [item.header.rank for item in parsed] == [0, 1, 2, 3]
    assert [item.source.bytes for item in parsed] == [len(content) for _, content in members]


def test_an_archive_that_ends_early_gives_what_it_holds(tmp_path):
    members = [(f"rank{rank}.json", fsdp_rank(rank, 4).text().encode()) for rank in range(2)]
    path = packed(tmp_path / "run.tar", members, "w")
    path.write_bytes(path.read_bytes()[: 512 + len(members[0][1]) // 2])
    (ref,) = find_inputs([str(path)])[0]
    assert "Q101" in {notice.code for notice in read_source(ref).notices}


def test_an_endless_name_in_an_archive_is_refused(tmp_path):
    header = tarfile.TarInfo("././@LongLink")
    header.type, header.size = b"L", 1 << 20
    path = tmp_path / "run.tar"
    path.write_bytes(header.tobuf() + b"a" * (1 << 20) + tarfile.TarInfo("rank0.json").tobuf() + bytes(1024))
    with pytest.raises(HostileInputError, match="64 KiB"):
        find_inputs([str(path)])


def outputs_of(tmp_path, capsys, path):
    """Everything that analyze writes about a path, as text; it must succeed."""
    page, data = tmp_path / "page.html", tmp_path / "data.json"
    assert run(["analyze", str(path), "-o", str(page), "--json", str(data), "--force"]) == 0
    said = capsys.readouterr()
    return [page.read_text(encoding="utf-8"), data.read_text(encoding="utf-8"), said.out, said.err]


def test_no_control_character_of_a_name_reaches_an_output(tmp_path, capsys):
    evil = "rank0\x1b]0;x\x07\x9b31m\u202ename.json"
    archive = packed(tmp_path / "run.tar", [(evil, fsdp_rank(0).text().encode())], "w")
    named = tmp_path / evil
    named.write_text(fsdp_rank(0).text())
    for path in (archive, named):
        for text in outputs_of(tmp_path, capsys, path):
            assert not CONTROL.search(text)


def test_a_file_name_that_is_not_utf_8_is_no_defect(tmp_path, capsys):
    path = os.fsdecode(bytes(tmp_path) + b"/rank0-\xff\xfe.json")
    with open(path, "w") as file:  # noqa: PTH123 - pathlib cannot spell it
        file.write(fsdp_rank(0).text())
    page = outputs_of(tmp_path, capsys, path)[0]
    assert "rank0-" in page


def test_a_duration_beyond_any_run_is_said_and_left_out(tmp_path, capsys):
    trace = fsdp_rank(0)
    for event in trace.events:
        if event["name"].startswith("ProfilerStep"):
            event["dur"] = 1e308
    outputs = outputs_of(tmp_path, capsys, trace.write(tmp_path / "rank0.json", "one_line"))
    assert "longer than a year" in outputs[1]


def test_a_pipe_that_nobody_writes_to_is_refused(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("paro_advise.advisor.commands.spool._PIPE_WAIT_S", 0.1)
    path = tmp_path / "rank0.json"
    os.mkfifo(path)
    with deadline(SECONDS_EACH):
        assert run(["analyze", str(path)]) == 3
    assert "nobody opened this one" in capsys.readouterr().err


def test_a_pipe_in_a_folder_or_glob_is_passed_over(tmp_path):
    fsdp_rank(0).write(tmp_path / "rank0.json")
    os.mkfifo(tmp_path / "rank1.json")
    with deadline(SECONDS_EACH):
        for path in (tmp_path, tmp_path / "rank*.json"):
            assert [ref.file_name for ref in find_inputs([str(path)])[0]] == ["rank0.json"]


def test_a_dump_that_repeats_one_long_list_of_ranks_stays_small(tmp_path):
    ranks = list(range(100_000))
    groups = {str(number): {"name": str(number), "desc": "", "ranks": ranks} for number in range(100)}
    path = tmp_path / "_dump_0"
    path.write_bytes(pickle.dumps({"version": "2.4", "pg_config": groups, "entries": [], "pg_status": {}}))
    known = [group for group in read(path).header.groups if group.ranks]
    assert len(known) == 40  # 4,000,000 ranks in all
