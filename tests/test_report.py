"""The HTML report: complete without JavaScript, no outgoing reference, escaped, small."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser

import pytest
from conftest import recorded
from helpers import analyze, gathered, write_run
from test_side_formats import nccl_sample
from trace_builder import fsdp_rank

from paro_advise.advisor.analysis.build import build_analysis
from paro_advise.advisor.analysis.model import Options
from paro_advise.advisor.cli import run
from paro_advise.advisor.rendering.charts import nice_ticks
from paro_advise.advisor.rendering.provenance import report_page
from paro_advise.core.documents import to_json

VOID = {"meta", "link", "br", "hr", "img", "input", "rect", "line", "path"}


class Page(HTMLParser):
    """Collects what the tests ask about."""

    def __init__(self, text):
        super().__init__()
        self.tags, self.ids, self.attributes, self.texts = [], [], [], []
        self.stack, self.scripts = [], {}
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        values = dict(attrs)
        self.tags.append((tag, values))
        self.attributes += [(tag, name, value or "") for name, value in attrs]
        if "id" in values:
            self.ids.append(values["id"])
        if tag not in VOID:
            self.stack.append((tag, values))

    def handle_endtag(self, tag):
        if tag not in VOID:
            assert self.stack, f"unopened </{tag}>"
            assert self.stack.pop()[0] == tag

    def handle_data(self, data):
        if self.stack and self.stack[-1][0] == "script":
            self.scripts[self.stack[-1][1].get("id", str(len(self.scripts)))] = data
        else:
            self.texts.append(data)


def page_of(folder, **options):
    found = gathered(folder)
    analysis = build_analysis(found.facts, found.notices, Options(**options))
    data = report_page(analysis, found.facts, None).encode()
    return analysis, data, Page(data.decode())


@pytest.fixture
def report(tmp_path):
    ranks = [fsdp_rank(rank, 8, late_us=30 if rank == 5 else 0) for rank in range(8)]
    return page_of(write_run(tmp_path / "run", ranks))


def test_nothing_leaves_the_page(report):
    _, data, page = report
    text = data.decode()
    for needle in (
        "http://",
        "https://",
        "//cdn",
        "@import",
        "fetch(",
        "XMLHttpRequest",
        "sendBeacon",
        "WebSocket",
    ):
        assert needle not in text, needle
    assert not re.search(r"url\((?!#)", text)
    for tag, name, value in page.attributes:
        assert name != "src", (tag, value)
        if name == "href":
            assert value.startswith(("#", "data:,"))
    (policy,) = [
        values["content"] for tag, values in page.tags if values.get("http-equiv") == "Content-Security-Policy"
    ]
    assert policy.startswith("default-src 'none'")
    assert "unsafe-eval" not in policy
    assert "script-src 'sha256-" in policy


def test_script_hashes_match_the_scripts(report):
    import base64
    import hashlib

    _, _data, page = report
    (policy,) = [
        values["content"] for tag, values in page.tags if values.get("http-equiv") == "Content-Security-Policy"
    ]
    scripts = [body for name, body in page.scripts.items() if not name.startswith("paro-")]
    assert len(scripts) == 3
    for body in scripts:
        digest = base64.b64encode(hashlib.sha256(body.encode()).digest()).decode()
        assert f"'sha256-{digest}'" in policy
    assert sum(map(len, scripts)) <= 15_000


def test_ids_are_unique_and_links_resolve(report):
    _, _, page = report
    assert len(page.ids) == len(set(page.ids))
    targets = [value[1:] for _, name, value in page.attributes if name == "href" and value.startswith("#")]
    assert targets
    assert set(targets) <= set(page.ids)


def test_every_chart_is_described_and_has_a_table(report):
    _, _data, page = report
    charts = [values for tag, values in page.tags if tag == "svg" and values.get("role") == "img"]
    assert len(charts) == 4
    for chart in charts:
        title, description = chart["aria-labelledby"].split()
        assert {title, description} <= set(page.ids)
    assert {"table-states", "table-timeline", "table-ranks", "table-links"} <= set(page.ids)
    columns = [values for tag, values in page.tags if tag == "th"]
    assert all(values.get("scope") == "col" for values in columns)
    assert not [values for _, values in page.tags if "fill" in values or "stroke" in values]


def test_the_verdict_and_the_data_block_agree(report):
    analysis, _, page = report
    block = json.loads(page.scripts["paro-data"])
    assert block == json.loads(to_json(analysis))
    assert block["verdict"]["text"] in "".join(page.texts)


def test_numbers_in_tables_stand_in_the_data_block(report):
    _, _, page = report
    block = json.dumps(json.loads(page.scripts["paro-data"]))
    known = {round(float(number), 6) for number in re.findall(r"-?\d+\.?\d*(?:[eE][+-]?\d+)?", block)}
    state_rows = [values["data-sort"] for tag, values in page.tags if tag == "td" and "data-sort" in values]
    assert len(state_rows) > 50
    derived = 0
    for value in state_rows:
        derived += round(float(value), 6) not in known
    # The timeline's boxes are drawn from events, which the block does not hold, and a saving may
    # be a part of an entry.
    boxes = 2 * sum(1 for tag, values in page.tags if tag == "rect" and str(values.get("class", "")).startswith("s-"))
    assert derived <= boxes


def test_provenance_names_every_input(report):
    analysis, data, _ = report
    for entry in analysis.run.inputs:
        assert entry.sha256.encode() in data


@pytest.mark.parametrize(("ranks", "limit_kib"), [(8, 300), (64, 1024)])
def test_size(tmp_path, ranks, limit_kib):
    builders = [fsdp_rank(rank, ranks, late_us=rank % 7, steps=4) for rank in range(ranks)]
    _, data, _ = page_of(write_run(tmp_path / "run", builders))
    assert len(data) <= limit_kib * 1024


def test_many_ranks_show_the_ones_that_stand_out(tmp_path):
    builders = []
    for rank in range(140):
        trace = fsdp_rank(rank, 140, steps=1)
        if rank == 77:
            trace.compute(900, 60)
        builders.append(trace)
    analysis, data, page = page_of(write_run(tmp_path / "run", builders))
    assert len(analysis.ranks) == 140
    assert "rank-77" in page.ids
    assert "Of 140 ranks the 16 that compute longest" in data.decode()
    assert sum(identifier.startswith("rank-") for identifier in page.ids) == 20


def test_hostile_names_are_escaped(tmp_path):
    evil = "</script><script>alert(1)</script>\"'><img src=x onerror=alert(2)>"
    trace = fsdp_rank(0)
    trace.groups = [("0", evil, [0, 1])]
    for event in trace.events:
        if event["name"].startswith("FSDP::all_gather"):
            event["name"] += f" ({evil})"
        if "Process Group Description" in event["args"]:
            event["args"]["Process Group Description"] = evil
    folder = write_run(tmp_path / "<b>run & co", [trace])
    _, data, page = page_of(folder)
    assert b"<script>alert" not in data
    assert b"<img" not in data
    assert [tag for tag, _ in page.tags].count("script") == 5
    assert "&lt;b&gt;run" in data.decode()


def test_a_run_without_times_still_gives_a_page(tmp_path):
    (tmp_path / "nccl.txt").write_text(
        "h:1:1 [0] NCCL INFO Bootstrap : Using eth0\nh:1:1 [0] NCCL INFO NCCL version 2.27.5+cuda12.8\n"
    )
    analysis, data, page = page_of(tmp_path)
    assert analysis.step_time_us.median is None
    assert analysis.breakdown_us.compute is None
    assert "could not be judged" in data.decode()
    assert not [values for tag, values in page.tags if tag == "svg" and values.get("role") == "img"]


@pytest.mark.parametrize("high", [0.5, 3, 17, 99, 1234, 72_000, 11_700_000])
def test_ticks_are_round_and_cover_the_axis(high):
    ticks = nice_ticks(high)
    assert ticks[0] == 0
    assert ticks[-1] <= high
    assert 3 <= len(ticks) <= 12
    step = ticks[1]
    assert float(f"{step:.0e}") == pytest.approx(step)


def test_states_of_the_hand_written_run(report):
    analysis, _, _ = report
    assert analysis.verdict.limiting_state == "parameter"
    assert analysis.run.strategy.triple == "GGG"


@pytest.mark.parametrize("folder", recorded("zero_runs", ["fsdp2_hsdp_gated_acc4"]))
def test_reports_of_recorded_runs_are_small(folder):
    _, data, _ = page_of(folder)
    assert len(data) <= 300 * 1024


@pytest.mark.parametrize("folder", recorded("zero_runs", ["ddp_acc4"]))
def test_recorded_runs_have_a_verdict(folder):
    assert analyze(folder).verdict.text


def test_inputs_that_time_no_step_have_a_page_of_their_own(tmp_path):
    """It says what the log says, what to record, and not once that something is unknown."""
    log = tmp_path / "nccl.log"
    log.write_text(nccl_sample())
    page = tmp_path / "log.html"
    assert run(["analyze", str(log), "-o", str(page), "-q"]) == 0
    text = page.read_text().split('<section>\n<h2 id="quality"')[0].split("<main")[1]
    assert "paro-advise capture -o before" in text
    assert "collectives counted" in text
    assert "could not be judged" not in text
    for name in ("exposed", "overlapped", "transfer", "regime"):
        assert f">{name}<" not in text
