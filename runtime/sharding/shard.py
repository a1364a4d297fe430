"""The public verb: make a model and its optimizer train under a strategy."""

from __future__ import annotations

import os
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn

from paro_advise.errors import UsageError
from paro_advise.policies.strategy import KEPT, Strategy, dominated_by
from paro_advise.runtime.ho_ring.worker import reaching_all_ranks
from paro_advise.runtime.sharding import states
from paro_advise.runtime.sharding.agreement import agree, fingerprint
from paro_advise.runtime.sharding.engine import Engine
from paro_advise.runtime.sharding.exchange.channels import GroupGrid
from paro_advise.runtime.sharding.optimizer import OptimizerShards
from paro_advise.runtime.sharding.parameters.units import UnitSpec, find_units
from paro_advise.runtime.sharding.settings import Settings

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from torch.distributed.device_mesh import DeviceMesh

_Model = TypeVar("_Model", bound=nn.Module)
_MIN_TORCH = (2, 9)


class ShardedModule(nn.Module):
    """Mixed into the class of a user's model; FSDP2's flags mean the same here."""

    def set_requires_gradient_sync(self, requires_gradient_sync: bool, *, recurse: bool = True) -> None:
        """Say whether the next backward pass is an accumulation boundary."""
        engine_of(self).gradients.set_synchronizes(enabled=requires_gradient_sync)

    def set_requires_all_reduce(self, requires_all_reduce: bool, *, recurse: bool = True) -> None:
        """Say whether the next backward pass is an accumulation boundary."""
        engine_of(self).gradients.set_synchronizes(enabled=requires_all_reduce)

    def set_is_last_backward(self, is_last_backward: bool) -> None:
        """Say whether the next backward pass is an accumulation boundary."""
        engine_of(self).gradients.set_synchronizes(enabled=is_last_backward)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget all gradients."""
        engine = Engine.find(self)
        if engine is not None:
            engine.gradients.discard()
        super().zero_grad(set_to_none)

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:  # type: ignore[override]  # torch has overloads
        """Return the parameters as they rest on this rank, after waiting for updates under way."""
        engine = Engine.find(self)
        if engine is not None:
            engine.updates.finish()
        found: dict[str, Any] = super().state_dict(*args, **kwargs)
        return found

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Only add gradients up in backward passes inside this context."""
        engine = engine_of(self)
        before = engine.synchronizes
        engine.gradients.set_synchronizes(enabled=False)
        try:
            yield
        finally:
            engine.gradients.set_synchronizes(enabled=before)


def mark(model: nn.Module) -> None:
    """Add our methods to a model's class."""
    model.__class__ = type(f"Sharded{type(model).__name__}", (ShardedModule, type(model)), {})


def unmark(model: nn.Module) -> None:
    """Take our methods off a model's class."""
    model.__class__ = type(model).__mro__[2]


class _Attachment:
    """What the optimizer sees of the engine."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def before_step(self) -> None:
        self._engine.before_step()

    def after_step(self) -> None:
        self._engine.after_step()

    def discard_gradients(self) -> None:
        self._engine.gradients.discard()

    def optimizer_state_dict(self) -> dict[str, Any]:
        return states.optimizer_state(self._engine)

    def load_optimizer_state_dict(self, state: dict[str, Any]) -> None:
        states.load_optimizer_state(self._engine, state)


def engine_of(model: Any) -> Engine:
    """Return the engine of a sharded model.

    Raises:
        UsageError: it is not sharded.
    """
    engine = Engine.find(model)
    if engine is None:
        raise UsageError(
            f"the model must be sharded by paro_advise.runtime.shard, got a plain {type(model).__name__}",
        )
    return engine


def shard(
    model: _Model,
    optimizer: torch.optim.Optimizer,
    strategy: str | Strategy,
    *,
    group_size: int | None = None,
    device_mesh: DeviceMesh | None = None,
    units: Sequence[type[nn.Module] | nn.Module] | None = None,
    param_dtype: torch.dtype | None = None,
    reduce_dtype: torch.dtype | None = None,
    init: Callable[[nn.Module], None] | None = None,
    reshard_root: bool = False,
    overlap_updates: bool = False,
    offload_optimizer: bool = False,
    ranks_per_node: int | None = None,
) -> tuple[_Model, torch.optim.Optimizer]:
    """Let a model and its optimizer train under a strategy, in place; training is ordinary PyTorch afterwards.

    Every rank calls it at the same point, with the same model. Every backward pass
    outside ``model.no_sync()`` is an accumulation boundary.

    Args:
        model: whole on every rank, with equal parameters (or on the meta device, see ``init``).
        optimizer: new, over the model's parameters; schedulers may hold it already.
        strategy: one of the 14 kept triples, such as "IIG".
        group_size: ranks that share fast links and divide the world; None for those of a node.
        device_mesh: a mesh of one dimension over all ranks, or of two, (groups, ranks of a group),
            instead of ``group_size``.
        units: modules, or classes of modules, that are gathered and reduced together; None for the
            repeated blocks. The rest of the model is one more unit.
        param_dtype: type to compute in: parameters are kept and sent in it while the optimizer works on
            a copy in their own type.
        reduce_dtype: type in which gradients are added up and sent; None for ``param_dtype``.
        init: fills a module made on the meta device, one unit after the other; rank 0's values count.
        reshard_root: free the parameters outside the blocks after forward too.
        overlap_updates: let the next forward wait for updated parameters instead of
            ``optimizer.step()``; parameters must then not be read between the two.
        offload_optimizer: keep the optimizer's parameters and states in the host's memory and step there,
            on the host's cores. Clip the gradients of ``model.parameters()``; the optimizer's have theirs
            only while it steps.
        ranks_per_node: None for the environment's LOCAL_WORLD_SIZE.

    Returns:
        The same two objects.

    Raises:
        UsageError: something of the above cannot be.
        DivergedError: the ranks do not hold the same model, optimizer or settings.
        CommunicationError: a rank is missing, or the backend computes wrongly.
    """
    wanted, grid = checked_strategy(strategy), grid_of(group_size, device_mesh, ranks_per_node)
    settings = Settings(
        param_dtype=param_dtype,
        reduce_dtype=reduce_dtype,
        reshard_root=reshard_root,
        overlap_updates=overlap_updates,
        offload_optimizer=offload_optimizer,
    )
    _check(model, settings)
    specs = find_units(model, units)
    shards = OptimizerShards(optimizer, {slot.name: slot for spec in specs for slot in spec.slots})
    _agree_on(wanted, grid, settings, optimizer, specs)
    with reaching_all_ranks("the set-up of a sharded model"):
        engine = Engine(model, specs, shards, strategy=wanted, grid=grid, settings=settings, device=_device(model))
        engine.reducing.self_check(engine.device)
        _settle(engine, init)
    shards.attach(_Attachment(engine))
    mark(model)
    engine.register()
    return model, optimizer


def _check(model: nn.Module, settings: Settings) -> None:
    """Refuse what cannot be, before anything changes.

    Raises:
        UsageError: torch is too old, gradients would overflow, or the model is sharded already.
    """
    version = tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2])
    if version < _MIN_TORCH:
        raise UsageError(f"torch must be {_MIN_TORCH[0]}.{_MIN_TORCH[1]} or later, got {torch.__version__}")
    if (settings.reduce_dtype or settings.param_dtype) == torch.float16:
        raise UsageError("gradients must be reduced in float32 or bfloat16, got float16, which overflows")
    if Engine.find(model) is not None:
        raise UsageError(
            "a model must be sharded once, got one that is sharded already", hint="use switch() to change it"
        )


def _agree_on(
    strategy: Strategy,
    grid: GroupGrid,
    settings: Settings,
    optimizer: torch.optim.Optimizer,
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
            "optimizer": [type(optimizer).__name__, [_plain(group) for group in optimizer.param_groups]],
            "model": fingerprint(specs),
        },
        hint="seed all ranks alike before the model is made, or load one checkpoint on all of them",
    )


def _settle(engine: Engine, init: Callable[[nn.Module], None] | None) -> None:
    """Bring all units to rest, one after the other, and the optimizer to its rows."""
    settings = engine.settings
    for unit in engine.units:
        if any(slot.parameter.is_meta for slot in unit.spec.slots):
            _materialize(engine, unit.spec, init)
        engine.settle(unit, states.own_rows(engine, unit) if settings.has_own_masters else None)
    engine.place_shards()
    engine.start()


def _materialize(engine: Engine, spec: UnitSpec, init: Callable[[nn.Module], None] | None) -> None:
    if init is None:
        raise UsageError(
            "a model on the meta device must be filled, got no init function",
            hint="pass init=lambda module: module.reset_parameters() or load a checkpoint after it",
        )
    is_root = spec.module is engine.model
    inner = {id(part) for other in engine.specs if other is not spec for part in other.module.modules()}
    for part in spec.module.modules():
        if is_root and id(part) in inner:
            continue
        part.to_empty(device=engine.device, recurse=False)
        init(part)
    for slot in spec.slots:
        dist.broadcast(slot.parameter.detach(), 0)
    for part in spec.module.modules():
        if not (is_root and id(part) in inner):
            for buffer in part.buffers(recurse=False):
                dist.broadcast(buffer, 0)


def checked_strategy(strategy: str | Strategy) -> Strategy:
    """Return a strategy that we run.

    Raises:
        UsageError: it is none of the 14 kept ones.
    """
    wanted = Strategy.parse(strategy) if isinstance(strategy, str) else strategy
    if wanted not in KEPT:
        better = dominated_by(wanted)
        raise UsageError(
            f"the strategy must be one of {', '.join(map(str, KEPT))}, got {wanted}",
            hint=f"{better} needs no more memory and sends no more" if better else None,
        )
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
    per_node = ranks_per_node or int(os.environ.get("LOCAL_WORLD_SIZE", world_size))
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


def _device(model: nn.Module) -> torch.device:
    devices = {parameter.device for parameter in model.parameters()} - {torch.device("meta")}
    if len(devices) > 1:
        raise UsageError(f"the model must be on one device, got {', '.join(sorted(map(str, devices)))}")
    if devices:
        return devices.pop()
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")


def _plain(group: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in group.items() if key != "params"} | {"num_params": len(group["params"])}
