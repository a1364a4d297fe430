"""FSDP2: ``fully_shard`` shards as ever; at the first training pass the plan takes over from it.

Until then a script initialises, loads and evaluates its model as under plain FSDP2, on shards of the same size.
"""

from __future__ import annotations

import contextlib
import functools
import sys
from typing import TYPE_CHECKING, ClassVar, TypedDict, TypeVar, Unpack

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, UnshardHandle
from torch.distributed.tensor import DTensor

from paro_advise.errors import TrainingError
from paro_advise.runtime.adapters.constants import NO_PLAN
from paro_advise.runtime.adapters.names import replace_everywhere
from paro_advise.runtime.adapters.planned.wrapping import Wrapping
from paro_advise.runtime.compiler import uncompiled
from paro_advise.runtime.mixins import Outermost, mixed_in, without_first
from paro_advise.runtime.sharding.parameters.fsdp2 import hold_hook_places, hook_handles, reshard, unwrap
from paro_advise.runtime.sharding.phases.lost_gradients import refuse_late

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import OffloadPolicy

    from paro_advise.runtime.adapters.session import Session

# What has no effect where a plan has replaced FSDP2, and decides itself when to gather and to free.
_OF_FSDP2_ALONE = (
    "set_modules_to_forward_prefetch",
    "set_modules_to_backward_prefetch",
    "set_reshard_after_forward",
    "set_unshard_in_backward",
    "set_post_optim_event",
    "set_allocate_memory_from_process_group_for_comm",
    "set_separate_reduce_scatter_group",
    "set_reduce_scatter_max_input_buffers",
    "set_force_sum_reduction_for_comms",
    "set_reduce_scatter_unused_params",
    "set_symm_mem_for_comm",
)
_REFUSED = ("shard_placement_fn", "dp_mesh_dims")
_Modules = TypeVar("_Modules", bound=nn.Module | list[nn.Module])


class FullyShardSettings(TypedDict, total=False):
    """The settings of ``fully_shard``; only those that are read here have a type."""

    mesh: DeviceMesh | None
    reshard_after_forward: bool | int | None
    shard_placement_fn: object
    mp_policy: MixedPrecisionPolicy | None
    offload_policy: OffloadPolicy | None
    ignored_params: set[nn.Parameter] | None
    dp_mesh_dims: object


class PlannedModule(Outermost):
    """Mixed into the class of a module that ``fully_shard`` was called on."""

    paro_calls: ClassVar[FullyShardCalls]

    def __call__(self, *args: object, **kwargs: object) -> object:
        """Let the plan take over before the first training pass, then call the module."""
        assert isinstance(self, nn.Module)
        self.paro_calls.before_forward(self)
        return super().__call__(*args, **kwargs)  # type: ignore[misc]  # of the class that this is mixed into

    def set_requires_gradient_sync(self, requires_gradient_sync: bool, *, recurse: bool = True) -> None:
        """Set whether the next backward pass is the last of its step."""
        assert isinstance(self, nn.Module)
        self.paro_calls.session.gate(self, synchronizes=requires_gradient_sync, recurse=recurse)

    def set_requires_all_reduce(self, requires_all_reduce: bool, *, recurse: bool = True) -> None:
        """Set whether the next backward pass is the last of its step; without replicas this does nothing in FSDP2."""
        assert isinstance(self, nn.Module)
        if self.paro_calls.has_replicas(self):
            self.set_requires_gradient_sync(requires_all_reduce, recurse=recurse)

    def set_is_last_backward(self, is_last_backward: bool) -> None:
        """Set whether the next backward pass is the last of its step."""
        self.set_requires_gradient_sync(is_last_backward)

    def set_gradient_divide_factor(self, factor: float) -> None:
        """Set what sums of gradients are divided by."""
        assert isinstance(self, nn.Module)
        self.paro_calls.set_divide_factor(self, factor)

    set_reduce_scatter_divide_factor = set_gradient_divide_factor  # its older name

    def unshard(self, async_op: bool = False) -> UnshardHandle | None:
        """Gather the parameters where FSDP2 still shards them; where a plan replicates them they are whole."""
        assert isinstance(self, nn.Module)
        self.paro_calls.begin_gathered(self)
        below = getattr(super(), "unshard", None)
        handle: UnshardHandle | None = below(async_op) if below else UnshardHandle() if async_op else None
        return handle

    def set_reshard_after_backward(self, reshard_after_backward: bool, *, recurse: bool = True) -> None:
        """Note what the script means to free by itself before each step; a plan frees it after each pass."""
        assert isinstance(self, nn.Module)
        for part in self.modules() if recurse else (self,):
            self.paro_calls.keep_after_backward(part, keeps=not reshard_after_backward)

    def reshard(self) -> None:
        """Free the parameters where FSDP2 still shards them."""
        assert isinstance(self, nn.Module)
        self.paro_calls.end_gathered(self)
        below = getattr(super(), "reshard", None)
        if below:
            below()

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Accumulate gradients inside this context without synchronizing them."""
        self.set_requires_gradient_sync(False)
        try:
            yield
        finally:
            self.set_requires_gradient_sync(True)


def _passing_on(name: str) -> Callable[..., object]:
    """Return a method that does what FSDP2's does where it still shards the module, and nothing elsewhere."""

    def call(self: PlannedModule, *args: object, **kwargs: object) -> object:
        below = getattr(super(PlannedModule, self), name, None)
        return below(*args, **kwargs) if below else None

    call.__name__ = name
    return call


def _refuse(self: PlannedModule, *_: object, **__: object) -> None:
    """Refuse what would act on collectives that the plan replaces."""
    self.paro_calls.session.refuse(TrainingError("a plan cannot express own collectives of FSDP2", hint=NO_PLAN))


for _name in _OF_FSDP2_ALONE:
    setattr(PlannedModule, _name, _passing_on(_name))
for _name in ("set_custom_all_gather", "set_custom_reduce_scatter", "set_all_reduce_hook"):
    setattr(PlannedModule, _name, _refuse)


def install(session: Session) -> None:
    """Replace ``fully_shard``."""
    import torch.distributed._composable.fsdp as old
    import torch.distributed.fsdp as new

    calls = FullyShardCalls(session, new.fully_shard)
    replace_everywhere("fully_shard", calls.fully_shard, new, old)
    replace_everywhere("register_fsdp_forward_method", calls.register_forward_method, new)
    replace_everywhere("FSDPModule", _standing_for(new.FSDPModule), new, old)


def _standing_for(original: type) -> type:
    """Return a class of which whatever ``fully_shard`` was called on is an instance, sharded yet or not."""

    class Kind(type):
        def __instancecheck__(cls, instance: object) -> bool:
            return isinstance(instance, (PlannedModule, original))

        def __setattr__(cls, name: str, value: object) -> None:
            raise TrainingError(
                f"a plan cannot express methods that replace FSDPModule's, got one for {name}", hint=NO_PLAN
            )

    def of_instance(name: str) -> Callable[..., object]:
        def call(self: nn.Module, *args: object, **kwargs: object) -> object:
            return getattr(self, name)(*args, **kwargs)

        call.__name__ = name
        return call

    methods = {name: of_instance(name) for name in vars(original) if not name.startswith("_")}
    return Kind("FSDPModule", (), {"__doc__": original.__doc__, **methods})


class FullyShardCalls:
    """The calls of ``fully_shard`` in a process.

    Args:
        session: the planned process.
        original: FSDP2's own function.
    """

    def __init__(self, session: Session, original: Callable[..., object]) -> None:
        self.session = session
        self._original = original
        self._settings: dict[int, tuple[nn.Module, FullyShardSettings]] = {}
        self._groups: list[list[nn.Module]] = []
        self._factors: dict[int, tuple[nn.Module, float]] = {}
        self._shown: dict[int, type] = {}  # by module, which `_settings` keeps alive
        self._gathered: set[int] = set()  # by hand; asked for at each call of each module
        self._kept: set[int] = set()  # gathered behind a backward pass, if FSDP2 had its way

    def fully_shard(self, module: _Modules, **settings: Unpack[FullyShardSettings]) -> _Modules:
        """Shard as FSDP2 does, and note what is wrapped, with FSDP2's settings."""
        self.session.is_reached = True
        self._original(module, **settings)
        group: list[nn.Module] = [*module] if isinstance(module, (list, tuple)) else [module]
        self._groups.append(group)
        for part in group:
            self._settings[id(part)] = (part, settings)
            self.session.handed_out.watch(part)
            self._mix_in(part)
        return module

    def _mix_in(self, module: nn.Module) -> None:
        """Give a module's class the methods of PlannedModule, so that the plan takes over at its first call."""
        cls = type(module)
        if not isinstance(module, PlannedModule):
            # FSDP2's class is taken off and on again; what a script sees is that of its own call.
            shown = self._shown.setdefault(id(module), cls)
            module.__class__ = mixed_in(PlannedModule, cls, shown_as=shown, paro_calls=self)

    def set_divide_factor(self, module: nn.Module, factor: float) -> None:
        """Note what sums of a module's gradients are divided by; it counts once the model is sharded."""
        self._factors[id(module)] = (module, factor)
        self._pass_on_factors()

    def _pass_on_factors(self) -> None:
        for key, (module, factor) in list(self._factors.items()):
            engine = self.session.engine(module)
            if engine is not None:
                engine.set_divide_factor(module, factor)
                del self._factors[key]

    def has_replicas(self, module: nn.Module) -> bool:
        """Tell whether a module's shards are repeated over one dimension of its mesh."""
        _, settings = self._settings.get(id(module), (module, FullyShardSettings()))
        mesh = settings.get("mesh")
        return mesh is not None and mesh.ndim > 1

    def keep_after_backward(self, module: nn.Module, *, keeps: bool) -> None:
        """Note whether FSDP2 would leave a module's parameters gathered behind its next backward pass."""
        if keeps and id(module) in self._settings:
            self._kept.add(id(module))
        elif not keeps:
            self._kept.discard(id(module))

    def begin_gathered(self, module: nn.Module) -> None:
        """Note that a script gathers a module by hand."""
        engine = self.session.engine(module)
        if engine is not None:
            self._gathered.add(id(module))
            engine.begin_gathered_by_hand(module)

    def end_gathered(self, module: nn.Module) -> None:
        """Note that a module's parameters are freed, by hand or because it is called.

        Raises:
            UsageError: the script has changed them, which FSDP2 forgets.
        """
        self.session.left_gathered.discard(module)
        engine = self.session.engine(module) if id(module) in self._gathered else None
        if engine is not None:
            self._gathered.discard(id(module))
            engine.end_gathered_by_hand(module)

    def register_forward_method(self, module: nn.Module, method_name: str) -> None:
        """Treat a method as another forward pass of a module that ``fully_shard`` was called on.

        Raises:
            ValueError: the module has no such method, as in FSDP2.
        """
        if not isinstance(module, PlannedModule):
            return
        assert isinstance(module, nn.Module)
        if not hasattr(module, method_name):
            raise ValueError(f"{type(module)} does not have a method {method_name}")
        method = getattr(module, method_name)

        @functools.wraps(method)
        def call(*args: object, **kwargs: object) -> object:
            if _is_running(module):
                return method(*args, **kwargs)
            own = module.__dict__.get("forward")

            def restore() -> None:
                module.__dict__.pop("forward", None)
                if own is not None:
                    module.forward = own

            def forward(*args: object, **kwargs: object) -> object:
                restore()  # the method may call it
                return method(*args, **kwargs)

            self.before_forward(module)
            module.forward = forward
            try:
                with self._only_own_hooks(module):
                    return module(*args, **kwargs)
            finally:
                restore()

        setattr(module, method_name, call)

    @contextlib.contextmanager
    def _only_own_hooks(self, module: nn.Module) -> Iterator[None]:
        """Call no hooks of the script's around a method, as FSDP2 calls its own alone."""
        engine = self.session.engine(module)
        handles = [*(engine.hook_handles if engine else ()), *hook_handles(module)]
        own = {(id(handle.hooks_dict_ref()), handle.id) for handle in handles}
        tables = (module._forward_pre_hooks, module._forward_hooks)  # noqa: SLF001 - a module's hooks have no public names
        before = [dict(table) for table in tables]
        for table in tables:
            for key in [key for key in table if (id(table), key) not in own]:
                del table[key]
        try:
            yield
        finally:
            for table, kept in zip(tables, before, strict=True):
                table.clear()
                table.update(kept)

    @uncompiled
    def before_forward(self, module: nn.Module) -> None:
        """Let the plan take over a model if this is its first pass that makes gradients."""
        self.end_gathered(module)
        if id(module) in self._kept and torch.is_grad_enabled():
            self.session.left_gathered.add(module)
        self.session.before_forward(module, lambda: self._wrapping(module))
        if self._factors:
            self._pass_on_factors()

    def _wrapping(self, root: nn.Module) -> Wrapping:
        reshard(root)  # a script may gather ahead of its first pass; optimizers hold what is sharded
        inside = {id(part) for part in root.modules()}
        wrapped = [(part, settings) for part, settings in self._settings.values() if id(part) in inside]
        policies: list[MixedPrecisionPolicy] = []
        mesh_shapes = set()
        for _, settings in wrapped:
            _check(settings)
            mesh = settings.get("mesh")
            mesh_shapes.add((dist.get_world_size(),) if mesh is None else tuple(mesh.shape))
            policies.append(settings.get("mp_policy") or MixedPrecisionPolicy())
        _refuse_cut_otherwise(root, max(map(len, mesh_shapes)))
        types = {(policy.param_dtype, policy.reduce_dtype) for policy in policies}
        if len(types) > 1:
            raise TrainingError(
                "a plan needs the same param_dtype and reduce_dtype in all calls of fully_shard, got several",
                hint=NO_PLAN,
            )
        param_dtype, reduce_dtype = types.pop()
        parts = [(part, policy) for (part, _), policy in zip(wrapped, policies, strict=True)]
        return Wrapping(
            origin="FSDP2 (fully_shard)",
            units=tuple(part for part, _ in wrapped if not self._is_tied(part)),
            param_dtype=param_dtype,
            reduce_dtype=reduce_dtype,
            cast_modules=tuple(part for part, policy in parts if policy.cast_forward_inputs),
            output_dtypes={part: policy.output_dtype for part, policy in parts if policy.output_dtype is not None},
            keeps_types=True,
            norms_are_dtensors=True,
            shards_parameters=True,
            mesh_shapes=frozenset(mesh_shapes),
            ignored=frozenset(item for _, settings in wrapped for item in settings.get("ignored_params") or ()),
            let_go=lambda: self._let_go([part for part, _ in wrapped]),
        )

    def _is_tied(self, part: nn.Module) -> bool:
        """Tell whether a module was wrapped together with one that holds a parameter of it: the root's, then."""
        own = {id(parameter) for parameter in part.parameters()}
        return any(
            id(parameter) in own
            for group in self._groups
            if any(part is member for member in group)
            for member in group
            if member is not part
            for parameter in member.parameters()
        )

    def _let_go(self, parts: Sequence[nn.Module]) -> None:
        """Take FSDP2 off modules, whose parameters stay the shards that it has made."""
        for part in parts:
            assert isinstance(part, FSDPModule)
            part.reshard()
        for part in parts:
            hold_hook_places(part)
        for part in parts:
            part.__class__ = without_first(type(part))
            unwrap(part, refuse_late)
            self._mix_in(part)


def _is_running(module: nn.Module) -> bool:
    """Tell whether a call of a module is under way on this thread."""
    frame = sys._getframe(1).f_back  # noqa: SLF001 - inspect.stack reads files
    while frame is not None:
        if frame.f_code is nn.Module._call_impl.__code__ and frame.f_locals.get("self") is module:  # noqa: SLF001
            return True
        frame = frame.f_back
    return False


def _refuse_cut_otherwise(part: nn.Module, num_dimensions: int) -> None:
    """Refuse parameters that something else has cut as well, be it in one part.

    Raises:
        TrainingError: they lie on a mesh of more dimensions than those of ``fully_shard``.
    """
    for name, parameter in part.named_parameters():
        if isinstance(parameter, DTensor) and parameter.device_mesh.ndim > num_dimensions:
            raise TrainingError(
                f"a plan cannot be combined with tensor parallelism, got a parameter on a mesh of "
                f"{parameter.device_mesh.ndim} dimensions",
                where=name,
                hint=NO_PLAN,
            )


def _check(settings: FullyShardSettings) -> None:
    """Refuse settings that a plan would silently ignore.

    Raises:
        TrainingError: it names the setting.
    """
    for name in _REFUSED:
        if settings.get(name):
            raise TrainingError(f"a plan cannot express fully_shard's {name}", hint=NO_PLAN)
    offload, mesh = settings.get("offload_policy"), settings.get("mesh")
    if offload is not None and type(offload).__name__ != "OffloadPolicy":
        raise TrainingError("a plan cannot express fully_shard's CPU offload", hint=NO_PLAN)
    if mesh is not None and mesh.size() != dist.get_world_size():
        raise TrainingError(
            f"the mesh of fully_shard must hold all {dist.get_world_size()} ranks, got {mesh.size()}: "
            "a plan cannot be combined with tensor, context or pipeline parallelism",
            hint=NO_PLAN,
        )
