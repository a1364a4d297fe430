"""Runs scripts on several ranks, as torchrun does but without importing torch for each of them."""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from paro_advise.runtime.job import DRIFT_VARIABLE, PLAN_VARIABLE

SERVER = Path(__file__).parent / "rank_server.py"


@functools.cache
def _server():
    """Return the process that forks ranks; it ends when its input does, with this one."""
    server = subprocess.Popen(
        [sys.executable, str(SERVER)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert server.stdout.readline() == "ready\n"
    return server


def run_ranks(script, *arguments, ranks=4, warnings="ignore", timeout_s=540, plan=None, drift=""):
    """Run a script on so many ranks on this machine, under a plan as `paro-advise run` lets it run, or without one.

    Returns:
        What ``subprocess.run`` would: the code of the first rank that failed, and what all have written.
    """
    pytest.importorskip("torch")
    server = _server()
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
            "environment": {PLAN_VARIABLE: str(plan), DRIFT_VARIABLE: drift} if plan else {},
            **{path.name: str(path) for path in outputs},
        }
        server.stdin.write(json.dumps(job) + "\n")
        server.stdin.flush()
        codes = json.loads(server.stdout.readline())
        stdout, stderr = (path.read_text(errors="replace") for path in outputs)
    # One that was ended because another had failed is not the cause.
    code = next((code for code in codes if code > 0), next((code for code in codes if code), 0))
    return subprocess.CompletedProcess([str(script), *map(str, arguments)], code, stdout, stderr)
