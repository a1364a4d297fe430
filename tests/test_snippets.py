"""The commands that pages show run as they stand there, in a folder that holds the files they name."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import pytest
from conftest import ROOT
from input_samples import samples
from test_documentation import PAGES, commands
from test_hang import dump, entry, written
from test_hang_ras import communicator, reduced, report
from test_hang_texts import IN_LOADER, IN_REDUCE, signalled, spied, waits
from test_side_formats import RANKS

from paro_advise.advisor.cli import run

DATA = ROOT / "tests" / "data"
# What starts or steers a job has tests of its own: test_loop, test_redirect, test_jobs, test_switch_job, test_watch.
OF_JOBS = {"attach", "capture", "run", "switch", "watch", "demo"}
OUTPUTS = {
    "-o",
    "--json",
    "--markdown",
    "--junit",
    "--html",
    "--prometheus",
    "--otel",
    "--grafana",
    "--inductor",
    "--export",
}
_USAGE = re.compile(r"\[|\.\.\.| [A-Z]{3,}\b(?!\d)|\{")
_ELSEWHERE = re.compile(r"://|/var/lib|/tmp/|/shared|s3:")


def shown(page):
    """The commands of a page that a folder is enough for, as words."""
    for line in commands(page.read_text()):
        words = shlex.split(line.split(" > ")[0], comments=True)
        if words[0] != "paro-advise" or len(words) < 3 or words[1] in OF_JOBS:
            continue
        if not _USAGE.search(line) and not _ELSEWHERE.search(line):
            yield words[1:]


def of_nvlink(table):
    """A benchmark ten times as quick, as links inside the node that the description is of."""
    return re.sub(
        r"([\d.]+)( +)([\d.]+)( +)([\d.]+) 0\b",
        lambda row: f"{float(row[1]) / 10:.2f}{row[2]}{float(row[3]) * 10:.2f}{row[4]}{float(row[5]) * 10:.2f} 0",
        table,
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Files of the names that pages use."""
    home = tmp_path_factory.mktemp("job")
    (home / "traces").mkdir()
    for path in (DATA / "nccl_like" / "fsdp2-inter-bw" / "traces").iterdir():
        shutil.copy(path, home / "traces" / path.name.replace("_trace", ""))
    shutil.copy(home / "traces" / "rank0.json.gz", home / "trace.json")
    for name in ("before", "after", "main", "branch", "now"):
        shutil.copytree(DATA / "zero_runs" / "fsdp2_ggg_acc1", home / name)
    (home / "train.py").write_text((ROOT / "examples" / "train.py").read_text())
    for name in ("ds.json", "ds_config.json"):
        (home / name).write_text(json.dumps({"train_batch_size": 8, "zero_optimization": {"stage": 3}}))
    described = (ROOT / "docs" / "descriptions.md").read_text()
    (home / "run.toml").write_text(re.search(r"```toml\n(# run.toml.*?)```", described, re.DOTALL).group(1))
    texts = {sample.name: sample.data for sample in samples() if sample.container == ""}
    node = "".join(
        f"#  Rank {r} Group  0 Pid  {40 + r} on  host0 device  {r} [0000:1{r}:00] NVIDIA H100\n" for r in range(8)
    )
    (home / "nccl-tests.txt").write_text(of_nvlink(texts["all_gather.txt"].decode().replace(RANKS, node)))
    (home / "nccl.log").write_bytes(texts["nccl.log"])
    written(home / "dumps", {rank: dump(entry(1, done=True), *([entry(2)] if rank else [])) for rank in range(4)})
    (home / "job.log").write_text("\n".join([*waits(0, 7), *waits(1, 7), *signalled(2, 6), *waits(3, 7)]))
    spied(home / "stacks", IN_REDUCE, IN_REDUCE, IN_REDUCE, IN_LOADER)
    (home / "stacks" / "stack_rank_3.txt").rename(home / "stack_rank_3.txt")
    for number in (1, 2):
        stands = communicator("0xa", range(4), reduced(641, 641, 640, 641))
        (home / f"ras{number}.json").write_text(report(stands, at=f"2026-11-25 10:0{number}:00"))
    (home / "tests").symlink_to(ROOT / "tests")
    (home / "runs").mkdir()
    for words in (
        ("analyze", "before", "-o", "run.html", "--json", "run.json"),
        ("compare", "before", "after", "-o", "runs/first.html"),
        ("recommend", "before", "-o", "plan.json"),
    ):
        home_words = [str(home / word) if word in ("before", "after") or "." in word else word for word in words]
        assert run(home_words) in (0, 5)
    shutil.copy(home / "plan.json", home / "plan.before.json")
    return home


@pytest.mark.parametrize("page", PAGES, ids=[str(page.relative_to(ROOT)) for page in PAGES])
def test_commands_of_a_page_run(page, folder, monkeypatch, capsys):
    """With exit code 0; a gate may say that a run compared with itself gained too little."""
    monkeypatch.chdir(folder)
    is_reference = page.name == "commands.md"  # its examples do not follow from each other
    for number, words in enumerate(shown(page)):
        if is_reference or number == 0:
            shutil.copy("plan.before.json", "plan.json")
            shutil.copy(ROOT / "examples" / "train.py", "train.py")
            for copy in folder.glob("*.before-paro"):
                copy.unlink()
        for option, value in pairwise(words):
            if option in OUTPUTS and value != "-":
                (folder / value).unlink(missing_ok=True)
        expected = (0, 5) if words[0] == "compare" else (0,)
        assert run(words) in expected, (words, capsys.readouterr().err)


def jobs_and_what_follows(page):
    """The commands of a page from its first job of torchrun on, in order, as words; other launchers are left out."""
    has_begun = False
    for line in commands(page.read_text()):
        words = shlex.split(line, comments=True)
        is_job = "torchrun" in words
        has_begun |= is_job
        is_plain = words[:1] == ["paro-advise"] and len(words) > 2 and words[1] not in OF_JOBS
        if has_begun and (is_job or is_plain) and not _USAGE.search(line) and not _ELSEWHERE.search(line):
            yield words


@pytest.mark.slow
@pytest.mark.parametrize(
    "page", ["README.md", "docs/getting-started.md", "docs/training.md", "docs/ci-gate.md", "docs/guides.md"]
)
def test_jobs_of_a_page_run(page, folder, tmp_path):
    """Eight ranks of an unchanged script, as the page starts them; what a page records, it then reads."""
    home = tmp_path / "job"
    shutil.copytree(folder, home, symlinks=True, ignore=shutil.ignore_patterns("*.before-paro"))
    scripts = ROOT / "examples/frameworks"
    shutil.copy(scripts / "train_fsdp2.py", home / "train.py")
    steps = '"--steps", type=int, default='
    common = (scripts / "common.py").read_text()
    assert f"{steps}8" in common
    (home / "common.py").write_text(common.replace(f"{steps}8", f"{steps}16"))  # the pages record the tenth and more
    shutil.copy(ROOT / "examples" / "train.py", tmp_path)  # whose model it trains
    told = list(jobs_and_what_follows(ROOT / page))
    for words in told:
        if "torchrun" in words:
            recorded = home / words[words.index("--capture" if "--capture" in words else "-o") + 1]
            shutil.rmtree(recorded, ignore_errors=True)
        for option, value in pairwise(words):
            written = home / (value.partition("=")[2] if option == "--export" else value)
            if option in OUTPUTS and value != "-" and written.is_file():
                written.unlink()
        done = subprocess.run(
            [sys.executable, "-m", "paro_advise", *words[1:]],
            cwd=home,
            env={**os.environ, "OMP_NUM_THREADS": "1", "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"},
            capture_output=True,
            text=True,
            timeout=540,
            check=False,
        )
        # A gate may speak, and a plan that gains nothing on this machine is refused.
        expected = {"compare": (0, 5), "apply": (0, 4)}.get(words[1], (0,))
        assert done.returncode in expected, (words, done.stderr)
        if "torchrun" in words:
            assert len(list(recorded.glob("rank*.json.gz"))) == 8
            if recorded.name == "branch":  # "main is the folder that the same capture wrote for the base branch"
                shutil.rmtree(home / "main")
                shutil.copytree(recorded, home / "main")
    assert any("torchrun" in words for words in told)


def test_most_commands_of_the_pages_are_run():
    """So that a change of how pages are read does not leave all of them out."""
    found = [tuple(words) for page in PAGES for words in shown(page)]
    assert len(set(found)) > 30
    assert {words[0] for words in found} >= {
        "analyze",
        "recommend",
        "apply",
        "compare",
        "export",
        "hang",
        "index",
        "show",
        "slice",
    }
