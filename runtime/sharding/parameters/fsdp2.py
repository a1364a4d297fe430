"""FSDP2 as the keeper of sharded parameters: everything that touches its private names.

FSDP2 gathers and frees parameters around forward and backward. What it would reduce is taken out of its
hands: the whole gradients of a unit go to our own procedure (docs/runtime.md, sharding).
Checked with torch 2.13 and 2.14; torch 2.11, whose FSDP2 lacks a few of these names, has trained the checks of
docs/gpu.md.
"""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import nn
from torch.distributed._composable.contract import REGISTRY_KEY, STATE_KEY
from torch.distributed._composable_state import _module_state_mapping
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_api import AllGather
from torch.distributed.fsdp._fully_shard._fsdp_common import TrainingState
from torch.distributed.tensor import DTensor, Shard
from torch.profiler import record_function
from torch.utils._pytree import tree_leaves

from paro_advise.errors import TrainingError
from paro_advise.runtime.compiler import uncompiled
from paro_advise.runtime.ho_ring.fsdp2 import PlainMemory
from paro_advise.runtime.hook_places import held_place, move_after
from paro_advise.runtime.mixins import beneath, shown_as_base, without_first
from paro_advise.runtime.sharding.parameters.owned import set_gradient
from paro_advise.runtime.sharding.parameters.rows import cut_dimension

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    import torch.distributed as dist
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup
    from torch.distributed.fsdp._fully_shard._fsdp_state import FSDPState
    from torch.utils.hooks import RemovableHandle

    from paro_advise.runtime.sharding.parameters.units import Slot, UnitSpec

    Gather = Callable[[torch.Tensor, torch.Tensor], None]
    Deliver = Callable[[list[torch.Tensor | None]], None]


# Where a module keeps what it calls; they have no public names.
_HOOK_TABLES = (
    "_forward_hooks",
    "_forward_pre_hooks",
    "_load_state_dict_post_hooks",
    "_load_state_dict_pre_hooks",
    "_state_dict_hooks",
    "_state_dict_pre_hooks",
)


class _Gatherer(PlainMemory, AllGather):
    """An all-gather of ours in FSDP2's form, which asks for memory on the stream that copies shards into it."""

    def __init__(self, gather: Gather, before_copy: Callable[[], None]) -> None:
        self._gather = gather
        self._before_copy = before_copy

    def allocate(self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Return an empty buffer."""
        self._before_copy()
        return super().allocate(size, dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        async_op: bool = False,
    ) -> dist.Work | None:
        self._gather(output_tensor, input_tensor)
        return None


def wrap(
    unit: UnitSpec,
    mesh: DeviceMesh,
    *,
    num_ranks: int,
    reshard_after_forward: bool,
    param_dtype: torch.dtype | None,
    reduce_dtype: torch.dtype | None,
    before_copy: Callable[[], None],
    before_backward: Callable[[], None],
    gather: Gather,
    deliver: Deliver,
) -> None:
    """Shard the parameters of a unit over a mesh; units first, their root last.

    Args:
        unit: holds whole parameters, equal on all ranks.
        mesh: one dimension.
        num_ranks: of the world, which decides how parameters are cut.
        reshard_after_forward: free them after forward and gather them again for backward.
        param_dtype: type to compute in, None for the parameters' own.
        reduce_dtype: type of the gradients that are delivered, None for the parameters' own.
        before_copy: called before shards are copied for a gather.
        before_backward: called before anything is done for backward.
        gather: all-gather into the first from the second tensor.
        deliver: gets the whole gradients of the unit's parameters that train, None for those without one.
    """
    # Inputs are cast by the engine's hooks, on the modules of the script's choice.
    policy = MixedPrecisionPolicy(param_dtype=param_dtype, reduce_dtype=reduce_dtype, cast_forward_inputs=False)
    with beneath(unit.module):
        fully_shard(
            unit.module,
            mesh=mesh,
            reshard_after_forward=reshard_after_forward,
            mp_policy=policy,
            shard_placement_fn=lambda parameter: Shard(cut_dimension(parameter.shape, num_ranks)),
            ignored_params=set(unit.ignored.values()),
        )
        unit.module.__class__ = shown_as_base(type(unit.module), __deepcopy__=_copied_part)
    module = unit.module
    assert isinstance(module, FSDPModule)
    if not unit.slots:
        return
    _check_order(unit, module)
    FSDPModule.set_custom_all_gather(module, _Gatherer(gather, before_copy))  # a script's own is refused
    _tell_of_backward(module, before_backward)
    _deliver_instead(module, unit, deliver)


def _tell_of_backward(module: FSDPModule, before_backward: Callable[[], None]) -> None:
    """Let FSDP2 call a function before it takes a unit's parameters for gathered, or gathers them, in backward."""
    group = module._get_fsdp_state()._fsdp_param_group  # noqa: SLF001
    assert group is not None
    prepare = group.pre_backward

    @uncompiled
    def pre_backward(default_prefetch: bool, *unused: object) -> None:
        before_backward()
        prepare(default_prefetch, *unused)

    group.pre_backward = pre_backward  # type: ignore[method-assign]


def _deliver_instead(module: FSDPModule, unit: UnitSpec, deliver: Deliver) -> None:
    """Let what FSDP2 does with a unit's gradients after backward end with their delivery, before it reduces them."""
    group = module._get_fsdp_state()._fsdp_param_group  # noqa: SLF001
    assert group is not None
    only_adds_up = group.post_backward
    training = [parameter for parameter, slot in zip(group.fsdp_params, unit.slots, strict=True) if slot.trains]

    @uncompiled
    def post_backward(*_: object) -> None:
        if not group.reduce_grads:
            only_adds_up()
            return
        group._training_state = TrainingState.POST_BACKWARD  # noqa: SLF001
        with record_function(f"FSDP::post_backward ({unit.name})"):
            gradients = [_take_gradient(parameter) for parameter in training]
            if group.reshard_after_backward:
                group.reshard()
            deliver(gradients)

    group.post_backward = post_backward  # type: ignore[method-assign]


def _take_gradient(parameter: Any) -> torch.Tensor | None:
    """Take the whole gradient that FSDP2 holds of a parameter, of this pass and of those that were not reduced."""
    parameter.accumulate_unsharded_grad_if_needed()
    whole = getattr(parameter, "_unsharded_param", None)
    added_up: torch.Tensor | None = parameter.unsharded_accumulated_grad
    gradient = added_up if added_up is not None or whole is None else whole.grad
    parameter.unsharded_accumulated_grad = None
    if whole is not None:
        whole.grad = None
    return gradient


def _check_order(unit: UnitSpec, module: FSDPModule) -> None:
    """Refuse to go on when FSDP2 would put the parameters into its buffers in another order than we.

    Raises:
        TrainingError: gradients would be mixed up.
    """
    group = module._get_fsdp_state()._fsdp_param_group  # noqa: SLF001
    theirs = [id(parameter.sharded_param) for parameter in group.fsdp_params] if group else []
    if theirs != [id(slot.parameter) for slot in unit.slots]:
        raise TrainingError(
            "FSDP2 must lay the parameters of a unit out in module order, "
            f"got another order in {unit.name or 'the root'}",
            hint=f"torch {torch.__version__} is not supported; use 2.11 to 2.14",
        )


def set_gradient_sync(root: nn.Module, *, enabled: bool) -> None:
    """Choose whether backward delivers gradients or adds them up in their whole size."""
    for module in root.modules():
        if isinstance(module, FSDPModule):
            FSDPModule.set_requires_gradient_sync(module, enabled, recurse=False)


def held(slot: Slot) -> torch.Tensor:
    """Return the rows that this rank holds of a sharded parameter."""
    parameter = slot.parameter
    assert isinstance(parameter, DTensor)
    local: torch.Tensor = parameter._local_tensor  # noqa: SLF001 - to_local() makes an autograd view
    return local.detach()


def accumulated_bytes(root: nn.Module) -> int:
    """Return the bytes of whole gradients that FSDP2 holds between micro-batches."""
    total = 0
    for parameter in _fsdp_parameters(root):
        gradient = parameter.unsharded_accumulated_grad
        if gradient is None and hasattr(parameter, "_unsharded_param"):
            gradient = parameter._unsharded_param.grad  # noqa: SLF001
        if gradient is not None:
            total += gradient.numel() * gradient.element_size()
    return total


def parameter_bytes(root: nn.Module) -> int:
    """Return the bytes of the sharded parameters, padding included."""
    return sum(
        parameter._sharded_param_data.untyped_storage().nbytes()  # noqa: SLF001
        for parameter in _fsdp_parameters(root)
    )


def _fsdp_parameters(root: nn.Module) -> list[Any]:
    found: list[Any] = []
    for module in root.modules():
        if isinstance(module, FSDPModule):
            group = module._get_fsdp_state()._fsdp_param_group  # noqa: SLF001
            found += group.fsdp_params if group else []
    return found


def discard_accumulated(root: nn.Module, only: torch.Tensor | None = None) -> None:
    """Forget whole gradients that were added up between micro-batches: of one sharded parameter, or of all."""
    for parameter in _fsdp_parameters(root):
        if only is not None and parameter.sharded_param is not only:
            continue
        parameter.unsharded_accumulated_grad = None
        if hasattr(parameter, "_unsharded_param"):
            set_gradient(parameter._unsharded_param, None)  # noqa: SLF001


def recover(root: nn.Module) -> None:
    """Let the next pass begin as if the last one, which an exception has left, had never begun.

    Unlike FSDP2's own ``reset_iter_state`` it keeps what micro-batches before have added up.
    """
    if not isinstance(root, FSDPModule):
        return
    top = root._get_fsdp_state()  # noqa: SLF001
    for state in top._state_ctx.all_states:  # noqa: SLF001
        state._modules_to_run_forward.clear()  # noqa: SLF001
        state._training_state = TrainingState.IDLE  # noqa: SLF001
        for group in _groups_of(state):
            _reset(group)
    top._state_ctx.iter_forward_root = None  # noqa: SLF001
    top._state_ctx.post_backward_final_callback_queued = False  # noqa: SLF001
    top._comm_ctx.post_forward_order.clear()  # noqa: SLF001
    getattr(top._comm_ctx, "reduce_scatter_states", []).clear()  # noqa: SLF001 - not before torch 2.13


class PassedUnits:
    """The units that forward has passed, as FSDP2 remembers them: backward gathers ahead in their order.

    FSDP2 forgets none before a backward pass ends. After a rank that has evaluated alone the ranks would gather ahead
    in unlike orders.
    """

    def __init__(self, root: nn.Module) -> None:
        self._root = root
        self._kept: int | None = None  # how many were passed before the evaluation

    def begin(self, *, evaluates: bool) -> None:
        """Say that a unit's forward begins: forget those of an evaluation when training goes on."""
        if evaluates:
            passed = len(self._order)
            self._kept = passed if self._kept is None else min(passed, self._kept)  # backward forgets units meanwhile
        elif self._kept is not None:
            self.forget(self._kept)

    def forget(self, kept: int = 0) -> None:
        """Forget all but the first so many."""
        order = self._order
        while len(order) > kept:
            indices = order.pop()._post_forward_indices  # noqa: SLF001
            while indices and indices[-1] >= len(order):
                indices.pop()
        self._kept = None

    @property
    def _order(self) -> list[FSDPParamGroup]:
        if not isinstance(self._root, FSDPModule):
            return []
        # FSDP2 makes it in the first pass.
        return getattr(self._root._get_fsdp_state()._comm_ctx, "post_forward_order", [])  # noqa: SLF001


def _groups_of(state: FSDPState) -> list[FSDPParamGroup]:
    """Return FSDP2's groups of parameters of a module: one before torch 2.13, there without a list."""
    found: list[FSDPParamGroup] | None = getattr(state, "_fsdp_param_groups", None)
    return [group for group in (state._fsdp_param_group,) if group] if found is None else found  # noqa: SLF001


def _reset(group: FSDPParamGroup) -> None:
    """Bring a group to rest, which also drops what was gathered ahead."""
    if hasattr(group, "_reset_iter_state"):
        group._reset_iter_state()  # noqa: SLF001
        return
    if group._all_gather_result is not None:  # noqa: SLF001
        group.wait_for_unshard()
    group._post_forward_indices.clear()  # noqa: SLF001
    group._training_state = TrainingState.IDLE  # noqa: SLF001
    group._to_sharded()  # type: ignore[no-untyped-call]  # noqa: SLF001


def hook_handles(root: nn.Module) -> list[RemovableHandle]:
    """Return what removes the functions that FSDP2 lets the model's modules call around a forward pass."""
    states = [module._get_fsdp_state() for module in root.modules() if isinstance(module, FSDPModule)]  # noqa: SLF001
    found = [state._pre_forward_hook_handle for state in states]  # noqa: SLF001
    found += [state._post_forward_hook_handle for state in states]  # noqa: SLF001
    # Modules that were wrapped together have one handle of many.
    return [single for handle in found for single in getattr(handle, "handles", (handle,))]


def _copied_part(module: nn.Module, memo: dict[int, object]) -> nn.Module:
    """Return a plain copy of a unit's module, in the place of FSDP2's refusal."""
    return copied_module(module, without_first(type(module)), memo)


def copied_module(module: nn.Module, plain: type, memo: dict[int, object]) -> nn.Module:
    """Return a copy of a module that nothing gathers for; its parameters are copied by their own way.

    Args:
        module: its class may be FSDP2's.
        plain: the class of the copy.
        memo: what ``copy.deepcopy`` has copied.
    """
    states = [part._get_fsdp_state() for part in module.modules() if isinstance(part, FSDPModule)]  # noqa: SLF001
    memo.update((id(hook), held_place) for hook in _own_hooks(module, states))
    memo.update((id(state), None) for state in states)
    copied: nn.Module = object.__new__(plain)
    memo[id(module)] = copied
    # What the model's class itself leaves out of copies (Lightning: its trainer) stays out. Its __reduce__ is not
    # asked: what that returns may hold the state anywhere.
    state = module.__getstate__()  # type: ignore[no-untyped-call]  # object's, of which torch's stubs know nothing
    copied.__setstate__(copy.deepcopy(state, memo))  # type: ignore[no-untyped-call]  # as torch declares it
    for part in copied.modules():
        _forget_marks(part)
        for name in _HOOK_TABLES:
            table = getattr(part, name)
            for key in [key for key, hook in table.items() if hook is held_place]:
                del table[key]
    return copied


def _own_hooks(root: nn.Module, states: Iterable[FSDPState]) -> Iterator[object]:
    """Return the functions that a model's modules call for FSDP2: around forward, and for state dicts."""
    handles = hook_handles(root)
    for group in (group for state in states for group in _groups_of(state)):
        handles += [parameter._post_load_hook_handle for parameter in group.fsdp_params]  # noqa: SLF001
        handles += group._module_to_pre_save_state_dict_hook_handle.values()  # noqa: SLF001
        handles += group._module_to_pre_load_state_dict_hook_handle.values()  # noqa: SLF001
    tables = [(handle.hooks_dict_ref(), handle.id) for handle in handles]
    yield from (table[key] for table, key in tables if table is not None and key in table)


def _forget_marks(module: nn.Module) -> None:
    """Take what FSDP2 has noted off a module; marks of torch's other composable functions, as checkpoint's, stay."""
    states, registry = module.__dict__.get(STATE_KEY, {}), module.__dict__.get(REGISTRY_KEY, {})
    for function in [item for item in states if item.__name__ == fully_shard.__name__]:
        del states[function]
    registry.pop(fully_shard.__name__, None)
    module.__dict__.pop("_is_fsdp_managed_module", None)
    module.__dict__.pop("_fsdp_use_orig_params", None)


def hold_hook_places(module: nn.Module) -> None:
    """Mark where FSDP2's functions stand among a module's hooks, for those of a plan that do their work."""
    before, after = module._forward_pre_hooks, module._forward_hooks  # noqa: SLF001 - they have no public names
    for handle in hook_handles(module):
        if handle.hooks_dict_ref() is before and handle.id in before:
            move_after(before, module.register_forward_pre_hook(held_place).id, handle.id)
        if handle.hooks_dict_ref() is after and handle.id in after:
            move_after(after, module.register_forward_hook(held_place).id, handle.id)


def reshard(root: nn.Module) -> None:
    """Free gathered parameters, as at rest."""
    for module in root.modules():
        if isinstance(module, FSDPModule):
            FSDPModule.reshard(module)  # not what a plan puts above it


def is_gathered(module: nn.Module, parameter: torch.Tensor | None) -> bool:
    """Tell whether a parameter is a whole one that FSDP2 has put into the place of a unit's sharded one."""
    assert isinstance(module, FSDPModule)
    group = module._get_fsdp_state()._fsdp_param_group  # noqa: SLF001
    known = group.fsdp_params if group else ()
    return parameter is not None and any(getattr(one, "_unsharded_param", None) is parameter for one in known)


def gather_once(module: nn.Module) -> None:
    """Gather the parameters of a unit at rest, and free them."""
    assert isinstance(module, FSDPModule)
    FSDPModule.unshard(module)  # not what stands in its place for scripts
    FSDPModule.reshard(module)


def tensors_with_gradient(output: object) -> tuple[torch.Tensor, ...]:
    """Return the tensors in a module's output that FSDP2 finds, and by which it notices a backward pass."""
    try:
        from torch.distributed.fsdp._common_utils import collect_grad_tensors
    except ImportError:  # before torch 2.13, whose FSDP2 looks into dataclasses too
        return tuple(leaf for leaf in tree_leaves(output) if isinstance(leaf, torch.Tensor) and leaf.requires_grad)
    return collect_grad_tensors(output)


def gathered_ahead(module: nn.Module) -> list[nn.Module]:
    """Return the modules whose parameters FSDP2 gathers together with those of this one, as a script has set."""
    if not isinstance(module, FSDPModule):
        return []
    ahead = module._get_fsdp_state()._states_to_forward_prefetch  # noqa: SLF001
    return [part for state in ahead for part in state._modules]  # noqa: SLF001


def is_resting(root: nn.Module) -> bool:
    """Tell whether no pass through FSDP2's modules is under way."""
    if not isinstance(root, FSDPModule):
        return True
    states = root._get_fsdp_state()._state_ctx.all_states  # noqa: SLF001
    return all(state._training_state == TrainingState.IDLE for state in states)  # noqa: SLF001


def unwrap(module: nn.Module, refuse_late: Callable[..., NoReturn]) -> None:
    """Undo ``wrap`` on a module whose parameters are at rest; its slots keep their shards.

    Args:
        module: of a unit.
        refuse_late: called by a backward pass through a forward pass of before.

    There is no public way: the hooks, the state and the class are taken back one by one.
    """
    assert isinstance(module, FSDPModule)
    state = module._get_fsdp_state()  # noqa: SLF001
    state._pre_forward_hook_handle.remove()  # noqa: SLF001
    state._post_forward_hook_handle.remove()  # noqa: SLF001
    for group in _groups_of(state):
        group.pre_backward = group.post_backward = refuse_late  # type: ignore[method-assign]
        for parameter in group.fsdp_params:
            parameter._post_load_hook_handle.remove()  # noqa: SLF001
        for handles in (
            group._module_to_pre_save_state_dict_hook_handle,  # noqa: SLF001
            group._module_to_pre_load_state_dict_hook_handle,  # noqa: SLF001
        ):
            for handle in handles.values():
                handle.remove()
    _module_state_mapping.pop(module, None)
    with beneath(module):
        module.__class__ = without_first(type(module))
    _forget_marks(module)
    for part in module.modules():
        part.__dict__.pop("_is_fsdp_managed_module", None)
        part.__dict__.pop("_fsdp_use_orig_params", None)
