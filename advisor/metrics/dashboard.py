"""A Grafana dashboard of the metrics, to import as a file (Grafana's dashboard JSON model, schema version 39)."""

from __future__ import annotations

from paro_advise.advisor.metrics.measures import PREFIX

_WIDTH, _HEIGHT, _COLUMNS = 12, 8, 2  # of a panel, and panels a row, in units of Grafana's grid of 24 columns
# title, query, legend, Grafana's unit, whether parts are stacked
_PANELS = (
    ("Step time", "step_seconds", "{{run}}", "s", False),
    ("Where a step goes", "step_part_seconds", "{{part}}", "s", True),
    ("Exposed communication by model state", "state_exposed_seconds", "{{state}}", "s", True),
    ("Waiting for other ranks by model state", "state_wait_seconds", "{{state}}", "s", True),
    (
        "Bus bandwidth",
        "bus_bandwidth_bytes_per_second",
        "{{op}} {{span}} x{{group_size}} on {{num_nodes}}",
        "Bps",
        False,
    ),
    ("Stragglers", "straggler_wait_seconds", "rank {{rank}} {{host}} ({{cause}})", "s", False),
    ("Groups with slow links", "slow_group_excess_seconds", "ranks {{ranks}} ({{span}})", "s", False),
    ("Predicted speed-up of the plan", "predicted_speedup_ratio", "{{strategy}} p{{quantile}}", "none", False),
    ("Running job: step time", "job_step_seconds", "{{run}}", "s", False),
    ("Running job: steps over those before the last alarm", "job_slowdown_ratio", "{{run}}", "none", False),
    ("Running job: host time by rank", "job_host_seconds", "rank {{rank}} {{host}}", "s", False),
    ("Running job: newest step", "job_newest_step", "{{run}}", "none", False),
)


def grafana_dashboard() -> dict[str, object]:
    """Return the dashboard; its data source and run are chosen in Grafana."""
    return {
        "title": "paro-advise",
        "uid": "paro-advise",
        "tags": ["paro-advise", "training", "nccl"],
        "schemaVersion": 39,
        "editable": True,
        "refresh": "1m",
        "time": {"from": "now-6h", "to": "now"},
        "templating": {
            "list": [
                {"name": "datasource", "label": "Data source", "type": "datasource", "query": "prometheus"},
                {
                    "name": "run", "label": "Run", "type": "query", "refresh": 2, "includeAll": True, "multi": True,
                    "datasource": _SOURCE, "query": f'label_values({{__name__=~"{PREFIX}_(job_)?step_seconds"}}, run)',
                },
            ]
        },
        "panels": [_panel(number, *panel) for number, panel in enumerate(_PANELS)],
    }  # fmt: skip


_SOURCE = {"type": "prometheus", "uid": "${datasource}"}


def _panel(number: int, title: str, metric: str, legend: str, unit: str, is_stacked: bool) -> dict[str, object]:  # noqa: FBT001 - a row of _PANELS
    return {
        "id": number + 1,
        "title": title,
        "type": "timeseries",
        "datasource": _SOURCE,
        "gridPos": {
            "x": number % _COLUMNS * _WIDTH, "y": number // _COLUMNS * _HEIGHT, "w": _WIDTH, "h": _HEIGHT,
        },
        "fieldConfig": {
            "defaults": {
                "unit": unit, "min": 0,
                "custom": {
                    "fillOpacity": 30 if is_stacked else 0,
                    "stacking": {"mode": "normal" if is_stacked else "none"},
                },
            },
            "overrides": [],
        },
        "targets": [
            {"refId": "A", "datasource": _SOURCE, "expr": f'{PREFIX}_{metric}{{run=~"$run"}}', "legendFormat": legend}
        ],
    }  # fmt: skip
