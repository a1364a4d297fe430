"""What all tests share: recorded runs and a clean environment."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
# With it a line and its end are two writes, between which another rank's line may come.
os.environ.pop("PYTHONUNBUFFERED", None)
# Shells let what they start in the background ignore Ctrl-C, and programs that are started from there too.
signal.signal(signal.SIGINT, signal.default_int_handler)

ROOT = Path(__file__).resolve().parents[1]
DATA = ROOT / "tests" / "data"  # runs cut short, see its README
SHARED = ROOT.parent / "shared"  # the same runs whole, and other people's files, where it is there


def recorded(kind, names):
    """Return a folder of each run as a parameter: cut short, and whole as well where ../shared is there."""
    places = {"cut": DATA} | ({"whole": SHARED} if SHARED.is_dir() else {})
    return [
        pytest.param(
            place / kind / name, id=f"{name}-{length}", marks=[pytest.mark.variant] if length == "whole" else []
        )
        for length, place in places.items()
        for name in names
    ]


def pytest_collection_modifyitems(config, items):
    """Leave out what judges other people's traces where there are none: what it holds is held on our own as well."""
    if (SHARED / "corpus").is_dir():
        return
    left_out = [item for item in items if item.get_closest_marker("corpus")]
    config.hook.pytest_deselected(items=left_out)
    items[:] = [item for item in items if item not in left_out]


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch, tmp_path):
    """No test sees or changes the user's cache, colours or debug switch."""
    for name in ("NO_COLOR", "FORCE_COLOR", "PARO_ADVISE_DEBUG"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PARO_ADVISE_CACHE", str(tmp_path / "cache"))


@pytest.fixture(scope="session")
def a_plan(tmp_path_factory):
    """A plan for four ranks that train the small model of the examples."""
    from loop import SCRIPTS, paro
    from ranks import forked

    folder = tmp_path_factory.mktemp("plan")
    job = forked(SCRIPTS / "train_fsdp2.py")
    assert paro("capture", "-o", folder / "before", "--steps", "4:6", job=job).returncode == 0
    assert paro("recommend", folder / "before", "-o", folder / "plan.json", "-q").returncode == 0
    return folder / "plan.json"
