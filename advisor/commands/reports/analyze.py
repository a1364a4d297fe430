"""``paro-advise analyze``: traces and logs to a verdict per model state."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import click

from paro_advise.advisor.commands.options import Number, engine_options
from paro_advise.advisor.commands.spool import is_stream, spooled
from paro_advise.advisor.facts.reading.choice import EngineChoice
from paro_advise.core.secrets import masked_command
from paro_advise.errors import UsageError
from paro_advise.trace_parsers.remote.objects import refuse_remote

if TYPE_CHECKING:
    from collections.abc import Callable

    from paro_advise.advisor.analysis.model import Analysis
    from paro_advise.advisor.commands.progress import Progress
    from paro_advise.advisor.facts.inputs import RunInputs
    from paro_advise.advisor.facts.reading.all_inputs import ReadInputs
    from paro_advise.advisor.hta.library import HtaFigures


@click.command(
    "analyze",
    short_help="Read traces and logs; say what limits the run.",
)
@click.argument("paths", nargs=-1, required=True, metavar="PATH...")
@click.option("-o", "--output", metavar="FILE", help="Write the report as one HTML file.")
@click.option("--json", "json_target", metavar="FILE", help="Write the analysis as JSON; - for stdout.")
@click.option("--force", is_flag=True, help="Replace output files that exist.")
@click.option("--gpus-per-node", type=click.IntRange(1, 1024), help="Ranks on one node, whatever the input tells.")
@click.option("--skip-steps", type=click.IntRange(0), default=0, show_default=True, help="Warm-up steps to leave out.")
@click.option("--tokens-per-step", type=click.IntRange(1), help="Tokens of all ranks in a step, for MFU.")
@click.option("--peak-tflops", type=Number(0, 1e6, min_open=True), help="Dense peak of one device, for MFU.")
@click.option(
    "--with-hta", is_flag=True, help="Add HolisticTraceAnalysis' figures, and the same computed here by its rules."
)
@click.option("--sample", is_flag=True, help="Read only as many ranks as tell the exposed communication of all to 2 %.")
@engine_options
@click.option("--jobs", type=click.IntRange(1), help="Processes that read files.  [default: all cores]")
@click.option("--cache/--no-cache", "use_cache", default=True, show_default=True, help="Keep facts of files read.")
@click.option("-q", "--quiet", is_flag=True, help="Suppress progress and notes; warnings stay.")
def command(
    *,
    paths: tuple[str, ...],
    output: str | None,
    json_target: str | None,
    force: bool,
    gpus_per_node: int | None,
    skip_steps: int,
    tokens_per_step: int | None,
    peak_tflops: float | None,
    with_hta: bool,
    sample: bool,
    jobs: int | None,
    use_cache: bool,
    quiet: bool,
    engine: EngineChoice,
) -> None:
    """Read torch profiler traces, NCCL logs and dumps, and say what limits the run.

    PATH is a file, a folder, an archive, a quoted glob, an address such as s3://bucket/run/, or -
    for a trace on standard input; of one or many ranks, of any supported kind, mixed.

    \b
    Examples:
      paro-advise analyze trace.json
      paro-advise analyze 'traces/rank*.json.gz' -o run.html --json run.json
      paro-advise analyze traces/ nccl.log --gpus-per-node 8
      paro-advise analyze s3://bucket/run-of-4096-ranks/ --sample
    """
    from paro_advise.advisor.analysis.build import build_analysis
    from paro_advise.advisor.analysis.model import Options
    from paro_advise.advisor.commands.output import Targets, wrote_text
    from paro_advise.advisor.commands.progress import Progress
    from paro_advise.advisor.facts.inputs import read_inputs
    from paro_advise.advisor.rendering.ranks.rank_file import rank_file_name
    from paro_advise.advisor.rendering.texts.analysis_text import analysis_text

    beside = rank_file_name(output) if output and output != "-" else None
    targets = Targets.checked(output, json_target, beside, force=force, inputs=paths)
    if with_hta:
        refuse_remote(paths, "--with-hta")
    progress = Progress(quiet=quiet)
    reading = partial(
        read_inputs, progress=progress, engine=replace(engine, jobs=jobs), is_sample=sample, skip_steps=skip_steps
    )
    inputs, hta, shown = _read(paths, reading, with_hta=with_hta, use_cache=use_cache)
    read = inputs.read
    options = Options(
        gpus_per_node=gpus_per_node,
        tokens_per_step=tokens_per_step,
        peak_tflops=peak_tflops,
        skip_steps=skip_steps,
    )
    notices = [*read.notices, *(hta.notices if hta else ())]
    analysis = _with_names(build_analysis(read.facts, notices, options, inputs.step_logs), shown)
    _refuse_mixed_sample(analysis)
    written = _write(analysis, read, hta, output=output, json_target=json_target, force=force)
    if targets.are_files:
        click.echo(analysis_text(analysis))
        _say_hta(hta)
    progress.notices(analysis.data_quality)
    for target in written:
        progress.say(wrote_text(target))
    known = {"--gpus-per-node": gpus_per_node, "--skip-steps": skip_steps or None}
    given = [word for option, value in known.items() if value for word in (option, str(value))]
    if "-" not in paths:  # standard input is read once
        _say_next(progress, analysis, masked_command([*paths, *given]), has_page=bool(output))


def _say_next(progress: Progress, analysis: Analysis, words: str, *, has_page: bool) -> None:
    if not has_page:
        progress.say(f"next: paro-advise analyze {words} -o report.html")
    if analysis.run.strategy.triple and (analysis.run.world_size or 1) > 1 and analysis.step_time_us.values:
        progress.say(f"next: paro-advise recommend {words} -o plan.json")


def _with_names(analysis: Analysis, shown: Callable[[str], str]) -> Analysis:
    """Return an analysis whose inputs have the names that the user knows."""
    entries = tuple(replace(entry, path=shown(entry.path)) for entry in analysis.run.inputs)
    return replace(analysis, run=replace(analysis.run, inputs=entries))


def _say_hta(hta: HtaFigures | None) -> None:
    if hta:
        from paro_advise.advisor.rendering.analyses.hta_figures import hta_text

        click.echo(hta_text(hta))


def _refuse_mixed_sample(analysis: Analysis) -> None:
    """Raise where some traces were read that are of several jobs: what they say holds of none of them.

    Raises:
        UsageError: they are.
    """
    if {"Q304", "Q323"} <= {item.code for item in analysis.data_quality}:
        raise UsageError(
            "--sample must get the traces of one job, these are of several",
            hint="pass the folder or files of one; `analyze` without --sample lists them",
        )


def _read(
    paths: tuple[str, ...], reading: Callable[..., RunInputs], *, with_hta: bool, use_cache: bool
) -> tuple[RunInputs, HtaFigures | None, Callable[[str], str]]:
    """Return what was read, HTA's figures if they are asked for, and how a file is called that was read."""
    with spooled(paths) as given:
        may_keep = use_cache and not any(map(is_stream, paths))
        # What came by a pipe lies on this machine only.
        own = {"engine": EngineChoice()} if any(map(is_stream, paths)) else {}
        inputs = reading(given.paths, use_cache=may_keep, **own)
        if not with_hta:
            return inputs, None, given.shown
        from paro_advise.advisor.hta.library import hta_figures

        return inputs, hta_figures(inputs.refs), given.shown


def _write(
    analysis: Analysis,
    read: ReadInputs,
    hta: HtaFigures | None,
    *,
    output: str | None,
    json_target: str | None,
    force: bool,
) -> list[str]:
    """Write the outputs; return the files."""
    from paro_advise.advisor.commands.output import write_output

    written = [target for target in (output, json_target) if target and target != "-"]
    if json_target:
        from paro_advise.core.documents import to_json

        beside = {"hta": hta.rows} if hta else {}
        write_output(json_target, to_json(analysis, **beside), force=force)
    if output:
        from paro_advise.advisor.rendering.provenance import report_page, steps_by_rank
        from paro_advise.advisor.rendering.ranks.rank_file import rank_file, rank_file_name

        if output != "-" and (rows := rank_file(analysis.ranks, steps_by_rank(analysis, read.facts))):
            write_output(rank_file_name(output), rows, force=force)
            written.append(rank_file_name(output))
        write_output(output, report_page(analysis, read.facts, hta).encode(), force=force)
    return written
