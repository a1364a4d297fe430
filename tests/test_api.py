"""The Python interface says what the command line says, and shows itself in a notebook."""

from __future__ import annotations

import json
import subprocess
import sys
from html.parser import HTMLParser

import pytest
from conftest import DATA
from helpers import write_run
from trace_builder import fsdp_rank

import paro_advise
from paro_advise.advisor.cli import run
from paro_advise.errors import NoInputError, UsageError

RUN = DATA / "zero_runs" / "fsdp2_ggg_acc1"


@pytest.fixture(scope="module")
def analyzed():
    return paro_advise.analyze(RUN, gpus_per_node=2)


def test_an_analysis_is_that_of_the_command(analyzed, capsys):
    assert run(["analyze", str(RUN), "--gpus-per-node", "2", "--json", "-", "-q"]) == 0
    assert json.loads(capsys.readouterr().out) == json.loads(analyzed.to_json())
    assert run(["--color", "never", "analyze", str(RUN), "--gpus-per-node", "2", "-q"]) == 0
    assert capsys.readouterr().out.strip() == str(analyzed)


def test_a_plan_is_that_of_the_command(analyzed, capsys):
    plan = paro_advise.recommend(analyzed, device_memory="16GiB")
    arguments = ["recommend", str(RUN), "--gpus-per-node", "2", "--device-memory", "16GiB", "-o", "-", "-q"]
    assert run(arguments) == 0
    assert json.loads(capsys.readouterr().out) == json.loads(plan.to_json())
    assert plan.plan.text in str(plan)
    assert "<html" in plan.to_html()


def test_a_comparison_tells_whether_it_passed(tmp_path):
    same = paro_advise.analyze(write_run(tmp_path / "run", [fsdp_rank(rank, steps=12) for rank in range(2)]))
    compared = paro_advise.compare(same, same)
    assert compared.comparison.verdict == "same"
    assert compared.passed
    assert not paro_advise.compare(same, same, min_gain_pct=50.0).passed
    assert {"name", "before", "after"} <= set(compared.frame().columns)


def test_tables_are_frames(analyzed):
    collectives = analyzed.frame("collectives")
    assert len(collectives) == len(analyzed.analysis.collectives)
    assert collectives["count"].sum() == pytest.approx(sum(item.count for item in analyzed.analysis.collectives))
    for name in ("ranks", "links", "states", "findings", "modules", "data_quality"):
        assert len(analyzed.frame(name)) == len(getattr(analyzed.analysis, name))
    assert len(analyzed.frame("inputs")) == len(analyzed.analysis.run.inputs) > 0
    with pytest.raises(UsageError, match="collectives"):
        analyzed.frame("kernels")


class Cells(HTMLParser):
    """Collects what a notebook shows, and every tag."""

    def __init__(self):
        super().__init__()
        self.text, self.tags = "", set()

    def handle_starttag(self, tag, attrs):
        self.tags.add(tag)
        assert not attrs

    def handle_data(self, data):
        self.text += data


def test_results_show_themselves_in_a_notebook(analyzed):
    for result, sentence in (
        (analyzed, analyzed.analysis.verdict.text),
        (plan := paro_advise.recommend(analyzed), plan.plan.text),
        (paro_advise.compare(analyzed, analyzed), ""),
    ):
        cells = Cells()
        cells.feed(result._repr_html_())
        assert sentence in cells.text
        assert "script" not in cells.tags


@pytest.mark.parametrize(
    ("call", "error"),
    [
        (lambda: paro_advise.analyze("no/such/file"), NoInputError),
        (lambda: paro_advise.analyze(), UsageError),
        (lambda: paro_advise.analyze([str(RUN)]), UsageError),  # type: ignore[arg-type]  # what is refused
        (lambda: paro_advise.analyze(RUN, skip_steps=-1), UsageError),
        (lambda: paro_advise.analyze(RUN, gpus_per_node=0), UsageError),
        (lambda: paro_advise.analyze(RUN, tokens_per_step=-5), UsageError),
        (lambda: paro_advise.analyze(RUN, peak_tflops=float("nan")), UsageError),
        (lambda: paro_advise.recommend(RUN, device_memory=80), UsageError),  # type: ignore[arg-type]  # what is refused
        (lambda: paro_advise.compare(RUN, RUN, allow_unlike=["zzz"]), UsageError),
        (lambda: paro_advise.compare(RUN, RUN, min_gain_pct=float("nan")), UsageError),
        (lambda: paro_advise.recommend(RUN, device_memory="lots"), UsageError),
    ],
)
def test_wrong_arguments_are_errors_of_the_one_tree(call, error):
    with pytest.raises(error):
        call()


def test_importing_the_package_imports_nothing_heavy():
    code = "import sys, paro_advise; paro_advise.analyze; print([m for m in ('torch', 'polars', 'numpy') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_a_script_without_a_guard_reads_large_runs(tmp_path, monkeypatch):
    """Code at the top level of a script, as on the page on Python; other processes would run it again."""
    script = tmp_path / "script.py"
    script.write_text(
        "import paro_advise\n"
        "from paro_advise.advisor.facts import reading\n"
        "reading.POOL_BYTES = 0\n"
        f"print(paro_advise.analyze({str(RUN)!r}).analysis.run.ranks)\n"
    )
    monkeypatch.setenv("PARO_ADVISE_CACHE", str(tmp_path / "cache"))
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.strip() == "(0, 1, 2, 3)"
