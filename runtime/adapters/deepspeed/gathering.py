"""DeepSpeed's ``zero.GatheredParameters`` under a plan."""

from __future__ import annotations

from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import wraps
from typing import TYPE_CHECKING, ParamSpec, TypeAlias, TypeVar

import torch
from torch import nn

from paro_advise.errors import TrainingError
from paro_advise.runtime.adapters.deepspeed.config import ZERO_3
from paro_advise.runtime.sharding.states.gathering import gathered_parameters, same_on_all_ranks, unchanged

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

    from paro_advise.runtime.adapters.deepspeed.whole_init import MadeWhole
    from paro_advise.runtime.adapters.session import Session
    from paro_advise.runtime.sharding.engine import Engine
    from paro_advise.runtime.sharding.parameters.units import Slot

    _Unwrapped: TypeAlias = Callable[[nn.Module], AbstractContextManager[nn.Module]]

_P = ParamSpec("_P")
_R = TypeVar("_R")


class Gathering:
    """``GatheredParameters`` under a plan.

    Args:
        session: the planned process.
        original: DeepSpeed's own, for parameters that no plan is for.
        models: that DeepSpeed was to train, with the stage of ZeRO.
        made_whole: parameters that lie in no such model yet.
    """

    def __init__(
        self,
        session: Session,
        original: Callable[..., AbstractContextManager[None]],
        models: Mapping[nn.Module, int],
        made_whole: MadeWhole,
    ) -> None:
        self._session = session
        self._original = original
        self._models = models
        self._made_whole = made_whole

    def gather(
        self,
        params: torch.Tensor | Iterable[torch.Tensor],
        modifier_rank: int | None = None,
        fwd_module: nn.Module | None = None,
        enabled: bool = True,  # noqa: FBT001, FBT002 - DeepSpeed's
    ) -> AbstractContextManager[None]:
        """Return a context in which parameters are whole; takes DeepSpeed's own arguments."""
        given = [params] if isinstance(params, torch.Tensor) else list(params)
        return self._context(given, modifier_rank, fwd_module, is_enabled=enabled)

    @contextmanager
    def _context(
        self, given: list[torch.Tensor], source: int | None, module: nn.Module | None, *, is_enabled: bool
    ) -> Iterator[None]:
        current = self._session.current(given)
        left = {id(item): item for item in current}
        kept = {id(new): old for old, new in zip(given, current, strict=True)}
        unsharded = {id(item) for model in self._models for item in model.parameters()}
        with ExitStack() as stack:
            for model in self._session.models:
                slots = _slots(model.engine, left)
                for slot in slots:
                    left.pop(id(slot.parameter))
                if slots and is_enabled:
                    # In other stages DeepSpeed's context does nothing, and changes stay until the next step.
                    forgets = source is None and self._models.get(model.root) == ZERO_3
                    names = {slot.name for slot in slots}
                    stack.enter_context(gathered_parameters(model.engine, names, kept, forgets_changes=forgets))
            waiting = [left.pop(key) for key in list(left) if key in unsharded]
            if waiting and is_enabled:
                stack.enter_context(unchanged(waiting, forgets_changes=False))
            fresh = [left.pop(key) for key, item in list(left.items()) if item in self._made_whole]
            if fresh and is_enabled:
                stack.enter_context(same_on_all_ranks(fresh, source))
            if left:
                stack.enter_context(self._original(list(left.values()), source, module, is_enabled))
            yield

    def unwrapping(self, original: Callable[[nn.Module], AbstractContextManager[nn.Module]]) -> _Unwrapped:
        """Return what stands in for ``unwrap_model_for_generation``: all parameters are whole inside.

        Args:
            original: DeepSpeed's own, for models that no plan is for.
        """

        @contextmanager
        def unwrapped(model: nn.Module) -> Iterator[nn.Module]:
            if not any(part in self._models for part in model.modules()):
                with original(model) as found:
                    yield found
                return
            with self.gather(model.parameters()):
                yield model

        return unwrapped

    def refusing(self, original: Callable[_P, _R]) -> Callable[_P, _R]:
        """Return a function of DeepSpeed's that ends the job where it is called for a parameter under a plan.

        Args:
            original: reads or changes the copy, the gradient or the states that DeepSpeed's optimizer keeps of one.
        """

        @wraps(original)
        def call(*args: _P.args, **kwargs: _P.kwargs) -> _R:
            given = [item for item in (*args, *kwargs.values()) if isinstance(item, torch.Tensor)]
            planned = {id(parameter) for model in self._models for parameter in model.parameters()}
            if any(id(self._session.current(item)) in planned for item in given):
                self._session.refuse(
                    TrainingError(
                        f"DeepSpeed's {original.__name__} must be given parameters of its own optimizer, got one that "
                        "a plan trains",
                        hint="read parameters in deepspeed.zero.GatheredParameters, or leave the call out under a plan",
                    )
                )
            return original(*args, **kwargs)

        return call


def _slots(engine: Engine, wanted: dict[int, torch.Tensor]) -> list[Slot]:
    return [slot for unit in engine.units for slot in unit.spec.slots if id(slot.parameter) in wanted]
