"""Our figures by HolisticTraceAnalysis' rules are HTA's, and asking HTA never harms the analysis."""

from __future__ import annotations

import gzip
import importlib.util
import json
import logging
import math
import os
import subprocess
import sys

import pytest
from conftest import DATA, SHARED
from helpers import facts_of
from trace_builder import LAYOUTS, TraceBuilder

from paro_advise.advisor.hta import library as hta_mode
from paro_advise.advisor.hta.library import hta_figures
from paro_advise.advisor.hta.rules import hta_rules
from paro_advise.advisor.rendering.analyses.hta_figures import hta_table, hta_text
from paro_advise.trace_parsers.bytes.blocks import BlockReader, SourceRef
from paro_advise.trace_parsers.discover import find_inputs
from paro_advise.trace_parsers.nccl import profiler_plugin
from paro_advise.trace_parsers.read import looks_like_kineto, read_head

HAS_HTA = importlib.util.find_spec("hta") is not None
needs_hta = pytest.mark.skipif(not HAS_HTA, reason="HolisticTraceAnalysis is not installed")
FIELDS = {
    "idle_time_us": "idle_time(us)",
    "compute_time_us": "compute_time(us)",
    "non_compute_time_us": "non_compute_time(us)",
    "kernel_time_us": "kernel_time(us)",
    "idle_time_pctg": "idle_time_pctg",
    "compute_time_pctg": "compute_time_pctg",
    "non_compute_time_pctg": "non_compute_time_pctg",
}
OVERLAP = "comp_comm_overlap_pctg"

# Runs HTA on its own, without a line of ours: one JSON line a trace.
ORACLE = """
import json, logging, sys, warnings
warnings.simplefilter("ignore")
logging.disable(logging.CRITICAL)
from hta.trace_analysis import TraceAnalysis
for path in sys.argv[2:]:
    try:
        traces = TraceAnalysis(trace_files={0: path}, include_last_profiler_step=sys.argv[1] == "last")
        figures = traces.get_temporal_breakdown(visualize=False).iloc[0].to_dict()
        figures |= traces.get_comm_comp_overlap(visualize=False).iloc[0].to_dict()
    except Exception as error:
        figures = f"{type(error).__name__}: {str(error)[:80]}"
    print("\\n" + json.dumps({"path": path, "figures": figures}), flush=True)
"""


def ask_hta(paths, *, last=False):
    """Return {path: HTA's figures, or why it has none}."""
    jobs = max(1, os.cpu_count() or 1)
    shares = [share for share in (paths[start::jobs] for start in range(jobs)) if share]
    running = [
        subprocess.Popen(
            [sys.executable, "-c", ORACLE, "last" if last else "default", *share],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env={name: value for name, value in os.environ.items() if name != "HTA_DISABLE_NS_ROUNDING"},
            text=True,
        )
        for share in shares
    ]
    lines = [line for process in running for line in process.communicate()[0].splitlines()]
    answers = [json.loads(line) for line in lines if line.startswith("{")]
    return {answer["path"]: answer["figures"] for answer in answers}


def differences(row, figures):
    """Return the fields in which our row is not what HTA printed; nan is our None."""
    theirs = {name: figures[column] for name, column in FIELDS.items()} | {OVERLAP: figures[OVERLAP]}
    ours = {name: getattr(row, name) for name in theirs}
    ours = {name: math.nan if value is None else value for name, value in ours.items()}
    return {
        name: (ours[name], value)
        for name, value in theirs.items()
        if ours[name] != value and not (math.isnan(value) and math.isnan(ours[name]))
    }


def kineto_in(*folders):
    refs, _ = find_inputs([str(folder) for folder in folders])
    heads = [(ref, read_head(ref)) for ref in refs]
    return [ref for ref, head in heads if looks_like_kineto(head) and not profiler_plugin.looks_like(head)]


def paths_of(refs, folder):
    """Return a path to each trace, members of archives taken out of them."""
    paths = [ref.path if ref.member is None else folder / f"{index}.json" for index, ref in enumerate(refs)]
    for ref, path in zip(refs, paths, strict=True):
        if ref.member is not None:
            path.write_bytes(b"".join(BlockReader(ref)))
    return [str(path) for path in paths]


def beside_hta(refs, folder):
    """Return where our figures differ from HTA's, by trace, and why HTA reads none of the others."""
    paths = paths_of(refs, folder)
    answers = ask_hta(paths)
    outcomes = {ref.label: (hta_rules(ref), answers[path]) for ref, path in zip(refs, paths, strict=True)}
    unreadable = {label: why for label, (_, why) in outcomes.items() if isinstance(why, str)}
    found = {label: differences(*pair) for label, pair in outcomes.items() if label not in unreadable}
    return found, {label: why.partition(":")[0] for label, why in unreadable.items()}


def ranks_of_runs(place):
    """Return two ranks of each NCCL run in a folder."""
    return [rank for run in sorted((place / "nccl_like").glob("*/traces")) for rank in sorted(run.iterdir())[:2]]


@pytest.mark.hta
@needs_hta
def test_every_run_reads_as_in_hta(tmp_path):
    ranks = ranks_of_runs(DATA)
    assert len(ranks) == 2 * 4
    found, unreadable = beside_hta(kineto_in(*ranks), tmp_path)
    assert (len(found), unreadable) == (len(ranks), {})
    assert found == {label: {} for label in found}


@pytest.mark.hta
@pytest.mark.variant
@needs_hta
def test_every_layout_reads_as_in_hta(tmp_path):
    """All layouts that torch and tools after it write; HTA wants an object with an array and rows of a device."""
    source = tmp_path / "traces"
    source.mkdir()
    texts = {layout: render({"schemaVersion": 1}, small_trace()[1:]) for layout, render in LAYOUTS.items()}
    texts["no_end"] = texts["torch213"][:-300]
    for name, text in texts.items():
        (source / f"{name}.json").write_text(text, encoding="utf-8")
    written(source / "no_device.json", [event("cpu_op", "aten::mm", 1.0, 5.0)])
    found, unreadable = beside_hta(kineto_in(source), tmp_path)
    assert {label.rpartition("/")[2]: why for label, why in unreadable.items()} == {
        "bare_list.json": "AttributeError",
        "bare_list_lines.json": "AttributeError",
        "no_end.json": "JSONDecodeError",
        "no_device.json": "IndexError",
    }
    assert len(found) == len(LAYOUTS) - 2
    assert found == {label: {} for label in found}


@pytest.mark.corpus
@pytest.mark.hta
@needs_hta
@pytest.mark.variant
def test_every_public_trace_reads_as_in_hta(tmp_path, record_property):
    """Other people's traces and the whole runs."""
    ranks = ranks_of_runs(SHARED)
    found, unreadable = beside_hta(kineto_in(SHARED / "corpus", *ranks), tmp_path)
    record_property("equal", len(found))
    record_property("unreadable_by_hta", unreadable)
    assert found == {label: {} for label in found}
    assert len(found) > len(ranks)
    # No device rows, broken JSON, a bare list of events.
    assert set(unreadable.values()) <= {"IndexError", "JSONDecodeError", "AttributeError"}


@pytest.mark.hta
@needs_hta
def test_hta_reads_none_of_the_gloo_runs(tmp_path, record_property):
    """HTA knows device rows only. It takes a second a trace, so it is asked for one rank of each run."""
    refs = kineto_in(DATA / "zero_runs")
    assert {hta_rules(ref).kernel_time_us for ref in refs} == {None}
    one_each = {ref.path.parent: ref for ref in refs}
    answers = ask_hta(paths_of(list(one_each.values()), tmp_path))
    record_property("unreadable_by_hta", answers)
    assert {why.partition(":")[0] for why in answers.values()} == {"IndexError"}


BASE_US = 4_458_676_605_000.0


def event(cat, name, ts, dur, **args):
    return {"ph": "X", "cat": cat, "name": name, "pid": 0, "tid": 7, "ts": BASE_US + ts, "dur": dur, "args": args}


def launched(cat, name, ts, dur, launch, correlation, stream=7):
    return [
        event("cuda_runtime", "cudaLaunchKernel", launch, 2.5, correlation=correlation),
        event(cat, name, ts, dur, stream=stream, correlation=correlation, device=0),
    ]


def small_trace(*more):
    """Three steps of 100 us; the third one's kernels must not count."""
    return [
        {"ph": "M", "name": "process_name", "pid": 0, "tid": 0, "args": {"name": "python"}, "ts": BASE_US},
        *(event("user_annotation", f"ProfilerStep#{step}", 100.0 * step + 0.5, 99.0) for step in range(3)),
        *launched("kernel", "sm90_gemm", 11.5, 39.2, 5.0, 1),  # 12 to 50
        *launched("kernel", "ncclDevKernel_AllGather_RING_LL", 30.0, 40.0, 6.0, 2, stream=20),
        *launched("kernel", "elementwise", 80.25, 0.5, 7.0, 3),  # 81 to 80: minus 1
        *launched("cuda_sync", "Stream Sync", 90.0, 10.0, 8.0, 4),  # busy, neither compute nor communication
        *launched("gpu_memcpy", "Memcpy DtoH (Device -> Pinned)", 100.0, 5.0, 9.0, 5, stream="21"),
        *launched("kernel", "sm90_gemm", 150.0, 40.0, 120.0, 6),
        *launched("kernel", "sm90_gemm", 250.0, 40.0, 220.0, 7),  # launched in the last step
        event("kernel", "without_launch", 195.0, 4.0, stream=7, correlation=99),
        *more,
    ]


def written(path, events, **head):
    text = json.dumps({"schemaVersion": 1, **head, "traceEvents": events})
    path.write_bytes(gzip.compress(text.encode()) if path.suffix == ".gz" else text.encode())
    return SourceRef(path=path)


def test_rules_on_a_trace_worked_out_by_hand(tmp_path):
    row = hta_rules(written(tmp_path / "rank3.json", small_trace()))
    assert row.rank == 3
    assert row.num_steps == 3
    assert row.kernel_time_us == 190 - 12
    assert row.compute_time_us == (50 - 12) + (80 - 81) + (190 - 150)
    busy = (70 - 12) + (80 - 81) + (105 - 90) + (190 - 150)
    assert row.idle_time_us == row.kernel_time_us - busy
    assert row.non_compute_time_us == row.kernel_time_us - row.compute_time_us - row.idle_time_us
    assert (row.idle_time_pctg, row.compute_time_pctg, row.non_compute_time_pctg) == (37.08, 43.26, 19.66)
    assert row.comp_comm_overlap_pctg == 50.0


def test_a_gpu_annotation_of_the_last_step_counts_as_its_start(tmp_path):
    late = event("gpu_user_annotation", "ProfilerStep#2", 240.0, 55.0)
    row = hta_rules(written(tmp_path / "t.json", small_trace(late)))
    assert row.kernel_time_us == 290 - 12


def test_without_two_steps_everything_counts(tmp_path):
    events = [item for item in small_trace() if item["name"] not in ("ProfilerStep#0", "ProfilerStep#1")]
    row = hta_rules(written(tmp_path / "t.json", events))
    assert row.num_steps == 1
    assert row.kernel_time_us == 290 - 12


def variants():
    whole = [{**item, "ts": int(item["ts"]), "dur": int(item.get("dur", 0))} for item in small_trace()]
    undated = [{key: value for key, value in small_trace()[0].items() if key != "ts"}, *small_trace()[1:]]
    return {
        "decimals": small_trace(),
        "whole numbers": whole,
        "whole starts only": [{**item, "ts": int(item["ts"])} for item in small_trace()],
        "rows without ts": undated,
        "annotation on the device": small_trace(event("gpu_user_annotation", "ProfilerStep#2", 240.0, 55.0)),
        "context sync without stream": small_trace(event("cuda_sync", "Context Sync", 60.0, 9.0, correlation=3)),
        "stream by name": small_trace(event("kernel", "odd", 60.0, 9.0, stream="default", correlation=3)),
        "same correlation twice": small_trace(*launched("kernel", "again", 82.0, 1.2, 30.0, 3)),
        "no communication": [item for item in small_trace() if "nccl" not in item["name"]],
        "one step": small_trace()[3:],
        "from zero": [{**item, "ts": round(item["ts"] - BASE_US, 3)} for item in small_trace()],
    }


@pytest.mark.hta
@needs_hta
@pytest.mark.parametrize("last", [False, True], ids=["default", "last step too"])
def test_small_variants_read_as_in_hta(tmp_path, last):
    refs = {
        name: written(tmp_path / f"{index}.json", events) for index, (name, events) in enumerate(variants().items())
    }
    answers = ask_hta([str(ref.path) for ref in refs.values()], last=last)
    found = {name: differences(hta_rules(ref, last), answers[str(ref.path)]) for name, ref in refs.items()}
    assert found == {name: {} for name in refs}


@pytest.mark.hta
@needs_hta
def test_hta_itself_is_asked_and_agrees(tmp_path, capfd, monkeypatch):
    monkeypatch.setenv("HTA_DISABLE_NS_ROUNDING", "1")
    refs = [
        written(tmp_path / "rank0.json.gz", small_trace()),
        written(tmp_path / "odd_name.trace", small_trace(), distributedInfo={"rank": 5}),
    ]
    figures = hta_figures(refs)
    assert figures.notices == ()
    assert [row.rank for row in figures.rows] == [0, 5]
    assert all(row.own is not None and row.own.compute_time_us == row.compute_time_us for row in figures.rows)
    assert all({"host_wait"} <= set(row.own.idle_us) <= {"host_wait", "kernel_wait", "other"} for row in figures.rows)
    assert all(sum(row.own.critical_path_pctg.values()) == pytest.approx(100, abs=0.1) for row in figures.rows)
    assert capfd.readouterr() == ("", "")
    assert os.environ["HTA_DISABLE_NS_ROUNDING"] == "1"
    assert logging.root.manager.disable == logging.NOTSET
    assert hta_text(figures).count("HTA itself: the same") == 2
    assert [row.cells[7].text for row in hta_table(figures).rows] == ["the same", "the same"]


@pytest.mark.hta
@needs_hta
def test_what_hta_cannot_read_is_a_notice_and_ours_stands(tmp_path):
    path = tmp_path / "list.json"
    path.write_text(json.dumps(small_trace()), encoding="utf-8")
    figures = hta_figures([SourceRef(path=path)])
    assert figures.rows[0].compute_time_us == 77
    assert figures.rows[0].own is None
    assert [notice.code for notice in figures.notices] == ["Q331"]
    assert "HTA itself: no figures" in hta_text(figures)


def test_without_hta_ours_are_shown_with_a_hint(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "hta", None)
    figures = hta_figures([written(tmp_path / "t.json", small_trace())])
    assert figures.rows[0].compute_time_us == 77
    (notice,) = figures.notices
    assert (notice.code, notice.severity, notice.help) == ("Q330", "warning", "pip install 'paro-advise[hta]'")


class Frame(dict):
    """The little of a pandas frame that is read."""

    def __getitem__(self, column):
        return type("Column", (), {"iloc": [super().__getitem__(column)]})


class Disagreeing:
    """An HTA that is off by one and fails at the rest."""

    def __init__(self, trace_files):
        self.trace_files = trace_files

    def get_temporal_breakdown(self, *, visualize):
        return Frame(dict.fromkeys(FIELDS.values(), 78.0))

    def get_comm_comp_overlap(self, *, visualize):
        raise KeyError("boom\nsecond line")


def test_a_mismatch_is_a_warning(tmp_path, monkeypatch):
    monkeypatch.setattr(hta_mode, "_library", lambda remarks: Disagreeing)
    refs = [written(tmp_path / name, small_trace()) for name in ("a.json", "b.json")]
    figures = hta_figures(refs)
    by_code = {notice.code: notice for notice in figures.notices}
    assert set(by_code) == {"Q332", "Q333"}
    assert by_code["Q333"].severity == "warning"
    assert by_code["Q333"].message == (
        "a.json and 1 more: idle_time_us is 66 by our reading of HTA's rules, 78 by HTA itself"
    )
    assert "HTA cannot compute its overlap (KeyError" in figures.notices[0].message
    assert "compute_time_us 78" in hta_text(figures)


def test_traces_without_device_rows(tmp_path):
    host_only = [event("cpu_op", "aten::mm", 1.0, 5.0), event("user_annotation", "gloo:all_reduce", 2.0, 3.0)]
    figures = hta_figures([written(tmp_path / "gloo.json", host_only)])
    assert figures.rows[0].kernel_time_us is None
    assert "Q335" in [notice.code for notice in figures.notices]
    assert "none has any" in hta_text(figures)
    assert hta_table(figures).rows[0].cells[2].text == "unknown"


def test_other_inputs_are_passed_over(tmp_path):
    (tmp_path / "log.txt").write_text("host:1:2 [0] NCCL INFO Bootstrap", encoding="utf-8")
    figures = hta_figures([SourceRef(path=tmp_path / name) for name in ("log.txt", "missing.json")])
    assert figures == hta_mode.HtaFigures(rows=(), notices=())
    assert hta_text(None) == ""


BROKEN = {
    "empty array": b'{"traceEvents": []}',
    "no array": b'{"schemaVersion": 1}',
    "cut": json.dumps({"traceEvents": small_trace()}).encode()[:-200],
    "odd values": json.dumps(
        {
            "distributedInfo": "none",
            "traceEvents": [
                {"ph": "X", "cat": "kernel", "name": None, "ts": "12", "dur": 5, "args": []},
                {"ph": "X", "cat": ["kernel"], "name": 7, "ts": 1e400, "dur": 5, "args": {"stream": [1]}},
                {"ph": "X", "cat": "kernel", "name": "k", "ts": 10**400, "dur": 5, "args": {"stream": 1e300}},
                {"ph": "X", "cat": "kernel", "name": "k", "ts": 3, "dur": -5, "args": {"stream": 2**70}},
                *small_trace(),
            ],
        }
    ).encode(),
    "equal correlations": json.dumps(
        {"traceEvents": small_trace(*(launched("kernel", "k", 60.0, 1.0, 7.0, 5) * 3000))}
    ).encode(),
}


@pytest.mark.parametrize("name", BROKEN)
def test_broken_traces_do_not_raise(tmp_path, name):
    path = tmp_path / "t.json"
    path.write_bytes(BROKEN[name])
    row = hta_rules(SourceRef(path=path))
    assert row.label == str(path)
    if name in ("cut", "odd values"):
        assert row.compute_time_us is not None


def test_deep_ep_is_communication_for_us_and_compute_for_hta(tmp_path):
    builder = TraceBuilder()
    builder.step(1, 0, 1000)
    builder.compute(100, 200)
    for start, verb in ((250, "dispatch"), (600, "combine")):
        name = f"void deep_ep::intranode::{verb}<8, 768, 8192>(int4*, float*, int*)"
        builder.compute(start, 150, name=name, stream=20)
    path = builder.write(tmp_path / "rank0.json")
    (step,) = facts_of(path).steps
    assert step.communication_us == 300
    assert step.compute_us == 200
    assert step.exposed_communication_us == 250
    row = hta_rules(SourceRef(path=path))
    assert row.compute_time_us == 300 + 150
    assert row.comp_comm_overlap_pctg is None


def test_hta_is_imported_only_when_asked():
    code = "import sys, paro_advise.advisor.hta.library; print({'hta', 'pandas', 'plotly'} & set(sys.modules))"
    assert subprocess.check_output([sys.executable, "-c", code], text=True).strip() == "set()"
