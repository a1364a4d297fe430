"""Trains a script of anybody's plain and under strategies, and compares losses and gradient norms step by step.

    python benchmarks/bench_scripts.py --name nanoGPT [--strategy NNG] [--strategy IIG/2] [--folder FOLDER]
        [--resume "COMMAND --resume {before}/checkpoint" [--prepare "cp -r {before} {out}"]] -- COMMAND

The plain run is captured, each plan is made by `recommend --strategy`, and each planned run is captured again.
{out} in the command is a folder that each run has of its own. --resume is the command that goes on from the folder
{before} of another run, after the command --prepare: plain and under a strategy from each other, and under one strategy
from the other. One row of a table comes out for each run: exit code, steps, the largest difference of a loss of any
rank and of a gradient norm, relative to the plain run's at the same step, for resumed runs to that of a plain run that
was resumed from a plain one.
"""

from __future__ import annotations

import argparse
import json
import math
import shlex
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

STEPS = "3:5"  # that are profiled
HEAD = "| script | run | exit | steps | loss off by | norm off by |\n|---|---|---|---|---|---|"
# A job that has not ended by then hangs.
LIMIT_S = 600


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What a run gave.

    Attributes:
        exit_code: of the job.
        losses: by rank, of each step; None where the script shows none.
        norms: of the gradients of each step, of all ranks; None likewise.
    """

    exit_code: int
    losses: dict[int, list[float | None]]
    norms: list[float | None]


def advise(*words: object, folder: Path) -> int:
    """Run one of our commands; what it prints goes to a file in a folder."""
    with (folder / "bench_scripts.log").open("a", encoding="utf-8") as log:
        command = [sys.executable, "-m", "paro_advise", *map(str, words)]
        try:
            done = subprocess.run(command, stdout=log, stderr=subprocess.STDOUT, timeout=LIMIT_S, check=False)
        except subprocess.TimeoutExpired:
            return 124  # as timeout(1) says it
    return done.returncode


def outcome_of(exit_code: int, capture: Path) -> Outcome:
    """Read the steps that a capture has recorded."""
    losses, shares = {}, []
    for path in sorted(capture.glob("steps.rank*.jsonl")):
        head, *rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
        steps = [row for row in rows if "step" in row]
        losses[head["rank"]] = [_value(row.get("loss")) for row in steps]
        shares.append([_value(row.get("gradient_norm_squared")) for row in steps])
    norms = [None if None in ranks else math.sqrt(sum(ranks)) for ranks in zip(*shares, strict=False)]
    return Outcome(exit_code=exit_code, losses=losses, norms=norms)


def _value(told: float | str | None) -> float | None:
    """Return a number of a step log, which writes NaN and infinities as text."""
    return None if told is None else float(told)


def largest(wanted: Sequence[float | None], got: Sequence[float | None]) -> float | None:
    """Return the largest relative difference of what is known on both sides."""
    pairs = [(a, b) for a, b in zip(wanted, got, strict=False) if a is not None and b is not None]
    found = [abs(a - b) / max(abs(a), 1e-30) if math.isfinite(a - b) else math.inf for a, b in pairs]
    return max(found, default=None)


def difference_of_losses(reference: Outcome, other: Outcome) -> float | None:
    """Return the largest relative difference of a loss of any rank; None where none is shown."""
    found = [largest(reference.losses.get(rank, []), mine) for rank, mine in other.losses.items()]
    return max((value for value in found if value is not None), default=None)


class Trial:
    """One script.

    Args:
        name: in the table.
        command: of the job, with {out}.
        folder: of all runs.
        resume, prepare: see this module.
    """

    def __init__(self, name: str, command: list[str], folder: Path, resume: str | None, prepare: str | None) -> None:
        self._name, self._command, self._folder = name, command, folder
        self._resume, self._prepare = resume, prepare
        # What fresh and resumed runs are compared with: the first one of each, which have no plan.
        self._references: dict[bool, Outcome] = {}

    def plain(self) -> Outcome:
        """Train without a plan."""
        return self._run("plain", None, None)

    def plan(self, strategy: str) -> Path | None:
        """Make a plan from the plain run; None where that gives none."""
        path = self._folder / f"{strategy.replace('/', '-')}.json"
        trace = self._folder / "plain/capture"
        words = ("recommend", trace, "--strategy", strategy, "-o", path, "--force", "--allow-untested")
        return path if advise(*words, folder=self._folder) == 0 else None

    def planned(self, strategy: str, plan: Path) -> None:
        """Train under a plan."""
        self._run(strategy, plan, None)

    def resumed(self, before: str, after: str, plan: Path | None) -> None:
        """Go on from another run."""
        self._run(f"{before}, then {after}", plan, self._folder / _folder_name(before))

    def _run(self, title: str, plan: Path | None, before: Path | None) -> Outcome:
        out = self._folder / _folder_name(title)
        out.mkdir(parents=True, exist_ok=True)
        names = {"out": out, "before": before}
        command = self._command if before is None else shlex.split(self._resume or "")
        words = [word.format(**names) for word in command]
        if before is not None and self._prepare:
            subprocess.run(
                [word.format(**names) for word in shlex.split(self._prepare)], check=False
            )  # of a run that failed there is nothing
        capture = out / "capture"
        first = ("run", "--plan", plan, "--capture", capture) if plan else ("capture", "-o", capture)
        code = advise(*first, "--force", "--steps", STEPS, "--", *words, folder=out)
        found = outcome_of(code, capture)
        reference = self._references.setdefault(before is not None, found)
        num_steps = max(map(len, found.losses.values()), default=0)
        off = difference_of_losses(reference, found), largest(reference.norms, found.norms)
        cells = (self._name, title, code, num_steps, *map(_number, off))
        print("| " + " | ".join(map(str, cells)) + " |", flush=True)
        return found


def _folder_name(title: str) -> str:
    return title.replace("/", "-").replace(", then ", "_")


def _number(value: float | None) -> str:
    return "not shown" if value is None else f"{value:.1e}"


def main() -> None:
    """Run the trial that the command line names."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--name", required=True)
    parser.add_argument("--strategy", action="append")
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--resume")
    parser.add_argument("--prepare")
    parser.add_argument("command", nargs=argparse.REMAINDER)
    args = parser.parse_args()
    command = args.command[1:] if args.command[:1] == ["--"] else args.command
    strategies = args.strategy or ["NNG", "IIG/2"]
    folder = args.folder or Path(tempfile.mkdtemp(prefix="scripts-"))
    folder.mkdir(parents=True, exist_ok=True)
    trial = Trial(args.name, command, folder, args.resume, args.prepare)
    print(HEAD)
    plain = trial.plain()
    plans = {strategy: plan for strategy in strategies if (plan := trial.plan(strategy))}
    for strategy, plan in plans.items():
        trial.planned(strategy, plan)
    if args.resume and plans:
        first, second = next(iter(plans)), [*plans][-1]
        trial.resumed("plain", "plain", None)
        trial.resumed("plain", first, plans[first])
        trial.resumed(second, "plain", None)
        trial.resumed(second, first, plans[first])
        trial.resumed(first, second, plans[second])
    if not plain.losses or len(plans) < len(strategies):
        sys.exit(f"not all could be compared; see {folder}")


if __name__ == "__main__":
    main()
