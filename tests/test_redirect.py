"""What scripts may do around a planned model, and what a plan refuses.

Ranks are forked where it does not matter how they were started; test_loop.py starts them as users do.
"""

from __future__ import annotations

import importlib
import importlib.util
import re
import sys
from contextlib import nullcontext
from typing import Any

import pytest
from conftest import ROOT
from loop import SCRIPTS, paro, plan_for
from ranks import forked, numbers_in, run_ranks

from paro_advise.errors import TrainingError
from paro_advise.runtime.import_hooks import when_imported

WORKERS = ROOT / "tests/workers"


UNWRAPPED = """
import sys
sys.path.insert(0, {scripts!r})
import torch
import torch.distributed as dist
from common import batch, loss_of, make_model, parse_args

args = parse_args()
dist.init_process_group("gloo")
model = make_model(args)
probe = torch.optim.SGD([torch.nn.Parameter(torch.ones(3))])
probe.step()  # of something else
optimizer = torch.optim.AdamW(model.parameters())
print("made")
loss_of(model, batch(args, 0, 0, dist.get_rank())).backward()
for parameter in model.parameters():
    dist.all_reduce(parameter.grad)
optimizer.step()
print("stepped")
"""

REMEMBERS = """
import sys
sys.path.insert(0, {scripts!r})
import torch
import torch.distributed as dist
from common import batch, loss_of, make_model, parse_args

args = parse_args()
dist.init_process_group("gloo")
inner = make_model(args)
model = torch.nn.parallel.DistributedDataParallel(inner)
before = inner.state_dict()
optimizer = torch.optim.AdamW(model.parameters())
for step in range(2):
    loss_of(model, batch(args, step, 0, dist.get_rank())).backward()
    optimizer.step()
    optimizer.zero_grad()
model.train().cpu().to(torch.float32)  # as Lightning leaves a job
inner.to("cpu")
try:
    inner.half()
except Exception as error:
    print("half:", error)
now = inner.state_dict()
print("away by", max((now[name] - value).abs().max().item() for name, value in before.items()), flush=True)
"""


FROZEN = """
import builtins
import sys
import time
import torch
import torch.distributed as dist

dist.init_process_group("gloo")
if dist.get_rank():
    builtins.print = lambda *words: None  # as public scripts do on all ranks but one
torch.manual_seed(0)
torch.set_default_dtype(torch.float64)
width = 80 if "wider" in sys.argv else 64
model = torch.nn.Sequential(torch.nn.Linear(64, width), torch.nn.ReLU(), torch.nn.Linear(width, 64))
model[0].requires_grad_(False)
ddp = torch.nn.parallel.DistributedDataParallel(model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
torch.set_default_device("meta")  # as "cuda" is set where there is a device
for step in range(7):
    ddp(torch.randn(4, 64, device="cpu")).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
# gloo's threads let go of the last all-reduce, and of Python objects with it: where the model is dropped at that very
# moment, torch joins them with the interpreter locked, and plain DDP hangs or aborts (one run in eight of torch 2.13).
time.sleep(0.5)
dist.destroy_process_group()
"""


@pytest.mark.distributed
def test_steps_in_unusual_orders_train_alike(a_plan, tmp_path):
    """Gradients dropped, looked at, made by two backward passes or by a closure; inner passes told to some modules."""
    plain = run_ranks(WORKERS / "unusual_steps.py")
    assert plain.returncode == 0, plain.stderr[-3000:]
    expected = numbers_in(plain.stdout)
    assert len(expected) == 10 + 8  # a loss after each step, and a norm where it clips
    for strategy in ("IIG", "NIG", "NNN"):
        plan = plan_for(a_plan, tmp_path / f"{strategy}.json", strategy)
        done = run_ranks(WORKERS / "unusual_steps.py", plan=plan)
        assert done.returncode == 0, done.stderr[-3000:]
        assert f"runs as {strategy}" in done.stderr
        assert numbers_in(done.stdout) == pytest.approx(expected, rel=2e-6), strategy


@pytest.mark.distributed
@pytest.mark.parametrize("strategy", ["NGG", "IIG", pytest.param("GGG", marks=pytest.mark.variant), "NNN"])
def test_gradients_are_cleared_as_plain_torch_clears_them(strategy, a_plan, tmp_path):
    """To None by hand and by several optimizers: what is unused then has none. To zero: momentum and decay act on it."""
    script = WORKERS / "cleared_gradients.py"
    plain = run_ranks(script)
    plan = plan_for(a_plan, tmp_path / f"{strategy}.json", strategy)
    done = run_ranks(script, plan=plan, drift="parameter_count")
    missing = [re.findall(r"missing (\d \d)", one.stdout) for one in (plain, done)]
    assert missing[1] == missing[0], done.stderr[-3000:]
    assert len(missing[0]) == 2 * 5 * 5
    assert numbers_in(done.stdout) == pytest.approx(numbers_in(plain.stdout), rel=2e-6)


def output_of(script, plan, strategy, folder, words):
    """Run a script that saves into a folder, plain or under a strategy, and return what it prints."""
    folder.mkdir(exist_ok=True)
    chosen = plan_for(plan, folder / f"{strategy}.json", strategy) if strategy else None
    # A model with tied layers has fewer parameters than the one that the plan was made for.
    done = run_ranks(script, folder, words, plan=chosen, drift="parameter_count")
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


@pytest.mark.distributed
def test_ddp_scripts_save_on_rank_0_and_resume_anywhere(a_plan, tmp_path):
    """Losses, norms, weights and their mean; whole states and evaluations of one rank while the others go on.

    The optimizer is a ZeroRedundancyOptimizer in the first runs, and a frozen copy teaches; plain and planned.
    """
    script = WORKERS / "saves_on_rank_0.py"

    def plain(folder, words):
        return run_ranks(script, folder, words)

    def planned(strategy, folder, words):
        plan = plan_for(a_plan, tmp_path / f"{strategy}.json", strategy)
        return run_ranks(script, folder, words, plan=plan)

    folders = {name: tmp_path / name.lower() for name in ("plain", "NNG", "GGG")}
    for folder in folders.values():
        folder.mkdir()
    words = "teacher,evaluate"
    first = plain(folders["plain"], f"{words},mean,zero")
    assert first.returncode == 0, first.stderr[-3000:]
    expected = numbers_in(first.stdout)
    assert len(expected) == 3 * 4 + 2 + 2
    for strategy in ("NNG", "GGG"):
        done = planned(strategy, folders[strategy], f"{words},mean,zero")
        assert done.returncode == 0, done.stderr[-3000:]
        assert numbers_in(done.stdout) == pytest.approx(expected, rel=2e-6), strategy
    for done in (
        plain(folders["GGG"], f"{words},resume"),
        planned("GGG", folders["plain"], f"{words},resume"),
        planned("NNG", folders["GGG"], f"{words},resume,compile"),
        planned("GGG", folders["NNG"], f"{words},resume,compile_after"),
    ):
        assert done.returncode == 0, done.stderr[-3000:]
        assert numbers_in(done.stdout) == pytest.approx(expected[8:15], rel=2e-6), done.args


@pytest.mark.distributed
def test_steps_of_fewer_micro_batches_than_usual_are_not_lost(a_plan, tmp_path):
    """Whole gradients and group shards are then brought on without another backward pass."""
    expected = numbers_in(run_ranks(WORKERS / "uneven_steps.py").stdout)
    assert len(expected) == 2 * 7
    for strategy in ("NNG", "IIG"):
        plan = plan_for(a_plan, tmp_path / f"{strategy}.json", strategy)
        done = run_ranks(WORKERS / "uneven_steps.py", plan=plan)
        assert done.returncode == 0, done.stderr[-3000:]
        assert "fewer than the usual 3 backward passes" in done.stderr
        assert numbers_in(done.stdout) == pytest.approx(expected, rel=2e-6), strategy


@pytest.mark.distributed
def test_fsdp2_scripts_fill_save_and_resume_as_ever(a_plan, tmp_path):
    """From the meta device or from ranks that differ, through torch's checkpoint helpers, plain and planned.

    Those from the meta device have two optimizers, each of which takes its gradients off after its step.
    """

    def trained(strategy, folder, words):
        return numbers_in(output_of(WORKERS / "fsdp2_resumes.py", a_plan, strategy, tmp_path / folder, words))

    of_ranks = trained(None, "plain", "ranks,tied,evaluate,load_later,in_place")
    assert len(of_ranks) == 1 + 4 * 2 + 4
    assert of_ranks[9] == of_ranks[10]
    again = trained("NNG", "NNG", "ranks,tied,evaluate,load_later,in_place")
    assert again == pytest.approx(of_ranks, rel=2e-6)
    assert trained(None, "NNG", "ranks,tied,resume") == pytest.approx(of_ranks[5:11], rel=2e-6)

    seeded = trained(None, "seeded", "seeded,recomputed,two,whole")
    assert len(seeded) == 4 * 2 + 2
    assert seeded[8] == seeded[9]
    assert trained("IIG", "IIG", "seeded,recomputed,two,whole") == pytest.approx(seeded, rel=2e-6)
    assert trained("GGG", "IIG", "resume,recomputed,two,assigned") == pytest.approx(seeded[4:], rel=2e-6)


@pytest.mark.distributed
def test_fsdp1_scripts_use_its_own_state_dicts(a_plan, tmp_path):
    """Whole and sharded ones, of model and optimizer, wrapped by hand or by policy, plain and planned.

    What is summoned has the names of the model that was wrapped.
    """

    def trained(strategy, folder, words):
        text = output_of(WORKERS / "fsdp1_states.py", a_plan, strategy, tmp_path / folder, words)
        return numbers_in(text), [line for line in text.splitlines() if line.startswith(("summoned", "blocks"))]

    expected, names = trained(None, "plain", "nested,meta")
    assert len(expected) == 4 * 2 + 2
    found, found_names = trained("GGG", "GGG", "nested,meta,rank0")
    assert found == pytest.approx(expected, rel=2e-6)
    assert found_names == names
    assert trained(None, "GGG", "resume")[0] == pytest.approx(expected[4:], rel=2e-6)
    assert trained("NNG", "plain", "resume_shards")[0] == pytest.approx(expected[4:], rel=2e-6)


@pytest.mark.distributed
def test_optimizer_states_of_flat_units_with_checkpoints_resume_both_ways(a_plan, tmp_path):
    """FSDP1 saves one count of steps for all parameters of a unit, and no name of what activation checkpoints wrap."""

    def trained(strategy, folder, words):
        text = output_of(WORKERS / "fsdp1_states.py", a_plan, strategy, tmp_path / folder, f"{words},flat,recomputed")
        return numbers_in(text)

    expected = trained(None, "plain", "")
    assert len(expected) == 4 * 2 + 2
    assert trained("GGG", "plain", "resume") == pytest.approx(expected[4:], rel=2e-6)
    assert trained("IIG", "IIG", "") == pytest.approx(expected, rel=2e-6)
    assert trained(None, "IIG", "resume") == pytest.approx(expected[4:], rel=2e-6)


@pytest.mark.distributed
def test_deepspeed_clips_gradients_by_its_own_default(a_plan, tmp_path):
    """It is 1.0 in DeepSpeed 0.19.8, and was 0.0, none, before."""
    script = WORKERS / "deepspeed_resumes.py"
    expected = numbers_in(run_ranks(script, tmp_path, "plain,default").stdout)
    assert max(expected[1:-1:3]) > 1.0  # of the gradients' norms: they are clipped
    found = numbers_in(output_of(script, a_plan, "NNG", tmp_path, "default"))
    assert found == pytest.approx(expected, rel=2e-6)


@pytest.mark.distributed
def test_deepspeed_updates_parameters_that_no_rank_used_by_zero_gradients(a_plan, tmp_path):
    """Momentum and weight decay go on for a layer that is left out."""
    script = WORKERS / "deepspeed_resumes.py"
    expected = numbers_in(run_ranks(script, tmp_path, "plain,skips").stdout)
    assert len(expected) == 4 * 3 + 1
    for strategy in ("NNG", "IIG"):
        found = numbers_in(output_of(script, a_plan, strategy, tmp_path, "skips"))
        assert found == pytest.approx(expected, rel=2e-6), strategy


@pytest.mark.distributed
def test_a_deepspeed_script_that_calls_its_module_by_itself_is_told_before_it_trains(a_plan, tmp_path):
    plan = plan_for(a_plan, tmp_path / "NNG.json", "NNG")
    done = run_ranks(WORKERS / "deepspeed_resumes.py", tmp_path, "module", plan=plan)
    assert done.returncode != 0
    assert done.stderr.count("a plan needs passes through DeepSpeed's engine") == 4
    assert not numbers_in(done.stdout)


@pytest.mark.distributed
@pytest.mark.variant
def test_deepspeed_scripts_resume_from_the_checkpoints_of_a_planned_engine(a_plan, tmp_path):
    """With schedules, counts and the script's own values, before the first step, under another strategy."""
    script = WORKERS / "deepspeed_resumes.py"
    expected = numbers_in(run_ranks(script, tmp_path, "plain").stdout)
    assert len(expected) == 4 * 3 + 1
    found = numbers_in(output_of(script, a_plan, "NNG", tmp_path, ""))
    assert found == pytest.approx(expected, rel=2e-6)
    assert (tmp_path / "latest").read_text() == "global_step2"
    again = numbers_in(output_of(script, a_plan, "IIG", tmp_path, "resume"))
    assert again == pytest.approx(expected[6:], rel=2e-6)
    # The same weights, but the optimizer and its schedule begin anew.
    weights = numbers_in(output_of(script, a_plan, "GGG", tmp_path, "weights"))
    assert weights[2] == expected[2]
    assert weights[0] != pytest.approx(expected[0], rel=1e-3)

    theirs = tmp_path / "theirs/global_step1"
    theirs.mkdir(parents=True)
    (theirs / "mp_rank_00_model_states.pt").write_bytes(b"")
    plan = plan_for(a_plan, tmp_path / "GGG.json", "GGG")
    done = run_ranks(script, tmp_path, "theirs", plan=plan)
    assert done.returncode != 0
    assert done.stderr.count("a planned engine reads its own checkpoints, got one of DeepSpeed's") == 4
    (tmp_path / "own").mkdir()
    for words in ("own", "own,resume"):
        assert "values" in output_of(script, a_plan, "NNG", tmp_path / "own", words)
    # DeepSpeed would add the gradients of before to those of after.
    done = run_ranks(script, tmp_path, "amid", plan=plan)
    assert done.returncode != 0
    assert done.stderr.count("a checkpoint must be loaded between two steps") >= 1


@pytest.mark.distributed
@pytest.mark.parametrize(
    ("word", "tolerance"),
    [
        ("divisor", 2e-6),
        pytest.param("ahead", 2e-6, marks=pytest.mark.variant),
        ("bf16", 2**-8),
        pytest.param("fp32", 2e-6, marks=pytest.mark.variant),
        pytest.param("reduced", 2**-8, marks=pytest.mark.variant),
    ],
)  # bf16 has 8 bits
def test_fsdp2_in_bf16_and_with_its_own_divisor(word, tolerance, a_plan, tmp_path):
    plain = run_ranks(WORKERS / "low_precision.py", word)
    assert plain.returncode == 0, plain.stderr[-3000:]
    expected = numbers_in(plain.stdout)
    assert len(expected) == 3 * 2
    for strategy in ("NNG", "GGG"):
        plan = plan_for(a_plan, tmp_path / f"{strategy}.json", strategy)
        done = run_ranks(WORKERS / "low_precision.py", word, plan=plan)
        assert done.returncode == 0, done.stderr[-3000:]
        assert numbers_in(done.stdout) == pytest.approx(expected, rel=tolerance), strategy
        assert ("parameters rest in" in done.stderr) == (word == "bf16" and strategy == "NNG")


@pytest.mark.distributed
def test_fsdp2_in_bf16_keeps_what_a_script_changes_by_hand_in_fp32(a_plan, tmp_path):
    """Shards that are updated where they rest keep their type; where others do not, that is said."""
    plain = run_ranks(WORKERS / "low_precision.py", "edits")
    assert plain.returncode == 0, plain.stderr[-3000:]
    expected = numbers_in(plain.stdout)
    assert len(expected) == 3 * 2 + 2
    for strategy in ("GGG", "III", "NNG"):
        plan = plan_for(a_plan, tmp_path / f"{strategy}.json", strategy)
        done = run_ranks(WORKERS / "low_precision.py", "edits", plan=plan)
        is_told = "parameters rest in bfloat16 under NNG, in their own type in FSDP2" in done.stderr
        assert is_told == (strategy == "NNG")
        if strategy != "NNG":
            assert done.returncode == 0, done.stderr[-3000:]
            assert numbers_in(done.stdout)[-2:] == pytest.approx(expected[-2:], rel=1e-6), strategy


@pytest.mark.distributed
@pytest.mark.parametrize("words", ["ddp,accumulate", "fsdp2,toggle"])
def test_two_models_train_each_other(words, a_plan, tmp_path):
    """A GAN; with DDP rank 0 saves and evaluates both while the others go on, and both resume."""

    def trained(strategy, folder, words):
        return numbers_in(output_of(WORKERS / "two_models.py", a_plan, strategy, tmp_path / folder, words))

    expected = trained(None, "plain", words)
    assert len(expected) == 4 * 3 + ("ddp" in words)
    for strategy in ("NNG", "GGG"):
        assert trained(strategy, strategy, words) == pytest.approx(expected, rel=2e-6), strategy
    if "ddp" in words:
        assert trained("GGG", "NNG", f"{words},resume") == pytest.approx(expected[7:], rel=2e-6)
        assert trained(None, "GGG", f"{words},resume") == pytest.approx(expected[7:], rel=2e-6)


@pytest.mark.distributed
def test_models_that_share_a_layer_stop_the_job(a_plan, tmp_path):
    job = forked(WORKERS / "two_models.py", tmp_path, "ddp,shared")
    done = paro("run", "--plan", a_plan, "--allow-drift", "parameter_count", job=job)
    assert done.returncode != 0
    assert not numbers_in(done.stdout)
    assert "models that share nothing" in done.stderr


@pytest.mark.distributed
def test_a_plan_of_a_model_with_frozen_parameters_fits_it(tmp_path):
    """DDP's trace shows what trains: the frozen half is no other model; ``print`` and torch's defaults are the script's."""
    script = tmp_path / "frozen.py"
    script.write_text(FROZEN)
    job = forked(script, ranks=2)
    assert paro("capture", "-o", tmp_path / "before", "--steps", "3:5", job=job).returncode == 0
    assert paro("recommend", tmp_path / "before", "--strategy", "NNG", "-o", tmp_path / "plan.json").returncode == 0
    done = paro("run", "--plan", tmp_path / "plan.json", job=job)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "DDP of Sequential runs as NNG" in done.stderr
    refused = paro("run", "--plan", tmp_path / "plan.json", job=forked(script, "wider", ranks=2))
    assert refused.stderr.count("the plan must fit the job") == 2  # from both ranks, although one must not print
    assert "Traceback" not in refused.stderr


@pytest.mark.distributed
def test_a_job_that_trains_nothing_is_told_that_its_plan_did_nothing(a_plan):
    done = paro("run", "--plan", a_plan, job=[sys.executable, "-c", "import torch"])
    assert done.returncode == 4
    assert "plan" in done.stderr


@pytest.mark.distributed
def test_a_plan_that_nothing_takes_up_ends_the_job_at_its_first_step(a_plan, tmp_path):
    script = tmp_path / "plain.py"
    script.write_text(UNWRAPPED.format(scripts=str(SCRIPTS)))
    done = paro("run", "--plan", a_plan, job=forked(script))
    assert done.returncode != 0
    assert "made" in done.stdout
    assert "stepped" not in done.stdout
    assert "a plan needs a model that FSDP2, FSDP1, DDP or DeepSpeed wraps" in done.stderr


@pytest.mark.distributed
def test_a_ddp_model_may_be_moved_where_it_is_and_its_states_from_before_follow_or_are_refused(a_plan, tmp_path):
    """In plain DDP a state dict follows the training; under a plan that shards parameters it cannot."""
    script = tmp_path / "remembers.py"
    script.write_text(REMEMBERS.format(scripts=str(SCRIPTS)))
    for strategy, refused in (("NNG", False), ("GGG", True)):
        plan = plan_for(a_plan, tmp_path / f"{strategy}.json", strategy)
        done = paro("run", "--plan", plan, job=forked(script))
        assert done.stdout.count("parameters under a strategy must keep their type, torch.float32") == 4, done.stderr
        assert ("away by 0.0" in done.stdout) is not refused, done.stderr[-3000:]
        assert ("a state dict from before the first training pass does not follow" in done.stderr) is refused


def test_asking_whether_a_module_is_there_does_not_use_up_the_wait_for_it(tmp_path, monkeypatch):
    (tmp_path / "waited_for.py").write_text("value = 3\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    seen = []
    when_imported("waited_for", lambda module: seen.append(module.value))
    assert importlib.util.find_spec("waited_for") is not None
    assert seen == []
    importlib.import_module("waited_for")
    assert seen == [3]
    monkeypatch.delitem(sys.modules, "waited_for")


def test_methods_of_fsdp2s_class_are_those_of_its_modules():
    """Scripts call them by the class too; what they put in their place would reach no module."""
    pytest.importorskip("torch")
    from torch import nn
    from torch.distributed.fsdp import FSDPModule

    from paro_advise.errors import TrainingError
    from paro_advise.runtime.adapters.fsdp2 import PlannedModule, _standing_for

    kind: Any = _standing_for(FSDPModule)
    assert {name for name in vars(FSDPModule) if not name.startswith("_")} <= set(vars(kind))

    class Planned(PlannedModule, nn.Linear):
        def set_gradient_divide_factor(self, factor):
            self.factor = factor

    module = Planned(2, 2)
    assert isinstance(module, kind)
    kind.set_gradient_divide_factor(module, 4.0)
    assert module.factor == 4.0
    with pytest.raises(TrainingError, match="set_gradient_divide_factor"):
        kind.set_gradient_divide_factor = None


@pytest.mark.distributed
def test_ranks_with_different_numbers_of_passes_train_or_are_told(a_plan, tmp_path):
    """Packed batches give ranks different numbers of micro-batches: plain DDP meets in the last one only."""
    expected = numbers_in(run_ranks(WORKERS / "uneven_passes.py").stdout)
    assert len(expected) == 4 + 1
    plan = plan_for(a_plan, tmp_path / "plan.json", "NNG", collectives="native")
    done = run_ranks(WORKERS / "uneven_passes.py", plan=plan)
    assert numbers_in(done.stdout) == pytest.approx(expected, rel=1e-6), done.stderr[-3000:]
    # Where parameters are sharded each pass gathers them: the group would wait until its timeout.
    done = run_ranks(WORKERS / "uneven_passes.py", plan=plan_for(a_plan, tmp_path / "plan.json", "GGG"))
    assert done.returncode != 0
    assert "all ranks must take equally many passes" in done.stderr


@pytest.mark.parametrize(("stage", "is_refused"), [(0, True), (None, True), (1, False), (3, False)])
def test_bf16_of_deepspeed_without_zero_is_refused(stage, is_refused):
    """Its FP16_UnfusedOptimizer steps once with zero gradients when it is made: losses would differ by 2 %."""
    from paro_advise.runtime.adapters.deepspeed.config import check_table

    zero = {} if stage is None else {"zero_optimization": {"stage": stage}}
    with pytest.raises(TrainingError, match="bf16 without ZeRO") if is_refused else nullcontext():
        check_table({"bf16": {"enabled": True}, **zero})
    check_table({"bf16": {"enabled": False}, **zero})


@pytest.mark.parametrize(("of_script", "alike"), [(0, {0}), (1, {0, 1, 2}), (2, {0, 1, 2}), (3, {0, 1, 2, 3})])
def test_deepspeed_runs_a_stage_itself_where_it_hides_nothing_from_the_script(of_script, alike):
    """A script for stage 1 that saves ``engine.module.state_dict()`` would save nothing at stage 3."""
    from paro_advise.runtime.adapters.deepspeed.config import shows_as_much

    assert {stage for stage in range(4) if shows_as_much(stage, of_script)} == alike
