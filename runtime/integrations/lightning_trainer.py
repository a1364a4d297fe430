"""Lightning's Trainer: a callback, a factory that Lightning finds by itself, and a strategy.

With PARO_CAPTURE set, every Trainer records: Lightning asks the entry points ``lightning.pytorch.callbacks_factory``
and ``pytorch_lightning.callbacks_factory``. ``register()`` makes ``Trainer(strategy="paro_advise")`` known.
"""

from __future__ import annotations

import os
from functools import cache
from importlib import import_module
from typing import TYPE_CHECKING, Protocol

from paro_advise.runtime.capture.request import CAPTURE_VARIABLE

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from paro_advise.runtime.integrations.trackers import Writer


class _Logger(Protocol):
    """What is used here of a logger of Lightning's."""

    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        """Log figures by name."""


class _Trainer(Protocol):
    """What is used here of a Trainer."""

    loggers: Sequence[_Logger]
    global_step: int


class _Hooks:
    """Records a Trainer's run, lets it train under a plan, and reports at the end of ``fit``.

        Trainer(..., callbacks=[ParoCallback("after", plan="plan.json", before="before")])

    Args:
        folder, steps, plan, before: see Recording.
    """

    def __init__(
        self,
        folder: str | Path | None = None,
        steps: str | None = None,
        *,
        plan: str | Path | None = None,
        before: str | Path | None = None,
    ) -> None:
        # Lightning imports this module for every Trainer, whether or not anything is recorded.
        from paro_advise.runtime.integrations.recording import Recording

        super().__init__()
        self._recording = Recording(folder, steps, plan=plan, before=before)

    def on_fit_start(self, *_: object) -> None:
        """Begin to count steps."""
        self._recording.start()

    def on_fit_end(self, trainer: _Trainer, *_: object) -> None:
        """Report, also to the Trainer's loggers."""
        self._recording.stop([_writer_of(logger, trainer.global_step) for logger in trainer.loggers])


def _writer_of(logger: _Logger, step: int) -> Writer:
    def write(figures: Mapping[str, float]) -> None:
        logger.log_metrics(dict(figures), step=step)

    write.__qualname__ = type(logger).__name__
    return write


# Classes are found by these names, also by processes that Lightning spawns.
_PACKAGES = {"ParoCallback": "lightning.pytorch", "PytorchLightningCallback": "pytorch_lightning"}


@cache
def _callback(name: str) -> type:
    """Return the callback as a class of one of Lightning's two packages."""
    base: type = import_module(_PACKAGES[name]).Callback
    return type(name, (_Hooks, base), {"__doc__": _Hooks.__doc__, "__module__": __name__})


def _requested_callback(name: str) -> list[object]:
    """Return a callback where the environment asks for a capture and nothing else makes one of this process."""
    if not os.environ.get(CAPTURE_VARIABLE):
        return []
    from paro_advise.runtime.capture.recorder import Recorder

    return [] if Recorder.of_process is not None else [_callback(name)()]


def callbacks() -> list[object]:
    """Return a callback for a Trainer of ``lightning.pytorch`` where the environment asks for a capture."""
    return _requested_callback("ParoCallback")


def callbacks_of_pytorch_lightning() -> list[object]:
    """Return a callback for a Trainer of ``pytorch_lightning`` where the environment asks for a capture."""
    return _requested_callback("PytorchLightningCallback")


def register() -> None:
    """Let ``Trainer(strategy="paro_advise")`` mean DDP under the plan that PARO_ADVISE_PLAN names."""
    registry = import_module("lightning.pytorch.strategies").StrategyRegistry
    if "paro_advise" not in registry:
        registry.register("paro_advise", planned_strategy, description="DDP, sharded as a plan of paro-advise says")


def planned_strategy(plan: str | Path | None = None, **options: object) -> object:
    """Return Lightning's DDP, which the plan shards as it says.

    Args:
        plan: the plan's file, None for what PARO_ADVISE_PLAN names.
        options: of DDPStrategy.

    Raises:
        UsageError: no plan is named.
    """
    from paro_advise.errors import UsageError
    from paro_advise.runtime.adapters import use_plan

    file = plan if plan is not None else os.environ.get("PARO_ADVISE_PLAN")
    if not file:
        raise UsageError(
            "the strategy paro_advise must get a plan", hint="planned_strategy('plan.json'), or set PARO_ADVISE_PLAN"
        )
    use_plan(str(file))
    strategy: type = import_module("lightning.pytorch.strategies").DDPStrategy
    return strategy(**options)


def __getattr__(name: str) -> type:
    """Make a callback's class where it is asked for."""
    if name in _PACKAGES:
        return _callback(name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
