"""What stands in for torch's own names: functions on gradients, optimizers and their steps.

Gradients of passes that were mistaken for inner ones are reduced before anything reads them, and
parameters that a script has kept from before the sharding are mapped to those of today.
"""

from __future__ import annotations

import functools
import weakref
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, TypeAlias, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from paro_advise.errors import TrainingError, UsageError
from paro_advise.runtime.adapters.names import replace_everywhere, replace_name
from paro_advise.runtime.adapters.planned.attendance import changes_of
from paro_advise.runtime.sharding.optimizers.methods import gradients_for
from paro_advise.runtime.sharding.optimizers.optimizer import called_within, closure_of, with_closure

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from paro_advise.runtime.adapters.session import Session

    Tensors: TypeAlias = torch.Tensor | Iterable[torch.Tensor]

_P = ParamSpec("_P")
_R = TypeVar("_R")


def _sending_whole(original: Callable[..., None], session: Session) -> Callable[..., None]:
    """Return a broadcast that leaves sharded parameters out: each value lies on one rank, so that none differ.

    The broadcast raises UsageError on all ranks where one of them has changed parameters that others have not.
    """

    def broadcast(group: dist.ProcessGroup, tensors: Sequence[torch.Tensor], *args: Any) -> None:
        whole = [tensor for tensor in tensors if not isinstance(tensor, DTensor)]
        if len(whole) < len(tensors):
            changes: list[list[str] | None] = [None] * dist.get_world_size(group)
            dist.all_gather_object(changes, [changes_of(model.engine) for model in session.models], group)
            if any(of_rank != changes[0] for of_rank in changes):
                raise UsageError(
                    "sharded parameters must be changed by all ranks alike, got a broadcast that shall bring the "
                    "changes of one rank to the others",
                    hint="change them on all ranks, or choose a strategy that replicates parameters (N..)",
                )
        if whole or not tensors:
            original(group, whole, *args)

    functools.update_wrapper(broadcast, original)
    return broadcast


class Hooks:
    """The stand-ins for torch's functions on gradients, and the hooks of its optimizers.

    Args:
        session: the planned process.
    """

    def __init__(self, session: Session) -> None:
        self._session = session
        self._mesh: DeviceMesh | None = None

    def install(self) -> None:
        """Notice optimizers, their steps, and clipping."""
        replace_name("__init__", self._wrap_init(torch.optim.Optimizer.__init__), torch.optim.Optimizer)
        register_optimizer_step_pre_hook(self._before_step)
        register_optimizer_step_post_hook(self._after_step)
        for home in (torch.nn.utils, torch.nn.utils.clip_grad):
            replace_everywhere("clip_grad_norm_", self._wrap_clipping(home.clip_grad_norm_), home)
            for name in ("clip_grad_value_", "get_total_norm"):
                if hasattr(home, name):
                    replace_everywhere(name, self._wrap_reader(getattr(home, name)), home)
        # What DDP and Lightning (before `test` and `validate`) make ranks equal by.
        original = dist._broadcast_coalesced  # type: ignore[attr-defined]  # noqa: SLF001 - has no public name
        replace_name("_broadcast_coalesced", _sending_whole(original, self._session), dist)
        unscale = torch.amp.GradScaler.unscale_
        replace_name("unscale_", self._finish_before(unscale), torch.amp.GradScaler)

    def _wrap_init(
        self, original: Callable[Concatenate[torch.optim.Optimizer, _P], None]
    ) -> Callable[Concatenate[torch.optim.Optimizer, _P], None]:
        session = self._session

        def init(self: torch.optim.Optimizer, /, *args: _P.args, **kwargs: _P.kwargs) -> None:
            original(self, *args, **kwargs)
            session.optimizers.append(weakref.ref(self))

        functools.update_wrapper(init, original)
        return init

    def _wrap_clipping(
        self, original: Callable[Concatenate[Tensors, _P], torch.Tensor]
    ) -> Callable[Concatenate[Tensors, _P], torch.Tensor]:
        session = self._session

        def clip_grad_norm_(parameters: Tensors, *args: _P.args, **kwargs: _P.kwargs) -> torch.Tensor:
            session.finish_gradients()
            given = session.current(parameters)
            _refuse_own_among_shared(session, given)
            session.meet_for_norm(given)
            norm = original(given, *args, **kwargs)
            return norm if not session.models else self._convert_norm(norm)

        functools.update_wrapper(clip_grad_norm_, original)
        return clip_grad_norm_  # type: ignore[return-value]  # scripts may also pass the first argument by its name

    def _wrap_reader(self, original: Callable[Concatenate[Tensors, _P], _R]) -> Callable[Concatenate[Tensors, _P], _R]:
        session = self._session

        def read(tensors: Tensors, *args: _P.args, **kwargs: _P.kwargs) -> _R:
            session.finish_gradients()
            given = session.current(tensors)
            session.meet_for_norm(given)
            return original(given, *args, **kwargs)

        functools.update_wrapper(read, original)
        return read  # type: ignore[return-value]  # scripts may also pass the first argument by its name

    def _finish_before(self, original: Callable[_P, _R]) -> Callable[_P, _R]:
        @functools.wraps(original)
        def call(*args: _P.args, **kwargs: _P.kwargs) -> _R:
            self._session.finish_gradients()
            return original(*args, **kwargs)

        return call

    def _before_step(
        self, optimizer: torch.optim.Optimizer, args: tuple[object, ...], kwargs: dict[str, object]
    ) -> tuple[tuple[object, ...], dict[str, object]] | None:
        """Finish the gradients before an optimizer reads them, also those that its closure makes."""
        session = self._session
        session.before_step(optimizer)
        session.refuse_step_in_backward(optimizer)
        session.refuse_if_impossible(lambda: session.collectives.check_step(optimizer))
        session.attend()
        closure, is_ours = closure_of(args, kwargs), session.steps(optimizer)
        if closure is None or is_ours or not session.models:
            session.finish_gradients()
        if closure is None:
            session.refuse_local_step(optimizer)
            return None
        if not is_ours:  # it calls ours with the closure, has nothing to do with a model, or is ours from there on
            return with_closure(self._sharding(closure, optimizer), args, kwargs)
        if isinstance(args[0], torch.optim.LBFGS):
            session.refuse(TrainingError("a plan cannot express LBFGS, which calls its closure several times"))

        def finish() -> None:
            session.finish_gradients()
            session.refuse_local_step(optimizer)

        return with_closure(called_within(closure, lambda: None, finish, is_under_way=False), args, kwargs)

    def _sharding(self, closure: Callable[[], object], optimizer: torch.optim.Optimizer) -> Callable[[], object]:
        """Return a closure of a step in which a model may be sharded: the optimizer's own hooks come too late then."""

        def call() -> object:
            if gradients := gradients_for(optimizer):
                gradients.pause_step()
            found = closure()
            if gradients := gradients_for(optimizer):
                self._session.finish_gradients()
                self._session.refuse_local_step(optimizer)
                gradients.before_step()
            return found

        return call

    def _after_step(self, optimizer: torch.optim.Optimizer, *_: object) -> None:
        self._session.after_step(optimizer)

    def _convert_norm(self, norm: torch.Tensor) -> torch.Tensor:
        """Return a norm as the kind of tensor that the script's own framework returns."""
        wants_dtensor = self._session.norms_are_dtensors
        if isinstance(norm, DTensor) and not wants_dtensor:
            return norm.full_tensor()
        if not isinstance(norm, DTensor) and wants_dtensor:
            if self._mesh is None:
                self._mesh = DeviceMesh(norm.device.type, torch.arange(dist.get_world_size(), device="cpu"))
            return DTensor.from_local(norm, self._mesh, [Replicate()], run_check=False)
        return norm


def _refuse_own_among_shared(session: Session, parameters: torch.Tensor | list[torch.Tensor]) -> None:
    """Refuse to clip what each rank has for itself together with what all share.

    Each rank would scale its shards of the shared gradients by a norm of its own: in the plain framework replicas part,
    here the pieces of one.

    Raises:
        UsageError: the script does.
    """
    own = {parameter for model in session.models for parameter in model.engine.own_parameters.values()}
    given = [parameters] if isinstance(parameters, torch.Tensor) else parameters
    if own and not own.isdisjoint(given) and any(isinstance(parameter.grad, DTensor) for parameter in given):
        raise UsageError(
            "gradients that all ranks share must be clipped by one norm, got some that each rank has for itself among "
            "them",
            hint="clip the parameters that the framework ignores by themselves, or scale all by a norm that ranks have "
            "agreed on",
        )
