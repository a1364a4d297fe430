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
        if engine.monitor.enabled:
            engine.monitor.write_events([(name, value, engine.global_samples) for name, value in figures.items()])

    write.__qualname__ = "DeepSpeed's monitor"
    return write
