"""Metrics as OTLP/JSON (opentelemetry-proto, ExportMetricsServiceRequest), which a collector's OTLP receiver takes."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from paro_advise.advisor.metrics.measures import Measure


def otlp_document(
    measures: Sequence[Measure], labels: Mapping[str, str], version: str, time_ns: int
) -> dict[str, object]:
    """Return the request: one resource, one scope, a gauge for each metric.

    Args:
        measures: the metrics.
        labels: of the resource.
        version: of paro-advise.
        time_ns: of all points, ns since the epoch.
    """
    return {
        "resourceMetrics": [
            {
                "resource": {"attributes": _attributes({"service.name": "paro-advise", **labels})},
                "scopeMetrics": [
                    {
                        "scope": {"name": "paro_advise", "version": version},
                        "metrics": [_gauge(measure, time_ns) for measure in measures],
                    }
                ],
            }
        ]
    }


def _gauge(measure: Measure, time_ns: int) -> dict[str, object]:
    points = [
        {"attributes": _attributes(sample.labels), "timeUnixNano": str(time_ns), "asDouble": sample.value}
        for sample in measure.samples
    ]
    return {"name": measure.name, "description": measure.about, "unit": measure.unit, "gauge": {"dataPoints": points}}


def _attributes(labels: Mapping[str, str]) -> list[dict[str, object]]:
    return [{"key": key, "value": {"stringValue": value}} for key, value in labels.items()]
