"""Metrics say what the analysis says, in forms that Prometheus and OpenTelemetry read."""

from __future__ import annotations

import json
import re
from dataclasses import replace

import pytest
from conftest import DATA

import paro_advise
from paro_advise.advisor.cli import run
from paro_advise.advisor.metrics.dashboard import grafana_dashboard
from paro_advise.advisor.metrics.measures import measures_of

parser = pytest.importorskip("prometheus_client.parser", reason="the format is read by Prometheus' own client library")

RUN = DATA / "zero_runs" / "straggler_fsdp2_ggg"


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """An analysis, a plan made from it, and both as files."""
    folder = tmp_path_factory.mktemp("made")
    analysis = paro_advise.analyze(RUN, gpus_per_node=1)
    plan = paro_advise.recommend(analysis)
    (folder / "run.json").write_bytes(analysis.to_json())
    (folder / "plan.json").write_bytes(plan.to_json())
    return folder, analysis.analysis, plan.plan


def families(text):
    return {family.name: family for family in parser.text_string_to_metric_families(text)}


def test_prometheus_reads_what_the_analysis_says(made, capsys):
    folder, analysis, plan = made
    arguments = ["--prometheus", "-", "--plan", str(folder / "plan.json"), "--label", "run=llama"]
    assert run(["export", str(folder / "run.json"), *arguments]) == 0
    found = families(capsys.readouterr().out)
    (step,) = found["paro_advise_step_seconds"].samples
    assert step.value == pytest.approx(analysis.breakdown_us.step_us / 1e6)
    assert step.labels == {"run": "llama"}
    parts = {item.labels["part"]: item.value for item in found["paro_advise_step_part_seconds"].samples}
    assert sum(parts.values()) == pytest.approx(step.value)
    exposed = {item.labels["state"]: item.value for item in found["paro_advise_state_exposed_seconds"].samples}
    assert exposed["parameter"] == pytest.approx(analysis.states["parameter"].exposed_us / 1e6)
    (late,) = found["paro_advise_straggler_wait_seconds"].samples
    assert (late.labels["rank"], late.labels["cause"]) == ("2", "host")
    speedup = {item.labels["quantile"]: item.value for item in found["paro_advise_predicted_speedup_ratio"].samples}
    assert speedup["0.5"] == pytest.approx(plan.chosen.predicted.speedup.p50)
    assert all(family.documentation.endswith(".") for family in found.values())


def test_links_of_the_same_groups_over_more_nodes_are_other_samples():
    """A scrape keeps the last of two that have the same labels."""
    analysis = paro_advise.analyze(RUN, gpus_per_node=1).analysis
    link = next(link for link in analysis.links if link.busbw_gbps is not None)
    twice = replace(analysis, links=(link, replace(link, num_nodes=link.num_nodes + 1)))
    for measure in measures_of(twice, None):
        labels = [tuple(sorted(sample.labels.items())) for sample in measure.samples]
        assert len(labels) == len(set(labels)), measure.name


def test_names_end_in_base_units(made, capsys):
    assert run(["export", str(made[0] / "run.json"), "--prometheus", "-"]) == 0
    names = set(families(capsys.readouterr().out))
    assert all(re.fullmatch(r"paro_advise_[a-z_]+", name) for name in names)
    without_unit = {name for name in names if not name.endswith(("_seconds", "_bytes_per_second", "_ratio", "_info"))}
    assert without_unit == {"paro_advise_ranks", "paro_advise_ranks_seen"}


def test_hostile_labels_are_escaped(made, capsys):
    label = 'run=a"b\\c\nd'
    assert run(["export", str(made[0] / "run.json"), "--prometheus", "-", "--label", label]) == 0
    (step,) = families(capsys.readouterr().out)["paro_advise_step_seconds"].samples
    assert step.labels["run"] == label.partition("=")[2]


def test_opentelemetry_has_the_same_values(made, capsys):
    assert run(["export", str(made[0] / "run.json"), "--otel", "-", "--label", "run=llama"]) == 0
    (resource,) = json.loads(capsys.readouterr().out)["resourceMetrics"]
    attributes = {item["key"]: item["value"]["stringValue"] for item in resource["resource"]["attributes"]}
    assert attributes == {"service.name": "paro-advise", "run": "llama"}
    (scope,) = resource["scopeMetrics"]
    metrics = {item["name"]: item for item in scope["metrics"]}
    (point,) = metrics["paro_advise_step_seconds"]["gauge"]["dataPoints"]
    assert point["asDouble"] == pytest.approx(made[1].breakdown_us.step_us / 1e6)
    assert metrics["paro_advise_step_seconds"]["unit"] == "s"
    assert re.fullmatch(r"\d{19}", point["timeUnixNano"])


def test_what_is_not_known_has_no_sample(tmp_path, capsys):
    log = tmp_path / "nccl.txt"
    log.write_text(
        "host:1:1 [0] NCCL INFO Bootstrap : Using eth0:10.0.0.1<0>\nhost:1:1 [0] NCCL INFO comm 0x1 rank 0 nranks 2\n"
    )
    assert run(["export", str(log), "--prometheus", "-"]) == 0
    found = families(capsys.readouterr().out)
    assert "paro_advise_step_seconds" not in found
    assert "paro_advise_run_info" in found


# tests/test_watch_metrics.py reads each of them.
OF_A_RUNNING_JOB = ("step_seconds", "slowdown_ratio", "host_seconds", "newest_step")


def test_the_dashboard_asks_for_metrics_that_are_exported(made, tmp_path, capsys):
    assert run(["export", "--grafana", str(tmp_path / "dashboard.json")]) == 0
    board = json.loads((tmp_path / "dashboard.json").read_text())
    assert board == json.loads(json.dumps(grafana_dashboard()))
    assert run(["export", str(made[0] / "run.json"), "--plan", str(made[0] / "plan.json"), "--prometheus", "-"]) == 0
    known = set(families(capsys.readouterr().out)) | {"paro_advise_slow_group_excess_seconds"}
    known |= {f"paro_advise_job_{name}" for name in OF_A_RUNNING_JOB}
    asked = {re.match(r"(\w+)\{", panel["targets"][0]["expr"])[1] for panel in board["panels"]}
    assert asked <= known
    boxes = [panel["gridPos"] for panel in board["panels"]]
    assert all(box["x"] + box["w"] <= 24 for box in boxes)
    assert len({(box["x"], box["y"]) for box in boxes}) == len(boxes)
    assert len({panel["id"] for panel in board["panels"]}) == len(boxes)


def kept(given, read, path=""):
    """Where what was read back lacks something that was given."""
    if isinstance(given, dict):
        return [place for key, value in given.items() for place in kept(value, (read or {}).get(key), f"{path}/{key}")]
    if isinstance(given, list):
        assert len(given) == len(read or [])
        return [place for one, other in zip(given, read, strict=True) for place in kept(one, other, path)]
    return [] if given == read else [path]


def read_by_grafana(board):
    """A dashboard that has gone through the types which Grafana makes from its own schema."""
    from grafana_foundation_sdk.cog.encoder import JSONEncoder
    from grafana_foundation_sdk.cog.plugins import register_default_plugins
    from grafana_foundation_sdk.models.dashboard import Dashboard

    register_default_plugins()
    return json.loads(JSONEncoder().encode(Dashboard.from_json(board)))


def test_grafanas_schema_knows_all_that_the_dashboard_says():
    board = json.loads(json.dumps(grafana_dashboard()))
    assert kept(board, read_by_grafana(board)) == []
    board["panels"][0]["fieldConfig"]["defaults"]["units"] = "s"  # the test would see what no schema knows
    assert kept(board, read_by_grafana(board)) == ["/panels/fieldConfig/defaults/units"]


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["export", "x.json"], "--prometheus FILE"), (["export", "--prometheus", "-"], "no PATH"),
        (["export", "x.json", "--prometheus", "-", "--label", "1=2"], "NAME=VALUE"),
        (["export", "x.json", "--prometheus", "same", "--otel", "same"], "file of its own"),
    ],
)  # fmt: skip
def test_wrong_uses_say_what_is_right(arguments, text, capsys):
    assert run(arguments) == 2
    assert text in capsys.readouterr().err


def test_a_label_that_a_metric_has_itself_is_refused(made, capsys):
    for target in ("--prometheus", "--otel"):
        assert run(["export", str(made[0] / "run.json"), target, "-", "--label", "part=x"]) == 2
        assert "part" in capsys.readouterr().err
    assert run(["export", str(made[0] / "run.json"), "--prometheus", "-", "--otel", "-"]) == 2
