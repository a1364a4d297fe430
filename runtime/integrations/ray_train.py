"""Ray Train: a training function that records itself."""

from __future__ import annotations

import functools
import inspect
from typing import TYPE_CHECKING, ParamSpec, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

_P = ParamSpec("_P")
_R = TypeVar("_R")


def recorded(
    function: Callable[_P, _R],
    folder: str | Path,
    steps: str | None = None,
    *,
    plan: str | Path | None = None,
    before: str | Path | None = None,
) -> Callable[_P, _R]:
    """Return a ``train_loop_per_worker`` that records its run, trains under a plan, and reports at its end.

        TorchTrainer(recorded(train, "/shared/after", plan="/shared/plan.json"), ...)

    Args:
        function: the training function, with or without a configuration as its argument.
        folder, steps, plan, before: see Recording; paths must mean the same on all workers.
    """

    def run(*arguments: _P.args, **named: _P.kwargs) -> _R:
        from paro_advise.runtime.integrations.recording import Recording

        with Recording(folder, steps, plan=plan, before=before):
            return function(*arguments, **named)

    # Ray looks at the signature for whether the function takes a configuration.
    functools.update_wrapper(run, function)
    run.__signature__ = inspect.signature(function)  # type: ignore[attr-defined]  # read by inspect
    return run
