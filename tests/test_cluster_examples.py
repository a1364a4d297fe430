"""Job files for clusters: they parse, name a command of ours that exists, and the Slurm one runs."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from pathlib import Path

import click
import pytest
from conftest import ROOT

from paro_advise.advisor.cli import cli

CLUSTER = ROOT / "examples" / "cluster"


def read_yaml(name):
    yaml = pytest.importorskip("ruamel.yaml", reason="the extra [apply] installs it")
    return yaml.YAML(typ="safe").load(CLUSTER / name)


def commands_of(name, document):
    """The words that the file's containers run."""
    if name == "trainjob.yaml":
        return document["spec"]["trainer"]["command"]
    if name == "skypilot.yaml":
        return shlex.split(document["run"].replace("\\\n", " "))
    (job,) = document["spec"]["replicatedJobs"]
    (container,) = job["template"]["spec"]["template"]["spec"]["containers"]
    assert container["command"] == ["bash", "-c"]
    return shlex.split(container["args"][0])


@pytest.mark.parametrize("name", ["trainjob.yaml", "jobset.yaml", "skypilot.yaml"])
def test_manifests_capture_before_torchrun(name):
    document = read_yaml(name)
    words = commands_of(name, document)
    assert words[:2] == ["paro-advise", "capture"]
    end = words.index("--")
    assert words[end + 1] == "torchrun"
    assert words[-1] == "train.py"
    command = cli.get_command(click.Context(cli), "capture")
    known = {text for parameter in command.params for text in parameter.opts}
    assert {word for word in words[2:end] if word.startswith("-")} <= known


def test_manifests_are_of_their_kind():
    assert read_yaml("trainjob.yaml")["apiVersion"].startswith("trainer.kubeflow.org/")
    jobset = read_yaml("jobset.yaml")
    assert jobset["apiVersion"].startswith("jobset.x-k8s.io/")
    (job,) = jobset["spec"]["replicatedJobs"]
    pods = job["template"]["spec"]["template"]["spec"]
    mounted = {mount["name"] for mount in pods["containers"][0]["volumeMounts"]}
    assert mounted == {volume["name"] for volume in pods["volumes"]}
    assert job["template"]["spec"]["parallelism"] == job["template"]["spec"]["completions"]


@pytest.mark.distributed
@pytest.mark.variant
def test_the_slurm_script_records_and_recommends(tmp_path):
    """With stand-ins for srun and scontrol, on one node of two ranks; torchrun, training and analysis are real."""
    tools = tmp_path / "bin"
    tools.mkdir()
    for name, body in (("srun", 'exec "$@"'), ("scontrol", "echo localhost")):
        (tools / name).write_text(f"#!/bin/sh\n{body}\n")
        (tools / name).chmod(0o755)
    given = {
        "SLURM_JOB_ID": "7", "SLURM_NNODES": "1", "SLURM_JOB_NODELIST": "localhost", "RANKS_PER_NODE": "2", "STEPS": "2:4",
        "PORT": "0", "TRACES": str(tmp_path / "traces"), "OMP_NUM_THREADS": "1",
        "PATH": f"{tools}:{Path(sys.executable).parent}:{os.environ['PATH']}",
    }  # fmt: skip
    script = [str(ROOT / "examples" / "train.py"), "--steps", "7", "--layers", "2", "--width", "64"]
    done = subprocess.run(
        ["bash", str(CLUSTER / "slurm.sbatch"), *script],
        env={**os.environ, **given}, cwd=tmp_path, capture_output=True, text=True, timeout=600,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    made = {path.name for path in (tmp_path / "traces").iterdir()}
    assert {"rank0.json.gz", "rank1.json.gz", "report.html", "analysis.json", "plan.json", "plan.html"} <= made
