"""What DDP scripts do on rank 0 alone, since every rank holds everything there: it works, or ranks are told."""

from __future__ import annotations

import re
import time

import pytest
from conftest import ROOT
from loop import plan_for
from ranks import numbers_in, run_ranks

from paro_advise.runtime.adapters.planned import attendance

WORKERS = ROOT / "tests/workers"


@pytest.mark.distributed
def test_ddp_scripts_save_parts_of_what_every_rank_holds(a_plan, tmp_path):
    """Rank 0 alone saves a part's state dict and keeps a mean of weights; parameters are saved one by one."""
    script = WORKERS / "rank_0_alone.py"
    expected = sorted(run_ranks(script, "save").stdout.splitlines())
    assert len(expected) == 5 + 2 * 4
    for strategy in ("NNG", "GGG", "IIG"):
        plan = plan_for(a_plan, tmp_path / f"{strategy}.json", strategy)
        done = run_ranks(script, "save", plan=plan)
        assert done.returncode == 0, done.stderr[-3000:]
        found = sorted(done.stdout.splitlines())
        assert [line.split()[0] for line in found] == [line.split()[0] for line in expected]
        assert numbers_in("\n".join(found)) == pytest.approx(numbers_in("\n".join(expected)), rel=2e-6)


@pytest.mark.distributed
def test_ddp_scripts_save_what_rank_0_alone_has_put_into_the_model_or_are_told(a_plan, tmp_path):
    """As diffusers saves a mean of weights: rows of rank 0 were saved among those of the others."""
    plain = run_ranks(WORKERS / "rank_0_alone.py", "swap")
    assert len(numbers_in(plain.stdout)) == 2
    replicated = plan_for(a_plan, tmp_path / "NNG.json", "NNG")
    done = run_ranks(WORKERS / "rank_0_alone.py", "swap", plan=replicated)
    assert numbers_in(done.stdout) == pytest.approx(numbers_in(plain.stdout), rel=2e-6), done.stderr[-3000:]
    sharded = plan_for(a_plan, tmp_path / "GGG.json", "GGG")
    done = run_ranks(WORKERS / "rank_0_alone.py", "swap", plan=sharded, timeout_s=60)
    assert done.returncode != 0
    assert "sharded parameters must be changed by all ranks alike" in done.stderr
    assert "swapped" not in done.stdout


@pytest.mark.distributed
@pytest.mark.parametrize(("word", "refused"), [("resend", ""), ("spread", "GGG"), ("load", "NNG GGG")])
def test_weights_of_rank_0_are_brought_to_the_others_or_ranks_are_told(a_plan, tmp_path, word, refused):
    """Of what rank 0 changes of a sharded parameter it keeps its own rows, which no broadcast makes whole."""
    script = WORKERS / "rank_0_alone.py"
    plain = run_ranks(script, word)
    assert len(numbers_in(plain.stdout)) == 1
    for strategy in ("NNG", "GGG", *(("NNN",) if word == "load" else ())):
        done = run_ranks(script, word, plan=plan_for(a_plan, tmp_path / f"{strategy}.json", strategy), timeout_s=60)
        assert (done.returncode != 0) is (strategy in refused), done.stderr[-3000:]
        if strategy in refused:
            assert re.search("must not be sent round before the next step|all ranks must load weights", done.stderr)
        else:
            assert numbers_in(done.stdout) == pytest.approx(numbers_in(plain.stdout), rel=2e-6)


@pytest.mark.distributed
@pytest.mark.parametrize(
    ("word", "refusal"),
    [
        ("part", ""),
        ("forgets", ""),
        ("forgets_ddp", "rank 0 begins one that is reduced, in eval mode"),
        ("saliency", "backward passes of a model under a plan must be made by all ranks"),
    ],
)
def test_ddp_scripts_evaluate_on_rank_0_alone_or_are_told(a_plan, tmp_path, word, refusal):
    """Whatever of the model it runs, with gradients that it forgets or without: the other ranks train on meanwhile."""
    script = WORKERS / "rank_0_alone.py"
    plan = plan_for(a_plan, tmp_path / "GGG.json", "GGG")
    done = run_ranks(script, word, plan=plan, timeout_s=60)
    if refusal:
        assert done.returncode != 0
        assert refusal in done.stderr
        return
    seen = numbers_in(run_ranks(script, word).stdout)
    assert len(seen) == 4 + 1
    assert numbers_in(done.stdout) == pytest.approx(seen, rel=2e-6), done.stderr[-3000:]


@pytest.mark.distributed
@pytest.mark.parametrize(
    "word",
    [
        *(
            pytest.param(word, marks=pytest.mark.variant)
            for word in ("amid_saves", "amid_evaluates", "amid_looks", "amid_both")
        ),
        "amid_part", "amid_frozen_looks", "broken_saves", "broken_evaluates",
    ],
)  # fmt: skip
def test_rank_0_looks_at_the_model_between_forward_and_backward_or_after_a_broken_one(a_plan, tmp_path, word):
    """Its gathers met those that the others made in backward: it read one unit's values for another's."""
    script = WORKERS / "rank_0_alone.py"
    seen = numbers_in(run_ranks(script, word).stdout)
    assert len(seen) == 3 * (2 if word == "amid_both" else 1) + 1
    for strategy in ("GGG", "IIG"):
        done = run_ranks(script, word, plan=plan_for(a_plan, tmp_path / f"{strategy}.json", strategy), timeout_s=60)
        assert numbers_in(done.stdout) == pytest.approx(seen, rel=2e-6), (strategy, done.stderr[-3000:])


@pytest.mark.distributed
def test_ranks_that_hold_whole_parameters_may_begin_unequal_numbers_of_passes(a_plan, tmp_path):
    """Rank 0 evaluates by DDP's wrapper and forgets ``no_grad``: it meets the others once more in each step."""
    script = WORKERS / "rank_0_alone.py"
    seen = numbers_in(run_ranks(script, "forgets_ddp").stdout)
    for strategy in ("NNN", "NNG"):
        plan = plan_for(a_plan, tmp_path / f"{strategy}.json", strategy)
        done = run_ranks(script, "forgets_ddp", plan=plan, timeout_s=60)
        assert numbers_in(done.stdout) == pytest.approx(seen, rel=2e-6), (strategy, done.stderr[-3000:])


@pytest.mark.distributed
@pytest.mark.parametrize("strategy", [pytest.param("NNG", marks=pytest.mark.variant), "GGG"])
def test_rank_0_runs_the_model_before_the_others_train(a_plan, tmp_path, strategy):
    """The plan took the model over in that pass, on rank 0 alone, and the job hung."""
    script = WORKERS / "rank_0_alone.py"
    seen = numbers_in(run_ranks(script, "before").stdout)
    assert len(seen) == 2 + 1
    done = run_ranks(script, "before", plan=plan_for(a_plan, tmp_path / "plan.json", strategy), timeout_s=60)
    assert numbers_in(done.stdout) == pytest.approx(seen, rel=2e-6), done.stderr[-3000:]


@pytest.mark.distributed
def test_a_rank_that_trains_by_itself_before_the_others_is_told(a_plan, tmp_path):
    """Plain DDP would wait for the others in its backward pass."""
    plan = plan_for(a_plan, tmp_path / "plan.json", "NNG")
    done = run_ranks(WORKERS / "rank_0_alone.py", "before_and_trains", plan=plan, timeout_s=60)
    assert done.returncode != 0
    assert "all ranks must train a model under a plan" in done.stderr


@pytest.mark.distributed
def test_rank_0_runs_weights_of_its_own_or_is_told(a_plan, tmp_path):
    """As scripts put a mean of weights in, and draw samples: sharded, it has changed its rows alone."""
    script = WORKERS / "rank_0_alone.py"
    seen = numbers_in(run_ranks(script, "swap_evaluates").stdout)
    done = run_ranks(script, "swap_evaluates", plan=plan_for(a_plan, tmp_path / "NNG.json", "NNG"), timeout_s=60)
    assert numbers_in(done.stdout)[0] == pytest.approx(seen[0], rel=2e-6), done.stderr[-3000:]
    done = run_ranks(script, "swap_evaluates", plan=plan_for(a_plan, tmp_path / "GGG.json", "GGG"), timeout_s=60)
    assert done.returncode != 0
    assert "got a pass of rank 0 after changes" in done.stderr
    assert "swapped" not in done.stdout


@pytest.mark.distributed
def test_what_rank_0_saves_when_the_others_have_left_is_whole_or_refused(a_plan, tmp_path):
    script = WORKERS / "rank_0_alone.py"
    seen = numbers_in(run_ranks(script, "late").stdout)
    done = run_ranks(script, "late", plan=plan_for(a_plan, tmp_path / "NNG.json", "NNG"), timeout_s=60)
    assert numbers_in(done.stdout) == pytest.approx(seen, rel=2e-6), done.stderr[-3000:]
    done = run_ranks(script, "late", plan=plan_for(a_plan, tmp_path / "GGG.json", "GGG"), timeout_s=60)
    assert done.returncode != 0
    assert "must be read while all ranks are there" in done.stderr


def test_rank_0_tells_that_nobody_comes_to_help_it_read_the_model(monkeypatch, capfd):
    waiting = object.__new__(attendance.Attendance)
    waiting._rank, waiting._is_over = 0, False
    monkeypatch.setattr(waiting, "_say", lambda _: None)
    monkeypatch.setattr(attendance, "LONG_WAIT_S", 0.01)
    with waiting.meeting("parameters"):
        time.sleep(0.5)
    assert "let them wait in torch.distributed.barrier() over all ranks" in capfd.readouterr().err


@pytest.mark.distributed
def test_a_rank_that_stays_in_eval_mode_trains_where_it_holds_whole_parameters(a_plan, tmp_path):
    script = WORKERS / "rank_0_alone.py"
    plain, plan = run_ranks(script, "stays"), plan_for(a_plan, tmp_path / "NNG.json", "NNG")
    done = run_ranks(script, "stays", plan=plan, timeout_s=60)
    assert numbers_in(done.stdout) == pytest.approx(numbers_in(plain.stdout), rel=2e-6), done.stderr[-3000:]


@pytest.mark.distributed
@pytest.mark.parametrize("word", ["read", "read_1"])
def test_ddp_scripts_that_read_shards_on_one_rank_are_told_and_do_not_hang(a_plan, tmp_path, word):
    plan = plan_for(a_plan, tmp_path / "GGG.json", "GGG")
    done = run_ranks(WORKERS / "rank_0_alone.py", word, plan=plan, timeout_s=60)
    assert done.returncode != 0
    assert re.search(r"(reads?|does so) at \S*rank_0_alone.py:\d+", done.stderr)
    assert "take the read, or what samples by a method other than forward, out of" in done.stderr
