"""``paro-advise export``: the figures of a run for monitoring and for the compiler."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import TYPE_CHECKING

import click

from paro_advise.advisor.commands.labels import labels_of, refuse_own_labels
from paro_advise.advisor.commands.options import engine_options
from paro_advise.core.plural import plural
from paro_advise.core.release import release
from paro_advise.errors import UsageError
from paro_advise.trace_parsers.remote.objects import refuse_remote

if TYPE_CHECKING:
    from paro_advise.advisor.commands.progress import Progress
    from paro_advise.advisor.facts.reading.choice import EngineChoice
    from paro_advise.advisor.metrics.measures import Measure


@click.command("export", short_help="Write a run's figures for Prometheus, OpenTelemetry, Grafana and Inductor.")
@click.argument("paths", nargs=-1, metavar="PATH...|ANALYSIS")
@click.option("--prometheus", metavar="FILE", help="Write Prometheus' text format; - for stdout.")
@click.option("--otel", metavar="FILE", help="Write OTLP/JSON; - for stdout.")
@click.option("--grafana", metavar="FILE", help="Write a Grafana dashboard of these metrics; needs no PATH.")
@click.option(
    "--inductor", metavar="FILE", help="Write durations for torch.compile's overlap scheduling; PATH must be traces."
)
@click.option("--plan", "plan_file", metavar="FILE", help="Add what this plan predicts.")
@click.option(
    "--label", "labels", multiple=True, metavar="NAME=VALUE", help="Add a label to every sample, such as run=llama."
)
@click.option("--force", is_flag=True, help="Replace output files that exist.")
@click.option("--gpus-per-node", type=click.IntRange(1, 1024), help="Ranks on one node, whatever the input tells.")
@engine_options
@click.option("-q", "--quiet", is_flag=True, help="Suppress progress and notes; warnings stay.")
def command(
    *,
    paths: tuple[str, ...],
    prometheus: str | None,
    otel: str | None,
    grafana: str | None,
    inductor: str | None,
    plan_file: str | None,
    labels: tuple[str, ...],
    force: bool,
    gpus_per_node: int | None,
    quiet: bool,
    engine: EngineChoice,
) -> None:
    """Write step time, exposed communication, link speeds, stragglers and a plan's prediction as metrics.

    PATH is what `analyze` reads, or the JSON or report that it wrote. A file for Prometheus is replaced as a whole, as
    the textfile collector of the node exporter needs it.

    Inductor's file holds how long collectives moved data and operators computed. All ranks must be given the same one,
    as profile_guided_estimations_profile_path. We never ran it on GPUs.

    \b
    Examples:
      paro-advise export traces/ --prometheus paro.prom --label run=llama
      paro-advise export run.json --plan plan.json --otel -
      paro-advise export --grafana dashboard.json
      paro-advise export traces/ --inductor profile.json
    """
    from paro_advise.advisor.commands.output import Targets, write_output
    from paro_advise.advisor.commands.progress import Progress
    from paro_advise.core.documents import to_json

    if not (prometheus or otel or grafana or inductor):
        raise UsageError(
            "no output given", hint="pass --prometheus FILE, --otel FILE, --grafana FILE or --inductor FILE"
        )
    inputs = [text for text in (*paths, plan_file) if text]
    targets = Targets.checked(prometheus, otel, grafana, inductor, force=force, inputs=inputs)
    if inductor:
        _check_profile(inductor, paths)
    named = labels_of(labels)
    progress = Progress(quiet=quiet or not targets.are_files)
    contents: list[tuple[str, bytes]] = []  # written when all are known, so that a refusal leaves none
    if prometheus or otel:
        measures = _measures(paths, plan_file, gpus_per_node, progress, engine)
        refuse_own_labels({name for one in measures for each in one.samples for name in each.labels}, named)
        if prometheus:
            from paro_advise.advisor.metrics.prometheus import prometheus_text

            contents.append((prometheus, prometheus_text(measures, named)))
        if otel:
            from paro_advise.advisor.metrics.opentelemetry import otlp_document

            document = otlp_document(measures, named, release(), time.time_ns())
            contents.append((otel, to_json(document)))
    if grafana:
        from paro_advise.advisor.metrics.dashboard import grafana_dashboard

        contents.append((grafana, to_json(grafana_dashboard())))
    if inductor:
        contents.append((inductor, _profile(paths, progress, engine)))
    for target, content in contents:
        write_output(target, content, force=force)


def _check_profile(target: str, paths: tuple[str, ...]) -> None:
    """Refuse a profile that the compiler could not read, or that would be read as a trace the next time.

    Raises:
        UsageError: it is one.
    """
    if not paths:
        raise UsageError("no PATH given", hint="pass the traces of all ranks")
    refuse_remote(paths, "a compiler's profile")
    if target.endswith(".gz"):
        raise UsageError("a compiler's profile must not be compressed, got .gz", where=target)
    folder = Path(os.path.realpath(target)).parent
    if any(Path(path).is_dir() and folder.is_relative_to(Path(path).resolve()) for path in paths):
        raise UsageError("a compiler's profile must not lie among the traces, of which it would be one", where=target)


def _profile(paths: tuple[str, ...], progress: Progress, engine: EngineChoice) -> bytes:
    from paro_advise.advisor.facts.inputs import read_inputs
    from paro_advise.advisor.slices.compiler_profile import profile_for_compiler
    from paro_advise.advisor.wording.escaping import plain

    inputs = read_inputs(list(paths), progress, engine=engine)
    profile = profile_for_compiler(inputs.read.facts, {ref.label: ref for ref in inputs.refs}, inputs.step_logs)
    for note in dict.fromkeys((*(notice.message for notice in inputs.read.notices), *profile.notes)):
        click.echo(f"note: {plain(note)}", err=True)
    click.echo(
        f"{plural(profile.num_collectives, 'kind')} of collective, {plural(profile.num_operators, 'kind')} of operator",
        err=True,
    )
    return profile.data


def _measures(
    paths: tuple[str, ...], plan_file: str | None, gpus_per_node: int | None, progress: Progress, engine: EngineChoice
) -> tuple[Measure, ...]:
    from paro_advise.advisor.analysis.load import load_analysis
    from paro_advise.advisor.analysis.model import Options
    from paro_advise.advisor.metrics.measures import measures_of
    from paro_advise.policies.plan import read_plan

    if not paths:
        raise UsageError("no PATH given", hint="pass what `analyze` reads, or the JSON that it wrote")
    analysis, _ = load_analysis(paths, Options(gpus_per_node=gpus_per_node), progress, engine=engine)
    progress.notices(analysis.data_quality)
    return measures_of(analysis, read_plan(plan_file) if plan_file else None)
