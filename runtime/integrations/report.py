"""The report of a run that just ended, made by the commands in a process of their own."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

import msgspec

from paro_advise.core.secrets import masked_command
from paro_advise.errors import InputError
from paro_advise.runtime.integrations.constants import REPORT_S

if TYPE_CHECKING:
    from pathlib import Path

_OWN = ("PARO_CAPTURE", "PARO_PLAN", "PARO_JOB", "PARO_APPLIED")
_REGRESSION = 5  # exit code of a comparison that did not meet its criteria: written all the same
_Value: TypeAlias = float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """What was made.

    Attributes:
        page, document: the report as HTML and as JSON.
        figures: by name, with the unit in the name.
    """

    page: Path
    document: Path
    figures: dict[str, float]


class _Step(msgspec.Struct, frozen=True):
    median: _Value = None


class _Breakdown(msgspec.Struct, frozen=True):
    exposed_communication: _Value = None


class _Metric(msgspec.Struct, frozen=True):
    name: str
    before: _Value = None
    after: _Value = None


class _Document(msgspec.Struct, frozen=True):
    """What is read of an analysis (step_time_us, breakdown_us) or a comparison (metrics); see docs/formats.md."""

    step_time_us: _Step = _Step()
    breakdown_us: _Breakdown = _Breakdown()
    metrics: tuple[_Metric, ...] = ()


def report(folder: Path, plan: str | Path | None, before: str | Path | None) -> Report | None:
    """Analyze a capture, or compare it with an earlier one; None where it holds no trace.

    Args:
        folder: of the capture; the report is written into it.
        plan: that the run trained under, None for none.
        before: folder of the earlier capture, None to analyze alone.

    Raises:
        InputError: the command could not do it.
    """
    if not any(folder.glob("rank*.json.gz")):
        return None
    verb = "analyze" if before is None else "compare"
    page, document = folder / f"{verb}.html", folder / f"{verb}.json"
    words = [verb, *([str(before)] if before is not None else []), str(folder)]
    words += ["-o", str(page), "--json", str(document), "--force", "-q"]
    if before is not None and plan is not None:
        words += ["--plan", str(plan)]
    environment = {name: value for name, value in os.environ.items() if not name.startswith(_OWN)}
    environment["PYTHONSAFEPATH"] = "1"  # the job's folder may hold modules named like ours' own
    done = subprocess.run(
        [sys.executable, "-m", "paro_advise", *words],
        env=environment,
        capture_output=True,
        text=True,
        errors="replace",
        timeout=REPORT_S,
        check=False,
    )
    if done.returncode not in (0, _REGRESSION) or not document.exists():
        said = done.stderr.strip() or f"it ended with {done.returncode}"
        raise InputError(f"`paro-advise {masked_command(words)}` must make a report: {said}")
    return Report(page=page, document=document, figures=_figures(document))


def _first_known(of_one_run: float | None, of_two: float | None) -> float | None:
    return of_two if of_one_run is None else of_one_run


def _figures(document: Path) -> dict[str, float]:
    found = msgspec.json.decode(document.read_bytes(), type=_Document)
    metrics = {metric.name: metric for metric in found.metrics}
    step, exposed = (metrics.get(name, _Metric(name=name)) for name in ("step_time", "exposed_communication"))
    step_us = _first_known(found.step_time_us.median, step.after)
    exposed_us = _first_known(found.breakdown_us.exposed_communication, exposed.after)
    speedup = step.before / step.after if step.before and step.after else None
    values = {
        "paro/step_time_ms": None if step_us is None else step_us / 1e3,
        "paro/exposed_communication_ms": None if exposed_us is None else exposed_us / 1e3,
        "paro/speedup": speedup,
    }
    return {name: value for name, value in values.items() if value is not None}
