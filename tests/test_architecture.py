"""The house rules that a machine can check: sizes, docstrings, documentation of every code."""

from __future__ import annotations

import ast
import re

import pytest
from conftest import ROOT
from paro_advise.advisor.cli import VERBS, run
from paro_advise.advisor.codes import known_codes

ROOMS = ("errors", "trace_parsers", "policies", "advisor", "runtime", "templates", "benchmarks", "examples", "tests")
FILES = sorted(path for room in ROOMS for path in (ROOT / room).rglob("*.py"))


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_files_and_functions_stay_small(path):
    text = path.read_text()
    assert text.count("\n") <= 600
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            assert node.end_lineno - node.lineno < 80, node.name


def test_nothing_unfinished_and_no_path_of_any_machine():
    unwanted = re.compile(r"\b(?:TODO|FIXME|XXX)\b|/root/|/work/")
    for path in FILES:
        if path.name != "test_architecture.py":
            hit = unwanted.search(path.read_text())
            assert hit is None, (path, hit)


def used_codes():
    text = "\n".join(
        path.read_text()
        for room in ("errors", "trace_parsers", "advisor", "runtime")
        for path in (ROOT / room).rglob("*.py")
    )
    return set(re.findall(r"\b(?:Q\d{3}|E\d{3}|PARO\d{3})\b", text))


def test_every_code_is_explained_and_every_explanation_is_used():
    assert used_codes() == set(known_codes())
    for entry in known_codes().values():
        assert entry.title
        assert entry.text


def test_the_readme_names_the_commands_that_exist(capsys):
    text = (ROOT / "README.md").read_text()
    makefile = (ROOT / "Makefile").read_text()
    for target in re.findall(r"`make ([a-z-]+)`", text):
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), target
    commands = re.findall(r"^(?:\$ )?paro-advise (\S+)", text, re.MULTILINE)
    assert commands
    for verb in commands:
        assert verb in VERBS or "/" in verb, verb
    for verb in VERBS:
        assert f"paro-advise {verb}" in text, verb
        assert run([verb, "--help"]) == 0
    options = set(
        re.findall(r"(?<![\w-])(--[a-z-]+)", "\n".join(re.findall(r"^(?:\$ )?paro-advise .*$", text, re.MULTILINE)))
    )
    help_text = capsys.readouterr().out
    assert all(option in help_text for option in options), options


def test_the_changelog_names_this_version():
    version = re.search(r'^version = "(.+)"', (ROOT / "pyproject.toml").read_text(), re.MULTILINE).group(1)
    text = (ROOT / "CHANGELOG.md").read_text()
    assert "Keep a Changelog" in text
    assert f"## [{version}]" in text


def test_the_package_data_is_installed():
    from importlib import resources

    for package, name in (("advisor", "docs/codes.md"), ("templates", "analysis.html.j2"), ("templates", "style.css")):
        assert resources.files(f"paro_advise.{package}").joinpath(name).is_file()


def test_a_wheel_holds_what_the_package_reads(tmp_path):
    """Built from the declared package data, not from what an editable install sees."""
    import tomllib

    table = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    folders = {ROOT / folder for folder in table["package-dir"].values()}
    packaged = {path for folder in folders for pattern in table["package-data"]["*"] for path in folder.glob(pattern)}
    wanted = {
        path
        for folder in folders
        for path in folder.rglob("*")
        if path.is_file() and path.suffix not in (".py", ".pyc") and "__pycache__" not in path.parts
    }
    assert wanted == packaged
    modules = {path.parent for folder in folders for path in folder.rglob("*.py")}
    names = {str(path.relative_to(ROOT)).replace("/", ".") for path in modules}
    assert {f"paro_advise.{name}" for name in names} == set(table["packages"])
