"""DeepSpeed: ``initialize`` returns an engine that trains under the plan, or DeepSpeed's own where that is the plan."""

from __future__ import annotations

import inspect
import sys
import weakref
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
import torch.distributed as dist

from paro_advise.errors import TrainingError
from paro_advise.policies.strategy import CollectiveBackend
from paro_advise.runtime.adapters.constants import NO_PLAN
from paro_advise.runtime.adapters.deepspeed.config import (
    STAGES,
    ZERO_3,
    check_table,
    low_precision,
    make_optimizer,
    make_scheduler,
    outputs_of,
    read_table,
    set_strategy,
    shows_as_much,
    zero_stage,
)
from paro_advise.runtime.adapters.deepspeed.engine import PlannedEngine
from paro_advise.runtime.adapters.deepspeed.gathering import Gathering
from paro_advise.runtime.adapters.deepspeed.whole_init import MadeWhole
from paro_advise.runtime.adapters.names import replace_everywhere
from paro_advise.runtime.adapters.refusals import end_job_on_error
from paro_advise.runtime.import_hooks import when_imported
from paro_advise.runtime.messages import tell

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import ModuleType

    from torch import nn

    from paro_advise.policies.plan import Choice, Plan
    from paro_advise.runtime.adapters.deepspeed.config import Table
    from paro_advise.runtime.adapters.session import Session
    from paro_advise.runtime.torch_types import StateDict

    # An engine, its optimizer, a data loader, a scheduler.
    Made: TypeAlias = tuple[object, object, object, object]


def install(session: Session) -> None:
    """Replace ``deepspeed.initialize`` once deepspeed is imported."""
    when_imported("deepspeed", lambda module: _replace(module, session))


def _replace(module: ModuleType, session: Session) -> None:
    made = _Initialization(session, module.initialize)
    replace_everywhere("initialize", end_job_on_error(made.run), module)
    zero, whole = module.zero, MadeWhole()
    gathering = Gathering(session, zero.GatheredParameters, made.models, whole)
    replace_everywhere("GatheredParameters", gathering.gather, zero, zero.partition_parameters)
    if hasattr(zero, "unwrap_model_for_generation"):  # since DeepSpeed 0.16.4
        unwrapped = gathering.unwrapping(zero.unwrap_model_for_generation)
        replace_everywhere("unwrap_model_for_generation", unwrapped, zero, zero.stage3)
    for name in [name for name in vars(module.utils) if name.startswith("safe_")]:
        function = gathering.refusing(getattr(module.utils, name))
        replace_everywhere(name, function, module.utils)
    if not _is_own_sharding(session.plan):
        from deepspeed.runtime.zero import utils

        replace_everywhere("is_zero_param", _only_partitioned(utils.is_zero_param), utils)
        replace_everywhere("Init", whole.stand_in(zero.Init), zero, zero.partition_parameters)


def _is_own(chosen: Choice) -> bool:
    """Tell whether one of DeepSpeed's own stages is the plan."""
    return chosen.collectives == CollectiveBackend.NATIVE and chosen.triple in STAGES


def _is_own_sharding(plan: Plan) -> bool:
    """Tell whether DeepSpeed's own ZeRO-3 runs a plan."""
    return _is_own(plan.chosen) and STAGES[plan.chosen.triple] == ZERO_3


class _Initialization:
    """``deepspeed.initialize`` under a plan.

    Args:
        session: the planned process.
        original: DeepSpeed's own.

    Attributes:
        models: that were given to it, with the stage of ZeRO that they were to be trained with.
    """

    def __init__(self, session: Session, original: Callable[..., Made]) -> None:
        self._session = session
        self._original = original
        self.models: weakref.WeakKeyDictionary[nn.Module, int] = weakref.WeakKeyDictionary()

    def run(self, *args: Any, **kwargs: Any) -> Made:  # Any: DeepSpeed's own parameters
        """Return what DeepSpeed returns: its own engine where it runs the plan as the script expects it, else ours."""
        self._session.is_reached = True
        given = dict(inspect.signature(self._original).bind(*args, **kwargs).arguments)
        given.update(given.pop("kwargs", {}))
        options, named = given.get("args"), given.pop("config_params", None)
        wanted = given.pop("config", None) or named or getattr(options, "deepspeed_config", None)
        table, model = read_table(wanted), given["model"]
        chosen = self._session.plan.chosen
        if _is_own(chosen) and shows_as_much(STAGES[chosen.triple], zero_stage(table)):
            num_parameters = sum(parameter.numel() for parameter in model.parameters())
            if options is not None and getattr(options, "deepspeed_config", None):
                options.deepspeed_config = None  # DeepSpeed takes one of the two
            made = self._original(**given, config=set_strategy(table, chosen))
            self._session.accept_own_settings("DeepSpeed", num_parameters)
            return made
        check_table(table, mpu=given.get("mpu"), mesh_param=given.get("mesh_param"))
        check_model(model)
        if given.get("dist_init_required") is not False and not dist.is_initialized():
            dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
        _set_up_comm(given)
        return self._make_engine(table, given)

    def _make_engine(self, table: Table, given: StateDict) -> Made:
        model, optimizer, scheduler = (given.get(key) for key in ("model", "optimizer", "lr_scheduler"))
        assert model is not None
        self.models[model] = zero_stage(table)
        model.to(torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else "cpu")
        if low_precision(table).get("enabled"):
            _keep_in_float32(model)
        parameters = given.get("model_parameters") or model.parameters()
        made = optimizer(parameters) if callable(optimizer) else optimizer
        if made is None:
            made = make_optimizer(table, parameters)
        scheduler = scheduler(made) if callable(scheduler) else scheduler
        if scheduler is None and table.get("scheduler", {}).get("type"):
            scheduler = make_scheduler(table["scheduler"], made)
        if zero_stage(table) == ZERO_3:
            _mark_as_partitioned(model)
        if (unwritten := outputs_of(table)) and dist.get_rank() == 0:
            tell(f"under a plan DeepSpeed's {', '.join(unwritten)} write nothing")
        engine = PlannedEngine(
            self._session,
            model,
            made,
            scheduler,
            table,
            client_optimizer=optimizer,
            collate_fn=given.get("collate_fn"),
        )
        if given.get("training_data") is not None:
            engine.training_dataloader = engine.deepspeed_io(given["training_data"])
        return engine, made, engine.training_dataloader, scheduler


def _keep_in_float32(model: nn.Module) -> None:
    """Let the optimizer work on what DeepSpeed's works on in bf16: copies in fp32 of what bfloat16 holds of a model.

    DeepSpeed leaves buffers in their type.
    """
    for parameter in model.parameters():
        if parameter.requires_grad and parameter.is_floating_point():
            parameter.data = parameter.data.bfloat16().float()


def _only_partitioned(is_zero_param: Callable[[object], bool]) -> Callable[[object], bool]:
    """Return DeepSpeed's own test of a parameter, which ours fail: it would gather them by what they do not have."""
    return lambda parameter: is_zero_param(parameter) and hasattr(parameter, "ds_tensor")


def _mark_as_partitioned(model: nn.Module) -> None:
    """Let parameters be known for ZeRO-3's, which scripts gather before they save them (``hasattr(p, "ds_id")``)."""
    from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus

    for number, parameter in enumerate(model.parameters()):
        parameter.__dict__.update(
            ds_id=number, ds_status=ZeroParamStatus.NOT_AVAILABLE, ds_shape=parameter.shape, ds_numel=parameter.numel()
        )


def check_model(model: nn.Module) -> None:
    """Refuse models of which ranks hold unlike parts, as DeepSpeed lays them out.

    Raises:
        TrainingError: it is a pipeline, or has experts that are dealt out over ranks.
    """
    if any(cls.__name__ == "PipelineModule" and cls.__module__.startswith("deepspeed") for cls in type(model).__mro__):
        raise TrainingError("a plan cannot train a PipelineModule of DeepSpeed, whose ranks hold stages", hint=NO_PLAN)
    for name, part in model.named_modules():
        if hasattr(part, "expert_group_name") and getattr(part, "ep_size", 1) > 1:
            raise TrainingError(
                f"a plan cannot train experts that DeepSpeed deals out over ranks, got {name or 'a model'} with "
                f"ep_size={part.ep_size}",
                where=name or None,
                hint=f"ep_size=1 keeps all experts on every rank; {NO_PLAN}",
            )


def _set_up_comm(given: StateDict) -> None:
    """Let ``deepspeed.comm`` work as after DeepSpeed's own call: on torch's process groups.

    Our engine does not need it; where its C++ helper for CPUs cannot be built only scripts miss it that use it.
    """
    comm = sys.modules.get("deepspeed.comm")
    if comm is None or given.get("dist_init_required") is False or comm.is_initialized():
        return
    try:
        comm.init_distributed(dist_backend=dist.get_backend())
    except Exception as error:  # noqa: BLE001 - whatever a compiler or its loader raises
        tell(f"deepspeed.comm could not be set up ({type(error).__name__}: {error}); a script that uses it will fail")
