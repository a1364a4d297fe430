"""Runs scripts on several ranks, as torchrun does but without importing torch for each of them."""

from __future__ import annotations

import atexit
import functools
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from forked import ask, code_of

from paro_advise.runtime.job import DRIFT_VARIABLE, PLAN_VARIABLE

SERVER = Path(__file__).parent / "rank_server.py"
FORKED = Path(__file__).parent / "forked.py"


@functools.cache
def _server():
    """Start the process that forks ranks; it ends when its input does, with this one. Return it and its socket's path."""
    path = Path(tempfile.mkdtemp(prefix="ranks", dir="/tmp")) / "socket"  # a socket's path is short
    atexit.register(shutil.rmtree, path.parent, ignore_errors=True)
    server = subprocess.Popen(
        [sys.executable, str(SERVER), str(path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert server.stdout.readline() == "ready\n"
    return server, path


def run_ranks(script, *arguments, ranks=4, warnings="ignore", timeout_s=540, plan=None, drift=""):
    """Run a script on so many ranks on this machine, under a plan as `paro-advise run` lets it run, or without one.

    Returns:
        What ``subprocess.run`` would: the code of the first rank that failed, and what all have written.
    """
    codes, stdout, stderr = codes_of_ranks(
        script, *arguments, ranks=ranks, warnings=warnings, timeout_s=timeout_s, plan=plan, drift=drift
    )
    return subprocess.CompletedProcess([str(script), *map(str, arguments)], code_of(codes), stdout, stderr)


def codes_of_ranks(script, *arguments, ranks=4, warnings="ignore", timeout_s=540, plan=None, drift="", survivors=None):
    """Run a script as ``run_ranks`` does; return the code of each rank, and what all have written.

    Args:
        survivors: ranks that end by themselves while others die or hang; without them one's end ends all.
    """
    pytest.importorskip("torch")
    with tempfile.TemporaryDirectory() as folder:
        outputs = [Path(folder) / name for name in ("stdout", "stderr")]
        for path in outputs:
            path.touch()
        job = {
            "script": str(script),
            "arguments": [*map(str, arguments)],
            "ranks": ranks,
            "warnings": warnings,
            "timeout_s": timeout_s,
            "survivors": survivors,
            "environment": {**os.environ, **({PLAN_VARIABLE: str(plan), DRIFT_VARIABLE: drift} if plan else {})},
            "cwd": str(Path.cwd()),
            **{path.name: str(path) for path in outputs},
        }
        codes = ask(_server()[1], job)
        return codes, *(path.read_text(errors="replace") for path in outputs)


def forked(script, *arguments, ranks=4):
    """Return a command that stands for torchrun where it does not matter how a job starts."""
    pytest.importorskip("torch")
    return [sys.executable, str(FORKED), str(_server()[1]), str(ranks), str(script), *map(str, arguments)]


def numbers_in(text):
    """Return what a worker has printed in scientific notation, in order."""
    return [float(word) for word in re.findall(r"-?\d\.\d+e[-+]\d+", text)]
