"""How the command line and the processes of a job find each other: variables, files, the path of Python."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

# Python runs the sitecustomize in this folder at start, where it is on PYTHONPATH.
INJECTED = Path(__file__).resolve().parent / "launch" / "inject"
PLAN_VARIABLE = "PARO_PLAN"
JOB_VARIABLE = "PARO_JOB"
DRIFT_VARIABLE = "PARO_ALLOW_DRIFT"
# A file that every rank makes once its model runs under the plan; one that refuses it writes its exit code beside it.
APPLIED_VARIABLE = "PARO_APPLIED"
# Files in a job's folder: what runs, its plan, the new plan, what became of it.
STATE, CURRENT, REQUEST, ANSWER = "job.json", "in-force.plan.json", "switch.json", "switched.json"


def mark_applied() -> None:
    """Tell ``paro-advise run`` on this node that the plan is in force."""
    _mark(applied_marks, "")


def mark_refused(exit_code: int) -> None:
    """Tell ``paro-advise run`` on this node why a rank ends, which launchers make another exit code of."""
    _mark(refused_marks, str(exit_code))


def applied_marks(marker: Path, plan: Path) -> tuple[Path, Path]:
    """Return where ranks mark the plan as applied.

    Ranks in containers and on other nodes do not see the launcher's folder for temporary files; all read the plan.
    """
    return marker, plan.with_name(f".{marker.parent.name}")


def refused_marks(marker: Path, plan: Path) -> tuple[Path, Path]:
    """Return where ranks write the exit code with which they refuse the plan."""
    return marker.with_name("refused"), plan.with_name(f".{marker.parent.name}.refused")


def _mark(places: Callable[[Path, Path], tuple[Path, Path]], text: str) -> None:
    marker, plan = (os.environ.get(name) for name in (APPLIED_VARIABLE, PLAN_VARIABLE))
    if marker is None or plan is None:
        return
    for path in places(Path(marker), Path(plan)):
        with contextlib.suppress(OSError):
            path.write_text(text, encoding="ascii")
            return


def job_environment(environment: Mapping[str, str], changes: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of a job in which every Python process starts what the variables ask for."""
    paths = [str(INJECTED), *[entry for entry in environment.get("PYTHONPATH", "").split(os.pathsep) if entry]]
    return {**environment, **changes, "PYTHONPATH": os.pathsep.join(paths)}
