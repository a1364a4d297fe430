"""What public scripts do around and inside their models trains as in their own framework, or is refused."""

from __future__ import annotations

import pytest
import torch
from conftest import ROOT
from loop import plan_for
from ranks import run_ranks

from paro_advise.errors import UsageError
from paro_advise.runtime.adapters.raw_errors import asks_for_what_dtensors_have, is_of_sharded_tensors

WORKER = ROOT / "tests/workers/script_habits.py"
# Changes of weights while FSDP2 has them gathered are lost in plain FSDP2, and count in plain DDP.
CHANGES = {
    "changes itself in forward",
    "changes itself plainly",
    "changes the root in forward",
    "changes the root before backward",
    "limits its embedding",
}
# In plain DDP each replica goes its own way then, if ranks see other inputs or sizes.
DRIFTS = {"steps on its own", "goes back twice", "limits its embedding"}
# FSDP2 itself adds what is not reduced to the next step's gradients.
LEFT_UNREDUCED = {"steps unreduced", "drops unreduced"}
OF_DDP = {*DRIFTS, "sparse", "deals parameters out", "grows"}
REFUSED = {
    ("ddp", "NNG"): OF_DDP,
    ("ddp", "IIG"): {*OF_DDP, *CHANGES, "penalizes gradients"},
    ("ddp", "GGG"): {*OF_DDP, *CHANGES, "penalizes gradients"},
    # FSDP1 gives zeros for what no rank used.
    ("fsdp1", "NNG"): {"changes itself in forward", "changes the root before backward", "trains while whole"},
    ("fsdp1", "IIG"): {"changes itself in forward", "changes the root before backward", "trains while whole"},
    ("fsdp2", "NNG"): {*CHANGES, *LEFT_UNREDUCED},
    ("fsdp2", "IIG"): LEFT_UNREDUCED,
}
USUAL = {("ddp", "GGG"), ("fsdp1", "NNG"), ("fsdp2", "IIG")}  # one of each framework, with all three ways of parameters


def jobs_of(framework, plan=None, worker=WORKER):
    done = run_ranks(worker, framework, plan=plan, drift="parameter_count")
    assert done.returncode == 0, done.stderr[-3000:]
    told = dict(line.split("|", 1) for line in done.stdout.splitlines() if "|" in line)
    refused = {name for name, text in told.items() if text.startswith("refused")}
    numbers = {name: [float(word) for word in text.split()] for name, text in told.items() if name not in refused}
    return numbers, refused, done.stderr


@pytest.mark.distributed
@pytest.mark.parametrize(
    ("framework", "strategy"),
    [pytest.param(*way, marks=[] if way in USUAL else [pytest.mark.variant]) for way in REFUSED],
)
def test_jobs_are_those_of_the_plain_framework_or_refused(framework, strategy, a_plan, tmp_path):
    plain, refused, _ = jobs_of(framework)
    assert refused == ({"sparse"} if framework == "ddp" else set())  # AdamW takes no sparse gradients either
    assert len(plain) >= 6
    expected = REFUSED[framework, strategy]
    found, refused, told = jobs_of(framework, plan_for(a_plan, tmp_path / f"{strategy}.json", strategy))
    assert refused == expected
    assert ("gradients must be dense" in told) is ("sparse" in expected)
    for name, numbers in found.items():
        assert numbers == pytest.approx(plain[name], rel=2e-6), name


# A norm of FSDP1's shards is another one than that of gradients which act as whole.
OF_SHARDS = {
    "sums norms of shards", "averages squares of shards", "scales by norms of shards", "adds sums of shards",
}  # fmt: skip
OF_FSDP2 = {"assigns data", "assigns data in groups", "wraps layers alone", "adds rows up in groups"}
REFUSED_OF_FRAMEWORKS = {
    ("ddp", "NNG"): {"trains two with one optimizer", "loads by assignment", "steps in hooks"},
    ("ddp", "GGG"): {
        "trains two with one optimizer", "loads by assignment", "steps in hooks", "puts weights in place in forward",
        "perturbs by a gradient of its own",
    },
    ("fsdp1", "NNG"): OF_SHARDS,
    ("fsdp1", "GGG"): OF_SHARDS,
    ("fsdp2", "NNG"): {"edits while gathered", "gathers twice and edits", "adds rows up", *OF_FSDP2},
    ("fsdp2", "IIG"): {"adds rows up", *OF_FSDP2},
    ("fsdp2", "GGG"): OF_FSDP2,
}  # fmt: skip
FURTHER = {("fsdp1", "NNG"), ("fsdp2", "NNG"), ("fsdp2", "IIG")}


@pytest.mark.distributed
@pytest.mark.parametrize(
    ("framework", "strategy"),
    [pytest.param(*way, marks=[pytest.mark.variant] if way in FURTHER else []) for way in REFUSED_OF_FRAMEWORKS],
)
def test_what_scripts_do_by_means_of_one_framework(framework, strategy, a_plan, tmp_path):
    worker = ROOT / "tests/workers/framework_habits.py"
    plain, refused, _ = jobs_of(framework, worker=worker)
    assert refused == set()
    plan = plan_for(a_plan, tmp_path / "plan.json", strategy)
    found, refused, told = jobs_of(framework, plan, worker)
    assert refused == REFUSED_OF_FRAMEWORKS[framework, strategy]
    if framework != "fsdp1":
        assert "an optimizer under a plan must hold parameters of one wrapped model only" in told
    for name, numbers in found.items():
        assert numbers == pytest.approx(plain[name], rel=2e-6), name


@pytest.mark.distributed
@pytest.mark.parametrize(
    ("jobs", "framework"),
    [
        ("shared_layers", "ddp"), ("shared_layers", "fsdp2"), ("few_rows", "ddp"),
        pytest.param("shared_layers", "fsdp1", marks=pytest.mark.variant),
    ],
)  # fmt: skip
def test_layers_may_stand_in_several_places_or_have_fewer_rows_than_ranks(jobs, framework, a_plan, tmp_path):
    worker = ROOT / f"tests/workers/{jobs}.py"
    plain, refused, _ = jobs_of(framework, worker=worker)
    assert refused == set()
    found, refused, _ = jobs_of(framework, plan_for(a_plan, tmp_path / "plan.json", "GGG"), worker)
    assert refused == set()
    for name, numbers in found.items():
        assert numbers == pytest.approx(plain[name], rel=2e-6), name


@pytest.mark.distributed
@pytest.mark.parametrize("strategy", ["IIG", *(pytest.param(way, marks=pytest.mark.variant) for way in ("GGG", "NNG"))])
def test_what_stays_gathered_behind_backward_is_in_the_norm_or_refused(strategy, a_plan, tmp_path):
    """In plain FSDP2 it is left out of the norm, until the script frees it; torchtitan's chunked loss does."""
    worker = ROOT / "tests/workers/resharding_habits.py"
    plain, refused, _ = jobs_of("fsdp2", worker=worker)
    assert refused == set()
    found, refused, _ = jobs_of("fsdp2", plan_for(a_plan, tmp_path / "plan.json", strategy), worker)
    assert refused == {"keeps gathered"}
    for name, numbers in found.items():
        assert numbers == pytest.approx(plain[name], rel=2e-2 if "bf16" in name else 2e-6), name


@pytest.mark.distributed
@pytest.mark.parametrize(
    "strategy", ["IIG", *(pytest.param(way, marks=pytest.mark.variant) for way in ("NNG", "NIG", "GGG"))]
)
def test_lists_with_a_parameter_that_stays_whole_are_changed_once(strategy, a_plan, tmp_path):
    """A temperature lies among DTensors, which torch refuses to mix; nothing may be done to it twice."""
    worker = ROOT / "tests/workers/list_habits.py"
    plain, refused, _ = jobs_of("ddp", worker=worker)
    assert refused == set()
    found, refused, _ = jobs_of("ddp", plan_for(a_plan, tmp_path / "plan.json", strategy), worker)
    assert refused == set()
    assert len(found) == 17
    for name, numbers in found.items():
        assert numbers == pytest.approx(plain[name], rel=2e-6), name


@pytest.mark.distributed
@pytest.mark.parametrize(
    "strategy", ["NNG", "IIG", *(pytest.param(way, marks=pytest.mark.variant) for way in ("NIG", "GGG"))]
)
def test_copies_of_a_model_are_whole_and_plain_as_torchs_own(strategy, a_plan, tmp_path):
    """Detectors copy and save the whole model on rank 0, means of weights begin with a copy; it has no gradients."""
    worker = ROOT / "tests/workers/copy_habits.py"
    plain, refused, _ = jobs_of("ddp", worker=worker)
    assert refused == set()
    found, refused, _ = jobs_of("ddp", plan_for(a_plan, tmp_path / "plan.json", strategy), worker)
    assert refused == set()
    assert len(found) == len(plain) == 7
    for name, numbers in found.items():
        assert numbers == pytest.approx(plain[name], rel=2e-6), name


@pytest.mark.distributed
@pytest.mark.parametrize(
    ("framework", "strategy"),
    [
        ("ddp", "IIG"),
        *(
            pytest.param(*way, marks=pytest.mark.variant)
            for way in (("ddp", "NNG"), ("ddp", "GGG"), ("fsdp1", "IIG"), ("fsdp2", "GGG"))
        ),
    ],
)
def test_what_a_model_returns_of_its_parameters_can_be_read_after_the_pass(framework, strategy, a_plan, tmp_path):
    """Deviations of policies, weights for a loss outside: where parameters are freed they are copies, until a step."""
    worker = ROOT / "tests/workers/view_habits.py"
    plain, refused, _ = jobs_of(framework, worker=worker)
    assert refused == set()
    found, refused, _ = jobs_of(framework, plan_for(a_plan, tmp_path / "plan.json", strategy), worker)
    is_copy = framework == "ddp" and strategy != "NNG"
    assert refused == (
        {"reads after the step", "changes what it got", "changes it before the step"} if is_copy else set()
    )
    assert set(found) == set(plain) - refused
    for name, numbers in found.items():
        assert numbers == pytest.approx(plain[name], rel=2e-6), name


# No rank has a whole gradient to hook, or takes one after it has reduced the unit's; and gradients that are dropped while
# parameters are gathered are refused, never lost; so are those of a backward pass whose end nobody sees.
REFUSED_OF_LIBRARIES = {
    "hooks by groups",
    "penalizes, then passes",
    "drops and trains inside",
    "answers after checkpoints",
    "answers from one unit",
    "prunes amid training",
}


@pytest.mark.distributed
@pytest.mark.variant
@pytest.mark.parametrize("strategy", ["NNG", "IIG", "GGG"])
def test_what_libraries_do_with_a_model_of_ddp(strategy, a_plan, tmp_path):
    """By names of classes, groups of optimizers and lists of norms, as transformers and Lightning do."""
    worker = ROOT / "tests/workers/library_habits.py"
    plain, refused, _ = jobs_of("ddp", worker=worker)
    assert refused == set()
    found, refused, _ = jobs_of("ddp", plan_for(a_plan, tmp_path / "plan.json", strategy), worker)
    assert refused == ({"prunes amid training"} if strategy == "NNG" else REFUSED_OF_LIBRARIES)
    for name, numbers in found.items():
        assert numbers == pytest.approx(plain[name], rel=2e-6), name


WAYS = [pytest.param("ddp", "NNG", marks=pytest.mark.variant), ("ddp", "GGG"), ("fsdp2", "IIG")]


def trained_alike(framework, worker, plan):
    """Compare a worker's jobs with the plain framework's, which refuses none; return those and what the plan refuses."""
    plain, refused, _ = jobs_of(framework, worker=worker)
    assert refused == set()
    found, refused, _ = jobs_of(framework, plan, worker)
    for name, numbers in found.items():
        assert numbers == pytest.approx(plain[name], rel=2e-6), name
    return plain, refused


@pytest.mark.distributed
@pytest.mark.parametrize(("framework", "strategy"), WAYS)
def test_closures_are_called_when_and_as_often_as_the_optimizer_does(framework, strategy, a_plan, tmp_path):
    plan = plan_for(a_plan, tmp_path / "plan.json", strategy)
    plain, refused = trained_alike(framework, ROOT / "tests/workers/closure_habits.py", plan)
    assert refused == set()
    calls = {name: numbers[-2] for name, numbers in plain.items()}  # in three steps
    assert calls.pop("halves its gradients") == 3
    assert min(calls.values()) >= 6


@pytest.mark.distributed
@pytest.mark.parametrize(("framework", "strategy"), WAYS)
def test_own_methods_and_hooks_are_called_where_torch_calls_them(framework, strategy, a_plan, tmp_path):
    """What an optimizer's add to its state is saved. Parts of states in the place of whole ones are refused."""
    plan = plan_for(a_plan, tmp_path / "plan.json", strategy)
    _, refused = trained_alike(framework, ROOT / "tests/workers/own_methods.py", plan)
    assert refused == ({"saves by hand", "saves its table"} if framework == "ddp" else set())


@pytest.mark.distributed
@pytest.mark.parametrize(("framework", "strategy"), WAYS)
def test_gradients_from_before_training_are_kept_where_the_framework_keeps_them(framework, strategy, a_plan, tmp_path):
    """DDP adds to them, as to those of ``no_sync``; FSDP2 drops them."""
    plan = plan_for(a_plan, tmp_path / "plan.json", strategy)
    plain, refused = trained_alike(framework, ROOT / "tests/workers/left_gradients.py", plan)
    assert refused == set()
    assert (plain["left before it is wrapped"] == plain["dropped after forward"]) is (framework != "ddp")


@pytest.mark.distributed
@pytest.mark.parametrize("strategy", ["NNG", pytest.param("GGG", marks=pytest.mark.variant)])
def test_the_second_pass_after_one_that_ddp_reduces_in_no_sync_is_refused(strategy, a_plan, tmp_path):
    """DDP leaves the gradients of the second one on each rank; a plan has added both up, unsaid."""
    worker = ROOT / "tests/workers/passes_in_no_sync.py"
    plain, refused, _ = jobs_of("ddp", worker=worker)
    assert refused == set()
    found, refused, _ = jobs_of("ddp", plan_for(a_plan, tmp_path / "plan.json", strategy), worker)
    assert refused == {"goes back again outside"}
    again = "runs again for the second pass"
    assert found[again] == pytest.approx(plain[again], rel=2e-6)


@pytest.mark.distributed
def test_what_torch_cannot_do_with_sharded_tensors_is_explained(a_plan, tmp_path):
    """Its words name DTensors, which no line of such a script does."""
    flat = ROOT / "tests/workers/flat_updates.py"
    assert run_ranks(flat).stdout.count("trained") > 0
    done = run_ranks(flat, plan=plan_for(a_plan, tmp_path / "GGG.json", "GGG"), drift="parameter_count")
    assert done.returncode == 1
    assert "mixed torch.Tensor and DTensor" in done.stderr
    assert "under a plan an optimizer meets sharded parameters and gradients" in done.stderr
    assert "take its form for a single device" in done.stderr


def test_a_plain_tensor_that_is_taken_for_a_dtensor_is_explained():
    for name, is_explained in {"to_local": True, "full_tensor": True, "no_such_thing": False}.items():
        with pytest.raises(AttributeError) as caught:
            getattr(torch.zeros(2), name)
        assert asks_for_what_dtensors_have(caught.value) is is_explained
    assert not asks_for_what_dtensors_have(AttributeError("'Model' object has no attribute 'to_local'"))


@pytest.mark.parametrize(
    ("raised", "is_explained"),
    [
        (RuntimeError("aten.copy_.default got mixed torch.Tensor and DTensor"), True),
        (NotImplementedError("Operator aten.frexp does not have a sharding strategy registered."), True),
        (UsageError("a DTensor must be read by all ranks"), False),  # it says itself what to do
        (ValueError("shapes differ"), False),
        (KeyboardInterrupt(), False),
    ],
)
def test_only_errors_about_sharded_tensors_are_explained(raised, is_explained):
    assert is_of_sharded_tensors(raised) == is_explained
    outer = RuntimeError("training failed")
    outer.__cause__ = raised
    assert is_of_sharded_tensors(outer) == is_explained


@pytest.mark.distributed
def test_ranks_that_work_on_sharded_weights_in_unlike_orders_are_told(a_plan, tmp_path):
    """What torch exchanges then pairs one weight's rows with another's, which no shape tells."""
    worker = ROOT / "tests/workers/order_of_exchanges.py"
    plan = plan_for(a_plan, tmp_path / "plan.json", "GGG")
    done = run_ranks(worker, plan=plan, drift="parameter_count")
    assert done.returncode != 0
    assert "all ranks must do the same to sharded tensors in one order" in done.stderr


@pytest.mark.distributed
def test_means_of_weights_from_before_the_plan_take_the_place_of_weights(a_plan, tmp_path):
    """After clipping, torch's own AssertionError ended the job: it keeps what it once called after a change in place."""
    worker = ROOT / "tests/workers/kept_dtensors.py"
    plain, _, _ = jobs_of("", worker=worker)
    assert len(plain["sums"]) == 8
    found, _, _ = jobs_of("", plan_for(a_plan, tmp_path / "plan.json", "NNG"), worker)
    assert found["sums"] == pytest.approx(plain["sums"], rel=2e-6)


@pytest.mark.distributed
def test_an_optimizer_that_plain_fsdp1_would_train_nothing_with_is_refused(a_plan, tmp_path):
    """FSDP1 makes flat parameters of its own; under a plan the model trained, unsaid."""
    worker = ROOT / "tests/workers/early_optimizer.py"
    told = {words: run_ranks(worker, *words).stdout.split() for words in ((), ("orig",))}
    assert len(set(told[()])) == 1
    assert len(set(told["orig",])) == 3
    plan = plan_for(a_plan, tmp_path / "plan.json", "NNG")
    done = run_ranks(worker, plan=plan, drift="parameter_count")
    assert done.returncode == 1
    assert "flattens must be made after it, got a SGD of before" in done.stderr
    assert done.stdout == ""
    assert run_ranks(worker, "orig", plan=plan, drift="parameter_count").stdout.split() == told["orig",]


UNFREEZES = """
import sys
import torch
import torch.distributed as dist

dist.init_process_group("gloo")
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(8, 4), torch.nn.Linear(4, 4))
model[0].requires_grad_(False)
if "early" in sys.argv:
    model[0].requires_grad_()
ddp = torch.nn.parallel.DistributedDataParallel(model)
model[0].requires_grad_()
optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
ddp(torch.full((2, 8), 1.0 + dist.get_rank())).square().mean().backward()
optimizer.step()
norm = torch.tensor([float(w.double().norm()) for w in ddp.state_dict().values()]).sum()
norms = [torch.zeros_like(norm) for _ in range(dist.get_world_size())]
dist.all_gather(norms, norm)
if dist.get_rank() == 0:
    print("apart by", max(norms).item() - min(norms).item(), flush=True)
"""


@pytest.mark.distributed
def test_what_trains_only_since_ddp_wrapped_it_is_refused(a_plan, tmp_path):
    """DDP leaves its gradients to each rank, so that copies drift apart; under a plan they did not, unsaid."""
    worker = tmp_path / "unfreezes.py"
    worker.write_text(UNFREEZES)
    drift = float(run_ranks(worker).stdout.rpartition(" ")[2])
    assert drift > 1e-3
    plan = plan_for(a_plan, tmp_path / "plan.json", "NNN")
    done = run_ranks(worker, plan=plan, drift="parameter_count")
    assert done.returncode == 1
    assert "must want its gradient when DDP wraps it" in done.stderr
    assert done.stdout == ""
    assert "apart by 0.0" in run_ranks(worker, "early", plan=plan, drift="parameter_count").stdout


@pytest.mark.distributed
@pytest.mark.parametrize("maker", ["script", "export"])
def test_programs_made_of_a_model_hold_nothing_of_ours(maker, a_plan, tmp_path):
    """TorchScript compiled our hooks, and export met gradients of ours: torch's raw errors ended jobs that had trained."""
    worker = ROOT / "tests/workers/model_programs.py"
    plain = run_ranks(worker, maker)
    assert plain.returncode == 0, plain.stderr
    for strategy in ("NNG", "NGG"):
        plan = plan_for(a_plan, tmp_path / f"{strategy}.json", strategy)
        found = run_ranks(worker, maker, plan=plan, drift="parameter_count")
        assert found.returncode == 0, found.stderr
        assert [float(word) for word in found.stdout.split()] == pytest.approx(
            [float(word) for word in plain.stdout.split()], rel=2e-6
        )
    plan = plan_for(a_plan, tmp_path / "GGG.json", "GGG")
    refused = run_ranks(worker, maker, plan=plan, drift="parameter_count")
    assert refused.returncode != 0
    assert "must be made of a model whose parameters are whole" in refused.stderr


@pytest.mark.distributed
def test_gradients_of_gradients_of_sharded_convolutions_are_refused_in_words(a_plan, tmp_path):
    """Torch says of them that data are not allocated yet, where linear layers miss storage."""
    worker = ROOT / "tests/workers/model_programs.py"
    refused = run_ranks(
        worker, "script", "penalty", plan=plan_for(a_plan, tmp_path / "plan.json", "GGG"), drift="parameter_count"
    )
    assert refused.returncode != 0
    assert "a gradient of gradients must find the parameters that it needs" in refused.stderr


@pytest.mark.distributed
@pytest.mark.parametrize(
    ("program", "said"),
    [
        ("penalty_on_gains", "a gradient of gradients must find the parameters that it needs"),
        ("penalty_on_norms", "a gradient of gradients must find the parameters that it needs"),
        ("curvature", "a gradient of gradients must find the parameters that it needs"),
        ("adjoint", "gradients of sharded parameters must be made by loss.backward()"),
    ],
)
def test_gradients_by_autograd_that_sharded_parameters_cannot_give_are_refused_in_words(
    program, said, a_plan, tmp_path
):
    """Elementwise operators read freed memory unasked; within a pass backward, gradients of None were taken for 0."""
    worker = ROOT / "tests/workers/autograd_programs.py"
    plain, whole = (
        run_ranks(worker, program, plan=plan, drift="parameter_count")
        for plan in (None, plan_for(a_plan, tmp_path / "NNG.json", "NNG"))
    )
    assert (plain.returncode, whole.returncode) == (0, 0), whole.stderr
    assert [float(word) for word in whole.stdout.split()] == pytest.approx(
        [float(word) for word in plain.stdout.split()], rel=1e-5
    )
    refused = run_ranks(worker, program, plan=plan_for(a_plan, tmp_path / "IIG.json", "IIG"), drift="parameter_count")
    assert refused.returncode == 1
    assert said in refused.stderr
    assert refused.stdout == ""


def test_what_changed_since_a_pass_that_makes_a_graph_is_still_refused_by_torch(monkeypatch):
    """Torch compares versions itself only of what no hook has kept: 20 and 30 would come in the place of 2 and 3."""
    torch = pytest.importorskip("torch")
    from paro_advise.runtime.sharding.checks import watch_kept_parameters

    monkeypatch.setattr(torch.autograd, "_engine_run_backward", torch.autograd._engine_run_backward)
    watch_kept_parameters()
    weight = torch.nn.Parameter(torch.tensor([2.0, 3.0]))
    values, vector = (torch.ones(2, requires_grad=True) for _ in range(2))
    (product,) = torch.autograd.grad(values * weight, values, vector, create_graph=True)
    assert torch.autograd.grad(product.sum(), vector, retain_graph=True)[0].tolist() == [2.0, 3.0]
    with torch.no_grad():
        weight.mul_(10)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        torch.autograd.grad(product.sum(), vector)


THAWS = """
import torch
import torch.distributed as dist

dist.init_process_group("gloo")
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(8, 6), torch.nn.ReLU(), torch.nn.Linear(6, 6), torch.nn.ReLU(), torch.nn.Linear(6, 4))
ddp = torch.nn.parallel.DistributedDataParallel(model, find_unused_parameters=True)
optimizer = torch.optim.AdamW(ddp.parameters(), lr=1e-2, weight_decay=0.1)
for step in range(6):
    for place, layer in enumerate((model[4], model[2], model[0])):
        layer.requires_grad_(place <= step // 2)
    values = torch.randn(4, 8, generator=torch.Generator().manual_seed(10 * step + dist.get_rank()))
    optimizer.zero_grad()
    ddp(values).square().mean().backward()
    norm = torch.nn.utils.clip_grad_norm_([p for p in ddp.parameters() if p.requires_grad], 1.0)
    optimizer.step()
    sums = [float(tensor.double().norm()) for tensor in ddp.state_dict().values()]
    if dist.get_rank() == 0:
        print(float(norm), *sums, flush=True)
"""


@pytest.mark.distributed
def test_layers_that_ddp_wrapped_may_be_frozen_before_the_first_step_and_let_loose_one_by_one(a_plan, tmp_path):
    """The job ended when the second one was let loose: what trains was what wanted a gradient in the first pass."""
    worker = tmp_path / "thaws.py"
    worker.write_text(THAWS)
    plain = run_ranks(worker)
    assert plain.returncode == 0, plain.stderr
    numbers = [float(word) for word in plain.stdout.split()]
    assert len(numbers) == 6 * 7
    for strategy in ("NNG", "GGG"):
        plan = plan_for(a_plan, tmp_path / f"{strategy}.json", strategy)
        found = run_ranks(worker, plan=plan, drift="parameter_count")
        assert found.returncode == 0, found.stderr
        assert [float(word) for word in found.stdout.split()] == pytest.approx(numbers, rel=1e-5)
