"""The house rules that a machine can check: sizes, docstrings, documentation of every code."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tomllib

import pytest
from conftest import ROOT

from paro_advise.advisor.cli import VERBS, run
from paro_advise.advisor.wording.codes import known_codes

ROOMS = (
    "core",
    "errors",
    "trace_parsers",
    "policies",
    "advisor",
    "runtime",
    "templates",
    "benchmarks",
    "examples",
    "tests",
)
FILES = sorted(path for room in ROOMS for path in (ROOT / room).rglob("*.py"))


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_files_and_functions_stay_small(path):
    text = path.read_text()
    assert text.count("\n") <= 500
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            assert node.end_lineno - node.lineno < 70, node.name


SOURCE = ROOMS[:7]


def test_the_advisor_has_seven_floors():
    """One more comes with a dependency between rooms that the layers alone let pass."""
    told = subprocess.run(
        [sys.executable, str(ROOT / "benchmarks/structure.py")], capture_output=True, text=True, check=True
    ).stdout
    (floors,) = re.findall(r"rooms in advisor/ .* on (\d+) floors", told)
    assert int(floors) <= 7


def test_no_name_of_a_module_is_assigned_twice():
    """The second value would hold where the first one is meant."""
    for path in FILES:
        names: list[str] = []
        for node in ast.parse(path.read_text()).body:
            targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
            names += [target.id for target in targets if isinstance(target, ast.Name) and target.id.isupper()]
        assert len(names) == len(set(names)), path


def test_no_constant_has_a_namesake_of_another_value():
    """A reader who has seen one takes the other for it."""
    values: dict[str, set[str]] = {}
    for path in (path for room in SOURCE for path in (ROOT / room).rglob("constants.py")):
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
                values.setdefault(node.targets[0].id, set()).add(f"{path}: {ast.unparse(node.value)}")
    assert {name: found for name, found in values.items() if len(found) > 1} == {}


def test_rooms_stay_small():
    folders = {path.parent for room in SOURCE for path in (ROOT / room).rglob("*.py")}
    for folder in folders:
        files = [path for path in folder.glob("*.py") if path.name != "__init__.py"]
        assert len(files) <= 12, folder


def test_types_mean_something():
    """What is said to be of any type is what JSON, torch or HTA leave open (`make structure`)."""
    uses = 0
    for room in SOURCE:
        for path in (ROOT / room).rglob("*.py"):
            tree = ast.parse(path.read_text())
            uses += sum(isinstance(node, ast.Name) and node.id == "Any" for node in ast.walk(tree))
    assert uses <= 150


def test_one_name_means_one_class():
    paths: dict[str, list[str]] = {}
    for room in SOURCE:
        for path in (ROOT / room).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                    paths.setdefault(node.name, []).append(str(path.relative_to(ROOT)))
    assert {name: found for name, found in paths.items() if len(found) > 1} == {}


def test_nothing_unfinished_and_no_path_of_any_machine():
    unwanted = re.compile(r"\b(?:TODO|FIXME|XXX)\b|/root/|/work/")
    for path in FILES:
        if path.name != "test_architecture.py":
            hit = unwanted.search(path.read_text())
            assert hit is None, (path, hit)


def used_codes():
    text = "\n".join(
        path.read_text()
        for room in ("core", "errors", "trace_parsers", "advisor", "runtime")
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


def test_both_fallbacks_of_the_version_are_the_newest_release_of_the_changelog():
    table = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools_scm"]
    released = re.search(r"^## \[(\d.*)\]", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE).group(1)
    assert table["fallback_version"] == released
    assert f"echo v{released}-" in table["scm"]["git"]["describe_command"][-1]


def test_the_package_data_is_installed():
    from importlib import resources

    for package, name in (
        ("advisor.wording", "codes.md"),
        ("templates", "analysis.html.j2"),
        ("templates", "style.css"),
    ):
        assert resources.files(f"paro_advise.{package}").joinpath(name).is_file()


def test_a_wheel_holds_what_the_package_reads():
    """By the declared packages and package data, not by what an editable install sees."""
    from fnmatch import fnmatch

    from setuptools import find_packages

    table = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    assert (table["package-dir"], table["packages"]["find"]["where"]) == ({"": "src"}, ["src"])
    packages = set(find_packages("src"))
    rooms = [path for path in (ROOT / "src" / "paro_advise").iterdir() if path.is_symlink()]
    files = [(room, path) for room in rooms for path in room.resolve().rglob("*") if "__pycache__" not in path.parts]
    for room, path in files:
        if path.is_file():
            folder = path.parent.relative_to(room.resolve())
            assert ".".join(["paro_advise", room.name, *folder.parts]) in packages, path
            is_data = any(fnmatch(path.name, pattern) for pattern in table["package-data"]["*"])
            assert path.suffix in (".py", ".pyc") or is_data, path


def test_every_room_at_the_top_is_a_link_of_the_package():
    links = {path.name: path.resolve() for path in (ROOT / "src" / "paro_advise").iterdir() if path.is_symlink()}
    assert links == {name: ROOT / name for name in ROOMS if name not in ("benchmarks", "examples", "tests")}


def test_the_runtime_does_not_print():
    """In a training process ``print`` may be the script's own; what runs as a program of its own may."""
    programs = {"probe.py", "sitecustomize.py"}
    files = [path for path in (ROOT / "runtime").rglob("*.py") if path.name not in programs and "lab" not in path.parts]
    printing = [
        str(path.relative_to(ROOT))
        for path in files
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "print"
    ]
    assert len(files) > 50
    assert not printing
