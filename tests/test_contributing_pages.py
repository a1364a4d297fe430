"""Following docs/contributing literally adds a trace format, a strategy, a framework and a finding that work."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys

import pytest
from conftest import DATA, ROOT

ROOMS = (
    "advisor",
    "benchmarks",
    "docs",
    "core",
    "errors",
    "policies",
    "runtime",
    "src",
    "templates",
    "tests",
    "trace_parsers",
)
PAGES = {
    "add-a-trace-format": ["tests/test_wiretimer.py"],
    "add-a-finding": ["tests/test_few_steps.py"],
    "add-a-framework": ["tests/test_toy_framework.py"],
    "add-a-strategy": ["tests/test_strategy_nin.py", "-k", "not distributed and not trains"],
}
# Of the project's own rules, those that a page could lead its reader to break.
RULES = ("tests/test_architecture.py", "tests/test_public_api.py", "tests/test_documentation.py")
RULES_BY_NAME = (
    "rooms or floors or types_mean or stay_small or explained or page_of_constants or reference_pages or frozen"
)
LINT_IMPORTS = "from importlinter.cli import lint_imports_command; lint_imports_command()"
WRITTEN_PAGES = {
    "constants": ("benchmarks/list_constants.py", "docs/constants.md"),
    "reference": ("benchmarks/reference.py", None),
}
DOCS = ROOT / "docs" / "contributing"
BLOCK = r"```(?:text|python)\n(?P<text>.*?)```"
INSERT = re.compile(
    r"In `(?P<file>[^`]+)`, (?P<where>after|before) the line `(?P<line>[^`]+)`, insert:\n\n" + BLOCK, re.DOTALL
)
REPLACE = re.compile(r"In `(?P<file>[^`]+)`, replace `(?P<old>[^`]+)` by\s`(?P<new>[^`]+)`\.")
NEW_FILE = re.compile(r"```python\n# file: (?P<file>\S+)\n(?P<text>.*?)```", re.DOTALL)


@pytest.fixture
def clone(tmp_path):
    """A copy of the working tree, whose package a process finds by PYTHONPATH."""
    for room in ROOMS:
        ignore = shutil.ignore_patterns("__pycache__", "data", "*.egg-info", "gallery")
        shutil.copytree(ROOT / room, tmp_path / room, symlinks=True, ignore=ignore)
    (tmp_path / "tests" / "data").symlink_to(DATA)
    for name in ("pyproject.toml", "layers.toml", "README.md", "CHANGELOG.md"):
        shutil.copy(ROOT / name, tmp_path)
    return tmp_path


def follow(page, clone):
    """Do what a page says: write new files, insert after or before whole lines, replace what stands once."""
    text = (DOCS / f"{page}.md").read_text()
    steps = sorted(
        (*INSERT.finditer(text), *REPLACE.finditer(text), *NEW_FILE.finditer(text)), key=lambda step: step.start()
    )
    assert steps
    for step in steps:
        path = clone / step["file"]
        if step.re is NEW_FILE:
            path.write_text(step["text"])
        elif step.re is REPLACE:
            content = path.read_text()
            assert content.count(step["old"]) == 1, step[0]
            path.write_text(content.replace(step["old"], step["new"]))
        else:
            lines = path.read_text().split("\n")
            assert lines.count(step["line"]) == 1, step[0]
            place = lines.index(step["line"]) + (step["where"] == "after")
            path.write_text("\n".join([*lines[:place], *step["text"].removesuffix("\n").split("\n"), *lines[place:]]))


@pytest.mark.variant
@pytest.mark.parametrize("page", PAGES)
def test_a_page_can_be_followed_to_the_letter(page, clone):
    follow(page, clone)
    for target in re.findall(r"`make ((?:constants|reference)[a-z ]*)`", (DOCS / f"{page}.md").read_text()):
        for name in target.split():
            script, output = WRITTEN_PAGES[name]
            written = python(clone, script)
            if output:
                (clone / output).write_text(written)
    pytest_options = ("-m", "pytest", "-q", "-p", "no:cacheprovider")
    assert " passed" in python(clone, *pytest_options, *PAGES[page])
    assert " passed" in python(clone, *pytest_options, *RULES, "-k", RULES_BY_NAME)
    for config in ("pyproject.toml", "layers.toml"):
        assert "0 broken" in python(clone, "-c", LINT_IMPORTS, "--config", config, "--no-cache")


def python(clone, *arguments):
    """Run Python in the clone and return what it prints."""
    environment = {**os.environ, "PYTHONPATH": str(clone / "src")}
    done = subprocess.run(
        [sys.executable, *arguments],
        cwd=clone, env=environment, capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-2000:]
    return done.stdout


def test_every_page_is_followed():
    pages = {path.stem for path in (ROOT / "docs" / "contributing").glob("add-*.md")}
    assert pages == set(PAGES)
