"""A running job takes a new plan through its folder, and goes on as if nothing had happened."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from dataclasses import replace

import pytest
from loop import SCRIPTS, paro, plan_for
from ranks import forked, run_ranks

from paro_advise.core.documents import to_json
from paro_advise.policies.plan import read_plan, with_id

pytestmark = pytest.mark.distributed


def of_another_job(plan_file, target):
    """Write the same plan as for a model of twice the size."""
    plan = read_plan(str(plan_file))
    facts = replace(plan.preconditions, parameter_count=2 * plan.preconditions.parameter_count)
    target.write_bytes(to_json(with_id(replace(plan, preconditions=facts))))
    return target


def test_a_running_job_takes_a_new_plan(a_plan, tmp_path):
    pytest.importorskip("torch")
    script = SCRIPTS / "train_fsdp2.py"
    arguments = ("--steps", 80)
    first = plan_for(a_plan, tmp_path / "first.json", "GGG")
    second = plan_for(a_plan, tmp_path / "second.json", "NIG")
    foreign = of_another_job(second, tmp_path / "foreign.json")
    job = tmp_path / "job"
    command = [sys.executable, "-m", "paro_advise", "run", "--plan", str(first), "--job", str(job), "--"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(
        [*command, *forked(script, *arguments)],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as running:
        until = time.monotonic() + 120
        while not (job / "job.json").exists():
            assert time.monotonic() < until
            time.sleep(0.05)
        refused = paro("switch", job, foreign, "--timeout", 60)
        done = paro("switch", job, second, "--timeout", 60)
        printed, said = running.communicate(timeout=200)
    assert refused.returncode != 0
    assert "the plan must fit the job: made for parameter_count" in refused.stderr
    assert done.returncode == 0, done.stderr + said[-2000:]
    assert "GGG -> NIG in groups of 2 in " in done.stdout
    assert running.returncode == 0
    assert "switched GGG -> NIG in groups of 2" in said
    plain = run_ranks(script, *arguments).stdout
    pattern = r"norm ([\d.]+)"
    norms, expected = (list(map(float, re.findall(pattern, text))) for text in (printed, plain))
    assert len(norms) == len(expected) == 80
    assert norms == pytest.approx(expected, abs=3e-6)


def test_a_job_that_does_not_run_is_told(tmp_path):
    from paro_advise.advisor.cli import run

    assert run(["switch", str(tmp_path), str(tmp_path / "none.json")]) == 3
