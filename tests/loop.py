"""Runs the command line around real training jobs, and reads what they logged."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace

import pytest
from conftest import ROOT

from paro_advise.core.documents import to_json
from paro_advise.policies.plan import Verdict, read_plan, with_id

SCRIPTS = ROOT / "examples/frameworks"


def torchrun(script, *arguments, ranks=4):
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    return [*launcher, str(script), *map(str, arguments)]


def paro(*words, job=(), environment=None, timeout=300):
    """Run a verb in a process of its own; what follows ``--`` is the job."""
    pytest.importorskip("torch")
    command = [sys.executable, "-m", "paro_advise", *map(str, words), *(["--", *job] if job else [])]
    settings = {**os.environ, "OMP_NUM_THREADS": "1", **(environment or {})}
    return subprocess.run(command, capture_output=True, text=True, timeout=timeout, env=settings, check=False)


def steps_of(folder, ranks=4):
    """Return mean loss and whole gradient norm of each step, as the formulas in docs/formats.md say."""
    logs = []
    for rank in range(ranks):
        lines = (folder / f"steps.rank{rank}.jsonl").read_text().splitlines()
        logs.append([json.loads(line) for line in lines[1:]])
    found = []
    for rows in zip(*logs, strict=True):
        squares = [row["gradient_norm_squared"] for row in rows]
        loss = sum(row["loss"] for row in rows) / ranks
        found.append((loss, sum(squares) ** 0.5))
    return found


def plan_for(plan_file, target, triple, group_size=2, collectives="ho_ring"):
    """Write a plan that chooses another of its candidates."""
    plan = read_plan(str(plan_file))
    chosen = next(
        choice
        for choice in plan.candidates
        if (choice.triple, choice.collectives, choice.variant) == (triple, collectives, "")
        and choice.group_size in (None, group_size)
    )
    target.write_bytes(to_json(with_id(replace(plan, chosen=chosen, verdict=Verdict.CHANGE))))
    return target
