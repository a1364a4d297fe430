"""Random training programs under random strategies, beside the same programs on one process.

Arguments: the first seed, how many programs, operations each. Prints one line for each program; ends with 1
if any had a third outcome beside "equal" and "refused".
"""

from __future__ import annotations

import contextlib
import faulthandler
import random
import sys
import traceback
from datetime import timedelta

import torch
import torch.distributed as dist
from differential_jobs import OPTIMIZERS, Job, PlannedJob
from differential_operations import OPERATIONS, STRATEGIES, decay_by_hand, step

from paro_advise.errors import CommunicationError, ParoAdviseError, SwitchError

TOLERANCE = 2e-5
HANG_S = 120


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


def run_program(seed, length):
    """Run one program; return its outcome and what was run."""
    rng = random.Random(seed)
    strategy, kind = rng.choice(STRATEGIES), rng.choice(sorted(OPTIMIZERS))
    size = rng.choice([item for item in (1, 2, 4) if dist.get_world_size() % item == 0])
    options = rng.choice([{}, {}, {}, {"reshard_root": True}, {"overlap_updates": True}, {"offload_optimizer": True}])
    # With updates under way, parameters of the optimizer must not be touched before the next pass.
    usable = [item for item in OPERATIONS if item is not decay_by_hand or "overlap_updates" not in options]
    program = [step, *(rng.choice(usable) for _ in range(length - 2)), step]
    log = [f"{strategy}/{size} {kind} {options}"]
    plain, planned = Job(kind), PlannedJob(kind, strategy, size, **options)
    refused = ""
    for place, operation in enumerate(program):
        log.append(operation.__name__)
        own = f"{seed}-{place}"
        number = planned.number
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
            return outcome, log
        else:
            wanted = operation(plain, random.Random(own))
        plain.number = planned.number
        found = agreed("; ".join(differences(planned, plain, seen, wanted)[:4]))
        if found:
            return f"THIRD {found}", log
    return refused or "equal", log


def main():
    # Ranks that part ways then fail, and do not wait for each other.
    dist.init_process_group("gloo", timeout=timedelta(seconds=HANG_S // 4))
    torch.set_num_threads(1)
    first, count, length = map(int, sys.argv[1:4])
    failed = 0
    for seed in range(first, first + count):
        # A program that hangs shows where, on every rank.
        faulthandler.dump_traceback_later(HANG_S, exit=True)
        outcome, log = run_program(seed, length)
        failed += not outcome.startswith(("equal", "refused"))
        if dist.get_rank() == 0:
            print(f"{seed} {outcome.strip()} | {' '.join(log)}", flush=True)
    with contextlib.suppress(RuntimeError):
        dist.destroy_process_group()
    sys.exit(bool(failed))


if __name__ == "__main__":
    main()
