"""``paro-advise recommend``: from a run to a plan."""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import click

from paro_advise.advisor.commands.options import ByteSize, Number, engine_options
from paro_advise.advisor.prediction.constants import HOST_GBPS
from paro_advise.errors import InputError, UsageError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from paro_advise.advisor.analysis.model import Options
    from paro_advise.advisor.commands.progress import Progress
    from paro_advise.advisor.facts.reading.choice import EngineChoice
    from paro_advise.advisor.prediction.calibration import Calibration
    from paro_advise.advisor.prediction.prediction_bias import PredictionBias
    from paro_advise.advisor.prediction.recommend import Recommendation
    from paro_advise.advisor.prediction.scoring import Limits
    from paro_advise.policies.plan import Plan, PlanInput


@click.command(
    "recommend", short_help="Rank all strategies for a run; recommend one, with its memory cost and uncertainty."
)
@click.argument("paths", nargs=-1, required=True, metavar="PATH...|ANALYSIS|RUN.toml")
@click.option("-o", "--output", metavar="FILE", help="Write the plan as JSON; - for stdout.")
@click.option("--html", "page", metavar="FILE", help="Write the plan as one HTML page.")
@click.option("--force", is_flag=True, help="Replace an output file that exists; export what gains nothing.")
@click.option("--device-memory", type=ByteSize(least=1 << 30), help="Memory of one device, such as 80GiB.")
@click.option("--measured-peak", type=ByteSize(least=1), help="Peak memory of a rank of this run, as measured.")
@click.option("--redundancy-budget", type=ByteSize(), help="What a rank may hold beyond GGG.")
@click.option(
    "--host-gbps",
    type=Number(0.01, 10_000),
    default=HOST_GBPS,
    show_default=True,
    help="What one device moves to or from its host, 1e9 bytes/s; counts where nothing else fits.",
)
@click.option(
    "--export",
    "exports",
    multiple=True,
    metavar="FRAMEWORK=FILE",
    help="Write the plan for deepspeed, fsdp1, fsdp2, torchtitan, accelerate, megatron, lightning or transformers; - "
    "is the standard output.",
)
@click.option(
    "--allow-untested",
    is_flag=True,
    help="Also let the plan choose what was never timed on several GPUs (the bundled runtime, HO-Ring).",
)
@click.option("--strategy", metavar="TRIPLE[/SIZE]", help="Make the plan for this strategy, such as IIG/8.")
@click.option("--what-if", "what_ifs", multiple=True, metavar="NAME=VALUE", help="Also answer nodes=64, inter-gbps=50.")
@click.option("--learn-from", multiple=True, metavar="FILE", help="A comparison (JSON or report) with its prediction.")
@click.option("--gpus-per-node", type=click.IntRange(1, 1024), help="Ranks on one node, whatever the input tells.")
@click.option(
    "--nodes-per-pod", type=click.IntRange(1, 4096), help="Nodes per pod (faster interconnect domain), if any."
)
@click.option("--skip-steps", type=click.IntRange(0), default=0, show_default=True, help="Warm-up steps to leave out.")
@engine_options
@click.option("-q", "--quiet", is_flag=True, help="Suppress progress and notes; warnings stay.")
def command(
    *,
    paths: tuple[str, ...],
    output: str | None,
    page: str | None,
    force: bool,
    device_memory: float | None,
    measured_peak: float | None,
    redundancy_budget: float | None,
    host_gbps: float,
    allow_untested: bool,
    strategy: str | None,
    what_ifs: tuple[str, ...],
    exports: tuple[str, ...],
    learn_from: tuple[str, ...],
    gpus_per_node: int | None,
    nodes_per_pod: int | None,
    skip_steps: int,
    quiet: bool,
    engine: EngineChoice,
) -> None:
    """Predict every strategy, group size and collective algorithm for the run in PATH, and recommend one.

    PATH is what `analyze` reads, or the JSON or the report that it wrote. A TOML file that describes a run stands for
    traces (docs/descriptions.md); benchmarks beside it give the links. --what-if takes nodes, micro-batches, inter-gbps
    and intra-gbps, joined by commas, or a target: communication=10%, efficiency=80%.

    \b
    Examples:
      paro-advise recommend traces/ --device-memory 80GiB -o plan.json
      paro-advise recommend run.json --redundancy-budget 4GiB
      paro-advise recommend traces/ --strategy IIG/8 -o plan.json
      paro-advise recommend run.toml nccl-tests.txt --what-if nodes=64 --what-if efficiency=80%
    """
    from paro_advise.advisor.analysis.model import Options
    from paro_advise.advisor.commands.output import Targets
    from paro_advise.advisor.commands.progress import Progress
    from paro_advise.advisor.prediction.advice.questions import Question
    from paro_advise.advisor.prediction.advice.wanted import Wanted
    from paro_advise.advisor.prediction.recommend import recommendation
    from paro_advise.advisor.prediction.scoring import Limits

    questions = [Question.parse(text) for text in what_ifs]
    wanted = Wanted.parse(strategy) if strategy is not None else None
    files = dict(_framework_and_file(text) for text in exports)
    targets = Targets.checked(output, page, *files.values(), force=force, inputs=[*paths, *learn_from])
    _refuse_slips(paths, output)
    progress = Progress(quiet=quiet)
    options = Options(gpus_per_node=gpus_per_node, skip_steps=skip_steps)
    run = _load(paths, options, nodes_per_pod, measured_peak, progress, engine)
    limits = Limits(
        device_memory_bytes=device_memory or run.device_memory_bytes,
        redundancy_budget_bytes=redundancy_budget,
        other_bytes=run.other_bytes,
        host_gbps=host_gbps,
        allow_untested=allow_untested,
    )
    made = recommendation(
        run.calibration, limits, bias=_bias(learn_from), wanted=wanted, questions=questions, inputs=run.inputs
    )
    # What a pipe is to take must stand on the standard output alone.
    _write(made, output, page, force=force, says_plan=targets.are_files)
    for framework, file in files.items():
        _export(made.plan, framework, file, force=force)
    if not quiet:
        for line in targets.written():
            click.echo(line, err=True)
        _next(made.plan, limits, output)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Run:
    """What a recommendation starts from.

    Attributes:
        calibration: the run.
        device_memory_bytes: of one device, None when unknown.
        other_bytes: of a rank, activations and the rest; 0 when unknown.
        inputs: files behind it.
    """

    calibration: Calibration
    device_memory_bytes: float | None
    other_bytes: float
    inputs: tuple[PlanInput, ...]


def _refuse_slips(paths: Sequence[str], output: str | None) -> None:
    if "-" in paths:
        raise UsageError("recommend must read files, got - for standard input", hint="use `analyze - --json` first")
    if output and output.endswith((".html", ".htm")):
        raise UsageError("-o writes the plan as JSON, got the name of a page", hint=f"--html {output} writes the page")


def _load(
    paths: Sequence[str],
    options: Options,
    nodes_per_pod: int | None,
    measured_peak: float | None,
    progress: Progress,
    engine: EngineChoice,
) -> _Run:
    """Return the run of traces, of an analysis or of a description."""
    from paro_advise.advisor.analysis.load import load_analysis
    from paro_advise.advisor.description.read import SUFFIX
    from paro_advise.advisor.prediction.fitting.calibrate import calibrate
    from paro_advise.advisor.prediction.fitting.run_memory import device_memory_of, inputs_of, other_bytes
    from paro_advise.advisor.prediction.scoring import least_bytes

    described = [path for path in paths if path.endswith(SUFFIX)]
    if described:
        if options.gpus_per_node or options.skip_steps or nodes_per_pod:
            raise UsageError(
                "--gpus-per-node, --nodes-per-pod and --skip-steps must come with traces, got a description",
                where=described[0],
                hint="cluster.gpus_per_node, cluster.nodes_per_pod",
            )
        return _load_described(described, [path for path in paths if path not in described], measured_peak, progress)
    analysis, _ = load_analysis(paths, options, progress, engine=engine)
    progress.notices(analysis.data_quality)
    calibration = calibrate(analysis, nodes_per_pod)
    return _Run(
        calibration=calibration,
        device_memory_bytes=device_memory_of(analysis),
        other_bytes=other_bytes(analysis, least_bytes(calibration), measured_peak),
        inputs=inputs_of(analysis),
    )


def _load_described(
    described: Sequence[str], benchmarks: Sequence[str], measured_peak: float | None, progress: Progress
) -> _Run:
    from paro_advise.advisor.analysis.load import load_analysis
    from paro_advise.advisor.analysis.model import Options
    from paro_advise.advisor.description.benchmarks import with_benchmarks
    from paro_advise.advisor.description.calibrate import calibrate_described
    from paro_advise.advisor.description.read import read_description, stated_bytes
    from paro_advise.advisor.prediction.fitting.run_memory import beyond_states, inputs_of
    from paro_advise.advisor.prediction.scoring import least_bytes
    from paro_advise.policies.plan import PlanInput

    if len(described) > 1:
        raise UsageError(f"recommend must read one description, got {' and '.join(described)}")
    description, digest = read_description(described[0])
    inputs: tuple[PlanInput, ...] = (PlanInput(name=Path(described[0]).name, sha256=digest),)
    if benchmarks:
        analysis, _ = load_analysis(benchmarks, Options(gpus_per_node=description.cluster.gpus_per_node), progress)
        progress.notices(analysis.data_quality)
        description, unused = with_benchmarks(description, analysis.links)
        if unused:
            click.echo(f"not used, since not of whole nodes or not of bandwidth: {', '.join(unused)}", err=True)
        inputs += inputs_of(analysis)
    try:
        calibration = calibrate_described(description)
        peak = measured_peak or stated_bytes("run.measured_peak", description.run.measured_peak)
        memory = stated_bytes("cluster.device_memory", description.cluster.device_memory)
    except InputError as error:
        error.where = error.where or described[0]
        raise
    if memory is not None and memory < 1 << 30:
        raise InputError(
            f"cluster.device_memory must be 1GiB or more, got {description.cluster.device_memory!r}", where=described[0]
        )
    return _Run(
        calibration=calibration,
        device_memory_bytes=memory,
        other_bytes=beyond_states(peak, least_bytes(calibration), str(calibration.baseline)) if peak else 0.0,
        inputs=inputs,
    )


def _next(plan: Plan, limits: Limits, output: str | None) -> None:
    """Say what of the memory is not counted, and which command comes after this one."""
    from paro_advise.policies.frameworks.model import Fidelity
    from paro_advise.policies.frameworks.registry import RUNTIME
    from paro_advise.policies.plan import Verdict
    from paro_advise.policies.strategy import CollectiveBackend

    for line in _unknown_memory(limits):
        click.echo(line, err=True)
    if plan.verdict == Verdict.CHANGE and output and output != "-":
        name = shlex.quote(output)
        click.echo(f"next: paro-advise apply {name} CONFIG_OR_SCRIPT    (shows the change, writes nothing)", err=True)
        is_ours = limits.allow_untested and plan.chosen.exports.get(RUNTIME) == Fidelity.EXACT
        if is_ours or plan.chosen.collectives == CollectiveBackend.HO_RING:
            click.echo(f"next: paro-advise run --plan {name} -- YOUR_COMMAND", err=True)
    elif plan.verdict == Verdict.CHANGE:
        readers = "`apply` reads for a configuration" if plan.chosen.variant else "`apply` and `run` read"
        click.echo(f"next: the same command with -o plan.json, which {readers}", err=True)
    elif plan.verdict == Verdict.MEASURE_FIRST:
        click.echo("next: measure what stands under `Measure`, then recommend again", err=True)


def _write(made: Recommendation, output: str | None, page: str | None, *, force: bool, says_plan: bool) -> None:
    from paro_advise.advisor.commands.output import write_output
    from paro_advise.advisor.rendering.texts.plan_text import plan_text
    from paro_advise.advisor.wording.escaping import plain
    from paro_advise.core.documents import to_json

    plan = made.plan
    if says_plan:
        click.echo("\n".join(plain(line) for line in plan_text(plan).splitlines()))
    if output:
        write_output(output, to_json(plan), force=force)
    if page:
        from paro_advise.advisor.prediction.advice.scenarios import scenarios_of
        from paro_advise.advisor.rendering.plans.plan_page import render_plan
        from paro_advise.advisor.rendering.provenance import provenance

        scenarios = scenarios_of(plan, made.basis)
        write_output(page, render_plan(plan, provenance(), scenarios).encode(), force=force)


def _unknown_memory(limits: Limits) -> list[str]:
    """Say what of the memory is not counted, and which option would."""
    lines = []
    if limits.device_memory_bytes is None:
        lines.append("the memory of a device is not known: no strategy was excluded; give --device-memory")
    if not limits.other_bytes:
        lines.append("activations are not counted: give --measured-peak for a full account")
    return lines


def _bias(paths: Sequence[str]) -> PredictionBias:
    from paro_advise.advisor.comparison.model import read_comparison
    from paro_advise.advisor.prediction.prediction_bias import fit_bias

    return fit_bias(
        (item.predicted, item.measured)
        for path in paths
        for item in read_comparison(path).predicted_vs_measured
        if item.name == "speedup"
    )


def _framework_and_file(text: str) -> tuple[str, str]:
    framework, sign, file = text.partition("=")
    if not sign or not file:
        raise UsageError(f"an export must be FRAMEWORK=FILE, got {text!r}", hint="for example deepspeed=ds.json")
    return framework, file


def _export(plan: Plan, framework: str, file: str, *, force: bool) -> None:
    """Write the chosen strategy in a framework's words; what differs is said."""
    from paro_advise.advisor.commands.output import write_output
    from paro_advise.advisor.edits.result import framework_caveats, refuse_no_gain, target_of
    from paro_advise.policies.frameworks.registry import export

    made = export(framework, target_of(plan))
    if not force:
        refuse_no_gain(plan, framework)
    write_output(file, made.text.encode(), force=force)
    for caveat in (made.claim, *made.caveats, *framework_caveats(plan, framework)):
        click.echo(f"{framework}: {caveat}", err=True)
