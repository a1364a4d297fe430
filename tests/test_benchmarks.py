"""Benchmarks measure what the product runs: each kind of their children does its work on a small input."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
from conftest import DATA, ROOT


@pytest.mark.parametrize("kind", ["ours", "cache_first", "scale"])
def test_the_analysis_benchmark_measures_an_analysis(kind, tmp_path):
    trace = DATA / "zero_runs" / "ddp_acc4" / "rank0.json.gz"
    command = [sys.executable, str(ROOT / "benchmarks" / "bench_analyze.py"), "--child", kind, "--cache", str(tmp_path)]
    done = subprocess.run([*command, str(trace)], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-1000:]
    measured = json.loads(done.stdout.splitlines()[-1])
    assert measured["rows"] > 1000
    assert measured["cpu_s"] > 0
