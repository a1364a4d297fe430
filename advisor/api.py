"""The Python interface: what the verbs do, as functions that return values for scripts and notebooks.

Each result holds the value that its JSON format is (docs/formats.md), shows itself in a notebook, and gives its tables
as Polars frames. Nothing is printed; what was skipped or guessed stands in ``data_quality``.
"""

from __future__ import annotations

import math
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

import click
import msgspec

from paro_advise.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import polars as pl

    from paro_advise.advisor.analysis.model import Analysis
    from paro_advise.advisor.comparison.model import Comparison
    from paro_advise.advisor.facts.model import RankFacts
    from paro_advise.advisor.prediction.advice.what_if import Basis
    from paro_advise.policies.plan import Plan

PathLike: TypeAlias = str | os.PathLike[str]


class _Quiet:
    """Whoever is told what goes on, and does not care."""

    def say(self, text: str) -> None:
        """Take one line."""

    def step(self, done: int, total: int, label: str) -> None:
        """Take how far reading is."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AnalysisResult:
    """What limits a run.

    Attributes:
        analysis: the value behind ``paro-advise/analysis``; times are microseconds, sizes bytes.
        facts: of the files that were read, () where an analysis was given.
    """

    analysis: Analysis
    facts: tuple[RankFacts, ...] = ()

    def __str__(self) -> str:
        """Return what ``paro-advise analyze`` prints."""
        from paro_advise.advisor.rendering.texts.analysis_text import analysis_text

        return click.unstyle(analysis_text(self.analysis))

    def frame(self, table: str) -> pl.DataFrame:
        """Return a table: "collectives", "ranks", "links", "states", "findings", "modules", "data_quality", "inputs".

        Raises:
            UsageError: there is no such table.
        """
        named = {
            "collectives": self.analysis.collectives,
            "ranks": self.analysis.ranks,
            "links": self.analysis.links,
            "states": [{"name": name, **msgspec.to_builtins(entry)} for name, entry in self.analysis.states.items()],
            "findings": self.analysis.findings,
            "modules": self.analysis.modules,
            "data_quality": self.analysis.data_quality,
            "inputs": self.analysis.run.inputs,
        }
        return _frame(named, table)

    def to_json(self) -> bytes:
        """Return the JSON document that ``analyze --json`` writes."""
        from paro_advise.core.documents import to_json

        return to_json(self.analysis)

    def to_html(self) -> str:
        """Return the report as one page that needs no network."""
        from paro_advise.advisor.rendering.provenance import report_page

        return report_page(self.analysis, self.facts)

    def _repr_html_(self) -> str:
        states = self.frame("states").filter(self.frame("states")["count"] > 0)
        return _as_html(self.analysis.verdict.text, states.select("name", "count", "exposed_us", "regime"))


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanResult:
    """A recommendation.

    Attributes:
        plan: the value behind ``paro-advise/plan``.
        basis: what further questions are answered from, for the page; not a part of the interface.
    """

    plan: Plan
    basis: Basis = field(repr=False, compare=False)

    def __str__(self) -> str:
        """Return what ``paro-advise recommend`` prints."""
        from paro_advise.advisor.rendering.texts.plan_text import plan_text

        return plan_text(self.plan)

    def frame(self, table: str = "candidates") -> pl.DataFrame:
        """Return a table: "candidates" (with step time and speed-up as quantiles) or "levers".

        Raises:
            UsageError: there is no such table.
        """
        return _frame({"candidates": self.plan.candidates, "levers": self.plan.levers}, table)

    def to_json(self) -> bytes:
        """Return the JSON document that ``recommend -o`` writes, which ``apply`` and ``run`` read."""
        from paro_advise.core.documents import to_json

        return to_json(self.plan)

    def to_html(self) -> str:
        """Return the plan as one page."""
        from paro_advise.advisor.prediction.advice.scenarios import scenarios_of
        from paro_advise.advisor.rendering.plans.plan_page import render_plan
        from paro_advise.advisor.rendering.provenance import provenance

        return render_plan(self.plan, provenance(), scenarios_of(self.plan, self.basis))

    def _repr_html_(self) -> str:
        import polars as pl

        rows = [
            {
                "strategy": choice.triple,
                "group_size": choice.group_size,
                "collectives": str(choice.collectives),
                "step_ms": choice.predicted.step_time_us.p50 / 1e3,
                "speedup": choice.predicted.speedup.p50,
            }
            for choice in (self.plan.baseline, *[item for item in self.plan.candidates if item.feasible][:8])
        ]
        return _as_html(self.plan.text, pl.DataFrame(rows))


@dataclass(frozen=True, slots=True, kw_only=True)
class ComparisonResult:
    """Two runs, compared.

    Attributes:
        comparison: the value behind ``paro-advise/comparison``.
    """

    comparison: Comparison

    def __str__(self) -> str:
        """Return what ``paro-advise compare`` prints."""
        from paro_advise.advisor.rendering.texts.comparison_text import comparison_text

        return click.unstyle(comparison_text(self.comparison))

    @property
    def passed(self) -> bool:
        """Tell whether the run became no slower and met all criteria, as the command's exit code does."""
        return self.comparison.passed

    def frame(self, table: str = "metrics") -> pl.DataFrame:
        """Return a table: "metrics", "acceptance", "predicted_vs_measured" or "collectives".

        Raises:
            UsageError: there is no such table.
        """
        named = {
            "metrics": self.comparison.metrics,
            "acceptance": self.comparison.acceptance,
            "predicted_vs_measured": self.comparison.predicted_vs_measured,
            "collectives": self.comparison.collectives,
        }
        return _frame(named, table)

    def to_json(self) -> bytes:
        """Return the JSON document that ``compare --json`` writes."""
        from paro_advise.core.documents import to_json

        return to_json(self.comparison)

    def _repr_html_(self) -> str:
        return _as_html(
            str(self).splitlines()[0], self.frame("metrics").select("name", "before", "after", "change_pct")
        )


def analyze(
    *paths: PathLike,
    gpus_per_node: int | None = None,
    skip_steps: int = 0,
    tokens_per_step: int | None = None,
    peak_tflops: float | None = None,
    jobs: int = 1,
    engine: str = "local",
) -> AnalysisResult:
    """Read traces and logs, and say what limits the run.

    Args:
        paths: files, folders, archives, quoted globs, or one analysis JSON or report.
        gpus_per_node: ranks on one node, where the input does not tell.
        skip_steps: warm-up steps to leave out.
        tokens_per_step: of all ranks, for MFU.
        peak_tflops: dense peak of one device, for MFU.
        jobs: processes to read with. More than one needs what all of Python's processes do: a script that
            does its work under ``if __name__ == "__main__":``, since each process runs its top level again.
        engine: where files are read: local, ray, slurm or dask.

    Raises:
        InputError: nothing can be used.
        UsageError: an argument cannot be.
    """
    from paro_advise.advisor.analysis.load import load_analysis
    from paro_advise.advisor.analysis.model import Options
    from paro_advise.advisor.facts.reading.choice import EngineChoice, EngineName

    if not paths:
        raise UsageError("no path given")
    if not all(isinstance(path, str | os.PathLike) for path in paths):
        raise UsageError("paths must be arguments of their own", hint="analyze(*paths) where they are a list")
    _require(1, gpus_per_node=gpus_per_node, tokens_per_step=tokens_per_step, jobs=jobs)
    _require(0, skip_steps=skip_steps)
    try:
        name = EngineName(engine)
    except ValueError:
        raise UsageError(f"engine must be one of {', '.join(EngineName)}, got {engine}") from None
    if peak_tflops is not None and not (0 < peak_tflops < math.inf):
        raise UsageError(f"peak_tflops must be positive, got {peak_tflops}")
    options = Options(
        gpus_per_node=gpus_per_node, skip_steps=skip_steps, tokens_per_step=tokens_per_step, peak_tflops=peak_tflops
    )
    analysis, read = load_analysis(
        [os.fspath(path) for path in paths], options, _Quiet(), engine=EngineChoice(name=name, jobs=jobs)
    )
    return AnalysisResult(analysis=analysis, facts=read.facts if read else ())


def recommend(
    run: AnalysisResult | PathLike | Sequence[PathLike],
    *,
    device_memory: str | None = None,
    redundancy_budget: str | None = None,
    measured_peak: str | None = None,
    nodes_per_pod: int | None = None,
    strategy: str | None = None,
    what_if: Sequence[str] = (),
    allow_untested: bool = False,
) -> PlanResult:
    """Predict every strategy for a run, and recommend one.

    Args:
        run: what ``analyze`` returned, or paths that it takes.
        device_memory: of one device, such as "80GiB"; by default what the inputs say.
        redundancy_budget: what a rank may hold beyond GGG, such as "4GiB".
        measured_peak: peak memory of a rank of this run, as measured, such as "61GiB".
        nodes_per_pod: of a faster interconnect domain, if any.
        strategy: make the plan for this one, such as "IIG/8".
        what_if: questions, such as "nodes=64".
        allow_untested: let the plan choose what was never timed on GPUs.

    Raises:
        InputError: the run does not tell enough to predict from.
        UsageError: an argument cannot be.
    """
    from paro_advise.advisor.prediction.advice.questions import Question
    from paro_advise.advisor.prediction.advice.wanted import Wanted
    from paro_advise.advisor.prediction.fitting.calibrate import calibrate
    from paro_advise.advisor.prediction.fitting.run_memory import device_memory_of, inputs_of, other_bytes
    from paro_advise.advisor.prediction.recommend import recommendation
    from paro_advise.advisor.prediction.scoring import Limits, least_bytes

    analysis = _analysis_of(run)
    calibration = calibrate(analysis, nodes_per_pod)
    peak = _bytes("measured_peak", measured_peak)
    limits = Limits(
        device_memory_bytes=_bytes("device_memory", device_memory) or device_memory_of(analysis),
        redundancy_budget_bytes=_bytes("redundancy_budget", redundancy_budget),
        other_bytes=other_bytes(analysis, least_bytes(calibration), peak),
        allow_untested=allow_untested,
    )
    made = recommendation(
        calibration,
        limits,
        wanted=Wanted.parse(strategy) if strategy is not None else None,
        questions=[Question.parse(text) for text in what_if],
        inputs=inputs_of(analysis),
    )
    return PlanResult(plan=made.plan, basis=made.basis)


def compare(
    before: AnalysisResult | PathLike,
    after: AnalysisResult | PathLike,
    *,
    plan: PlanResult | PathLike | None = None,
    min_gain_pct: float = 0.0,
    allow_unlike: Sequence[str] = (),
) -> ComparisonResult:
    """Compare two runs of the same work.

    Args:
        before, after: what ``analyze`` returned, or a path that it takes.
        plan: that led from one to the other.
        min_gain_pct: by how much throughput must rise to be accepted.
        allow_unlike: facts in which the runs may differ.

    Raises:
        UnlikeRunsError: the runs did not do the same work.
        StalePlanError: the plan was made for another run.
    """
    from paro_advise.advisor.comparison.acceptance import Thresholds
    from paro_advise.advisor.comparison.comparability import FACTS
    from paro_advise.advisor.comparison.compare import Terms
    from paro_advise.advisor.comparison.compare import compare as judge
    from paro_advise.policies.plan import read_plan

    if unknown := sorted(set(allow_unlike) - set(FACTS)):
        raise UsageError(f"allow_unlike must be of {', '.join(FACTS)}, got {', '.join(unknown)}")
    if not math.isfinite(min_gain_pct):
        raise UsageError(f"min_gain_pct must be a number of percent, got {min_gain_pct}")
    terms = Terms(
        thresholds=Thresholds.of({"min_throughput_gain_pct": min_gain_pct}, "min_gain_pct"),
        allow_unlike=tuple(allow_unlike),
    )
    held = plan.plan if isinstance(plan, PlanResult) else read_plan(os.fspath(plan)) if plan is not None else None
    return ComparisonResult(comparison=judge(_analysis_of(before), _analysis_of(after), held, terms))


def _analysis_of(run: AnalysisResult | PathLike | Sequence[PathLike]) -> Analysis:
    if isinstance(run, AnalysisResult):
        return run.analysis
    paths = [run] if isinstance(run, str | Path | os.PathLike) else list(run)
    return analyze(*paths).analysis


def _require(least: int, **values: int | None) -> None:
    """Raise unless all values that are given are integers of at least so much.

    Raises:
        UsageError: one is not.
    """
    for name, value in values.items():
        if value is not None and (not isinstance(value, int) or value < least):
            raise UsageError(f"{name} must be an integer of at least {least}, got {value!r}")


def _bytes(name: str, text: str | None) -> float | None:
    """Return a size in bytes, None for none.

    Raises:
        UsageError: it is no size.
    """
    from paro_advise.advisor.wording.quantities import bytes_of

    if text is None:
        return None
    size = bytes_of(text) if isinstance(text, str) else None
    if size is None:
        raise UsageError(f"{name} must be a size with its unit, got {text!r}", hint="such as 80GiB or 512MiB")
    return size


def _frame(tables: Mapping[str, Sequence[object]], name: str) -> pl.DataFrame:
    """Return the rows of a table as a frame; nested values become structs.

    Raises:
        UsageError: there is no such table.
    """
    import polars as pl

    if name not in tables:
        raise UsageError(f"a table must be one of {', '.join(sorted(tables))}, got {name!r}")
    rows = [row if isinstance(row, dict) else msgspec.to_builtins(row, enc_hook=str) for row in tables[name]]
    return pl.DataFrame(rows, infer_schema_length=None, strict=False)


def _as_html(text: str, frame: pl.DataFrame) -> str:
    """Return a sentence and a small table as HTML for a notebook."""
    from paro_advise.templates import render

    rows = [[_cell(value) for value in row] for row in frame.iter_rows()]
    return render("notebook_cell.html.j2", text=text, columns=frame.columns, rows=rows)


def _cell(value: object) -> str:
    return f"{value:,.4g}" if isinstance(value, float) else "" if value is None else str(value)
