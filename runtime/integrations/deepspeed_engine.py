"""DeepSpeed: figures of a run as events of its monitor."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from paro_advise.runtime.integrations.trackers import Writer


class _Monitor(Protocol):
    """What is used here of a monitor of DeepSpeed's."""

    enabled: bool

    def write_events(self, events: Sequence[tuple[str, float, int]]) -> None:
        """Write values by name, each at a count of steps."""


class _Engine(Protocol):
    """What is used here of an engine of DeepSpeed's, or of one that stands for it under a plan."""

    global_steps: int
    monitor: _Monitor
    config: Mapping[str, object]


def monitor_writer(engine: _Engine) -> Writer:
    """Return what writes figures to the monitors of an engine's configuration (TensorBoard, W&B, CSV, Comet).

        recording = Recording("after", before="before")
        recording.start()
        engine, *_ = deepspeed.initialize(...)
        ...
        recording.stop([monitor_writer(engine)])

    Args:
        engine: of ``deepspeed.initialize``.
    """

    def write(figures: Mapping[str, float]) -> None:
        monitor = _monitor_of(engine)
        if monitor.enabled:
            monitor.write_events([(name, value, engine.global_steps) for name, value in figures.items()])

    write.__qualname__ = "DeepSpeed's monitor"
    return write


def _monitor_of(engine: _Engine) -> _Monitor:
    """Return DeepSpeed's monitor; an engine under a plan has none of its own, but the same configuration."""
    try:
        return engine.monitor
    except AttributeError:
        from deepspeed.monitor.config import get_monitor_config
        from deepspeed.monitor.monitor import MonitorMaster

        monitor: _Monitor = MonitorMaster(get_monitor_config(engine.config))
        return monitor
