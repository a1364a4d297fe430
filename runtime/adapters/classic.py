"""DDP, FSDP1 and ZeroRedundancyOptimizer: wrappers that keep their names and lead to the plan."""

from __future__ import annotations

import contextlib
import math
from functools import partial, wraps
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn

from paro_advise.errors import TrainingError
from paro_advise.runtime.adapters.session import Session, Wrapping, from_rank_0

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

_session: Session | None = None
_NO_PLAN = "run this script without a plan"


def install(session: Session) -> None:
    """Replace the three classes."""
    import torch.distributed.fsdp as fsdp
    import torch.distributed.optim as optim

    global _session
    _session = session
    torch.nn.parallel.DistributedDataParallel = DistributedDataParallel
    torch.nn.parallel.distributed.DistributedDataParallel = DistributedDataParallel
    fsdp.FullyShardedDataParallel = FullyShardedDataParallel
    fsdp.fully_sharded_data_parallel.FullyShardedDataParallel = FullyShardedDataParallel
    optim.ZeroRedundancyOptimizer = ZeroRedundancyOptimizer


def _refusing(init: Callable[..., None]) -> Callable[..., None]:
    """Let an __init__ that cannot be mapped end the job with its reason and no traceback."""

    @wraps(init)
    def call(self: Any, *args: Any, **kwargs: Any) -> None:
        try:
            init(self, *args, **kwargs)
        except TrainingError as error:
            assert _session is not None
            _session.refuse(error)

    return call


class _Wrapper(nn.Module):  # type: ignore[misc]
    """What both wrappers do."""

    _inner_name = "module"
    _wrapping: Wrapping

    def _take(self, module: nn.Module, wrapping: Wrapping) -> None:
        self.add_module(self._inner_name, module)
        self._wrapping = wrapping

    @property
    def _inner(self) -> nn.Module:
        found = self._modules[self._inner_name]
        assert found is not None
        return found

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the wrapped module, sharded before its first pass."""
        inner = self._inner
        if _session is not None and not isinstance(inner, _Wrapper):
            _session.before_forward(inner, lambda: self._wrapping)
        return inner(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            inner = self.__dict__["_modules"].get(self._inner_name)
            if inner is None:
                raise
            return getattr(inner, name)

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Only add gradients up in backward passes inside this context."""
        assert _session is not None
        if _session.root is not None:
            with _session.root.no_sync():
                yield
            return
        before = _session.gated
        _session.gate(synchronizes=False)
        try:
            yield
        finally:
            _session.gate(synchronizes=before)
            if _session.root is not None:  # it was sharded inside
                _session.root.set_requires_gradient_sync(before)


class DistributedDataParallel(_Wrapper):
    """Takes DDP's arguments; the plan decides how the model is sharded."""

    @_refusing
    def __init__(
        self,
        module: nn.Module,
        *_: Any,
        process_group: Any = None,
        broadcast_buffers: bool = True,
        init_sync: bool = True,
        **settings: Any,
    ) -> None:
        super().__init__()
        if process_group is not None and dist.get_world_size(process_group) != dist.get_world_size():
            raise TrainingError("a plan needs DDP over all ranks, got a smaller process group", hint=_NO_PLAN)
        if settings.get("mixed_precision") is not None:
            raise TrainingError("a plan cannot express DDP's mixed_precision", hint=_NO_PLAN)
        if settings.get("find_unused_parameters"):
            # Ours would step parameters that nobody used with a gradient of zero: weight decay would act.
            raise TrainingError(
                "a plan cannot express DDP's find_unused_parameters",
                hint="turn it off if all parameters are used (Trainer: ddp_find_unused_parameters=False), "
                f"else {_NO_PLAN}",
            )
        if init_sync:
            from_rank_0(module)
        self._sends_buffers = broadcast_buffers and any(True for _ in module.buffers())
        self._take(module, Wrapping(origin="DDP"))

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the wrapped module, with rank 0's buffers as DDP does."""
        if self._sends_buffers and self.training and torch.is_grad_enabled():
            for buffer in self._inner.buffers():
                dist.broadcast(buffer, 0)
        return super().forward(*args, **kwargs)

    @_refusing
    def register_comm_hook(self, *_: Any, **__: Any) -> None:
        """Refuse: the plan moves the gradients."""
        raise TrainingError("a plan cannot be combined with DDP's communication hooks", hint=_NO_PLAN)


class FullyShardedDataParallel(_Wrapper):
    """Takes FSDP1's arguments; the plan decides how the model is sharded."""

    _inner_name = "_fsdp_wrapped_module"

    @_refusing
    def __init__(
        self,
        module: nn.Module,
        process_group: Any = None,
        sharding_strategy: Any = None,
        cpu_offload: Any = None,
        auto_wrap_policy: Any = None,
        backward_prefetch: Any = None,
        mixed_precision: Any = None,
        ignored_modules: Any = None,
        ignored_states: Any = None,
        device_id: Any = None,
        sync_module_states: bool = False,
        device_mesh: Any = None,
        **__: Any,
    ) -> None:
        super().__init__()
        del sharding_strategy, backward_prefetch  # the plan's to decide
        groups = process_group if isinstance(process_group, (tuple, list)) else [process_group]
        size = math.prod(dist.get_world_size(group) for group in groups if group is not None)
        covered = device_mesh.size() if device_mesh is not None else (size if process_group is not None else None)
        if covered is not None and covered != dist.get_world_size():
            raise TrainingError(f"a plan needs FSDP over all ranks, got {covered} of them", hint=_NO_PLAN)
        buffers, parameters = (getattr(mixed_precision, f"{name}_dtype", None) for name in ("buffer", "param"))
        if buffers not in (None, parameters):
            raise TrainingError("a plan cannot express FSDP's buffer_dtype", hint=_NO_PLAN)
        if ignored_modules or ignored_states:
            raise TrainingError("a plan cannot express FSDP's ignored modules", hint=_NO_PLAN)
        if cpu_offload is not None and getattr(cpu_offload, "offload_params", cpu_offload):
            raise TrainingError("a plan cannot express FSDP's CPU offload", hint=_NO_PLAN)
        if device_id is not None:
            module.to(torch.device("cuda", device_id) if isinstance(device_id, int) else device_id)
        if sync_module_states:
            from_rank_0(module)
        inner = [part._inner for part in module.modules() if isinstance(part, FullyShardedDataParallel)]  # noqa: SLF001 - our class
        units = tuple(inner) or _classes(auto_wrap_policy)
        wrapping = Wrapping(
            origin="FSDP1 (FullyShardedDataParallel)",
            units=units,
            param_dtype=getattr(mixed_precision, "param_dtype", None),
            reduce_dtype=getattr(mixed_precision, "reduce_dtype", None),
        )
        self._take(module, wrapping)

    @property
    def module(self) -> nn.Module:
        """Return the wrapped module."""
        return self._inner

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> torch.Tensor:
        """Clip the gradients of the whole model."""
        norm: torch.Tensor = torch.nn.utils.clip_grad_norm_(self.parameters(), max_norm, norm_type)
        return norm

    @staticmethod
    def fsdp_modules(*_: Any, **__: Any) -> list[nn.Module]:
        """Return none: torch's own helpers of checkpoints then take the model as it is."""
        return []

    @staticmethod
    def state_dict_type(*_: Any, **__: Any) -> Any:
        """Refuse: checkpoints of a planned model are not FSDP1's."""
        raise TrainingError(
            "a planned model cannot write FSDP1's own checkpoints",
            hint="use torch.distributed.checkpoint or paro_advise.runtime.save_checkpoint",
        )

    set_state_dict_type = full_optim_state_dict = sharded_optim_state_dict = optim_state_dict = state_dict_type


def _classes(policy: Any) -> tuple[type[nn.Module], ...] | None:
    """Return the classes that an auto-wrap policy names, None if it goes by size or there is none."""
    if isinstance(policy, partial):
        return tuple(policy.keywords.get("transformer_layer_cls") or ()) or None
    return tuple(getattr(policy, "_module_classes", ())) or None


class ZeroRedundancyOptimizer:
    """Makes the optimizer that it would have wrapped; the plan shards its states."""

    def __new__(
        cls,
        params: Any,
        optimizer_class: type[torch.optim.Optimizer],
        process_group: Any = None,
        parameters_as_bucket_view: bool = False,
        overlap_with_ddp: bool = False,
        **defaults: Any,
    ) -> Any:
        """Return the plain optimizer."""
        if process_group is not None and dist.get_world_size(process_group) != dist.get_world_size():
            raise TrainingError("a plan needs all ranks, got a smaller process group", hint=_NO_PLAN)
        if overlap_with_ddp:
            raise TrainingError("a plan cannot express overlap_with_ddp", hint=_NO_PLAN)
        del cls, parameters_as_bucket_view
        return optimizer_class(params, **defaults)
