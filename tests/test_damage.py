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
from fuzz_case import CONTROL
from helpers import analyze, read, write_run
from test_hostile import SECONDS_EACH, deadline
from test_side_dumps import flight_dump, inspector_record, plugin_events
from test_side_formats import COLUMNS, RANKS, table_row
from trace_builder import TraceBuilder, fsdp_rank

from paro_advise.advisor.cli import run
from paro_advise.errors import HostileInputError
from paro_advise.trace_parsers.discover import find_inputs
from paro_advise.trace_parsers.rank_lists import ranks_in, ranks_text
from paro_advise.trace_parsers.read import read_source


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
    (idle,) = [finding for finding in analysis.findings if finding.code == "PARO031"]
    assert idle.status != "applies"  # what is missing looks like idle time
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


@pytest.mark.parametrize("scale", [1e-315, 1e-9])
def test_times_too_short_to_be_any_are_no_defect(tmp_path, capsys, scale):
    """A damaged exponent can make a step shorter than numbers divide."""
    trace = fsdp_rank(0)
    for event in trace.events:
        event["ts"], event["dur"] = (event["ts"] - trace.offset) * scale, event["dur"] * scale
    document = {**trace.head(), "traceEvents": trace.events}
    path = tmp_path / "rank0.json"
    path.write_text(json.dumps(document))
    charts = re.findall(r'<svg role="img".*?</svg>', outputs_of(tmp_path, capsys, path)[0], re.DOTALL)
    assert not [chart for chart in charts if "inf" in re.sub(r"<(title|desc).*?>.*?<", "<", chart)]


def test_a_pipe_that_nobody_writes_to_is_refused(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("paro_advise.advisor.commands.spool._PIPE_WAIT_S", 0.1)
    path = tmp_path / "rank0.json"
    os.mkfifo(path)
    with deadline(SECONDS_EACH):
        assert run(["analyze", str(path)]) == 3
    assert "nothing writes to this pipe" in capsys.readouterr().err


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


def test_a_cut_inside_an_event_with_brackets_is_said(tmp_path):
    text = fsdp_rank(0, steps=4).text("sorted_keys")
    path = tmp_path / "rank0.json"
    path.write_text(text[: text.rindex('"Process Group Ranks": "[0, 1]"') + 40])
    analysis = analyze(path)
    assert "Q102" in {note.code for note in analysis.data_quality}
    assert analysis.verdict.regime == "unknown"


def test_a_broken_last_event_is_counted(tmp_path):
    path = tmp_path / "rank0.json"
    text = fsdp_rank(0).text("one_line")
    last = text.rindex('"dur"')
    path.write_text(f'{text[:last]}"du{text[last + 5 :]}')
    (notice,) = [note for note in read(path).notices if note.code in ("Q102", "Q104")]
    assert notice.code == "Q104" and notice.message.startswith("rank0.json: 1 event")


def test_a_cut_that_joins_two_events_into_one_that_is_skipped_is_counted(tmp_path):
    trace = TraceBuilder()
    for number in range(400):
        trace.row("cuda_runtime", "cudaLaunchKernel", 10.0 * number, 1.0, correlation=number)
        trace.compute(10.0 * number + 2, 9.0)
    text = trace.text("torch2020")
    begin, end = text.index('"correlation": 150'), text.index('"stream": 7', len(text) * 3 // 4)
    path = tmp_path / "rank0.json"
    path.write_text(text[:begin] + text[end + 3 :])
    assert "Q104" in {notice.code for notice in read(path).notices}


def test_a_member_larger_than_any_file_is_no_defect(tmp_path, capsys):
    path = packed(tmp_path / "run.tar", [("rank0.json", fsdp_rank(0).text().encode())], "w")
    data = bytearray(path.read_bytes())
    data[124:136] = b"\x80" + b"\xff" * 11  # the size in base 256
    data[148:156] = b"%06o\0 " % (sum(data[:148]) + 8 * 32 + sum(data[156:512]))
    path.write_bytes(data)
    assert run(["analyze", str(path)]) in (0, 3)
    assert "E100" not in capsys.readouterr().err


@pytest.mark.parametrize("time_us", [1e306, -1e306, 1e17])
def test_times_that_no_clock_shows_are_refused(tmp_path, capsys, time_us):
    trace = fsdp_rank(0)
    for event in trace.events:
        event["ts"] = time_us
    assert run(["analyze", str(trace.write(tmp_path / "rank0.json", "one_line"))]) == 3
    said = capsys.readouterr().err
    assert "that a clock can show" in said and "defect" not in said


def test_time_stamps_of_inspector_that_no_clock_shows_are_left_out(tmp_path):
    record = inspector_record()
    record["metadata"]["dump_timestamp_us"] = (1 << 63) - 1
    path = tmp_path / "h.json"
    path.write_text(json.dumps(record))
    assert run(["analyze", str(path)]) == 0  # and its facts fit the cache


def test_a_time_next_to_zero_is_no_bandwidth(tmp_path):
    row = table_row(1 << 24, 400.0, 0.75, "none").replace("   400.00   41.94", " 1e-308 0")
    path = tmp_path / "all_gather.txt"
    path.write_text(f"# Collective test starting: all_gather_perf\n{RANKS}{COLUMNS}{row}\n")
    record = inspector_record(coll_exec_time_us=1e-308)
    (tmp_path / "h.json").write_text(json.dumps(record))
    for name in ("all_gather.txt", "h.json"):
        assert run(["analyze", str(tmp_path / name)]) == 0


def test_a_plugin_record_of_an_odd_category_is_left_out(tmp_path):
    odd = [event | {"cat": {"a": 1}} for event in plugin_events(7, 900.0)]
    path = tmp_path / "plugin.json"
    path.write_text("[\n" + ",\n".join(map(json.dumps, [*plugin_events(0, 1.0), *odd])))
    assert len(read(path).collectives) == 1


def test_text_that_steers_reaches_no_output(tmp_path, capsys):
    trace = fsdp_rank(0)
    trace.host = "a\u202eb"
    for event in trace.events:
        if "dtype" in event["args"]:
            event["args"] |= {"dtype": "\u202etxt.exe\x9b31m", "Process Group Description": "\u2066x"}
    document = TraceBuilder.head(trace)
    document["distributedInfo"] |= {"backend": "nccl\u202e\x9b", "nccl_version": "\u202e2"}
    trace.head = lambda: document
    for text in outputs_of(tmp_path, capsys, trace.write(tmp_path / "rank0.json", "one_line")):
        assert not CONTROL.search(text)
    data = json.loads((tmp_path / "data.json").read_text(encoding="utf-8"))
    assert data["run"]["backend"] == "nccl\u202e\x9b"  # escaped, not lost


def test_an_analysis_with_text_that_steers_is_shown_without_it(tmp_path, capsys):
    outputs_of(tmp_path, capsys, fsdp_rank(0).write(tmp_path / "rank0.json"))
    data = json.loads((tmp_path / "data.json").read_text())
    data["run"]["gpus_per_node_source"] = data["states"]["parameter"]["evidence"] = "\x1b]0;x\x07"
    (tmp_path / "evil.json").write_text(json.dumps(data))
    assert run(["show", str(tmp_path / "evil.json")]) == 0
    assert not CONTROL.search(capsys.readouterr().out)


def test_shapes_nested_without_end_are_unknown(tmp_path):
    nested = "[" * 900 + "8" + "]" * 900
    rows = ",".join(
        f'{{"ph": "X", "cat": "{cat}", "name": "{name}", "pid": 1, "tid": 1, "ts": 1, "dur": 5, "args": {{"Input Dims": {nested}}}}}'
        for cat, name in (("cpu_op", "c10d::allreduce_"), ("user_annotation", "gloo:all_reduce"))
    )
    path = tmp_path / "rank0.json"
    path.write_text('{"schemaVersion": 1, "traceEvents": [' + rows + "]}")
    assert read(path).collectives["bytes"].to_list() == [None]


@pytest.mark.parametrize(
    "ranks",
    [[], [3], list(range(64)), range(65), range(8, 16_000, 8), [*range(50), *range(100, 150), 7, 7, 3], [5] * 99],
)
def test_lists_of_ranks_come_back_from_their_text(ranks):
    text = ranks_text(ranks)
    assert ranks_in(text) == list(ranks)
    assert len(text) < 400


def test_a_large_world_is_not_listed_by_every_collective(tmp_path):
    world = 16_384
    dump = flight_dump()
    dump["pg_config"]["7"]["ranks"] = str(list(range(world)))
    dump["entries"] = [dump["entries"][0] | {"collective_seq_id": number} for number in range(500)]
    path = tmp_path / "_dump_0"
    path.write_bytes(pickle.dumps(dump))
    table = read(path).collectives
    assert table["group_size"].to_list() == [world] * 500
    assert table.estimated_size() < 1 << 20


def test_what_several_files_say_alike_is_said_once(tmp_path):
    """Of three ranks without marks of steps, each says so; one line names them."""
    builders = []
    for rank in range(3):
        builder = fsdp_rank(rank, world=3)
        builder.events = [
            event for event in builder.events if not event["name"].startswith(("ProfilerStep", "Optimizer.step"))
        ]
        builders.append(builder)
    (note,) = [item for item in analyze(write_run(tmp_path / "run", builders)).data_quality if item.code == "Q120"]
    assert note.message.startswith("3 files (rank0.json, rank1.json, ...): no ProfilerStep marks")
