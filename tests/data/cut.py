"""Cuts the recorded runs down to what the tests ask, keeping every byte of the events that stay.

From a folder with the whole runs (``zero_runs`` and ``nccl_like``, each run with its
``truth.json``) it takes the first two profiled steps of every rank, or the only one where a run
has no more. All ranks stay: strategies, waiting and clocks are properties of the group. Events
keep their own text, so a cut trace has the layout in which torch wrote it. Left out are

* everything that starts after the second step;
* arrows between events, and the rows that sort threads for a viewer;
* operators inside another operator that computes (the outer one covers the same time), and those
  on the worker threads of gloo;
* operators and autograd nodes shorter than 50 us, but for those in which a collective is issued,
  those where a backward pass or a forward begins or ends, and DDP's copies of gradients out of its
  buckets: most rows, a tenth of the compute;
* the operators of a GPU run but for those of collectives and of autograd: its kernels compute;
* Python frames, but for those in which a collective is issued.

The truth beside a run is cut without asking the program under test: of the call-site logs the
lines of the two steps stay, of a simulator's figures those of the two steps, and its means are
formed anew from these by the formula that gives its own means over all three (checked here).

    python tests/data/cut.py ../shared        # from the root of the repository

The result depends on the input only: run twice, it writes the same bytes.
"""

from __future__ import annotations

import gzip
import json
import re
import shutil
import sys
from bisect import bisect_left
from pathlib import Path

HERE = Path(__file__).resolve().parent
NUM_STEPS = 2
SHORT_US = 50.0
EVENT = re.compile(r"^  \{\n.*?^  \}", re.DOTALL | re.MULTILINE)
# Operators that hold others without computing themselves.
CONTAINERS = ("c10d::", "autograd::", "torch::", "_c10d_functional::")
COLLECTIVES = ("c10d::", "_c10d_functional::", "record_param_comms")
# Modules of DeepSpeed's ZeRO-3 are told by its own autograd functions, buckets of DDP by what its reducer copies.
MARKS = ("PreBackwardFunctionForModule", "PostBackwardFunctionModule", "ZeroStage3", "reducer::copy_bucket_to_grad")
ZERO_TRUTH = (
    "name", "framework", "version", "triple", "triple_at_rest", "world", "nodes", "ranks_per_node", "group_size_I", "backend",
    "link_rate", "params", "dtype", "micro_batches", "straggler", "straggler_sleep_s_per_forward", "activation_checkpointing",
    "optimizer", "per_step_rank0",
)  # fmt: skip
STATE_FIGURES = ("bytes_full", "count", "exposed_us", "total_us", "transfer_us", "wait_us")
STEP_FIGURES = ("step", "step_time_us", "compute_us", "exposed_communication_us", "other_us", "idle_us")
COLLECTIVE_COLUMNS = ("step", "state", "op", "pg_name", "seq", "bytes_full", "transfer_us")
NCCL_TRUTH = ("preset", "seed", "window", "clock", "compute", "links", "model", "run")


def write(path, data):
    """Write bytes, compressed the same on every machine where the name asks for it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(gzip.compress(data, compresslevel=9, mtime=0) if path.suffix == ".gz" else data)


def write_json(path, value):
    """Write a truth, one key a line."""
    lines = [f"{json.dumps(key)}: {json.dumps(value[key], separators=(',', ':'))}" for key in value]
    write(path, ("{\n" + ",\n".join(lines) + "\n}\n").encode())


def end_of_steps(events):
    """Return the time at which the last step to keep ends, and the labels of the kept ones."""
    marks = [event for event in events if event.get("cat") == "user_annotation"]
    steps = sorted(
        (event for event in marks if event["name"].startswith("ProfilerStep#")), key=lambda event: event["ts"]
    )
    kept = steps[:NUM_STEPS]
    return kept[-1]["ts"] + kept[-1]["dur"], [step["name"] for step in kept]


class Threads:
    """Which rows of a thread lie in which others."""

    def __init__(self, events):
        self.issues = {}
        for event in events:
            if event.get("cat") == "cpu_op" and event["name"].startswith(COLLECTIVES):
                self.issues.setdefault(event["tid"], []).append(event["ts"])
        for times in self.issues.values():
            times.sort()
        self.workers = {event["tid"] for event in events if event["name"].startswith("gloo:")}

    def issues_collective(self, event):
        """Tell whether a collective is issued inside a row."""
        times = self.issues.get(event["tid"], [])
        place = bisect_left(times, event["ts"])
        return place < len(times) and times[place] <= event["ts"] + event["dur"]


def computes(event):
    """Tell whether a row is an operator that computes, not one that holds others."""
    return event.get("cat") == "cpu_op" and "::" in event["name"] and not event["name"].startswith(CONTAINERS)


def inner(events):
    """Return the indices of rows that lie in an operator that computes."""
    found, until = set(), {}
    rows = [(index, event) for index, event in enumerate(events) if event.get("cat") == "cpu_op"]
    for index, event in sorted(rows, key=lambda row: (row[1]["ts"], -row[1]["dur"])):
        end = event["ts"] + event["dur"]
        if end <= until.get(event["tid"], 0.0):
            found.add(index)
        elif computes(event):
            until[event["tid"]] = end
    return found


def ends_of_passes(events):
    """Return the indices of rows that tell where backward passes begin and end.

    The engine takes the nodes of a pass in falling sequence number; where it rises, a pass may
    end. The next forward begins with the next numbered operator outside of autograd's nodes.
    """
    numbered = [(index, event) for index, event in enumerate(events) if "Sequence number" in event.get("args", {})]
    found, previous, until, in_forward = set(), None, 0.0, True
    for index, event in sorted(numbered, key=lambda row: (row[1]["ts"], -row[1]["dur"])):
        if event["name"].startswith("autograd::"):
            if previous is None:
                found.add(index)
            elif number_of(event) > number_of(events[previous]):
                found |= {previous, index}
            previous, until, in_forward = index, max(until, event["ts"] + event["dur"]), False
        elif not in_forward and event["ts"] > until:
            found.add(index)
            in_forward = True
    return found | {previous}


def number_of(event):
    """Return the sequence number of an autograd node."""
    return event["args"]["Sequence number"]


def is_needed(event, *, is_inner, is_end, threads, is_gpu):
    """Tell whether an event of the kept steps stays."""
    category, name = event.get("cat"), event["name"]
    if event["ph"] == "M":
        return name in ("process_name", "thread_name")
    if event["ph"] in "sft":
        return False
    if category == "python_function":
        return threads.issues_collective(event)
    if category != "cpu_op":
        return True
    if name.startswith(COLLECTIVES) or any(mark in name for mark in MARKS):
        return True
    if is_end or threads.issues_collective(event):
        return True
    if event["dur"] < SHORT_US or event["tid"] in threads.workers:
        return False
    return name.startswith("autograd::") or (not is_gpu and computes(event) and not is_inner)


def cut_trace(source, target):
    """Cut one trace; return the labels of its steps."""
    text = gzip.decompress(source.read_bytes()).decode()
    events = json.loads(text)["traceEvents"]
    found = list(EVENT.finditer(text, text.index('"traceEvents"')))
    if len(found) != len(events):
        raise ValueError(f"{source}: {len(found)} events by their text, {len(events)} by JSON")
    until, labels = end_of_steps(events)
    threads, inside, ends = Threads(events), inner(events), ends_of_passes(events)
    is_gpu = any(event.get("cat") == "kernel" for event in events)
    kept = [
        match.group()
        for index, (match, event) in enumerate(zip(found, events, strict=True))
        if event["ph"] in "Mi" or event["ts"] < until
        if is_needed(event, is_inner=index in inside, is_end=index in ends, threads=threads, is_gpu=is_gpu)
    ]
    whole = text[: found[0].start()] + ",\n".join(kept) + text[found[-1].end() :]
    if len(json.loads(whole)["traceEvents"]) != len(kept):
        raise ValueError(f"{source}: the cut trace is not what was meant")
    write(target, whole.encode())
    return labels


def cut_zero_run(source, target):
    """Cut one run of a framework, and the log of its call sites."""
    truth = json.loads((source / "truth.json").read_text())
    for path in sorted(source.glob("rank*.json.gz")):
        labels = cut_trace(path, target / path.name)
        log = source / f"collectives_{path.name.replace('.json.gz', '.jsonl.gz')}"
        lines = gzip.decompress(log.read_bytes()).decode().splitlines()
        kept = [line for line in lines if json.loads(line)["step"] in labels]
        write(target / log.name, ("\n".join(kept) + "\n").encode())
    write_json(target / "truth.json", {key: truth[key] for key in ZERO_TRUTH} | {"profiled_steps": len(labels)})


def means_over(ranks, num_steps):
    """Return the mean of every state's figures over all ranks and the first steps of each."""
    steps = [step["states"] for rank in ranks.values() for step in rank[:num_steps]]
    return {
        state: {name: sum(step[state][name] for step in steps) / len(steps) for name in STATE_FIGURES}
        for state in steps[0]
    }


def check_means(truth):
    """Raise unless the formula gives the run's own means over all its steps."""
    for state, figures in means_over(truth["ranks"], None).items():
        for name, value in figures.items():
            own = truth["summary"]["states"][state][name]
            if abs(value - own) > 1e-3 + 1e-9 * abs(own):
                raise ValueError(f"{state} {name}: {value} by the formula, {own} in the truth")


def cut_nccl_like(source, target):
    """Cut one simulated run and what its simulator knows."""
    truth = json.loads((source / "truth.json").read_text())
    check_means(truth)
    for path in sorted((source / "traces").iterdir()):
        labels = cut_trace(path, target / "traces" / path.name)
    kept = {int(label.partition("#")[2]) for label in labels}
    columns = truth["collective_columns"]
    rows = [dict(zip(columns, row, strict=True)) for row in truth["collectives"]]
    means = means_over(truth["ranks"], NUM_STEPS)
    for state, figures in means.items():
        figures["regime"] = truth["summary"]["states"][state]["regime"]
    cut = {key: truth[key] for key in NCCL_TRUTH}
    cut["run"] = {key: value for key, value in truth["run"].items() if key not in ("files", "steps", "json_bytes")}
    cut["summary"] = {"states": means}
    cut["ranks"] = {rank: [cut_step(step) for step in steps[:NUM_STEPS]] for rank, steps in truth["ranks"].items()}
    cut["collective_columns"] = COLLECTIVE_COLUMNS
    cut["collectives"] = [[row[name] for name in COLLECTIVE_COLUMNS] for row in rows if row["step"] in kept]
    write_json(target / "truth.json", cut)


def cut_step(step):
    """Return the figures of one step that the tests check."""
    states = {state: {name: figures[name] for name in STATE_FIGURES} for state, figures in step["states"].items()}
    return {name: step[name] for name in STEP_FIGURES} | {"states": states}


def main():
    """Cut every run."""
    shared = Path(sys.argv[1])
    for name, cut in (("zero_runs", cut_zero_run), ("nccl_like", cut_nccl_like)):
        shutil.rmtree(HERE / name, ignore_errors=True)
        for source in sorted(path for path in (shared / name).iterdir() if path.is_dir()):
            cut(source, HERE / name / source.name)


if __name__ == "__main__":
    main()
