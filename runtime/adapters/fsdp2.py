"""FSDP2: ``fully_shard`` notes what is wrapped; the plan decides how it is sharded."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from torch import nn

from paro_advise.errors import TrainingError
from paro_advise.runtime.adapters.session import Session, Wrapping

if TYPE_CHECKING:
    from collections.abc import Iterator

_session: Session | None = None
_asked: dict[int, tuple[nn.Module, dict[str, Any]]] = {}
# What a plan takes no notice of: it has its own order, and its own times to gather and to free.
_WITHOUT_EFFECT = (
    "set_modules_to_forward_prefetch",
    "set_modules_to_backward_prefetch",
    "set_reshard_after_forward",
    "set_reshard_after_backward",
    "set_unshard_in_backward",
    "set_post_optim_event",
    "set_allocate_memory_from_process_group_for_comm",
    "set_separate_reduce_scatter_group",
    "set_reduce_scatter_max_input_buffers",
    "unshard",
    "reshard",
)
_NO_PLAN = "run this script without a plan"
_REFUSED = ("shard_placement_fn", "ignored_params", "dp_mesh_dims")


class PlannedModule:
    """Mixed into the class of a module that ``fully_shard`` was called on."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Shard the model before its first pass, then call it."""
        assert isinstance(self, nn.Module)
        if _session is not None:
            _session.before_forward(self, lambda: _wrapping(self))
        return super().__call__(*args, **kwargs)  # type: ignore[misc]

    def set_requires_gradient_sync(self, requires_gradient_sync: bool, *, recurse: bool = True) -> None:
        """Say whether the next backward pass is the last of its step."""
        if _session is not None:
            _session.gate(synchronizes=requires_gradient_sync)

    def set_requires_all_reduce(self, requires_all_reduce: bool, *, recurse: bool = True) -> None:
        """Say whether the next backward pass is the last of its step."""
        self.set_requires_gradient_sync(requires_all_reduce)

    def set_is_last_backward(self, is_last_backward: bool) -> None:
        """Say whether the next backward pass is the last of its step."""
        self.set_requires_gradient_sync(is_last_backward)

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Only add gradients up in backward passes inside this context."""
        self.set_requires_gradient_sync(False)
        try:
            yield
        finally:
            self.set_requires_gradient_sync(True)


def _no_effect(self: Any, *_: Any, **__: Any) -> None:
    """Take no notice."""


for _name in _WITHOUT_EFFECT:
    setattr(PlannedModule, _name, _no_effect)


def install(session: Session) -> None:
    """Replace ``fully_shard``."""
    import torch.distributed._composable.fsdp as old
    import torch.distributed.fsdp as new

    global _session
    _session = session
    new.fully_shard = old.fully_shard = fully_shard


def fully_shard(module: Any, **settings: Any) -> Any:
    """Note what shall be sharded, in FSDP2's words."""
    for part in module if isinstance(module, (list, tuple)) else [module]:
        _asked[id(part)] = (part, settings)
        plan_module(part)
    return module


def plan_module(module: nn.Module) -> None:
    """Let a module be sharded at its first call."""
    cls = type(module)
    if not isinstance(module, PlannedModule):
        module.__class__ = type(f"Planned{cls.__name__}", (PlannedModule, cls), {})


def _wrapping(root: Any) -> Wrapping:
    inside = {id(part) for part in root.modules()}
    asked = [settings for part, settings in _asked.values() if id(part) in inside]
    policies = set()
    for settings in asked:
        _check(settings)
        policy = settings.get("mp_policy")
        policies.add((policy.param_dtype, policy.reduce_dtype) if policy else (None, None))
    if len(policies) > 1:
        raise TrainingError("a plan needs one mp_policy for all calls of fully_shard, got several", hint=_NO_PLAN)
    param_dtype, reduce_dtype = policies.pop()
    return Wrapping(
        origin="FSDP2 (fully_shard)",
        units=tuple(part for part, _ in _asked.values()),
        param_dtype=param_dtype,
        reduce_dtype=reduce_dtype,
        norms_are_dtensors=True,
    )


def _check(settings: dict[str, Any]) -> None:
    """Refuse what would be lost.

    Raises:
        TrainingError: it names the setting.
    """
    for name in _REFUSED:
        if settings.get(name):
            raise TrainingError(f"a plan cannot express fully_shard's {name}", hint=_NO_PLAN)
    policy, offload, mesh = (settings.get(name) for name in ("mp_policy", "offload_policy", "mesh"))
    if offload is not None and type(offload).__name__ != "OffloadPolicy":
        raise TrainingError("a plan cannot express fully_shard's CPU offload", hint=_NO_PLAN)
    if mesh is not None and mesh.size() != dist.get_world_size():
        raise TrainingError(
            f"the mesh of fully_shard must hold all {dist.get_world_size()} ranks, got {mesh.size()}: "
            "a plan cannot be combined with tensor, context or pipeline parallelism",
            hint=_NO_PLAN,
        )
    if policy is not None and policy.output_dtype not in (None, policy.param_dtype):
        raise TrainingError("a plan cannot express fully_shard's output_dtype", hint="leave output_dtype out")
    if policy is not None and not policy.cast_forward_inputs:
        raise TrainingError("a plan cannot express fully_shard's cast_forward_inputs=False", hint=_NO_PLAN)
