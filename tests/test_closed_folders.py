"""Folders that may not be looked into: what is in them is missing, and that is said."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest
from conftest import DATA
from helpers import analyze

from paro_advise.advisor.cli import run
from paro_advise.trace_parsers.discover import files_below, find_inputs


@pytest.fixture
def closed(tmp_path, monkeypatch):
    """A recording whose second rank lies in a folder that is closed to this user, root as it may be."""
    for rank in range(2):
        folder = tmp_path / f"node{rank}"
        folder.mkdir()
        shutil.copy(DATA / f"gpu_loops/ddp/rank{rank}.json.gz", folder)
    folder, listed = tmp_path / "node1", os.scandir

    def scandir(path="."):
        if Path(path) == folder:
            raise PermissionError(13, "Permission denied", str(path))
        return listed(path)

    monkeypatch.setattr(os, "scandir", scandir)
    return folder


def test_a_closed_folder_is_found_as_what_cannot_be_read(closed):
    files, folders = files_below(closed.parent)
    assert [path.name for path in files] == ["rank0.json.gz"]
    assert folders == [closed]
    refs, is_collection = find_inputs([str(closed.parent)])
    assert [ref.path for ref in refs] == [closed.parent / "node0/rank0.json.gz", closed]
    assert is_collection


def test_an_analysis_says_which_folder_it_could_not_read(closed):
    notes = [item for item in analyze(closed.parent).data_quality if item.code == "Q301"]
    assert len(notes) == 1
    assert notes[0].message.startswith("node1 could not be used: an input must be a readable file")


def test_an_index_says_which_folder_it_could_not_read(closed, capsys):
    assert run(["index", str(closed.parent)]) == 3
    assert "node1: permission denied" in capsys.readouterr().err


def test_a_file_that_may_not_be_looked_at_is_found_and_tells_no_size(tmp_path, monkeypatch):
    """Its folder may be listed and not entered."""
    path = tmp_path / "rank0.json.gz"
    path.write_bytes(b"x" * 10)
    looked_at = Path.stat

    def stat(self, **options):
        if self == path:
            raise PermissionError(13, "Permission denied", str(self))
        return looked_at(self, **options)

    monkeypatch.setattr(Path, "stat", stat)
    assert files_below(tmp_path) == ([path], [])
    refs, _ = find_inputs([str(tmp_path)])
    assert [(ref.path, ref.size_bytes) for ref in refs] == [(path, 0)]
