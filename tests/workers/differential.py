"""Random training programs under random strategies, beside the same programs on one process.

Arguments: the first seed, how many programs, operations each; or a file of programs, a line each. Prints one line for
each program; ends with 1 if any had a third outcome beside "equal" and "refused", and prints such a program once more
without the operations that it fails without.
"""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import random
import sys
import traceback
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from differential_jobs import OPTIMIZERS, Job, PlannedJob
from differential_operations import STRATEGIES, decay_by_hand, step
from differential_parts import ALL_OPERATIONS, edit_parts_of_groups

from paro_advise.errors import CommunicationError, ParoAdviseError, SwitchError

TOLERANCE = 2e-5
HANG_S = 120
OPTIONS = ("reshard_root", "overlap_updates", "offload_optimizer")
TOUCH_GROUPS = (decay_by_hand, edit_parts_of_groups)
BY_NAME = {operation.__name__: operation for operation in ALL_OPERATIONS}


@dataclass(frozen=True)
class Program:
    """What is run: operations by name, each with the seed of its own choices."""

    strategy: str
    group_size: int
    optimizer: str
    option: str
    steps: tuple[tuple[str, str], ...]

    @classmethod
    def drawn(cls, seed, length):
        rng = random.Random(seed)
        strategy, kind = rng.choice(STRATEGIES), rng.choice(sorted(OPTIMIZERS))
        size = rng.choice([item for item in (1, 2, 4) if dist.get_world_size() % item == 0])
        option = rng.choice(["", "", "", *OPTIONS])
        # With updates under way, parameters of the optimizer must not be touched before the next pass.
        usable = [item for item in ALL_OPERATIONS if item not in TOUCH_GROUPS or option != "overlap_updates"]
        operations = [step, *(rng.choice(usable) for _ in range(length - 2)), step]
        steps = tuple((item.__name__, f"{seed}-{place}") for place, item in enumerate(operations))
        return cls(strategy, size, kind, option, steps)

    @classmethod
    def read(cls, line):
        head, kind, option, *steps = line.split()
        strategy, size = head.split("/")
        return cls(
            strategy,
            int(size),
            kind,
            option.strip("-"),
            tuple(tuple(item.split("=")) for item in steps),  # type: ignore[arg-type]
        )

    def __str__(self):
        steps = " ".join(f"{name}={own}" for name, own in self.steps)
        return f"{self.strategy}/{self.group_size} {self.optimizer} {self.option or '-'} {steps}"

    def without(self, place):
        return replace(self, steps=self.steps[:place] + self.steps[place + 1 :])


def differences(planned, plain, seen, wanted):
    """Return what differs between two jobs after an operation."""
    found = []
    if len(seen) != len(wanted):
        found.append(f"{len(seen)} values for {len(wanted)}")
    for place, (value, right) in enumerate(zip(seen, wanted, strict=False)):
        if not abs(value - right) <= TOLERANCE * max(1.0, abs(right)):
            found.append(f"value {place} is {value:.7g} for {right:.7g}")
    theirs = plain.whole()
    for name, value in planned.whole().items():
        error = (value - theirs[name]).abs().max().item()
        if not error <= TOLERANCE * max(1.0, theirs[name].abs().max().item()):
            found.append(f"{name} differs by {error:.2g}")
    return found


def agreed(outcome):
    """Return the outcome if all ranks have the same, else all of them."""
    everyone = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, outcome)
    return everyone[0] if len(set(everyone)) == 1 else f"ranks differ: {everyone}"


def run_program(program):
    """Run one program; return its outcome, and how many operations were run."""
    options = {program.option: True} if program.option else {}
    plain = Job(program.optimizer)
    planned = PlannedJob(program.optimizer, program.strategy, program.group_size, **options)
    refused = ""
    for count, (name, own) in enumerate(program.steps, 1):
        operation, number = BY_NAME[name], planned.number
        try:
            seen = operation(planned, random.Random(own))
            outcome = ""
        except ParoAdviseError as error:
            fault = isinstance(error, (SwitchError, CommunicationError))
            outcome = f"{'THIRD' if fault else 'refused'} {type(error).__name__}: {error}"
            if error.__cause__ is not None:
                traceback.print_exception(error.__cause__)
        except Exception as error:  # noqa: BLE001 - every kind is looked at
            last = traceback.extract_tb(error.__traceback__)[-1]
            outcome = f"THIRD {type(error).__name__}: {str(error)[:300]} ({last.filename.split('/')[-1]}:{last.lineno})"
        outcome = agreed(outcome)
        if outcome.startswith("refused"):
            refused = f"{refused or outcome} "
            planned.number = number
            planned.optimizer.zero_grad()
            plain.optimizer.zero_grad()
            planned.model.output = "logits"
            plain.kept = {key: value for key, value in plain.kept.items() if key in planned.kept}
            seen = wanted = []
        elif outcome:
            return outcome, count
        else:
            wanted = operation(plain, random.Random(own))
        plain.number = planned.number
        found = agreed("; ".join(differences(planned, plain, seen, wanted)[:4]))
        if found:
            return f"THIRD {found}", count
    return refused or "equal", len(program.steps)


def has_third_outcome(outcome):
    return not outcome.startswith(("equal", "refused"))


def shrunk(program):
    """Return what is left of a failing program when no operation can be taken out."""
    place = len(program.steps)
    while place:
        place -= 1
        smaller = program.without(place)
        faulthandler.dump_traceback_later(HANG_S, exit=True)
        if has_third_outcome(run_program(smaller)[0]):
            program = smaller
    return program


def programs():
    """Return names and programs, drawn or read."""
    if len(sys.argv) == 2:
        return [(place, Program.read(line)) for place, line in enumerate(Path(sys.argv[1]).read_text().splitlines())]
    first, count, length = map(int, sys.argv[1:4])
    return [(seed, Program.drawn(seed, length)) for seed in range(first, first + count)]


def main():
    # Ranks that part ways then fail, and do not wait for each other.
    dist.init_process_group("gloo", timeout=timedelta(seconds=HANG_S // 4))
    torch.set_num_threads(1)
    failed = 0
    for name, program in programs():
        # A program that hangs shows where, on every rank.
        faulthandler.dump_traceback_later(HANG_S, exit=True)
        outcome, count = run_program(program)
        if dist.get_rank() == 0:
            print(f"{name} {outcome.strip()} | {program}", flush=True)
        if has_third_outcome(outcome):
            failed += 1
            small = shrunk(replace(program, steps=program.steps[:count]))
            if dist.get_rank() == 0:
                print(f"shrunk: {small}", flush=True)
    gc.collect()
    with contextlib.suppress(RuntimeError):
        dist.destroy_process_group()
    sys.exit(bool(failed))


if __name__ == "__main__":
    main()
