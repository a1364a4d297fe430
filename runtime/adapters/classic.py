"""DDP, FSDP1 and ZeroRedundancyOptimizer: wrappers that keep their names and lead to the plan."""

from __future__ import annotations

import contextlib
import copy
import math
import weakref
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import ShardingStrategy

from paro_advise.errors import TrainingError
from paro_advise.runtime.adapters.constants import NO_PLAN
from paro_advise.runtime.adapters.fsdp1_states import PART, FullyShardedStates
from paro_advise.runtime.adapters.names import replace_everywhere
from paro_advise.runtime.adapters.planned.wrapping import (
    Wrapping,
    copy_from_rank_0,
    ignored_by_ddp,
    wrapped_classes,
)
from paro_advise.runtime.adapters.precision import BufferTypes, cast_by, check_precision, run_unsharded
from paro_advise.runtime.adapters.refusals import end_job_on_error, this_session
from paro_advise.runtime.adapters.session import Session
from paro_advise.runtime.compiler import taken_apart, uncompiled
from paro_advise.runtime.mixins import mixed_in
from paro_advise.runtime.sharding.exchange.usage import Missing

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import CPUOffload, MixedPrecision
    from torch.optim.optimizer import ParamsT

_STATE_DICT = "state_dict"


def install(session: Session) -> None:
    """Replace the three classes."""
    import torch.distributed.fsdp as fsdp
    import torch.distributed.fsdp.fully_sharded_data_parallel as fsdp_module
    import torch.distributed.optim as optim
    import torch.nn.parallel.distributed as ddp_module

    Session.of_process = session
    replace_everywhere("DistributedDataParallel", DistributedDataParallel, torch.nn.parallel, ddp_module)
    replace_everywhere("FullyShardedDataParallel", FullyShardedDataParallel, fsdp, fsdp_module)
    replace_everywhere("ZeroRedundancyOptimizer", ZeroRedundancyOptimizer, optim)


_SHARED_BY_COPIES = ("process_group", "_wrapping")


class _Wrapper(nn.Module):
    """What the stand-ins for DDP and FSDP1 share."""

    _inner_name = "module"
    _key_prefix = "module."
    _is_in_no_sync = False
    _wrapping: Wrapping

    def _adopt(self, module: nn.Module, wrapping: Wrapping) -> None:
        setattr(self, self._inner_name, module)  # add_module asks a subclass's __getattr__ for the name
        self._wrapping = wrapping
        this_session().is_reached = True
        this_session().refuse_new_parameters(module)
        this_session().handed_out.watch(module)

    def __deepcopy__(self, memo: dict[int, Any]) -> _Wrapper:
        """Return a copy that belongs to the same groups, as those of means of weights do."""
        copied = type(self).__new__(type(self))
        memo[id(self)] = copied
        for key, value in self.__dict__.items():
            copied.__dict__[key] = value if key in _SHARED_BY_COPIES else copy.deepcopy(value, memo)
        return copied

    @property
    def _inner(self) -> nn.Module:
        inner = self._modules[self._inner_name]
        assert inner is not None
        return inner

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget the gradients of the wrapped module."""
        inner = self._inner
        while isinstance(inner, _Wrapper):
            inner = inner._inner  # noqa: SLF001 - our class
        nn.Module.zero_grad(inner, set_to_none)  # a wrapped model's own method is not called

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Parameter]]:
        """Return the parameters, up to date."""
        session = Session.of_process
        engine = session.engine(self._inner) if session is not None else None
        if engine is not None:
            engine.show_parameters()
        return super().named_parameters(*args, **kwargs)

    @uncompiled
    def forward(self, *args: object, **kwargs: object) -> object:
        """Call the wrapped module, sharded before its first pass."""
        inner, compiler = taken_apart(self._inner)
        if Session.of_process is not None and not isinstance(inner, _Wrapper):
            Session.of_process.before_forward(inner, lambda: replace(self._wrapping, compile=compiler))
            if "is_inner" not in self.__dict__ and Session.of_process.engine(inner) is None:
                return run_unsharded(inner, self._wrapping, args, kwargs)
        output: object = inner(*args, **kwargs)
        return output

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """Take a state dict of this wrapper's, whole or in shards; names without its prefix are none of its own."""
        prefix = self._key_prefix
        names = {k.removeprefix(prefix) if k.startswith(prefix) else f"{k} (not {prefix}...)": k for k in state_dict}
        given = {own: state_dict[key] for own, key in names.items()}
        inner = self._inner
        # Part by part, as a wrapper does: a wrapped model's own method is not called.
        is_wrapper = isinstance(inner, _Wrapper)
        load = inner.load_state_dict if is_wrapper else partial(nn.Module.load_state_dict, inner)
        found = load(given, strict, assign)
        found.missing_keys[:] = [prefix + key for key in found.missing_keys]
        found.unexpected_keys[:] = [names.get(key, prefix + key) for key in found.unexpected_keys]
        return found

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Accumulate gradients inside this context without synchronizing them."""
        session, inner = this_session(), self._inner
        sharded = session.sharded(inner)
        if sharded is not None:
            outside, self._is_in_no_sync = self._is_in_no_sync, True
            try:
                with session.boundary(inner).told_by_script(), sharded.no_sync():
                    yield
            finally:
                self._is_in_no_sync = outside
            return
        before = session.next_pass_is_last(inner)
        session.gate(inner, synchronizes=False)
        try:
            yield
        finally:
            session.gate(inner, synchronizes=before)
            sharded = session.sharded(inner)
            if sharded is not None:  # inside
                sharded.set_requires_gradient_sync(before)


class _NoReducer:
    """DDP's reducer to those who prepare it for backward by hand, after a forward pass that did not."""

    def __init__(self, wrapper: DistributedDataParallel) -> None:
        self._wrapper = weakref.ref(wrapper)

    def _rebuild_buckets(self) -> bool:
        return False

    def prepare_for_backward(self, *_: object) -> None:
        """Let the coming backward pass count as one of a forward pass that synchronizes, if it does."""
        wrapper = self._wrapper()
        if wrapper is not None:
            wrapper.is_prepared()


class DistributedDataParallel(_Wrapper):
    """Takes DDP's arguments; the plan decides how the model is sharded."""

    @end_job_on_error
    def __init__(
        self,
        module: nn.Module,
        device_ids: object = None,
        output_device: object = None,
        dim: int = 0,
        broadcast_buffers: bool | None = None,
        init_sync: bool = True,
        process_group: dist.ProcessGroup | None = None,
        *more: object,
        device_mesh: DeviceMesh | None = None,
        forward_sync_buffers: bool | None = None,
        **settings: object,
    ) -> None:
        super().__init__()
        del device_ids, output_device  # of one process for several devices
        if _num_covered_ranks(process_group, device_mesh) != dist.get_world_size():
            raise TrainingError("a plan needs DDP over all ranks, got a smaller process group", hint=NO_PLAN)
        if settings.get("mixed_precision") is not None or more[7:8] not in ((), (None,)):
            raise TrainingError("a plan cannot express DDP's mixed_precision", hint=NO_PLAN)
        self._ignored_names = frozenset(getattr(module, "_ddp_params_and_buffers_to_ignore", ()))
        ignored = ignored_by_ddp(module, self._ignored_names)
        copies_buffers = forward_sync_buffers is not None or broadcast_buffers in (None, True)  # torch 2.13
        if init_sync:
            own = [one for name, one in module.named_buffers() if not copies_buffers or name in self._ignored_names]
            copy_from_rank_0(module, [*ignored, *own])
        self.forward_sync_buffers = copies_buffers if forward_sync_buffers is None else forward_sync_buffers
        frozen = frozenset(parameter for parameter in module.parameters() if not parameter.requires_grad)
        wrapping = Wrapping(
            origin="DDP", states_are_whole=True, evaluates_alone=True, ignored=ignored, frozen=frozen - ignored,
            keeps_local_gradients=True,
        )  # fmt: skip
        self._adopt(module, wrapping)
        this_session().collectives.begin()
        self.reducer = _NoReducer(self)
        self.dim, self.is_multi_device_module, self.require_forward_param_sync = dim, False, True
        self._show_settings(process_group if device_mesh is None else device_mesh.get_group(0), settings)

    def _show_settings(self, process_group: dist.ProcessGroup | None, settings: dict[str, object]) -> None:
        """Have the attributes of DDP that others read."""
        first = next(iter(self._inner.parameters()), None)
        self.device = first.device if first is not None else torch.device("cpu")
        self.device_type = self.device.type
        self.device_ids = self.output_device = self.logger = None
        self.process_group = process_group or dist.group.WORLD
        for name in ("static_graph", "find_unused_parameters", "gradient_as_bucket_view"):
            setattr(self, name, bool(settings.get(name)))

    @property
    def broadcast_buffers(self) -> bool:
        """Return the setting by the name that it had until torch 2.13."""
        return self.forward_sync_buffers

    @broadcast_buffers.setter
    def broadcast_buffers(self, value: bool) -> None:
        self.forward_sync_buffers = value

    @staticmethod
    def _set_params_and_buffers_to_ignore_for_model(module: nn.Module, params_and_buffers_to_ignore: object) -> None:
        """Note what DDP shall leave alone."""
        module._ddp_params_and_buffers_to_ignore = params_and_buffers_to_ignore  # type: ignore[assignment]  # noqa: SLF001

    def _get_ddp_logging_data(self) -> dict[str, object]:
        """Return nothing: there are no buckets to tell of."""
        return {}

    @classmethod
    def _get_active_ddp_module(cls) -> None:
        """Tell torch's compiler that no DDP of torch's own is at work."""

    def _set_static_graph(self) -> None:
        """Ignore what only speeds DDP up."""
        self.static_graph = True

    @property
    def require_backward_grad_sync(self) -> bool:
        """Tell whether the next backward pass is the last of its step, as the script says."""
        return not self._is_in_no_sync and this_session().next_pass_is_last(self._inner)

    @require_backward_grad_sync.setter
    def require_backward_grad_sync(self, value: bool) -> None:
        session = this_session()
        session.gate(self._inner, synchronizes=value)
        sharded = session.sharded(self._inner)
        if sharded is not None:
            sharded.set_requires_gradient_sync(value)

    def is_prepared(self) -> None:
        """Take note that the script itself prepares the coming backward pass."""
        engine = this_session().engine(self._inner)
        if engine is not None and self.require_backward_grad_sync:
            engine.gradients.has_synchronized_forward = engine.gradients.synchronizes
            self.require_forward_param_sync = True

    def forward(self, *args: object, **kwargs: object) -> object:
        """Call the wrapped module, with rank 0's buffers where DDP sends them.

        That is in each pass after one that synchronizes gradients, evaluation or not.
        """
        if self.forward_sync_buffers and self.require_forward_param_sync:
            for name, buffer in self._inner.named_buffers():
                if name not in self._ignored_names:
                    dist.broadcast(buffer, 0)
        output = super().forward(*args, **kwargs)
        self.require_forward_param_sync = torch.is_grad_enabled() and self.require_backward_grad_sync
        return output

    @end_job_on_error
    def join(self, _divide: bool = True, enable: bool = True, **_: object) -> contextlib.AbstractContextManager[None]:
        """Refuse, unless disabled: ranks with fewer inputs than others would leave collectives of the plan alone."""
        if not enable:
            return contextlib.nullcontext()
        raise TrainingError("a plan cannot express DDP's join()", hint="give all ranks as many batches, or " + NO_PLAN)

    def join_hook(self, *_: object, **__: object) -> None:
        """Refuse as ``join`` does; torch's ``Join`` asks each model for this."""
        self.join()

    @end_job_on_error
    def register_comm_hook(self, *_: object, **__: object) -> None:
        """Refuse: the plan moves the gradients."""
        raise TrainingError("a plan cannot be combined with DDP's communication hooks", hint=NO_PLAN)

    _register_builtin_comm_hook = _register_fused_optim = register_comm_hook


class FullyShardedDataParallel(FullyShardedStates, _Wrapper):
    """Takes FSDP1's arguments; the plan decides how the model is sharded."""

    _inner_name = "_fsdp_wrapped_module"
    _key_prefix = ""

    @end_job_on_error
    def __init__(
        self,
        module: nn.Module,
        process_group: dist.ProcessGroup | tuple[dist.ProcessGroup, dist.ProcessGroup] | None = None,
        sharding_strategy: object = None,
        cpu_offload: CPUOffload | bool | None = None,
        auto_wrap_policy: object = None,
        backward_prefetch: object = None,
        mixed_precision: MixedPrecision | None = None,
        ignored_modules: Iterable[nn.Module] | None = None,
        param_init_fn: Callable[[nn.Module], None] | None = None,
        device_id: int | torch.device | None = None,
        sync_module_states: bool = False,
        forward_prefetch: bool = False,
        limit_all_gathers: bool = True,
        use_orig_params: bool = False,
        ignored_states: Iterable[nn.Module | nn.Parameter] | None = None,
        device_mesh: DeviceMesh | None = None,
    ) -> None:
        super().__init__()
        del backward_prefetch, forward_prefetch, limit_all_gathers  # the plan's to decide
        early = [] if use_orig_params else this_session().optimizers_over(module)
        if (covered := _num_covered_ranks(process_group, device_mesh)) != dist.get_world_size():
            raise TrainingError(f"a plan needs FSDP over all ranks, got {covered} of them", hint=NO_PLAN)
        check_precision(mixed_precision, module, wraps_by_policy=auto_wrap_policy is not None)
        self._buffer_types = BufferTypes(getattr(mixed_precision, "buffer_dtype", None), ignored_modules)
        parameters, reductions = (getattr(mixed_precision, f"{name}_dtype", None) for name in ("param", "reduce"))
        self._precision = (parameters, reductions, bool(getattr(mixed_precision, "cast_forward_inputs", False)))
        offloads: object = getattr(cpu_offload, "offload_params", cpu_offload)
        if offloads:
            raise TrainingError("a plan cannot express FSDP's CPU offload", hint=NO_PLAN)
        if any(parameter._backward_hooks for parameter in module.parameters()):  # noqa: SLF001 - has no public name
            raise TrainingError(
                "a plan cannot express hooks on gradients from before FSDP, which would drop them",
                hint="change parameter.grad between backward and step",
            )
        _materialize(module, param_init_fn)
        if device_id is not None:
            module.to(torch.device("cuda", device_id) if isinstance(device_id, int) else device_id)
        wrapped = [part for part in module.modules() if isinstance(part, FullyShardedDataParallel)]
        ignored = _parameters_of([*(ignored_modules or ()), *(ignored_states or ())]).union(
            *(part._wrapping.ignored for part in wrapped)  # noqa: SLF001 - our class
        )
        if sync_module_states:
            copy_from_rank_0(module, ignored)
        for part in wrapped:
            part.mark_inner()
            if part._precision != self._precision:  # noqa: SLF001 - our class
                raise TrainingError("a plan needs one mixed_precision for all parts, got several", hint=NO_PLAN)
        inner = tuple(part._inner for part in wrapped)  # noqa: SLF001 - our class
        units = inner or wrapped_classes(auto_wrap_policy)
        wrapping = Wrapping(
            origin="FSDP1 (FullyShardedDataParallel)",
            states_are_whole=True,
            units=units,
            param_dtype=parameters,
            reduce_dtype=reductions,
            cast_modules=cast_by(mixed_precision, module, None if units is None and auto_wrap_policy else units or ()),
            keeps_types=True,
            shards_parameters=True,
            shows_shards=sharding_strategy is not ShardingStrategy.NO_SHARD,
            # Wrapped as a whole, the model is one unit of FSDP1's, whatever units the plan makes of it.
            missing_gradients=Missing.ZEROS_IN_USED_UNITS if inner or auto_wrap_policy else Missing.ZEROS,
            ignored=ignored,
            too_early=tuple(map(weakref.ref, early)),
        )
        self._show_settings(process_group, device_mesh, sharding_strategy, mixed_precision)
        self._adopt(module, wrapping)

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """Take a state dict by the names of the model that was wrapped."""
        own = {key.replace(PART, ""): key for key in nn.Module.state_dict(self._inner, keep_vars=True)}
        return super().load_state_dict({own.get(key, key): value for key, value in state_dict.items()}, strict, assign)

    def __getattr__(self, name: str) -> Any:  # Any: whatever the wrapped model has
        try:
            return super().__getattr__(name)
        except AttributeError:
            inner = self.__dict__["_modules"].get(self._inner_name)
            if inner is None:
                raise
            return getattr(inner, name)

    @property
    def module(self) -> nn.Module:
        """Return the wrapped module."""
        return self._inner

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> torch.Tensor:
        """Clip the gradients of the whole model."""
        return torch.nn.utils.clip_grad_norm_(self.parameters(), max_norm, norm_type)

    @staticmethod
    def fsdp_modules(*_: object, **__: object) -> list[nn.Module]:
        """Return none: torch's own helpers of checkpoints then take the model as it is."""
        return []


def _materialize(module: nn.Module, fill: Callable[[nn.Module], None] | None) -> None:
    """Fill what is on the meta device as FSDP1 does: by the script's function, else by ``reset_parameters``."""
    device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
    for part in module.modules():
        own = [*nn.Module.parameters(part, recurse=False), *part.buffers(recurse=False)]
        if any(tensor.is_meta for tensor in own):
            if fill is not None:
                fill(part)
            else:
                part.to_empty(device=device, recurse=False)
                part.reset_parameters()  # type: ignore[operator]  # as FSDP1 requires of such a module


def _parameters_of(states: Iterable[nn.Module | nn.Parameter]) -> frozenset[nn.Parameter]:
    """Return parameters, and those of modules."""
    found = [list(item.parameters()) if isinstance(item, nn.Module) else [item] for item in states]
    return frozenset(parameter for items in found for parameter in items)


def _num_covered_ranks(
    process_group: dist.ProcessGroup | tuple[dist.ProcessGroup, ...] | None, mesh: DeviceMesh | None
) -> int:
    """Return how many ranks DDP or FSDP1 would shard and replicate over."""
    if mesh is not None:
        return mesh.size()
    groups = process_group if isinstance(process_group, (tuple, list)) else [process_group]
    return math.prod(map(dist.get_world_size, groups))


class _Consolidating(torch.optim.Optimizer):
    """Mixed into the class of an optimizer that ZeroRedundancyOptimizer would have wrapped."""

    def consolidate_state_dict(self, to: int = 0) -> None:
        """Gather the state for one rank; all ranks call it."""
        self.__dict__.pop(_STATE_DICT, None)
        state = self.state_dict()
        if dist.get_rank() == to:
            # On the object, before whatever class a plan makes of it.
            self.__dict__[_STATE_DICT] = lambda: state

    def step(self, *args: Any, **kwargs: Any) -> Any:  # as the optimizer's own
        """Step; what was consolidated before is not the state any more."""
        self.__dict__.pop(_STATE_DICT, None)
        return super().step(*args, **kwargs)


class _AnyConsolidating(type):
    """Of the class whose instances are the optimizers that it makes."""

    def __instancecheck__(cls, instance: object) -> bool:
        return isinstance(instance, _Consolidating)


class ZeroRedundancyOptimizer(metaclass=_AnyConsolidating):
    """Makes the optimizer that it would have wrapped; the plan shards its states."""

    def __new__(
        cls,
        params: ParamsT,
        optimizer_class: Callable[..., torch.optim.Optimizer],
        process_group: dist.ProcessGroup | None = None,
        parameters_as_bucket_view: bool = False,
        overlap_with_ddp: bool = False,
        **defaults: object,
    ) -> Any:  # Any: __new__ may return another class's object, but not be declared so
        """Return the plain optimizer."""
        if process_group is not None and dist.get_world_size(process_group) != dist.get_world_size():
            raise TrainingError("a plan needs all ranks, got a smaller process group", hint=NO_PLAN)
        if overlap_with_ddp:
            raise TrainingError("a plan cannot express overlap_with_ddp", hint=NO_PLAN)
        del cls, parameters_as_bucket_view
        optimizer = optimizer_class(params, **defaults)
        made = type(optimizer)
        optimizer.__class__ = mixed_in(_Consolidating, made)
        return optimizer
