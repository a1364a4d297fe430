"""Parameters that a framework is told to ignore, such as a rank's own experts: a plan leaves them alone as well."""

from __future__ import annotations

import re

import pytest
import torch
from conftest import ROOT
from loop import plan_for
from ranks import run_ranks
from torch import nn

from paro_advise.errors import TrainingError
from paro_advise.runtime.adapters.classic import DistributedDataParallel
from paro_advise.runtime.adapters.planned.wrapping import ignored_by_ddp

WORKER = ROOT / "tests/workers/ignored_parameters.py"
RANKS, VALUES, STEPS = 4, 3, 4


class Job:
    """Runs the worker plain and under strategies, in folders of their own."""

    def __init__(self, plan, tmp_path):
        self._plan, self._tmp_path = plan, tmp_path

    def run(self, words, strategy="", folder="states"):
        path = self._tmp_path / folder
        path.mkdir(exist_ok=True)
        plan = plan_for(self._plan, path / f"{strategy}.json", strategy) if strategy else None
        return run_ranks(WORKER, path, words, plan=plan, drift="parameter_count")

    def numbers(self, *args, **kwargs):
        """Return loss, norms and the sum of its own parameters of each rank in each step."""
        done = self.run(*args, **kwargs)
        assert done.returncode == 0, done.stderr[-3000:]
        return [float(word) for word in re.findall(r"-?\d\.\d+e[-+]\d+", done.stdout)]


@pytest.fixture
def job(a_plan, tmp_path):
    return Job(a_plan, tmp_path)


@pytest.mark.distributed
@pytest.mark.parametrize(
    ("words", "strategies"), [("ddp", ["IIG", "GGG"]), ("ddp,two", ["NNG"]), ("fsdp1", ["NIG"]), ("fsdp2", ["IIG"])]
)
def test_each_ranks_own_parameters_train_as_in_the_plain_framework(words, strategies, job):
    plain = job.numbers(words)
    assert len(plain) == STEPS * RANKS * VALUES
    assert len(set(plain[2 : RANKS * VALUES : VALUES])) == RANKS  # each rank has others
    for strategy in strategies:
        assert job.numbers(words, strategy) == pytest.approx(plain, rel=2e-6), strategy


@pytest.mark.distributed
@pytest.mark.parametrize("framework", ["ddp", pytest.param("fsdp2", marks=pytest.mark.variant)])
def test_states_that_each_rank_saves_for_itself_are_resumed_four_ways(framework, job):
    plain = job.numbers(f"{framework},save", folder="plain")
    half = plain[len(plain) // 2 :]
    assert job.numbers(f"{framework},save", "NNG", "planned") == pytest.approx(plain, rel=2e-6)
    for strategy, folder in (("", "plain"), ("NNG", "plain"), ("", "planned"), ("NNG", "planned")):
        assert job.numbers(f"{framework},resume", strategy, folder) == pytest.approx(half, rel=2e-6), (strategy, folder)


@pytest.mark.distributed
def test_a_switch_leaves_them_alone_and_a_checkpoint_of_what_all_share_is_refused(job):
    plain = job.numbers("ddp")
    done = job.run("shard")
    assert done.returncode == 0, done.stderr[-3000:]
    found = [float(word) for word in re.findall(r"-?\d\.\d+e[-+]\d+", done.stdout)]
    assert found == pytest.approx(plain, rel=2e-6)
    assert done.stdout.count("refused: a checkpoint must hold what all ranks share, got 9 parameters") == RANKS


@pytest.mark.distributed
@pytest.mark.parametrize(
    ("words", "reason"),
    [
        ("ddp,together", "gradients that all ranks share must be clipped by one norm"),
        ("ddp,foreach", "a group of an optimizer with foreach=True must hold sharded parameters or others, got both"),
    ],
)
def test_what_would_scale_or_update_both_kinds_at_once_is_refused(words, reason, job):
    done = job.run(words, "IIG")
    assert done.returncode not in {0, 124}
    assert reason in done.stderr


@pytest.mark.parametrize("ignored", [["scale"], ["first.weight"]])
def test_what_ddp_itself_ignores_in_part_is_refused(ignored):
    """DDP does not copy a parameter of the outermost module, or one tied under another name, and reduces its gradient."""
    model = nn.Module()
    model.scale = nn.Parameter(torch.ones(1))
    model.first, model.second = nn.Linear(2, 2), nn.Linear(2, 2)
    model.second.weight = model.first.weight
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, ignored)
    with pytest.raises(TrainingError, match="ignores in part"):
        ignored_by_ddp(model, frozenset(ignored))
