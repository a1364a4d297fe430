"""Every layout and container of a Kineto trace gives the same tables; losses are counted."""

from __future__ import annotations

import codecs
import gzip
import io
import json
import tarfile
from typing import Any

import pytest
from helpers import analyze, collectives_of, facts_of, gathered, read
from trace_builder import LAYOUTS, fsdp_rank

from paro_advise.errors import InputError


def codes(parsed):
    return {notice.code for notice in parsed.notices}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_all_layouts_give_the_same_collectives(tmp_path, layout):
    trace = fsdp_rank(0)
    expected = collectives_of(trace.write(tmp_path / "expected.json", "torch213"))
    got = collectives_of(trace.write(tmp_path / "rank0.json", layout))
    columns = ["start_us", "end_us", "op", "bytes", "dtype", "seq", "state", "detail", "phase", "step"]
    if layout.startswith("bare_list"):
        columns.remove("step")
    assert got.select(columns).equals(expected.select(columns))
    assert len(got) == 10


@pytest.mark.parametrize("layout", LAYOUTS)
def test_event_counts_equal_a_plain_json_parse(tmp_path, layout):
    trace = fsdp_rank(0)
    path = trace.write(tmp_path / "rank0.json", layout)
    parsed = read(path)
    plain = json.loads(path.read_text())
    events = plain if isinstance(plain, list) else plain["traceEvents"]
    kernels = [event for event in events if event["cat"] in ("kernel", "gpu_memcpy")]
    assert parsed.num_events == len(events)
    assert len(parsed.events.device) == len(kernels)
    total = sum(event["dur"] for event in kernels)
    assert (parsed.events.device["end_us"] - parsed.events.device["start_us"]).sum() == pytest.approx(total, rel=1e-9)


def test_gzip_zstd_and_tar_archives(tmp_path):
    zstandard = pytest.importorskip("zstandard")
    text = fsdp_rank(0).text().encode()
    (tmp_path / "a.json").write_bytes(text)
    (tmp_path / "b.json.gz").write_bytes(gzip.compress(text))
    (tmp_path / "two_members.json.gz").write_bytes(gzip.compress(text[:5000]) + gzip.compress(text[5000:]))
    (tmp_path / "c.json.zst").write_bytes(zstandard.ZstdCompressor().compress(text))
    with tarfile.open(tmp_path / "d.tar.gz", "w:gz") as archive:
        info = tarfile.TarInfo("traces/rank0.json")
        info.size = len(text)
        archive.addfile(info, io.BytesIO(text))
    expected = collectives_of(tmp_path / "a.json")
    for name in ("b.json.gz", "two_members.json.gz", "c.json.zst"):
        assert collectives_of(tmp_path / name).equals(expected), name
    (from_archive,) = gathered(tmp_path / "d.tar.gz").facts
    assert from_archive.source.path.endswith("d.tar.gz!traces/rank0.json")
    assert len(from_archive.steps) == 2


WAYS_TO_WRITE: dict[str, dict[str, Any]] = {
    "one line": {},
    "compact": {"separators": (",", ":")},
    "sorted keys": {"sort_keys": True},
    "indented": {"indent": 1},
}


@pytest.mark.parametrize("broken", [None, float("nan")], ids=["whole", "a NaN"])
@pytest.mark.parametrize("way", WAYS_TO_WRITE)
def test_rows_that_somebody_put_in_front_cost_no_others(way, broken, tmp_path):
    """Such as names of processes, whose fields stand in another order than those of events."""
    document = fsdp_rank(0).document()
    rows = [{"name": "process_name", "ph": "M", "pid": pid, "ts": 0, "args": {"name": "python"}} for pid in range(2)]
    (tmp_path / "expected.json").write_text(json.dumps(document, **WAYS_TO_WRITE[way]))
    expected = collectives_of(tmp_path / "expected.json")
    document["traceEvents"] = [*rows, *document["traceEvents"]]
    document["traceEvents"][20]["args"]["loss"] = broken
    path = tmp_path / "rank0.json"
    path.write_text(json.dumps(document, **WAYS_TO_WRITE[way]))
    parsed = read(path)
    assert parsed.num_events == len(document["traceEvents"])
    assert collectives_of(path).equals(expected)
    assert codes(parsed) - codes(read(tmp_path / "expected.json")) == ({"Q103"} if broken is not None else set())


def test_a_byte_order_mark_changes_nothing(tmp_path):
    trace = tmp_path / "rank0.json"
    text = fsdp_rank(0).text().encode()
    trace.write_bytes(text)
    expected = read(trace)
    trace.write_bytes(codecs.BOM_UTF8 + text)
    marked = read(trace)
    assert marked.header == expected.header
    assert marked.notices == expected.notices
    assert marked.num_events == expected.num_events


def test_traces_whose_events_have_no_category_are_no_input(tmp_path):
    """As those of Ascend's profiler, whose host rows have one: all of the device would be missing."""
    trace = fsdp_rank(0)
    for event in trace.events:
        if event["cat"] == "kernel":
            del event["cat"]
    with pytest.raises(InputError, match="must name the category of its events"):
        read(trace.write(tmp_path / "trace_view.json", "bare_list"))


@pytest.mark.parametrize("share", [0.5, 0.8, 0.95])
def test_a_cut_file_keeps_every_complete_event_and_says_so(tmp_path, share):
    text = fsdp_rank(0, steps=4).text()
    cut = text[: int(len(text) * share)]
    path = tmp_path / "rank0.json"
    path.write_text(cut)
    parsed = read(path)
    assert parsed.num_events == cut[cut.index('"traceEvents"') :].count("\n  }")
    assert "Q102" in codes(parsed)


def test_a_cut_gzip_is_salvaged(tmp_path):
    data = gzip.compress(fsdp_rank(0, steps=20).text().encode())
    (tmp_path / "rank0.json.gz").write_bytes(data[: int(len(data) * 0.7)])
    parsed = read(tmp_path / "rank0.json.gz")
    assert parsed.num_events > 100
    assert {"Q101", "Q102"} <= codes(parsed)


def break_names(text, replacement, times):
    return text.replace('"name": "sm90_gemm"', f'"name": "{replacement}"', times)


@pytest.mark.parametrize(
    ("broken", "is_mended"),
    [
        (r"C:\Users\x\gemm", True),
        ('call "quoted" gemm', True),
        ("tab\tand\x01control", True),
        ("raw\nnewline", True),
    ],
)
def test_broken_names_are_mended_and_counted(tmp_path, broken, is_mended):
    text = break_names(fsdp_rank(0).text(), broken, 3)
    (tmp_path / "rank0.json").write_bytes(text.encode())
    parsed = read(tmp_path / "rank0.json")
    assert len(parsed.events.device) == 20
    assert ("Q103" in codes(parsed)) is is_mended


def test_invalid_utf8_nan_and_missing_values(tmp_path):
    text = fsdp_rank(0).text().encode()
    text = text.replace(b'"name": "sm90_gemm"', b'"name": "g\xff\xfemm"', 1)
    text = text.replace(b'"dur": 130.000', b'"dur": -nan', 1).replace(b'"dur": 200.000', b'"dur": ', 1)
    (tmp_path / "rank0.json").write_bytes(text)
    parsed = read(tmp_path / "rank0.json")
    assert len(parsed.events.device) == 19  # only the event without a value is lost
    messages = [notice.message for notice in parsed.notices if notice.code in ("Q103", "Q104")]
    assert any("2 events" in message for message in messages)
    assert "rank0.json: 1 event could not be read and is missing from all figures" in messages


def test_a_file_of_two_layouts_loses_nothing(tmp_path):
    first, second = fsdp_rank(0, steps=1), fsdp_rank(0, steps=1)
    one = first.text("torch213")
    other = json.dumps(second.events)[1:-1]
    merged = one.replace('\n  ],\n  "traceName"', ",\n  " + other + '\n  ],\n  "traceName"')
    (tmp_path / "rank0.json").write_text(merged)
    assert len(read(tmp_path / "rank0.json").events.device) == 20


def test_nanoseconds_survive_long_timestamps(tmp_path):
    """Without a base time `ts` has 16 digits: float64 alone would be wrong by up to 0.25 us."""
    trace = fsdp_rank(0)
    for event in trace.events:
        event["ts"] = 0.0
    head = {key: value for key, value in trace.head().items() if key != "baseTimeNanoseconds"}
    text = LAYOUTS["torch213"](head, trace.events)
    starts = [f"1712195495{index:06d}.{(index * 37) % 1000:03d}" for index in range(len(trace.events))]
    for start in starts:
        text = text.replace('"ts": 0.000', f'"ts": {start}', 1)
    (tmp_path / "rank0.json").write_text(text)
    device = read(tmp_path / "rank0.json").events.device
    kernels = [index for index, event in enumerate(trace.events) if event["cat"] == "kernel"]
    expected = sorted(index + ((index * 37) % 1000) / 1000 for index in kernels)
    got = device["start_us"].to_list()
    assert [value - got[0] for value in got] == pytest.approx([value - expected[0] for value in expected], abs=2e-4)


def test_huge_identifiers_do_not_overflow(tmp_path):
    text = fsdp_rank(0).text().replace('"correlation": 3', '"correlation": 99999999999999999999999', 1)
    text = text.replace('"Seq": 0', '"Seq": 18446744073709551615')
    (tmp_path / "rank0.json").write_text(text)
    assert len(facts_of(tmp_path / "rank0.json").steps) == 2


def test_an_empty_event_array_is_a_clear_error(tmp_path):
    (tmp_path / "rank0.json").write_text('{"schemaVersion": 1, "traceEvents": []}')
    with pytest.raises(InputError, match="holds none that can be read"):
        analyze(tmp_path / "rank0.json")


def test_rank_comes_from_content_before_the_name(tmp_path):
    fsdp_rank(1).write(tmp_path / "rank7.json")
    assert read(tmp_path / "rank7.json").header.rank == 1
    fsdp_rank(1).write(tmp_path / "rank9.json", "bare_list")
    assert read(tmp_path / "rank9.json").header.rank == 9


def test_rank_lists_cut_by_kineto_are_rebuilt(tmp_path):
    trace = fsdp_rank(0, world=64)
    cut = "[" + ", ".join(map(str, range(30))) + ", ...]"
    for event in trace.events:
        if "Process Group Ranks" in event["args"]:
            event["args"].update(
                {
                    "Process Group Ranks": cut,
                    "Process Group Name": "other",
                    "Global rank start": 0,
                    "Global rank stride": 1,
                }
            )
    table = collectives_of(trace.write(tmp_path / "rank0.json"))
    assert set(table["group_ranks"]) == {",".join(map(str, range(64)))}


@pytest.mark.parametrize("layout", ["torch213", "compact"])
def test_a_roll_over_of_long_timestamps_keeps_the_order(tmp_path, layout):
    """The leading digits that are cut off change every 1000 s, here in the middle of a step."""
    trace = fsdp_rank(0, steps=1)
    trace.offset = 0.0
    for event in trace.events:
        event["ts"] += 1712195999999500.0 - 1_000_000.0
    head = {key: value for key, value in trace.head().items() if key != "baseTimeNanoseconds"}
    (tmp_path / "rank0.json").write_text(LAYOUTS[layout](head, trace.events))
    facts = facts_of(tmp_path / "rank0.json")
    assert facts.steps[0].compute_us == pytest.approx(540, abs=2)
    assert facts.steps[0].exposed_communication_us == pytest.approx(250, abs=2)
    assert facts.header.origin_ns == pytest.approx(1712195999999500000, abs=2_000_000)


def test_objects_inside_events_are_no_events(tmp_path):
    """Lists of them in arguments may hold more than there are events, and begin with a field that events have too."""
    document = fsdp_rank(0).document()
    (tmp_path / "expected.json").write_text(json.dumps(document))
    for event in document["traceEvents"]:
        event["args"]["frames"] = [{"name": "forward", "line": number} for number in range(20)]
    path = tmp_path / "rank0.json"
    path.write_text(json.dumps(document, separators=(",", ":")))
    assert read(path).num_events == len(document["traceEvents"])
    assert collectives_of(path).equals(collectives_of(tmp_path / "expected.json"))
