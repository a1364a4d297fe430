"""``paro-advise compare``: two runs to a verdict with its range, and the before/after report."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from paro_advise.advisor.commands.options import ByteSize, Number, engine_options
from paro_advise.advisor.commands.output import REGRESSION
from paro_advise.advisor.comparison.comparability import FACTS
from paro_advise.core.plural import plural
from paro_advise.core.secrets import masked_command
from paro_advise.errors import UsageError

if TYPE_CHECKING:
    from paro_advise.advisor.analysis.model import Analysis, Options
    from paro_advise.advisor.comparison.acceptance import Thresholds
    from paro_advise.advisor.comparison.model import Comparison
    from paro_advise.advisor.facts.reading.all_inputs import ReadInputs
    from paro_advise.advisor.facts.reading.choice import EngineChoice
    from paro_advise.policies.plan import Plan


@click.command("compare", short_help="Compare two runs: before and after, with ranges.")
@click.argument("before", metavar="BEFORE")
@click.argument("after", metavar="AFTER")
@click.option("--plan", "plan_file", metavar="FILE", help="The plan that led from one to the other.")
@click.option("-o", "--output", metavar="FILE", help="Write the before/after report as one HTML file.")
@click.option("--json", "json_target", metavar="FILE", help="Write the comparison as JSON; - for stdout.")
@click.option("--markdown", metavar="FILE", help="Write it as Markdown for a ticket; - for stdout.")
@click.option("--junit", metavar="FILE", help="Write the judgement as JUnit XML for CI; - for stdout.")
@click.option("--notebook", metavar="FILE", help="Write a notebook that holds and recomputes the evidence.")
@click.option("--force", is_flag=True, help="Replace output files that exist.")
@click.option("--acceptance", "acceptance_file", metavar="FILE", help="Thresholds as TOML or JSON.")
@click.option(
    "--min-gain",
    type=Number(),
    help="Throughput must surely rise by so many percent; 0 or less: must not surely fall below.  [default: 0]",
)
@click.option("--device-memory", type=ByteSize(least=1 << 30), help="Memory of one device, such as 80GiB.")
@click.option("--price-per-gpu-hour", type=Number(0), help="For the cost of the work.")
@click.option("--watts-per-gpu", type=Number(0), help="Mean power, for the energy of the work.")
@click.option("--gpus-per-node", type=click.IntRange(1, 1024), help="Ranks on one node, whatever the input tells.")
@click.option("--allow-unlike", multiple=True, type=click.Choice(FACTS), help="Compare although this fact differs.")
@engine_options
@click.option("-q", "--quiet", is_flag=True, help="Suppress progress and notes; warnings stay.")
def command(
    *,
    before: str,
    after: str,
    plan_file: str | None,
    output: str | None,
    json_target: str | None,
    markdown: str | None,
    junit: str | None,
    notebook: str | None,
    force: bool,
    acceptance_file: str | None,
    min_gain: float | None,
    device_memory: float | None,
    price_per_gpu_hour: float | None,
    watts_per_gpu: float | None,
    gpus_per_node: int | None,
    allow_unlike: tuple[str, ...],
    quiet: bool,
    engine: EngineChoice,
) -> int:
    """Compare run BEFORE with run AFTER: folders that `capture` wrote, traces, or analysis JSONs.

    The exit code is 5 if the run became slower or an acceptance criterion failed.

    \b
    Examples:
      paro-advise compare before/ after/ --plan plan.json -o report.html
      paro-advise compare before/ after/ --min-gain 5 --json -
      paro-advise compare main/ branch/ --junit result.xml
    """
    from paro_advise.advisor.analysis.load import load_analysis
    from paro_advise.advisor.commands.output import Targets
    from paro_advise.advisor.commands.progress import Progress
    from paro_advise.advisor.comparison.compare import Terms, compare
    from paro_advise.advisor.rendering.texts.comparison_text import comparison_text
    from paro_advise.policies.plan import read_plan

    inputs = [text for text in (before, after, plan_file, acceptance_file) if text]
    targets = Targets.checked(output, json_target, markdown, junit, notebook, force=force, inputs=inputs)
    terms = Terms(
        thresholds=_thresholds(acceptance_file, min_gain),
        allow_unlike=allow_unlike,
        price_per_gpu_hour=price_per_gpu_hour,
        watts_per_gpu=watts_per_gpu,
        device_memory_bytes=device_memory,
    )
    plan = read_plan(plan_file) if plan_file else None
    progress = Progress(quiet=quiet)
    made_by = [(path, _options(path, gpus_per_node, plan)) for path in (before, after)]
    sides = [load_analysis([path], options, progress, engine=engine) for path, options in made_by]
    comparison = compare(sides[0][0], sides[1][0], plan, terms)
    _write(comparison, sides, output, json_target, markdown, notebook, junit, force=force)
    if targets.are_files:
        click.echo(comparison_text(comparison))
    for (analysis, _), (name, side) in zip(sides, comparison.sides, strict=True):
        progress.notices(side.warnings, of=f"{name}: ")
        if more := len(analysis.data_quality) - len(side.warnings):
            progress.say(f"{name}: {plural(more, 'note')} on the data; see `analyze`")
    written = targets.written()
    for line in written:
        progress.say(line)
    kept = next((target for target in (output, json_target) if target and target != "-"), None)
    if comparison.predicted_vs_measured and kept:
        words = masked_command([after, "--learn-from", kept])
        progress.say(f"next: paro-advise recommend {words} -o next.json")
    elif not written:
        progress.say(f"next: paro-advise compare {masked_command([before, after])} -o comparison.html")
    return 0 if comparison.passed else REGRESSION


def _options(path: str, gpus_per_node: int | None, plan: Plan | None) -> Options:
    """Return how a run is analysed: its nodes are those of the plan, unless it has been analysed already."""
    from paro_advise.advisor.analysis.load import is_analysis
    from paro_advise.advisor.analysis.model import Options

    planned = plan.preconditions.gpus_per_node if plan and not is_analysis(path) else None
    return Options(gpus_per_node=gpus_per_node or planned)


def _thresholds(path: str | None, min_gain: float | None) -> Thresholds:
    from paro_advise.advisor.comparison.acceptance import Thresholds

    table: dict[str, Any] = {}
    if path:
        import json
        import tomllib

        try:
            text = Path(path).read_text(encoding="utf-8-sig")
            table = json.loads(text) if path.endswith(".json") else tomllib.loads(text)
        except (OSError, ValueError, RecursionError, OverflowError) as error:
            raise UsageError(f"acceptance thresholds must be readable TOML or JSON: {error}", where=path) from error
        if not isinstance(table, dict):
            raise UsageError("acceptance thresholds must be a table of names and numbers", where=path)
    if min_gain is not None:
        table["min_throughput_gain_pct"] = min_gain
    return Thresholds.of(table, path or "--min-gain")


def _write(
    comparison: Comparison,
    sides: list[tuple[Analysis, ReadInputs | None]],
    output: str | None,
    json_target: str | None,
    markdown: str | None,
    notebook: str | None,
    junit: str | None,
    *,
    force: bool,
) -> None:
    from paro_advise.advisor.commands.output import write_output
    from paro_advise.advisor.rendering.provenance import provenance
    from paro_advise.advisor.rendering.texts.comparison_text import comparison_markdown
    from paro_advise.core.documents import to_json

    if json_target:
        write_output(json_target, to_json(comparison), force=force)
    if markdown:
        write_output(markdown, comparison_markdown(comparison).encode(), force=force)
    if junit:
        from paro_advise.advisor.rendering.texts.comparison_junit import comparison_junit

        write_output(junit, comparison_junit(comparison), force=force)
    if notebook:
        from paro_advise.advisor.rendering.comparisons.notebook import notebook_bytes

        write_output(notebook, notebook_bytes(comparison), force=force)
    if output:
        from paro_advise.advisor.rendering.comparisons.comparison_page import Timelines, render_comparison
        from paro_advise.advisor.timelines.of_run import timeline_of

        timelines = [timeline_of(analysis, read.facts) if read else None for analysis, read in sides]
        page = render_comparison(comparison, Timelines(before=timelines[0], after=timelines[1]), provenance())
        write_output(output, page.encode(), force=force)
