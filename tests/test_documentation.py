"""What README and docs tell a reader to type exists, and their links lead somewhere."""

from __future__ import annotations

import ast
import re
import shlex
import subprocess
import sys

import click
import pytest
from conftest import ROOT

from paro_advise.advisor.analysis.model import FORMAT as ANALYSIS
from paro_advise.advisor.cli import VERBS, cli
from paro_advise.advisor.comparison.model import FORMAT as COMPARISON
from paro_advise.advisor.hangs.model import FORMAT as HANG
from paro_advise.core.capture_files import RUN, STEPS
from paro_advise.policies.collective_cost import RingAlgorithm
from paro_advise.policies.plan import FORMAT as PLAN

PAGES = sorted([ROOT / "README.md", *(ROOT / "docs").rglob("*.md")])
DOCS = ROOT / "docs"
NAMES = [str(page.relative_to(ROOT)) for page in PAGES]
_FENCE = re.compile(r"^```\w*\n(.*?)^```", re.MULTILINE | re.DOTALL)
_INLINE = re.compile(r"`((?:paro-advise|make) [^`]*)`")
_LINK = re.compile(r"\]\(([^)\s]+)\)")


def commands(text):
    """Every command of ours in blocks and in the text."""
    blocks = "\n".join(_FENCE.findall(text)).replace("\\\n", " ").splitlines()
    found = [line.strip() for line in blocks] + _INLINE.findall(_FENCE.sub("", text))
    return [line for line in found if line.startswith(("paro-advise ", "make "))]


def anchors(text):
    """The names that headings get."""
    heads = re.findall(r"^#+ (.+)$", _FENCE.sub("", text), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", head.lower()).replace(" ", "-") for head in heads}


@pytest.mark.parametrize("page", PAGES, ids=NAMES)
def test_commands_exist_with_their_options(page):
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    for line in commands(page.read_text()):
        words = shlex.split(re.sub(r"\[|\]|\.\.\.", " ", line), comments=True)
        if words[0] == "make":
            assert words[1] in targets, line
            continue
        ours = words[1 : words.index("--")] if "--" in words else words[1:]
        if not ours or not ours[0].islower() or "/" in ours[0]:
            continue  # a placeholder, or a path in place of a verb
        assert ours[0] in VERBS, line
        command = cli.get_command(click.Context(cli), ours[0])
        known = {text for parameter in command.params for text in parameter.opts} | {"--help"}
        for word in ours[1:]:
            if word.startswith("-") and len(word) > 1:
                assert word.partition("=")[0] in known, line


@pytest.mark.parametrize("page", PAGES, ids=NAMES)
def test_links_lead_to_files_and_headings(page):
    text = page.read_text()
    for target in _LINK.findall(_FENCE.sub("", text)):
        if re.match(r"[a-z]+:", target):
            continue
        path, _, anchor = target.partition("#")
        leads_to = (page.parent / path).resolve() if path else page
        assert leads_to.exists(), target
        assert not anchor or anchor in anchors(leads_to.read_text()), target


def test_the_site_holds_every_page():
    site = (ROOT / "mkdocs.yml").read_text()
    for page in (ROOT / "docs").rglob("*.md"):
        assert f" {page.relative_to(ROOT / 'docs')}\n" in site, page


def test_the_reference_pages_are_what_the_code_says():
    import runpy

    pages = runpy.run_path(str(ROOT / "benchmarks" / "reference.py"))["PAGES"]
    for name, page in pages.items():
        assert (ROOT / "docs" / name).read_text() == page(), "run `make reference`"


def test_the_python_page_runs(tmp_path, monkeypatch):
    """The code of the page on Python, with recorded runs in the places of its folders."""
    (block,) = re.findall(r"^```python\n(.*?)^```", (ROOT / "docs" / "python.md").read_text(), re.MULTILINE | re.DOTALL)
    monkeypatch.chdir(tmp_path)
    for name in ("traces", "after"):
        (tmp_path / name).symlink_to(ROOT / "tests" / "data" / "zero_runs" / "fsdp2_ggg_acc1")
    exec(compile(block, "python.md", "exec"), {})
    assert (tmp_path / "plan.json").stat().st_size > 1000


def test_the_list_for_language_models_names_every_page():
    listed = re.findall(r"\]\(([^)]+\.md)\)", (DOCS / "llms.txt").read_text())
    assert sorted(listed) == sorted(set(listed))
    assert set(listed) == {path.relative_to(DOCS).as_posix() for path in DOCS.rglob("*.md")} - {"index.md"}


def python_blocks():
    for path in sorted(DOCS.glob("*.md")):
        for number, code in enumerate(re.findall(r"^```python\n(.*?)^```", path.read_text(), re.MULTILINE | re.DOTALL)):
            yield pytest.param(code, id=f"{path.stem}-{number}")


@pytest.mark.parametrize("code", list(python_blocks()))
def test_code_on_pages_is_python_and_imports_what_there_is(code):
    """Without running it, since frameworks may be missing: the names that it imports from us are defined there."""
    for node in ast.walk(ast.parse(code)):
        if not isinstance(node, ast.ImportFrom) or not (node.module or "").startswith("paro_advise"):
            continue
        home = ROOT.joinpath("src", *node.module.split("."))
        source = (home / "__init__.py" if home.is_dir() else home.with_suffix(".py")).read_text()
        for name in node.names:
            defined = rf"^(class|def) {name.name}\b|\"{name.name}\""
            assert re.search(defined, source, re.MULTILINE) or (home / f"{name.name}.py").exists(), name.name


def test_the_table_of_formats_has_the_versions_of_the_code():
    stated = dict(
        re.findall(r"^\| `(paro-advise/\w+)` \| ([\d.]+) \|", (DOCS / "formats.md").read_text(), re.MULTILINE)
    )
    formats = (ANALYSIS, PLAN, COMPARISON, HANG, STEPS, RUN)
    assert {item.name: stated[item.name] for item in formats} == {item.name: item.version for item in formats}


def test_the_table_of_strategies_can_be_recomputed_as_it_says():
    (command,) = re.findall(r'python -c "\n(.*?)^"\n', (DOCS / "strategies.md").read_text(), re.MULTILINE | re.DOTALL)
    done = subprocess.run([sys.executable, "-c", command], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.splitlines()) == len(RingAlgorithm)


@pytest.mark.parametrize("name", NAMES)
def test_files_that_pages_name_exist(name):
    rooms = "advisor|benchmarks|core|examples|policies|runtime|tests|trace_parsers"
    for path in re.findall(rf"`((?:{rooms})/[\w/]+\.py)`", _FENCE.sub("", (ROOT / name).read_text())):
        assert (ROOT / path).is_file(), path
