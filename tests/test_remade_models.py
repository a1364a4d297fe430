"""The class of a planned model makes plain models, as that of the script does; and models that no plan trains."""

from __future__ import annotations

import copy
import inspect
from abc import ABCMeta

import pytest
from conftest import ROOT
from loop import plan_for
from ranks import numbers_in, run_ranks

from paro_advise.errors import TrainingError
from paro_advise.runtime.mixins import mixed_in


class Mixin:
    pass


class Further:
    pass


class Plain:
    made = 0

    def __init__(self, width):
        for cls in (Plain, Abstract):
            cls.made += type(self) is cls
        self.width = width


class Abstract(Plain, metaclass=ABCMeta):
    made = 0


@pytest.mark.parametrize("cls", [Plain, Abstract])
def test_a_class_that_something_was_mixed_into_makes_plain_objects(cls):
    """Python runs ``__init__`` once: random numbers drawn there would be others the second time."""
    once, twice = mixed_in(Mixin, cls), mixed_in(Further, mixed_in(Mixin, cls))
    cls.made = 0
    for made in (once, twice):
        assert type(made(3)) is cls
        assert type(copy.copy(object.__new__(made))) is made
        assert list(inspect.signature(made).parameters) == ["width"]
        assert type(type("Sub", (made,), {})(3)).__name__ == "Sub"
    assert cls.made == 2


@pytest.mark.distributed
@pytest.mark.parametrize("word", ["ddp", "fsdp2"])
def test_the_class_of_a_planned_model_makes_another_one(a_plan, tmp_path, word):
    script = ROOT / "tests/workers/remade_models.py"
    expected = numbers_in(run_ranks(script, word).stdout)
    assert len(expected) == (4 if word == "ddp" else 3)
    for strategy in ("NNG", "GGG"):
        plan = plan_for(a_plan, tmp_path / f"{strategy}.json", strategy)
        done = run_ranks(script, word, plan=plan, drift="parameter_count")
        assert numbers_in(done.stdout) == pytest.approx(expected, rel=2e-6), done.stderr[-3000:]


@pytest.mark.distributed
def test_a_model_that_was_pruned_in_training_is_saved_without_its_masks(a_plan, tmp_path):
    """torch's ``prune.remove`` puts other parameters in the places of those that trained."""
    script = ROOT / "tests/workers/remade_models.py"
    plain = run_ranks(script, "pruned").stdout
    assert "blocks.0.weight" in plain
    for strategy in ("NNN", "NNG"):
        plan = plan_for(a_plan, tmp_path / f"{strategy}.json", strategy)
        done = run_ranks(script, "pruned", plan=plan, drift="parameter_count")
        assert numbers_in(done.stdout) == pytest.approx(numbers_in(plain), rel=2e-6), done.stderr[-3000:]
        assert "_orig" not in done.stdout


def test_fsdp1s_wrapped_classes_may_lie_inside_each_other():
    """As of ModuleWrapPolicy({Block, LayerNorm}): a unit is the outermost of them."""
    torch = pytest.importorskip("torch")
    from paro_advise.runtime.adapters.planned.wrapping import outermost_units

    blocks = [torch.nn.Sequential(torch.nn.LayerNorm(2), torch.nn.Linear(2, 2)) for _ in range(2)]
    model = torch.nn.Module()
    model.blocks, model.norm = torch.nn.ModuleList(blocks), torch.nn.LayerNorm(2)
    assert outermost_units(model, [torch.nn.Sequential, torch.nn.LayerNorm]) == [*blocks, model.norm]
    assert outermost_units(model, [torch.nn.Conv1d]) == [torch.nn.Conv1d]
    assert outermost_units(model, None) is None


def test_deepspeeds_pipelines_and_dealt_out_experts_are_refused():
    """Ranks hold other stages and other experts: copied from rank 0 they would train something else."""
    torch = pytest.importorskip("torch")
    from paro_advise.runtime.adapters.deepspeed.initialize import check_model

    def made(name, module, **members):
        part = type(name, (torch.nn.Module,), {"__module__": module})()
        for key, value in members.items():
            setattr(part, key, value)
        return part

    with pytest.raises(TrainingError, match="PipelineModule"):
        check_model(made("PipelineModule", "deepspeed.runtime.pipe.module"))
    check_model(made("PipelineModule", "someone.else"))
    model = torch.nn.Sequential(made("MoE", "deepspeed.moe.layer", ep_size=2, expert_group_name="ep_size_2"))
    with pytest.raises(TrainingError, match="got 0 with ep_size=2"):
        check_model(model)
    model[0].ep_size = 1
    check_model(model)
