"""FSDP1's states under a plan: full and sharded state dicts of model and optimizer, and whole parameters for a while.

Before a model is sharded, every rank holds it and its optimizer whole.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._shard.sharded_tensor.api import ShardedTensor
from torch.distributed._state_dict_utils import _all_gather_sharded_tensor
from torch.distributed.fsdp import OptimStateKeyType
from torch.distributed.fsdp._common_utils import clean_tensor_name
from torch.distributed.fsdp.api import (
    FullOptimStateDictConfig,
    FullStateDictConfig,
    MixedPrecision,
    OptimStateDictConfig,
    ShardedOptimStateDictConfig,
    ShardedStateDictConfig,
    ShardingStrategy,
    StateDictConfig,
    StateDictSettings,
    StateDictType,
)
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_map_only

from paro_advise.errors import TrainingError, UsageError
from paro_advise.runtime.adapters.constants import NO_PLAN
from paro_advise.runtime.adapters.refusals import this_session
from paro_advise.runtime.compiler import uncompiled
from paro_advise.runtime.sharding.states.summoning import whole_parameters

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch.distributed.device_mesh import DeviceMesh

    from paro_advise.runtime.adapters.precision import BufferTypes
    from paro_advise.runtime.torch_types import StateDict


PART = "_fsdp_wrapped_module."  # in names of parameters, which FSDP1 leaves out of its state dicts
_SETTINGS = "_paro_state_dicts"
_INNER = "is_inner"
_CONFIGS: dict[StateDictType, tuple[type[StateDictConfig], type[OptimStateDictConfig]]] = {
    StateDictType.FULL_STATE_DICT: (FullStateDictConfig, FullOptimStateDictConfig),
    StateDictType.SHARDED_STATE_DICT: (ShardedStateDictConfig, ShardedOptimStateDictConfig),
}


class FullyShardedStates(nn.Module):
    """What FSDP1's class knows about states, for what stands in its place."""

    _buffer_types: BufferTypes
    _are_names_clean = False

    @staticmethod
    def get_state_dict_type(module: nn.Module) -> StateDictSettings:
        """Return which state dicts the wrapped parts of a model make now."""
        for part in module.modules():
            if isinstance(part, FullyShardedStates) and _SETTINGS in part.__dict__:
                found: StateDictSettings = part.__dict__[_SETTINGS]
                return found
        return StateDictSettings(StateDictType.FULL_STATE_DICT, FullStateDictConfig(), FullOptimStateDictConfig())

    @staticmethod
    def set_state_dict_type(
        module: nn.Module,
        state_dict_type: StateDictType,
        state_dict_config: StateDictConfig | None = None,
        optim_state_dict_config: OptimStateDictConfig | None = None,
    ) -> StateDictSettings:
        """Choose which state dicts the wrapped parts of a model make from now on; returns those of before."""
        before = FullyShardedStates.get_state_dict_type(module)
        if state_dict_type not in _CONFIGS:
            this_session().refuse(TrainingError("a plan cannot express FSDP's LOCAL_STATE_DICT", hint=NO_PLAN))
        of_model, of_optimizer = _CONFIGS[state_dict_type]
        settings = StateDictSettings(
            state_dict_type, state_dict_config or of_model(), optim_state_dict_config or of_optimizer()
        )
        _remember(module, settings)
        return before

    @staticmethod
    @contextlib.contextmanager
    def state_dict_type(module: nn.Module, *args: Any, **kwargs: Any) -> Iterator[None]:
        """Choose which state dicts the wrapped parts of a model make inside this context."""
        before = FullyShardedStates.set_state_dict_type(module, *args, **kwargs)
        try:
            yield
        finally:
            _remember(module, before)

    @staticmethod
    @contextlib.contextmanager
    def summon_full_params(
        module: nn.Module,
        recurse: bool = True,
        writeback: bool = True,
        rank0_only: bool = False,
        offload_to_cpu: bool = False,
        with_grads: bool = False,
    ) -> Iterator[None]:
        """Show whole parameters inside this context; what is written into them counts afterwards."""
        # More of the parameters than asked for, on more ranks, on their own device.
        if with_grads:
            this_session().refuse(TrainingError("a plan cannot summon gradients", hint="read them from the parameters"))
        engine = this_session().engine(module)
        parts = [part for part in (module.modules() if recurse else [module]) if isinstance(part, FullyShardedStates)]
        before = [part._are_names_clean for part in parts]  # noqa: SLF001 - our class
        try:
            for part in parts:
                part._are_names_clean = True  # noqa: SLF001 - our class
            with whole_parameters(engine, writes_back=writeback) if engine else contextlib.nullcontext():
                yield
        finally:
            for part, are_clean in zip(parts, before, strict=True):
                part._are_names_clean = are_clean  # noqa: SLF001 - our class

    def _show_settings(
        self,
        process_group: dist.ProcessGroup | tuple[dist.ProcessGroup, ...] | None,
        mesh: DeviceMesh | None,
        sharding_strategy: object,
        mixed_precision: MixedPrecision | None,
    ) -> None:
        """Keep what scripts ask FSDP1 for; without groups of their own hybrid sharding has none to show here."""
        self.sharding_strategy = sharding_strategy or ShardingStrategy.FULL_SHARD
        self.mixed_precision = mixed_precision or MixedPrecision()
        given = process_group[0] if isinstance(process_group, (tuple, list)) else process_group
        if given is None and mesh is not None:
            given = mesh.get_group(mesh.ndim - 1)
        hybrid = (ShardingStrategy.HYBRID_SHARD, ShardingStrategy._HYBRID_SHARD_ZERO2)  # noqa: SLF001 - has no public name
        if given is not None or sharding_strategy not in hybrid:
            self.process_group = given or dist.group.WORLD
            self.rank, self.world_size = dist.get_rank(given), dist.get_world_size(given)

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        """Return the parameters; where they are summoned, by the names of the model that was wrapped."""
        for name, parameter in super().named_parameters(prefix, recurse, remove_duplicate):
            yield name.replace(PART, "") if self._are_names_clean else name, parameter

    def named_buffers(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """Return the buffers by such names."""
        for name, buffer in super().named_buffers(prefix, recurse, remove_duplicate):
            yield name.replace(PART, "") if self._are_names_clean else name, buffer

    def state_dict(self, *args: Any, **kwargs: Any) -> StateDict:  # type: ignore[override]  # torch has overloads
        """Return whole tensors, or shards as DTensors, by the names of the model that was wrapped."""
        settings, engine = self.get_state_dict_type(self), this_session().engine(self)
        is_full = settings.state_dict_type == StateDictType.FULL_STATE_DICT
        to_cpu = settings.state_dict_config.offload_to_cpu
        is_dropped = is_full and getattr(settings.state_dict_config, "rank0_only", False) and dist.get_rank() != 0
        with contextlib.ExitStack() as stack:
            if engine is not None and not is_full:
                stack.enter_context(engine.shown_as_shards())
            elif engine is not None:
                # Unit by unit, so that no device holds the whole model.
                keep = torch.Tensor.cpu if to_cpu else torch.Tensor.detach
                stack.enter_context(engine.placing_states((lambda value: value.new_empty(0)) if is_dropped else keep))
            found: StateDict = super().state_dict(*args, **kwargs)
        if _INNER in self.__dict__:
            return found  # the outer one has what follows to do, once
        prefix = kwargs.get("prefix", "")
        own = [key for key in found if key.startswith(prefix)]
        for key in own:
            value, name = found.pop(key), key.replace(PART, "")
            if not is_dropped:
                found[name] = self._buffer_types.as_saved(name.removeprefix(prefix), _place(value, to_cpu=to_cpu))
        return found

    @uncompiled
    def forward(self, *args: object, **kwargs: object) -> object:
        """Call the wrapped module, with its buffers in the type of mixed precision."""
        if _INNER not in self.__dict__:
            self._buffer_types.cast((name.replace(PART, ""), buffer) for name, buffer in self.named_buffers())
        output: object = super().forward(*args, **kwargs)
        return output

    def mark_inner(self) -> None:
        """Note that this one is wrapped again."""
        self.__dict__[_INNER] = True

    # ---- the optimizer's ----------------------------------------------------------------------

    @staticmethod
    def optim_state_dict(
        model: nn.Module,
        optim: torch.optim.Optimizer,
        optim_state_dict: StateDict | None = None,
        group: dist.ProcessGroup | None = None,
    ) -> StateDict:
        """Return an optimizer's state by names, in whole tensors or in shards."""
        del group  # all ranks
        settings, engine = FullyShardedStates.get_state_dict_type(model), this_session().engine(model)
        config = settings.optim_state_dict_config
        if settings.state_dict_type != StateDictType.FULL_STATE_DICT and engine is not None:
            with engine.shown_as_shards():
                state = tree_map_only(torch.Tensor, _copy, optim.state_dict())
        else:
            state = optim_state_dict or optim.state_dict()
            if getattr(config, "rank0_only", False) and dist.get_rank():
                return {}
        names = [name for group_names in _names(model, optim) for name in group_names]
        found = {
            "state": {names[place]: values for place, values in state["state"].items()},
            "param_groups": [
                {**entry, "params": [names[place] for place in entry["params"]]} for entry in state["param_groups"]
            ],
        }
        placed: StateDict = tree_map_only(
            torch.Tensor, lambda value: _place(value, to_cpu=config.offload_to_cpu), found
        )
        return placed

    @staticmethod
    def full_optim_state_dict(
        model: nn.Module,
        optim: torch.optim.Optimizer,
        optim_input: object = None,
        rank0_only: bool = True,
        group: dist.ProcessGroup | None = None,
    ) -> StateDict:
        """Return an optimizer's state by names in whole tensors, on rank 0 or on all ranks."""
        del optim_input, group
        config = FullOptimStateDictConfig(rank0_only=rank0_only)
        with FullyShardedStates.state_dict_type(model, StateDictType.FULL_STATE_DICT, None, config):
            return FullyShardedStates.optim_state_dict(model, optim)

    @staticmethod
    def sharded_optim_state_dict(
        model: nn.Module, optim: torch.optim.Optimizer, group: dist.ProcessGroup | None = None
    ) -> StateDict:
        """Return an optimizer's state by names in shards."""
        del group
        with FullyShardedStates.state_dict_type(model, StateDictType.SHARDED_STATE_DICT):
            return FullyShardedStates.optim_state_dict(model, optim)

    @staticmethod
    def optim_state_dict_to_load(
        model: nn.Module,
        optim: torch.optim.Optimizer,
        optim_state_dict: StateDict,
        is_named_optimizer: bool = False,
        load_directly: bool = False,
        group: dist.ProcessGroup | None = None,
    ) -> StateDict:
        """Return a state by names as what the optimizer's ``load_state_dict`` takes."""
        del is_named_optimizer, group
        config = FullyShardedStates.get_state_dict_type(model).optim_state_dict_config
        if getattr(config, "rank0_only", False):
            optim_state_dict = _of_rank_0(optim_state_dict)
        names = _names(model, optim)
        places = {name: place for place, name in enumerate(name for group_names in names for name in group_names)}
        saved = {_clean(name): entry for entry in optim_state_dict["param_groups"] for name in entry["params"]}
        groups = []
        for entry, group_names in zip(optim.param_groups, names, strict=True):
            kept = {key: value for key, value in entry.items() if key != "params"}
            theirs = saved.get(group_names[0], {}) if group_names else {}
            groups.append({**kept, **theirs, "params": [places[name] for name in group_names]})
        by_name = {_clean(name): values for name, values in optim_state_dict["state"].items()}
        state = {places[name]: values for name, values in by_name.items() if name in places}
        state = tree_map_only(torch.Tensor, _copy, state)  # FSDP1 saves one count of steps for all of a flat unit
        state = tree_map_only(ShardedTensor, _all_gather_sharded_tensor, state)  # as torch's older loaders return them
        if this_session().engine(model) is None:
            state = tree_map_only(DTensor, DTensor.full_tensor, state)
        found = {"state": state, "param_groups": groups}
        if load_directly:
            optim.load_state_dict(found)
        return found

    @staticmethod
    def scatter_full_optim_state_dict(
        full_optim_state_dict: StateDict | None,
        model: nn.Module,
        optim_input: object = None,
        optim: torch.optim.Optimizer | None = None,
        group: object = None,
    ) -> StateDict:
        """Return rank 0's whole state as what the optimizer's ``load_state_dict`` takes."""
        del optim_input, group
        optim = optim or _optimizer_of(model)
        config = FullOptimStateDictConfig(rank0_only=True)
        with FullyShardedStates.state_dict_type(model, StateDictType.FULL_STATE_DICT, None, config):
            return FullyShardedStates.optim_state_dict_to_load(model, optim, full_optim_state_dict or {})

    @staticmethod
    def shard_full_optim_state_dict(
        full_optim_state_dict: StateDict,
        model: nn.Module,
        optim_input: object = None,
        optim: torch.optim.Optimizer | None = None,
    ) -> StateDict:
        """Return a whole state as what the optimizer's ``load_state_dict`` takes."""
        del optim_input
        return FullyShardedStates.optim_state_dict_to_load(model, optim or _optimizer_of(model), full_optim_state_dict)

    @staticmethod
    def flatten_sharded_optim_state_dict(
        sharded_optim_state_dict: StateDict, model: nn.Module, optim: torch.optim.Optimizer
    ) -> StateDict:
        """Return a state in shards as what the optimizer's ``load_state_dict`` takes."""
        return FullyShardedStates.optim_state_dict_to_load(model, optim, sharded_optim_state_dict)

    @staticmethod
    def rekey_optim_state_dict(
        optim_state_dict: StateDict,
        optim_state_key_type: OptimStateKeyType,
        model: nn.Module,
        optim_input: object = None,
        optim: torch.optim.Optimizer | None = None,
    ) -> StateDict:
        """Return a state by names for one by places, or the other way round.

        Places are those in an optimizer's groups, or without one in the model.
        """
        del optim_input
        if optim is None:
            names = [clean_tensor_name(name) for name, _ in model.named_parameters()]
        else:
            names = [name for group_names in _names(model, optim) for name in group_names]
        other: dict[object, object] = dict(enumerate(names))
        if optim_state_key_type == OptimStateKeyType.PARAM_ID:
            other = {name: place for place, name in other.items()}
        return {
            "state": {other.get(key, key): values for key, values in optim_state_dict["state"].items()},
            "param_groups": [
                {**entry, "params": [other.get(key, key) for key in entry["params"]]}
                for entry in optim_state_dict["param_groups"]
            ],
        }


def _remember(module: nn.Module, settings: StateDictSettings) -> None:
    for part in module.modules():
        if isinstance(part, FullyShardedStates):
            part.__dict__[_SETTINGS] = settings


def _optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    """Return the optimizer of a model, which torch lets scripts leave out.

    Raises:
        TrainingError: the script has made none.
        UsageError: it has made several.
    """
    engine = this_session().engine(model)
    found = engine.shards.optimizers if engine is not None else this_session().optimizers_of(model)
    if len(found) != 1:
        raise UsageError(
            f"a state must be of one optimizer of the model, got none by name and {len(found)} that could be meant",
            hint="pass optim=",
        )
    return found[0]


def _copy(value: torch.Tensor) -> torch.Tensor:
    """Return what no step changes, as FSDP1 returns it."""
    return value.detach().clone()


def _place(value: Any, *, to_cpu: bool) -> Any:
    return value.cpu() if to_cpu and isinstance(value, torch.Tensor) else value


def _names(model: nn.Module, optim: torch.optim.Optimizer) -> list[list[str]]:
    """Return the names of an optimizer's parameters in each of its groups, as in the model that was wrapped."""
    engine = this_session().engine(model)
    own = engine.shards.behind(optim) if engine is not None else None
    if engine is not None and own is not None:
        found = engine.shards.all_names[engine.shards.groups_of(own)]
    else:
        of = {id(parameter): name for name, parameter in model.named_parameters()}
        found = [[of[id(parameter)] for parameter in entry["params"]] for entry in optim.param_groups]
    return [[clean_tensor_name(name) for name in names] for names in found]


def _clean(name: object) -> object:
    """Return a saved name without what FSDP1 leaves out, which earlier versions of ours did not."""
    return clean_tensor_name(name) if isinstance(name, str) else name


def _of_rank_0(state: StateDict) -> StateDict:
    told = [state]
    dist.broadcast_object_list(told, src=0)
    return told[0]
