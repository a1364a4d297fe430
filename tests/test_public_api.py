"""What users import: complete, sorted, and frozen; a change here is a change of the public interface."""

from __future__ import annotations

import inspect
import re
from importlib import import_module

import pytest
from conftest import ROOT

MEMBERS = {
    "paro_advise": ["AnalysisResult", "ComparisonResult", "PlanResult", "analyze", "compare", "recommend"],
    "paro_advise.errors": [
        "BrokenInputError", "CommunicationError", "DivergedError", "ForeignDataError", "HostileInputError",
        "InputError", "NoGainError", "NoInputError", "OutputError", "ParoAdviseError", "StalePlanError", "SwitchError",
        "TrainingError", "UnknownFormatError", "UnlikeRunsError", "UsageError", "WouldOverwriteError",
    ],
    "paro_advise.runtime": [
        "SwitchReport", "engine_of", "latest_checkpoint", "load_checkpoint", "save_checkpoint",
        "save_checkpoint_async", "shard", "stream_state_dict", "switch",
    ],
    "paro_advise.runtime.capture": ["CaptureCallback", "capture"],
    "paro_advise.runtime.ho_ring": [
        "Algorithm", "ChoiceTable", "Collectives", "Grid", "HoRing", "Operation", "Sample", "Sent", "use_ho_ring",
    ],
    "paro_advise.runtime.redirect": ["use_plan"],
}  # fmt: skip

SIGNATURES = {
    "paro_advise.analyze": ["paths", "gpus_per_node", "skip_steps", "tokens_per_step", "peak_tflops", "jobs", "engine"],
    "paro_advise.recommend": [
        "run", "device_memory", "redundancy_budget", "measured_peak", "nodes_per_pod", "strategy", "what_if",
        "allow_untested",
    ],
    "paro_advise.compare": ["before", "after", "plan", "min_gain_pct", "allow_unlike"],
    "paro_advise.runtime.shard": [
        "model", "optimizer", "strategy", "group_size", "device_mesh", "units", "param_dtype",
        "cast_modules", "output_dtypes", "keep_types", "reduce_dtype", "init",
        "reshard_root", "overlap_updates", "offload_optimizer", "ranks_per_node",
        "native_collectives", "ignored_params",
    ],
    "paro_advise.runtime.stream_state_dict": ["model"],
    "paro_advise.runtime.switch": ["model", "strategy", "group_size", "device_mesh"],
    "paro_advise.runtime.save_checkpoint": ["path", "model", "extra", "force"],
    "paro_advise.runtime.save_checkpoint_async": ["path", "model", "extra", "force"],
    "paro_advise.runtime.capture.capture": ["folder", "steps"],
    "paro_advise.runtime.redirect.use_plan": ["plan", "beside"],
}  # fmt: skip


def needs_torch(module):
    if "runtime" in module:
        pytest.importorskip("torch")


@pytest.mark.parametrize("module", MEMBERS)
def test_exported_members_are_complete_sorted_and_frozen(module):
    needs_torch(module)
    found = import_module(module)
    assert sorted(found.__all__) == found.__all__
    assert found.__all__ == MEMBERS[module]
    for name in found.__all__:
        assert getattr(found, name).__doc__, name


@pytest.mark.parametrize("function", SIGNATURES)
def test_arguments_keep_their_names_and_order(function):
    needs_torch(function)
    module, _, name = function.rpartition(".")
    found = getattr(import_module(module), name)
    assert list(inspect.signature(found).parameters) == SIGNATURES[function]


def test_nothing_is_cited_that_is_not_in_the_repository():
    """Comments and docstrings lead to pages of docs/, whose section they name, or to public sources."""
    rooms = ("advisor", "core", "errors", "policies", "runtime", "templates", "trace_parsers", "tests", "benchmarks")
    pages = {path.name: path.read_text().lower() for path in (ROOT / "docs").rglob("*.md")}
    for path in (path for room in rooms for path in (ROOT / room).rglob("*.py")):
        text = path.read_text()
        if path.name != "test_public_api.py":
            assert not re.search(
                r"(?i)reference[: (]+(?:traces|formats|prediction|strategies|runtime|parsing|lab)\b", text
            ), path
        for page, section in re.findall(r"(?<![\w/])docs/([\w/-]+\.md)(?:, ([a-z][\w' -]*))?", text):
            name = page.rpartition("/")[2]
            assert name in pages, (path, page)
            if section:
                heads = re.findall(r"^#+ (.*)$", pages[name], re.MULTILINE)
                assert any(section.strip().startswith(head[:12]) or head in section for head in heads), (
                    path,
                    page,
                    section,
                )


def test_the_page_of_constants_is_what_the_code_says():
    import runpy

    page = runpy.run_path(str(ROOT / "benchmarks" / "list_constants.py"))["page"]

    assert (ROOT / "docs" / "constants.md").read_text() == page(), "run `make constants`"
    assert not re.findall(r"^\| `(.+)` \|  \|$", page(), re.MULTILINE), "a constant needs a unit and an origin"
