"""Metrics in Prometheus' text format, for the node exporter's textfile collector or a push gateway."""

from __future__ import annotations

from typing import TYPE_CHECKING

from paro_advise.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from paro_advise.advisor.metrics.measures import Measure


def prometheus_text(measures: Sequence[Measure], labels: Mapping[str, str]) -> bytes:
    """Return the exposition; every sample carries the given labels too.

    Raises:
        UsageError: prometheus_client is not installed, or a label has no name that Prometheus takes.
    """
    try:
        from prometheus_client import CollectorRegistry, Gauge, generate_latest
    except ImportError as error:
        raise UsageError("--prometheus needs prometheus-client", hint="pip install 'paro-advise[metrics]'") from error
    registry = CollectorRegistry()
    for measure in measures:
        names = (*labels, *measure.samples[0].labels)
        try:
            gauge = Gauge(measure.name, measure.about, names, registry=registry)
        except ValueError as error:
            raise UsageError(
                f"a label needs a name that Prometheus takes: {error}", hint="letters, digits and _"
            ) from error
        for sample in measure.samples:
            child = gauge.labels(*labels.values(), *sample.labels.values()) if names else gauge
            child.set(sample.value)
    return generate_latest(registry)
