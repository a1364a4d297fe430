"""Makes jobs hang on gloo, and counts how often `paro-advise hang` names the rank that was made to.

    python benchmarks/bench_hang.py [--hangs N] [--seed N] [--steps N] [--wait-s S] [--keep FOLDER]

Each job has 4 to 6 ranks, up to three groups beside that of all ranks, and a random program of collectives that all
ranks run, for some steps as a training loop does or once; torch's own flight recorder is dumped from a thread of each
rank. What is done to a job, in its last step:

* sleep: one rank sleeps before one of its collectives;
* gone: it does so and leaves no dump;
* skip: it leaves a collective out and goes on;
* other: it issues another collective in its place;
* swap: one rank issues two collectives of different groups in another order, which may or may not hang.

"wrong" is a rank named that is innocent; of "swap" the one rank, or the ranks in the circle, may be named, and no
others. The last line of the output is JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
import tempfile
import threading
import time
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from paro_advise.advisor.hangs.diagnosis import diagnose
from paro_advise.trace_parsers.bytes.blocks import SourceRef
from paro_advise.trace_parsers.dumps.rank_dump import read_dump

KINDS = ("sleep", "gone", "skip", "other", "swap")
FLIGHT_RECORDER: Any = torch._C._distributed_c10d  # noqa: SLF001 - has no public name for what torchrun's own tools use
OPERATIONS = ("all_reduce", "all_gather", "reduce_scatter", "broadcast")
# From the first collective to the dump; the longest program takes a tenth of it on a quiet machine.
WAIT_S = 2.5


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """A collective of a program: its group (-1 for all ranks), name and elements."""

    group: int
    operation: str
    elements: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """A program and what is done to it, by one rank before one of the calls that it takes part in."""

    num_ranks: int
    groups: tuple[tuple[int, ...], ...]
    calls: tuple[Call, ...]
    kind: str
    culprit: int
    place: int


def draw(seed: int, num_steps: int) -> Job:
    """Return a job."""
    source = random.Random(seed)
    num_ranks = source.randint(4, 6)
    groups = tuple(
        tuple(sorted(source.sample(range(num_ranks), source.randint(2, num_ranks - 1))))
        for _ in range(source.randint(1, 3))
    )
    calls = tuple(
        Call(
            group=source.randint(-1, len(groups) - 1),
            operation=source.choice(OPERATIONS),
            elements=source.choice((60, 120, 480)),
        )
        for _ in range(source.randint(12, 30))
    )
    culprit = source.randrange(num_ranks)
    own = [place for place, call in enumerate(calls) if call.group < 0 or culprit in groups[call.group]]
    kind = KINDS[seed % len(KINDS)]
    # What follows shows that the rank is late: all ranks meet again at the end.
    last = Call(group=-1, operation="all_reduce", elements=60)
    place = source.choice(own) if own else len(calls)
    place += (num_steps - 1) * len(calls)
    calls *= num_steps
    return Job(num_ranks=num_ranks, groups=groups, calls=(*calls, last), kind=kind, culprit=culprit, place=place)


def own_calls(job: Job, rank: int) -> list[Call]:
    """Return what a rank issues, with what is done to the job."""
    calls = [(place, call) for place, call in enumerate(job.calls) if call.group < 0 or rank in job.groups[call.group]]
    if rank != job.culprit or job.kind in ("sleep", "gone"):
        return [call for _, call in calls]
    index = next(index for index, (place, _) in enumerate(calls) if place == job.place)
    issued = [call for _, call in calls]
    if job.kind == "skip":
        del issued[index]
    elif job.kind == "other":
        names = [name for name in OPERATIONS if name != issued[index].operation]
        issued[index] = replace(issued[index], operation=names[job.place % len(names)])
    elif index + 1 < len(issued):
        issued[index], issued[index + 1] = issued[index + 1], issued[index]
    return issued


def run_rank(job: Job, rank: int, folder: Path, wait_s: float) -> None:
    """Be one rank, until the dump is written."""
    store = dist.FileStore(str(folder / "store"), job.num_ranks)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=job.num_ranks)
    groups = {place: dist.new_group(list(ranks)) for place, ranks in enumerate(job.groups)}
    for place, ranks in enumerate(job.groups):  # as in steps before: who is in which group can be seen
        if rank in ranks:
            issue(Call(group=place, operation="all_gather", elements=60), groups[place], job)
    issue(Call(group=-1, operation="all_gather", elements=60), None, job)

    def dump() -> None:
        time.sleep(wait_s)
        if not (job.kind == "gone" and rank == job.culprit):
            data = getattr(FLIGHT_RECORDER, "_dump_fr_trace_json")()  # noqa: B009 - see above
            (folder / f"nccl_trace_rank_{rank}.json").write_bytes(data.encode() if isinstance(data, str) else data)
        os._exit(0)

    threading.Thread(target=dump, daemon=True).start()
    try:
        reached = [place for place, call in enumerate(job.calls) if call.group < 0 or rank in job.groups[call.group]]
        for place, call in zip([*reached, len(job.calls)], own_calls(job, rank), strict=False):
            if job.kind in ("sleep", "gone") and rank == job.culprit and place == job.place:
                time.sleep(60)
            issue(call, groups.get(call.group), job)
    except RuntimeError:
        pass  # gloo ends some mismatches with an error; the job then waits for its dump
    time.sleep(60)


def issue(call: Call, group: dist.ProcessGroup | None, job: Job) -> None:
    """Issue a collective."""
    ranks = job.groups[call.group] if call.group >= 0 else tuple(range(job.num_ranks))
    size = call.elements // len(ranks) * len(ranks)
    whole, part = torch.ones(size), torch.ones(size // len(ranks))
    match call.operation:
        case "all_reduce":
            dist.all_reduce(whole, group=group)
        case "all_gather":
            dist.all_gather_into_tensor(whole, part, group=group)
        case "reduce_scatter":
            dist.reduce_scatter_tensor(part, whole, group=group)
        case _:
            dist.broadcast(whole, ranks[0], group=group)


def outcome(job: Job, folder: Path) -> tuple[str, str]:
    """Return "right", "wrong", "cannot tell" or "no hang", and the verdict's text."""
    paths = sorted(folder.glob("nccl_trace_rank_*.json"))
    dumps = {int(path.stem.rpartition("_")[2]): read_dump(SourceRef(path=path)) for path in paths}
    hang = diagnose(dumps)
    named = {one.rank for one in hang.culprits}
    if not named:
        return ("no hang" if hang.text.startswith("Nothing waits") else "cannot tell"), hang.text
    return ("right" if named == {job.culprit} else "wrong"), hang.text


def run(seed: int, num_steps: int, folder: Path, wait_s: float) -> tuple[Job, str, str]:
    """Run one job."""
    job = draw(seed, num_steps)
    folder.mkdir(parents=True)
    children = []
    for rank in range(job.num_ranks):
        child = os.fork()
        if not child:
            with (folder / f"log.{rank}").open("w") as log:
                os.dup2(log.fileno(), 1)
                os.dup2(log.fileno(), 2)
            try:
                run_rank(job, rank, folder, wait_s)
            finally:
                os._exit(1)
        children.append(child)
    for child in children:
        os.waitpid(child, 0)
    return job, *outcome(job, folder)


def main() -> None:
    """Print the counts for each kind."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hangs", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--wait-s", type=float, default=WAIT_S)
    parser.add_argument("--keep", type=Path)
    args = parser.parse_args()
    os.environ["TORCH_FR_BUFFER_SIZE"] = "2000"
    torch.set_num_threads(1)
    root = args.keep or Path(tempfile.mkdtemp(prefix="hangs-"))
    counts: dict[str, Counter[str]] = {kind: Counter() for kind in KINDS}
    for seed in range(args.seed, args.seed + args.hangs):
        job, result, text = run(seed, args.steps, root / str(seed), args.wait_s)
        counts[job.kind][result] += 1
        if result in ("wrong", "cannot tell"):
            print(f"{seed} {job.kind} by rank {job.culprit}: {result}: {text}", file=sys.stderr, flush=True)
    print("| done to the job | hangs | right | wrong | cannot tell |\n|---|---|---|---|---|")
    for kind, found in counts.items():
        hung = sum(found.values()) - found["no hang"]
        print(f"| {kind} | {hung} | {found['right']} | {found['wrong']} | {found['cannot tell']} |")
    print(json.dumps(counts))


if __name__ == "__main__":
    main()
