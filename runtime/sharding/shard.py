"""The public verb: make a model and its optimizer train under a strategy."""

from __future__ import annotations

import contextlib
import itertools
import os
import socket
import weakref
from functools import partial
from typing import TYPE_CHECKING, TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Replicate

from paro_advise.errors import UsageError
from paro_advise.policies.strategy import Level, Strategy, check_kept
from paro_advise.runtime.dtensor_calls import let_dtensors_mix
from paro_advise.runtime.ho_ring.worker import reaching_all_ranks
from paro_advise.runtime.messages import tell
from paro_advise.runtime.sharding.agreement import agree, fingerprint, fingerprint_of_states
from paro_advise.runtime.sharding.checks import check
from paro_advise.runtime.sharding.engine import Engine
from paro_advise.runtime.sharding.exchange.channels import GroupGrid
from paro_advise.runtime.sharding.module import mark
from paro_advise.runtime.sharding.optimizers.optimizer import OptimizerShards
from paro_advise.runtime.sharding.parameters.owned import free_replaced
from paro_advise.runtime.sharding.parameters.units import Slot, UnitSpec, find_units
from paro_advise.runtime.sharding.parameters.whole import stand_in
from paro_advise.runtime.sharding.phases.singles import Singles
from paro_advise.runtime.sharding.saving.distributed_checkpoint import let_helpers_see_optimizers
from paro_advise.runtime.sharding.settings import Settings, effective
from paro_advise.runtime.sharding.states import states
from paro_advise.runtime.sharding.states.whole_states import fsdp2_optimizer_state, named, own_rows_of, part_of

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
    from contextlib import AbstractContextManager

    from torch.distributed.device_mesh import DeviceMesh

    from paro_advise.runtime.torch_types import StateDict

_SAME_MODEL = (
    "seed all ranks alike before the model is made, or load one checkpoint on all of them; give optimizers the same "
    "settings"
)
_Model = TypeVar("_Model", bound=nn.Module)
_Optimizers = TypeVar("_Optimizers", bound="torch.optim.Optimizer | Sequence[torch.optim.Optimizer]")


class _Attachment:
    """What the optimizer sees of the engine."""

    def __init__(self, engine: Engine, optimizer: torch.optim.Optimizer) -> None:
        self._engine = engine
        self._optimizer = weakref.ref(optimizer)

    @property
    def keeps_shards(self) -> bool:
        return self._engine.stands_for_fsdp2

    def are_waiting(self) -> bool:
        return self._engine.gradients.are_waiting

    def before_step(self) -> None:
        self._engine.gradients.refuse_unseen()
        self._engine.gradients.compare_replicas(self._engine.edits.publish)
        self._engine.before_step()

    def pause_step(self) -> None:
        self._engine.shards.pause_step()

    def after_step(self) -> None:
        self._engine.after_step()

    def before_groups(self) -> None:
        self._engine.edits.absorb()

    def discard_gradients(self, *, to_none: bool) -> None:
        shards, gradients = self._engine.shards, self._engine.gradients
        shards.discard_ignored(self._own, to_none=to_none)
        if len(shards.optimizers) == 1 or gradients.is_broken_off:
            gradients.discard(to_none=to_none)
            return
        names = {name for group in shards.all_names[shards.groups_of(self._own)] for name in group}
        gradients.discard_of(names, to_none=to_none)

    def optimizer_state_dict(self) -> StateDict:
        engine = self._engine
        if engine.stands_for_fsdp2:
            found = fsdp2_optimizer_state(engine)
        else:
            found = engine.whole_reader.optimizer_state() if engine.whole_reader else states.optimizer_state(engine)
        return part_of(engine, found, self._own) if len(engine.shards.optimizers) > 1 else found

    def load_optimizer_state_dict(self, state: StateDict) -> None:
        engine, own = self._engine, self._own
        states.load_optimizer_state(engine, named(engine, state, own), own_rows_of, engine.shards.groups_of(own))

    @property
    def _own(self) -> torch.optim.Optimizer:
        optimizer = self._optimizer()
        assert optimizer is not None
        return optimizer


def shard(
    model: _Model,
    optimizer: _Optimizers,
    strategy: str | Strategy,
    *,
    group_size: int | None = None,
    device_mesh: DeviceMesh | None = None,
    units: Sequence[type[nn.Module] | nn.Module] | None = None,
    param_dtype: torch.dtype | None = None,
    cast_modules: Sequence[nn.Module] | None = None,
    output_dtypes: Mapping[nn.Module, torch.dtype] | None = None,
    keep_types: bool = False,
    reduce_dtype: torch.dtype | None = None,
    init: Callable[[nn.Module], None] | None = None,
    reshard_root: bool = False,
    overlap_updates: bool = False,
    offload_optimizer: bool = False,
    ranks_per_node: int | None = None,
    native_collectives: bool = False,
    ignored_params: Collection[nn.Parameter] = (),
) -> tuple[_Model, _Optimizers]:
    """Let a model and its optimizer train under a strategy, in place; training is ordinary PyTorch afterwards.

    Every rank calls it at the same point. Every backward pass outside ``model.no_sync()`` is a boundary.

    Args:
        model: whole on every rank, with equal parameters (or on the meta device, see ``init``); parameters may be
            DTensors, which are gathered unit by unit.
        optimizer: over the model's parameters, with or without a state, or a list of several; schedulers may hold it.
        strategy: one of the 14 kept triples, such as "IIG".
        group_size: ranks that share fast links and divide the world; None for those of a node.
        device_mesh: over all ranks, or of (groups, ranks of a group), instead of ``group_size``.
        units: modules, or classes of them, gathered and reduced together, and the rest; None for repeated blocks.
        param_dtype: type to compute in, to keep and to send parameters in; the optimizer's copy has their own type.
        cast_modules: whose inputs are cast to ``param_dtype``; None for the model and its units.
        output_dtypes: types by modules of the model whose outputs are cast to them.
        keep_types: shards that the optimizer updates where they rest stay in their own type, as FSDP keeps them.
        reduce_dtype: type in which gradients are added up and sent; None for ``param_dtype``.
        init: fills a module made on the meta device, one unit after the other; rank 0's values count.
        reshard_root: free the parameters outside the blocks after forward too.
        overlap_updates: the next forward waits for updated parameters, not the step; touch none between the two.
        offload_optimizer: keep the optimizer's parameters and states in the host's memory, and step there.
        ranks_per_node: None for the environment's LOCAL_WORLD_SIZE.
        native_collectives: use the backend's own collectives inside and across groups, not HO-Ring.
        ignored_params: what each rank has for itself, such as its experts: whole, with its own gradients.

    Returns:
        The same two objects.

    Raises:
        UsageError: something of the above cannot be.
        DivergedError: the ranks do not hold the same model, optimizer or settings.
        CommunicationError: a rank is missing, or the backend computes wrongly.
    """
    with _at_device_of(model):
        wanted, grid = checked_strategy(strategy), grid_of(group_size, device_mesh, ranks_per_node)
    settings = Settings(
        param_dtype=param_dtype,
        cast_modules=None if cast_modules is None else tuple(sorted(_names_of(model, cast_modules, "cast_modules"))),
        output_dtypes=_named_types(model, output_dtypes or {}),
        keep_types=keep_types,
        reduce_dtype=reduce_dtype,
        reshard_root=reshard_root,
        overlap_updates=overlap_updates,
        offload_optimizer=offload_optimizer,
        native_collectives=native_collectives,
    )
    specs, singles = _units_of(model, units, ignored_params, settings)
    _hand_over(_agreed_engine(model, optimizer, specs, wanted, grid, settings, init), singles)
    return model, optimizer


def _agreed_engine(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer],
    specs: list[UnitSpec],
    strategy: Strategy,
    grid: GroupGrid,
    settings: Settings,
    init: Callable[[nn.Module], None] | None,
) -> Engine:
    """Return the engine of a model that all ranks hold alike, with its parameters at rest."""
    let_dtensors_mix()
    optimizers = [optimizer] if isinstance(optimizer, torch.optim.Optimizer) else optimizer
    check(specs, optimizers, settings, effective(strategy, grid))
    shards = OptimizerShards(optimizers, {slot.name: slot for spec in specs for slot in spec.slots}, specs[-1].ignored)
    with _at_device_of(model), reaching_all_ranks("the set-up of a sharded model"):
        _agree_on(strategy, grid, settings, shards, specs)
        engine = Engine(model, specs, shards, strategy=strategy, grid=grid, settings=settings, device=_device(model))
        _settle(engine, init)
    return engine


def _hand_over(engine: Engine, singles: Sequence[nn.Parameter]) -> None:
    """Let the script find the sharded model behind its own objects."""
    engine.gradients.keep_whole(Singles(singles))
    engine.shards.attach(partial(_Attachment, engine))
    mark(engine.model)
    engine.register()
    let_helpers_see_optimizers()


def _singles_of(model: nn.Module, settings: Settings, ignored: Collection[nn.Parameter]) -> list[nn.Parameter]:
    """Return the parameters without a dimension that every rank can keep whole, as it is."""
    return [
        parameter
        for parameter in model.parameters()
        if not parameter.dim()
        and parameter not in set(ignored)
        and not parameter.is_meta
        and settings.param_dtype in (None, parameter.dtype)
        and not settings.offload_optimizer
    ]


def _named_types(model: nn.Module, types: Mapping[nn.Module, torch.dtype]) -> tuple[tuple[str, torch.dtype], ...]:
    named = dict(zip(_names_of(model, types, "output_dtypes"), types.values(), strict=True))
    return tuple((name, named[name]) for name in sorted(named))


def _names_of(model: nn.Module, modules: Iterable[nn.Module], setting: str) -> list[str]:
    """Return the names of modules of the model, in their order.

    Raises:
        UsageError: one is not the model's.
    """
    names = {id(module): name for name, module in model.named_modules()}
    for module in modules:
        if id(module) not in names:
            raise UsageError(f"{setting} must name modules of the model, got a {type(module).__name__} that is none")
    return [names[id(module)] for module in modules]


def _units_of(
    model: nn.Module,
    chosen: Sequence[type[nn.Module] | nn.Module] | None,
    ignored: Collection[nn.Parameter],
    settings: Settings,
) -> tuple[list[UnitSpec], list[nn.Parameter]]:
    """Cut a model into units, and parameters without a dimension, which are in none.

    Raises:
        UsageError: it cannot be, or it is sharded already.
    """
    if Engine.find(model) is not None:
        raise UsageError(
            "a model must be sharded once, got one that is sharded already", hint="use switch() to change it"
        )
    if any(isinstance(part, FSDPModule) for part in model.modules()):
        raise UsageError(
            "a model must be sharded once, got one that FSDP2 shards", hint="leave the calls of fully_shard out"
        )
    singles = _singles_of(model, settings, ignored)
    return find_units(model, chosen, [*ignored, *singles]), singles


def _agree_on(
    strategy: Strategy,
    grid: GroupGrid,
    settings: Settings,
    shards: OptimizerShards,
    specs: Sequence[UnitSpec],
) -> None:
    """Make sure that all ranks want the same for the same model.

    Raises:
        DivergedError: they do not.
    """
    agree(
        {
            "strategy": [str(strategy), grid.group_size, str(settings)],
            "torch version": torch.__version__,
            "optimizer": [
                [type(optimizer).__name__ for optimizer in shards.optimizers],
                [
                    _plain(group) | {"num_params": sum(name not in shards.ignored for name in names)}
                    for group, names in zip(shards.optimizer.param_groups, shards.all_names, strict=True)
                ],
            ],
            "model": fingerprint(specs),
            "optimizer state": fingerprint_of_states(shards.given),
            "ranks of a node": grid.ranks_per_node,
        },
        hint=_SAME_MODEL,
    )


def _settle(engine: Engine, init: Callable[[nn.Module], None] | None) -> None:
    """Check the backend, and bring all units to rest, one after the other, and the optimizer to its rows."""
    engine.reducing.self_check(engine.device)
    settings, replicas = engine.settings, []
    for unit in engine.units:
        if any(slot.parameter.is_meta for slot in unit.spec.slots):
            _materialize(engine, unit.spec, init)
        if _make_whole(unit.spec):
            replicas.append(fingerprint([unit.spec]))
        if engine.levels.parameter != Level.N:  # else they stay where they are
            gradients = ((place, slot.parameter.grad) for place, slot in enumerate(unit.spec.training))
            unit.left = {place: gradient for place, gradient in gradients if gradient is not None}
        engine.settle(unit, states.own_rows(engine, unit) if settings.has_own_masters(engine.levels) else None)
    if replicas:
        agree({"model in each of its replicas": replicas}, hint=_SAME_MODEL)
    engine.place_shards()
    engine.start()


def _make_whole(spec: UnitSpec) -> bool:
    """Gather the parameters of a unit that its script has sharded; what it remembers leads to those of today.

    Returns:
        Whether the script has replicated some, so that the whole ones may differ between ranks.
    """
    is_replicated = False
    for slot in spec.slots:
        sharded = slot.parameter
        if isinstance(sharded, DTensor):
            with torch.no_grad():
                whole = sharded.full_tensor()
            slot.fill(nn.Parameter(whole, requires_grad=slot.trains))
            is_replicated |= any(isinstance(place, Replicate) for place in sharded.placements)
            free_replaced(sharded)
            stand_in(sharded, slot)
    return is_replicated


def _materialize(engine: Engine, spec: UnitSpec, init: Callable[[nn.Module], None] | None) -> None:
    if init is None:
        raise UsageError(
            "a model on the meta device must be filled before it trains, got one that is empty",
            hint="call model.to_empty(device=...) and fill it or load a checkpoint; with shard(), pass init=",
        )
    is_root = spec.module is engine.model
    inner = {id(part) for other in engine.specs if other is not spec for part in other.module.modules()}
    filled: set[str] = set()
    for part in spec.module.modules():
        if is_root and id(part) in inner:
            continue
        # What is tied stays one tensor: to_empty makes one for each place.
        tied = [(slot, slot.parameter) for slot in spec.slots if slot.name in filled and _is_in(slot, part)]
        part.to_empty(device=engine.device, recurse=False)
        for slot, parameter in tied:
            slot.fill(parameter)
        for slot in spec.slots:
            if slot.name not in filled and _is_in(slot, part):
                slot.fill(slot.parameter_in(part))
                filled.add(slot.name)
        init(part)
    for slot in spec.slots:
        dist.broadcast(slot.parameter.detach(), 0)
    for part in spec.module.modules():
        if not (is_root and id(part) in inner):
            for buffer in part.buffers(recurse=False):
                dist.broadcast(buffer, 0)


def _is_in(slot: Slot, part: nn.Module) -> bool:
    return any(module is part for module, _ in slot.places)


def checked_strategy(strategy: str | Strategy) -> Strategy:
    """Return a strategy that we run.

    Raises:
        UsageError: it is none of the 14 kept ones.
    """
    wanted = Strategy.parse(strategy) if isinstance(strategy, str) else strategy
    check_kept(wanted)
    if dist.is_initialized() and dist.get_world_size() == 1:
        # All levels are one on one rank, and FSDP2 delivers no gradients on a mesh of one.
        return Strategy.parse("NNN")
    return wanted


def grid_of(group_size: int | None, mesh: DeviceMesh | None, ranks_per_node: int | None) -> GroupGrid:
    """Lay the ranks out in groups.

    Raises:
        UsageError: they cannot be laid out so.
    """
    if not dist.is_initialized():
        raise UsageError("torch.distributed must be initialized before shard", hint="call dist.init_process_group()")
    world_size = dist.get_world_size()
    per_node = ranks_per_node or _ranks_of_a_node(world_size)
    if mesh is not None:
        if group_size is not None:
            raise UsageError("shard takes a group size or a device mesh, got both")
        if mesh.mesh.numel() != world_size or mesh.mesh.flatten().tolist() != list(range(world_size)):
            raise UsageError(f"the device mesh must hold all {world_size} ranks in order, got {mesh.mesh.tolist()}")
        if mesh.ndim not in {1, 2}:
            raise UsageError(f"the device mesh must have one or two dimensions, got {mesh.ndim}")
        group_size = mesh.mesh.shape[-1] if mesh.ndim > 1 else None
    if group_size is None:
        group_size = per_node if world_size % per_node == 0 else world_size
    return GroupGrid(rank=dist.get_rank(), world_size=world_size, group_size=group_size, ranks_per_node=per_node)


def _ranks_of_a_node(world_size: int) -> int:
    """Return how many ranks share a node: as the launcher says, else by the names of the hosts.

    Where the launcher says so although hosts come back after others, rank 0 tells: results are the same, but groups
    of ranks in a row cross the network.

    Raises:
        UsageError: nodes have different numbers of ranks, or their ranks do not follow each other.
    """
    everyone: list[tuple[str | None, str]] = [(None, "")] * world_size
    mine = os.environ.get("LOCAL_WORLD_SIZE"), socket.gethostname()
    with reaching_all_ranks("a comparison of nodes"):
        dist.all_gather_object(everyone, mine)
    said = {local for local, _ in everyone}
    hosts = [host for _, host in everyone]
    counts = [len(list(ranks)) for _, ranks in itertools.groupby(hosts)]
    follow = len(counts) == len(set(hosts))
    if None not in said and len(said) == 1:
        local = int(str(said.pop()))
        nodes = [hosts[first : first + local] for first in range(0, world_size, local)]
        torn = next((place for place, names in enumerate(nodes) if len(set(names)) > 1), None)
        if not follow and torn is not None and dist.get_rank() == 0:
            tell(
                f"ranks of a node do not follow each other: ranks {torn * local} to "
                f"{(torn + 1) * local - 1} are on {', '.join(sorted(set(nodes[torn])))}; groups of ranks in a row "
                "cross the network"
            )
        return local
    if len(set(counts)) > 1 or not follow:
        raise UsageError(
            f"all nodes must hold equally many ranks, one after the other, got {counts} on {len(set(hosts))} hosts",
            hint="start equally many processes on each node, node by node, or set LOCAL_WORLD_SIZE",
        )
    return counts[0]


def _at_device_of(model: nn.Module) -> AbstractContextManager[object]:
    """Let torch's current device be the model's, where ranks meet; a script may have chosen another one, or none."""
    index = next((one.device.index for one in model.parameters() if one.device.type not in {"cpu", "meta"}), None)
    return contextlib.nullcontext() if index is None else torch.accelerator.device_index(index)


def _device(model: nn.Module) -> torch.device:
    devices = {parameter.device for parameter in model.parameters()} - {torch.device("meta")}
    if len(devices) > 1:
        raise UsageError(f"the model must be on one device, got {', '.join(sorted(map(str, devices)))}")
    if devices:
        return devices.pop()
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")


def _plain(group: StateDict) -> StateDict:
    return {key: value for key, value in group.items() if key != "params"}
