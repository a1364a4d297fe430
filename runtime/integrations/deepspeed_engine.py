"""DeepSpeed: figures of a run as events of its monitor."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping

    from paro_advise.runtime.integrations.trackers import Writer


def monitor_writer(engine: Any) -> Writer:
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


def _monitor_of(engine: Any) -> Any:
    """Return DeepSpeed's monitor; an engine under a plan has none of its own, but the same configuration."""
    try:
        return engine.monitor
    except AttributeError:
        from deepspeed.monitor.config import get_monitor_config
        from deepspeed.monitor.monitor import MonitorMaster

        return MonitorMaster(get_monitor_config(engine.config))
