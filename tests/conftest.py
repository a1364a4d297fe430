"""What all tests share: the shared inputs, a clean environment, a way to run an analysis."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

ROOT = Path(__file__).resolve().parents[1]
SHARED = ROOT.parent / "shared"


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch, tmp_path):
    """No test sees or changes the user's cache, colours or debug switch."""
    for name in ("NO_COLOR", "FORCE_COLOR", "PARO_ADVISE_DEBUG"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PARO_ADVISE_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def shared():
    """The folder of real inputs; tests that need it are skipped where it is absent."""
    if not SHARED.is_dir():
        pytest.skip("the folder ../shared with real traces is not here")
    return SHARED
