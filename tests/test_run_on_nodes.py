"""One job that several `paro-advise run` start, one on each node: what they were given must agree."""

from __future__ import annotations

import os
import socket
import subprocess
import sys

import pytest
from loop import SCRIPTS, paro, plan_for, torchrun
from test_recommend import calibration

from paro_advise.advisor.prediction.recommend import recommend
from paro_advise.advisor.prediction.scoring import Limits
from paro_advise.core.documents import to_json

SCRIPT = SCRIPTS / "train_fsdp2.py"
DRIFT = ("--allow-drift", "gpus_per_node")


def on_two_nodes(*options):
    """Start a job of two ranks on each of two nodes, each with its own options of `run`; return what both have said."""
    pytest.importorskip("torch")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    nodes = []
    for rank, words in enumerate(options):
        launcher = [sys.executable, "-m", "torch.distributed.run", "--nnodes=2", f"--node-rank={rank}"]
        launcher += ["--nproc-per-node=2", "--master-addr=127.0.0.1", f"--master-port={port}"]
        command = [sys.executable, "-m", "paro_advise", "run", *DRIFT, *map(str, words), "--", *launcher]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        nodes.append(
            subprocess.Popen(
                [*command, str(SCRIPT), "--steps", "3"],
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                env=environment,
            )
        )
    try:
        outputs = [node.communicate(timeout=240) for node in nodes]
    finally:
        for node in nodes:
            node.kill()
    return [node.returncode for node in nodes], outputs


@pytest.mark.distributed
def test_nodes_with_different_plans_are_told_so_on_every_rank(a_plan, tmp_path):
    plans = [plan_for(a_plan, tmp_path / f"{triple}.json", triple) for triple in ("GGG", "NNG")]
    codes, outputs = on_two_nodes(*(("--plan", plan) for plan in plans))
    assert all(codes)
    for printed, said in outputs:
        assert "norm" not in printed
        assert "error[E511]: all ranks must have the same plan, got another one on ranks 2, 3" in said
        assert "one plan file" in said


@pytest.mark.distributed
def test_a_folder_for_switches_on_one_node_only_ends_the_job_before_it_trains(a_plan, tmp_path):
    plan = plan_for(a_plan, tmp_path / "plan.json", "GGG")
    codes, outputs = on_two_nodes(("--plan", plan, "--job", tmp_path / "job"), ("--plan", plan))
    assert all(codes)
    for printed, said in outputs:
        assert "norm" not in printed
        assert "the same use of --job" in said


@pytest.mark.distributed
def test_a_folder_for_switches_that_cannot_be_written_ends_the_job_in_words(a_plan, tmp_path):
    plan = plan_for(a_plan, tmp_path / "plan.json", "GGG")
    (tmp_path / "file").touch()
    codes, outputs = on_two_nodes(*[("--plan", plan, "--job", tmp_path / "file" / "job")] * 2)
    assert all(codes)
    assert "norm" not in outputs[0][0]
    assert "error[E400]: the folder of --job must be writable" in outputs[0][1]
    assert "OSError" not in outputs[0][1]


@pytest.mark.distributed
def test_ranks_that_do_not_see_the_launchers_temporary_files_still_tell_that_the_plan_is_applied(a_plan, tmp_path):
    plan = plan_for(a_plan, tmp_path / "plan.json", "GGG")
    elsewhere = tmp_path / "node"  # as of a container
    launcher = (
        "import os, subprocess, sys; marker = os.environ['PARO_APPLIED'];"
        f"os.environ['PARO_APPLIED'] = {str(elsewhere)!r} + marker;"
        "sys.exit(subprocess.call(sys.argv[1:]))"
    )
    done = paro("run", "--plan", plan, job=[sys.executable, "-c", launcher, *torchrun(SCRIPT, "--steps", 3)])
    assert done.returncode == 0, done.stderr
    assert "runs as GGG" in done.stderr
    assert sorted(path.name for path in tmp_path.iterdir()) == ["plan.json"]


def test_a_plan_from_a_pipe_is_refused_before_the_job_starts(tmp_path):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    done = paro("run", "--plan", pipe, job=[sys.executable, "-c", "print('started')"])
    assert done.returncode == 2
    assert "--plan must be a file that every rank can read" in done.stderr
    assert "started" not in done.stdout


@pytest.mark.parametrize(
    ("job", "code"),
    [
        ("mark_refused(4)", 4),  # behind a launcher that ends well whatever its ranks do
        ("mark_refused(4); sys.exit(1)", 4),  # as torchrun
        ("mark_refused(4); mark_applied(); sys.exit(1)", 4),  # one rank each
        ("mark_applied(); mark_refused(1)", 1),
        ("mark_applied(); sys.exit(7)", 7),
        ("mark_applied()", 0),
        ("mark_refused(4); os.kill(os.getpid(), signal.SIGINT)", 130),
        (
            "os.environ['PARO_APPLIED'] = '/nowhere' + os.environ['PARO_APPLIED']; mark_refused(4); sys.exit(1)",
            4,
        ),  # in a container
        ("pass", 4),  # nobody has applied it
    ],
)
def test_a_refused_plan_ends_run_with_the_refusals_code(job, code, tmp_path):
    plan = tmp_path / "plan.json"
    made = recommend(calibration(), Limits())
    assert made.verdict == "change"
    plan.write_bytes(to_json(made))
    script = f"import os, signal, sys; from paro_advise.runtime.job import mark_applied, mark_refused; {job}"
    done = paro("run", "--plan", plan, job=[sys.executable, "-c", script])
    assert done.returncode == code, done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["plan.json"]
