"""What a script asked of its framework for a model, in words that all frameworks share."""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

import torch.distributed as dist
from torch import nn

from paro_advise.errors import TrainingError
from paro_advise.runtime.sharding.exchange.usage import Missing
from paro_advise.runtime.sharding.parameters.whole import current

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
    from weakref import ref

    import torch

    from paro_advise.runtime.sharding.engine import Engine


_NOTE_OF_SHARDS = (
    "checkpoints now hold this rank's shards as DTensors: save them with torch.distributed.checkpoint or "
    "paro_advise.runtime.save_checkpoint on all ranks; evaluation runs on all ranks too"
)
_NOTE_OF_WHOLE = (
    "state_dict() returns whole tensors, on rank 0 alone or on all ranks; evaluation runs on all ranks, since none "
    "holds everything"
)
_NOTE_OF_RANK_0 = "state_dict() returns whole tensors, and evaluation runs, on rank 0 alone or on all ranks"


@dataclass(frozen=True, slots=True, kw_only=True)
class Wrapping:
    """What a script asked of its framework.

    Attributes:
        origin: the framework's call, for people.
        units: modules or classes that it wraps one by one; None for the repeated blocks.
        param_dtype, reduce_dtype: mixed precision.
        cast_modules: whose inputs the framework casts to ``param_dtype``.
        output_dtypes: types by the modules whose outputs it casts to them.
        keeps_types: parameters rest in their own type, not in that of the passes.
        norms_are_dtensors: the framework's clipping returns DTensors.
        init_from_rank_0: the framework copies rank 0's parameters to all ranks.
        compile: what torch.compile was to do with the model, as a function of functions; None for nothing.
        let_go: takes the framework's own sharding off the model, whose parameters stay sharded; None where it has none.
        states_are_whole: the framework's state dicts hold whole tensors, and rank 0 may ask for them alone.
        evaluates_alone: rank 0 may run passes that the others do not, and that no step follows.
        ignored: parameters that the framework leaves alone: each rank has its own.
        shards_parameters: the framework does.
        mesh_shapes: sizes of the meshes over which FSDP2 shards.
        shows_shards: gradients are this rank's shards to the script, and plain tensors, as FSDP1's.
        keeps_local_gradients: what passes without a reduction make lies in ``grad``, and a step takes it.
        missing_gradients: what the framework gives for a parameter that no rank used.
        frozen: parameters that trained nothing when the framework looked which ones to average.
        too_early: optimizers of before the framework made parameters of its own, of which they have none.
    """

    origin: str
    units: tuple[type[nn.Module] | nn.Module, ...] | None = None
    param_dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None
    cast_modules: tuple[nn.Module, ...] = ()
    output_dtypes: Mapping[nn.Module, torch.dtype] = field(default_factory=dict)
    keeps_types: bool = False
    norms_are_dtensors: bool = False
    init_from_rank_0: bool = False
    let_go: Callable[[], None] | None = None
    states_are_whole: bool = False
    evaluates_alone: bool = False
    ignored: frozenset[nn.Parameter] = frozenset()
    shards_parameters: bool = False
    mesh_shapes: frozenset[tuple[int, ...]] = frozenset()
    shows_shards: bool = False
    keeps_local_gradients: bool = False
    missing_gradients: Missing = Missing.NONE
    compile: Callable[[Callable[..., object]], Callable[..., object]] | None = None
    frozen: frozenset[nn.Parameter] = frozenset()
    too_early: tuple[ref[torch.optim.Optimizer], ...] = ()

    def check_frozen(self, module: nn.Module) -> None:
        """Refuse a parameter that trains only since the framework wrapped the model.

        Raises:
            TrainingError: there is one.
        """
        for name, parameter in module.named_parameters() if self.frozen else ():
            if parameter.requires_grad and parameter in self.frozen:
                raise TrainingError(
                    f"a parameter must want its gradient when {self.origin} wraps it: else {self.origin} leaves its "
                    "gradient to each rank, and copies of the model drift apart",
                    where=name,
                    hint="call requires_grad_() before the model is wrapped",
                )

    @contextmanager
    def as_wrapped(self, module: nn.Module, optimizers: Sequence[torch.optim.Optimizer]) -> Iterator[None]:
        """Let parameters want their gradients meanwhile that did when DDP wrapped them, and that an optimizer holds.

        A script that lets its layers loose one by one freezes them before the first step. What is sharded as training
        may be frozen and let loose.
        """
        groups = [group for optimizer in optimizers for group in optimizer.param_groups]
        trained = {current(item) for group in groups for item in group["params"]} - self.frozen - self.ignored
        names = [
            name
            for name, parameter in module.named_parameters()
            if self.keeps_local_gradients and not parameter.requires_grad and parameter in trained
        ]
        for name in names:
            module.get_parameter(name).requires_grad_()
        try:
            yield
        finally:
            for name in names:
                module.get_parameter(name).requires_grad = False

    def check_optimizers(self, module: nn.Module, optimizers: Iterable[torch.optim.Optimizer]) -> None:
        """Refuse an optimizer that holds parameters outside of the model that is about to be sharded, or none of it.

        Raises:
            TrainingError: one does.
        """
        inside, early = set(module.parameters()), [reference() for reference in self.too_early]
        for optimizer in optimizers:
            if any(optimizer is other for other in early):
                raise TrainingError(
                    f"an optimizer of parameters that {self.origin} flattens must be made after it, got a "
                    f"{plain_name(optimizer)} of before, which trains nothing without a plan",
                    hint="make it from the wrapped model's parameters, or wrap with use_orig_params=True",
                )
            held = [current(item) for group in optimizer.param_groups for item in group["params"]]
            others = [item for item in held if item not in inside]
            if others:
                raise TrainingError(
                    "an optimizer under a plan must hold parameters of one wrapped model only, "
                    f"{plain_name(optimizer)} also holds {len(others)} outside of {plain_name(module)}, the first one "
                    f"of shape {tuple(others[0].shape)}",
                    hint="wrap one module that holds all of them (of two models, one that holds both; with FSDP2 the "
                    "model as well as its layers), or make an optimizer for each wrapped model",
                )

    def notes(self, engine: Engine) -> list[str]:
        """Return what the script's author must know of what runs in the framework's place."""
        found = []
        if not self.norms_are_dtensors:
            whole = _NOTE_OF_RANK_0 if self.evaluates_alone else _NOTE_OF_WHOLE
            found.append(whole if self.states_are_whole else _NOTE_OF_SHARDS)
        resting = engine.settings.resting_dtype(engine.levels)
        others = {slot.dtype for unit in engine.units for slot in unit.spec.training} - {resting}
        if self.keeps_types and resting is not None and others:
            name = str(resting).removeprefix("torch.")
            found.append(
                f"parameters rest in {name} under {engine.strategy}, in their own type in {self.origin}: "
                "what the script reads of them or changes by hand is rounded to it, state dicts of what trains are "
                "not; GGG, III, GNG and INI keep their type"
            )
        return found


def outermost_units(
    module: nn.Module, wrapped: Sequence[type[nn.Module] | nn.Module] | None
) -> list[type[nn.Module] | nn.Module] | None:
    """Return the outermost wrapped modules inside a model, those of wrapped classes among them.

    Args:
        module: the model.
        wrapped: modules and classes; None for the repeated blocks.
    """
    if wrapped is None:
        return None
    classes = tuple(item for item in wrapped if isinstance(item, type))
    wanted = {id(item) for item in wrapped if isinstance(item, nn.Module)}
    inner: list[type[nn.Module] | nn.Module] = []
    covered: set[int] = {id(module)}
    for part in module.modules():  # parents come before their children
        if (id(part) in wanted or isinstance(part, classes)) and id(part) not in covered:
            inner.append(part)
            covered |= {id(below) for below in part.modules()}
    return inner or list(classes) or None


def copy_from_rank_0(module: nn.Module, ignored: Collection[torch.Tensor] = ()) -> None:
    """Copy rank 0's parameters and buffers to all ranks, but for those that each rank has for itself."""
    own = {id(tensor) for tensor in ignored}
    for tensor in [*module.parameters(), *module.buffers()]:
        if id(tensor) not in own:
            dist.broadcast(tensor.detach(), 0)


def ignored_by_ddp(module: nn.Module, names: frozenset[str]) -> frozenset[nn.Parameter]:
    """Return the parameters that DDP neither copies to all ranks nor reduces, by the names that it was given.

    Raises:
        TrainingError: it does one of the two.
    """
    known: dict[nn.Parameter, list[str]] = {}
    for name, parameter in nn.Module.named_parameters(module, remove_duplicate=False):
        known.setdefault(parameter, []).append(name)
    ignored = {parameter: found for parameter, found in known.items() if names.intersection(found)}
    for parameter, found in ignored.items():
        # DDP's reducer takes a parameter of the outermost module under the name ".name", which nobody gives.
        unclear = [name for name in found if name not in names or "." not in name]
        if unclear and parameter.requires_grad:
            raise TrainingError(
                f"a plan cannot express what DDP ignores in part: it does not copy {found[0]} from rank 0, and reduces "
                "its gradient",
                hint="name a parameter under all its names, and put those of the outermost module into a part of it",
            )
    return frozenset(ignored)


def plain_name(thing: object) -> str:
    """Return the name of a class as its script knows it, without what FSDP2 puts before."""
    return type(thing).__name__.removeprefix("FSDP")


def wrapped_classes(policy: object) -> tuple[type[nn.Module], ...] | None:
    """Return the classes that an auto-wrap policy of FSDP1 names, None if it goes by size or there is none."""
    if isinstance(policy, partial):
        return tuple(policy.keywords.get("transformer_layer_cls") or ()) or None
    return tuple(getattr(policy, "_module_classes", ())) or None
