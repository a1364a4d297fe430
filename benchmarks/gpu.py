"""Everything that only a GPU can tell, in one command: a table, and JSON. It says what it cannot run.

    python benchmarks/gpu.py [--json FILE] [--on-cpu] [--only NAME ...] [--at-once N] [--logs DIR]

One GPU is enough: NCCL at world size 1; ranks that share the GPU and talk by NCCL, as if each were a host; and four
ranks that talk by gloo. ``--on-cpu`` runs the same checks with gloo on the CPU, to test the checks themselves; that says
nothing about GPUs.
"""

from __future__ import annotations

import argparse
import datetime
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

sys.path.insert(0, str(Path(__file__).parent))

import gpu_jobs as jobs
import gpu_loops as loops

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

CHECKS = Path(__file__).with_name("gpu_checks.py")
START_S = 60  # for processes to begin and to find each other
TOGETHER = 4  # checks of one job at most: several jobs run beside each other
FRAMEWORKS = ("ddp", "ddp_amp", "fsdp2", "fsdp2_bf16", "fsdp1", "accelerate", "trainer", "lightning")
LIBRARY_OF = {"trainer": "transformers"}  # which a framework needs beside torch, where it isn't its own name
NEAR, NEAR_16_BIT = 1e-5, 2e-3  # largest relative difference of a loss: fp32; 16 bits, whose roundings Adam grows
PLANS = ("NNG", "GGG")
LOOPS = {"fsdp2": ("NNG", "NGG"), "ddp": ("NNG", "GGG")}
# Checks that share no processes with others.
OF_THEIR_OWN = ("scripts", "capture", "attach", "loop", "step_times", "layouts")


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """A check.

    Attributes:
        name: of a function in gpu_checks.py, "capture", or "scripts".
        ranks: processes that share the GPU.
        backend: of their collectives.
        on_cpu: it makes sense without a GPU.
        alone: it measures time, and runs when nothing else does.
        framework: of `gpu_scripts.py`.
    """

    name: str
    ranks: int
    backend: str
    on_cpu: bool = True
    alone: bool = False
    framework: str = ""

    @property
    def label(self) -> str:
        """Return it for the table."""
        names = {"loop": f"loop of {self.framework}", "scripts": self.framework}
        return f"{names.get(self.name, self.name)} ({self.ranks} x {self.backend})"

    @property
    def hosts(self) -> bool:
        """Tell whether its ranks pass for hosts of their own, as NCCL wants it."""
        return self.backend == "nccl" and self.ranks > 1


SUITE = (
    *(Check(name=name, ranks=1, backend="nccl", on_cpu=False) for name in ("parity_fp32", "parity_bf16", "compiled")),
    Check(name="parity_fp32", ranks=2, backend="nccl", on_cpu=False),
    Check(name="host_waits", ranks=2, backend="nccl"),
    *(Check(name=name, ranks=4, backend="nccl", on_cpu=False) for name in ("parity_fp32", "side_stream", "offloaded")),
    *(Check(name="scripts", ranks=2, backend="nccl", framework=one) for one in FRAMEWORKS),
    *(
        Check(name=name, ranks=4, backend="gloo")
        for name in (
            "parity_fp32", "parity_bf16", "side_stream", "repeatable", "memory", "offloaded", "out_of_memory",
            "compiled", "checkpointing", "grad_scaler", "traces",
        )
    ),
    Check(name="step_times", ranks=2, backend="nccl", alone=True),
    Check(name="layouts", ranks=1, backend="gloo", alone=True),
    Check(name="capture", ranks=1, backend="nccl", alone=True),
    Check(name="attach", ranks=2, backend="nccl", alone=True),
    *(Check(name="loop", ranks=2, backend="nccl", alone=True, framework=framework) for framework in LOOPS),
)  # fmt: skip


def why_not(check: Check, device: str | None) -> str:
    """Return why a check cannot run here, "" where it can."""
    if device is None:
        return "torch finds no GPU"
    if device == "cpu" and not check.on_cpu:
        return "NCCL needs a GPU"
    library = LIBRARY_OF.get(check.framework, check.framework)
    if library in {"accelerate", "transformers", "lightning"} and importlib.util.find_spec(library) is None:
        return f"{library} is not installed"
    return ""


def find_device(*, on_cpu: bool) -> tuple[str | None, str]:
    """Return "cuda", "cpu" or None for none, and what it is."""
    import torch

    if on_cpu:
        return "cpu", "CPU: a test of the checks, not of a GPU"
    if not torch.cuda.is_available():
        return None, f"no GPU (torch {torch.__version__})"
    return "cuda", f"{torch.cuda.get_device_name()}, torch {torch.__version__}, CUDA {torch.version.cuda}"


def run_checks(checks: Sequence[Check], device: str, logs: Path | None = None) -> list[dict[str, Any]]:
    """Run checks of one number of ranks and one backend; what they say goes into a folder, if there is one.

    Most share their processes, whose start takes longer than they do.
    """
    first = checks[0]
    if first.name == "capture":
        return [capture()]
    if first.name == "attach":
        return [loops.attach(first.ranks, hosts=first.hosts)]
    if first.name == "loop":
        return [loops.closed_loop(first.framework, LOOPS[first.framework], first.ranks, hosts=first.hosts, keep=logs)]
    if first.name == "scripts":
        return [train_under_plans(first, logs)]
    script = [str(CHECKS), *(check.name for check in checks), "--device", device]
    script += ["--backend", first.backend if device == "cuda" else "gloo"]
    ended = jobs.run(script, ranks=first.ranks, hosts=first.hosts, limit_s=START_S + jobs.LIMIT_S * len(checks))
    _keep(ended, logs, ", ".join(check.label for check in checks))
    told = [json.loads(line) for line in ended.output.splitlines() if line.startswith('{"name"')]
    found: dict[str, dict[str, Any]] = {one.pop("name"): one for one in told}
    reason = {"holds": False, "failed": ended.reason or "it told nothing"}
    rows = []
    for check in checks:
        rows.append(found.get(check.name, reason))
        if check.name not in found:  # the first without a result ended the others
            reason = {"holds": False, "failed": f"not reached, for {check.name} ended the job"}
    return rows


def train_under_plans(check: Check, logs: Path | None) -> dict[str, Any]:
    """Train an unchanged script plain while it is recorded, let each plan be made of that, and train under them."""
    script = [str(jobs.SCRIPTS), check.framework]
    found: dict[str, Any] = {}
    job = partial(jobs.run, script, ranks=check.ranks, hosts=check.hosts, limit_s=jobs.LIMIT_S)
    with tempfile.TemporaryDirectory() as folder:
        recording = str(Path(folder) / "before")
        before = job(under=[*jobs.PARO_ADVISE, "capture", "-o", recording, "--steps", "3:6", "--"])
        _keep(before, logs, f"{check.label} recorded")
        wanted = numbers_in(before.output)
        if before.code != 0 or not wanted:
            return {"holds": False, "failed": f"recorded: {before.reason or 'it told no steps'}"}
        for strategy in PLANS:
            plan = str(Path(folder) / f"{strategy}.json")
            made = jobs.advise("recommend", recording, "--strategy", strategy, "--allow-untested", "-q", "-o", plan)
            if not Path(plan).exists():
                return jobs.why_nothing(made)
            after = job(under=[*jobs.PARO_ADVISE, "run", "--plan", plan, "--"])
            _keep(after, logs, f"{check.label} {strategy}")
            got = numbers_in(after.output)
            if after.code != 0 or len(got) != len(wanted):
                return {"holds": False, "failed": f"{strategy}: {after.reason or 'it told other steps'}"}
            found[strategy] = jobs.worst_difference(got, wanted)
    near = NEAR if check.framework in {"ddp", "fsdp2", "fsdp1"} else NEAR_16_BIT
    return {**found, "asked": near, "holds": max(found.values()) <= near}


def _keep(ended: jobs.Ended, logs: Path | None, name: str) -> None:
    if logs is not None:
        logs.mkdir(parents=True, exist_ok=True)
        (logs / f"{name}.log").write_text(f"{ended.output}\n{ended.errors}", encoding="utf-8")


def numbers_in(output: str) -> list[float]:
    """Return the losses and the gradients' norms that a script of `gpu_scripts.py` has told, step by step."""
    told = [line.split() for line in output.splitlines() if line.startswith("R ")]
    return [float(number) for words in told for number in words[2:]]


def capture() -> dict[str, Any]:
    """Train the lab's script alone and under `paro-advise capture`, in turn; then read the trace."""
    script = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=1"]
    script += ["-m", "paro_advise.runtime.lab.train", "--steps", "30", "--layers", "2"]
    seconds: dict[str, list[float]] = {"alone": [], "captured": []}
    with tempfile.TemporaryDirectory() as folder:
        for number in range(2):
            target = Path(folder) / f"run{number}"
            captured = [*jobs.PARO_ADVISE, "capture", "-o", str(target), "--", *script]
            for kind, words in (("alone", script), ("captured", captured)):
                begun = time.perf_counter()
                done = subprocess.run(words, capture_output=True, text=True, timeout=jobs.LIMIT_S, check=False)
                if done.returncode:
                    return {"holds": False, "failed": f"{kind}: {done.stderr.splitlines()[-1:]}"}
                seconds[kind].append(time.perf_counter() - begun)
        read = jobs.advise("analyze", target, "-q")
    alone, under = (min(seconds[kind]) for kind in ("alone", "captured"))
    return {"alone s": round(alone, 2), "captured s": round(under, 2), "holds": read.returncode == 0}


def main() -> None:
    """Print the table; exit 1 where a check has failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write the table as JSON")
    parser.add_argument("--logs", type=Path, help="a folder for what each check says")
    parser.add_argument("--on-cpu", action="store_true")
    parser.add_argument("--only", nargs="+", default=[check.name for check in SUITE])
    few = max(1, min(5, (os.cpu_count() or 1) // 3))  # each is up to four processes
    parser.add_argument(
        "--at-once", type=int, default=few, help="checks that run beside each other (default: %(default)s)"
    )
    args = parser.parse_args()
    device, what = find_device(on_cpu=args.on_cpu)
    today = datetime.datetime.now(tz=datetime.UTC).date().isoformat()
    print(f"{what}, {today}\n", flush=True)
    rows: list[dict[str, Any]] = []
    for row in _in_order([check for check in SUITE if check.name in args.only], device, args.at_once, args.logs):
        rows.append(row)
        if args.json:  # after each: what was found is worth keeping if the suite is cut off
            args.json.write_text(json.dumps({"device": what, "date": today, "rows": rows}, indent=1) + "\n")
    if any(row["verdict"] == "FAILS" for row in rows):
        sys.exit(1)


def _in_order(chosen: list[Check], device: str | None, at_once: int, logs: Path | None) -> Iterator[dict[str, Any]]:
    """Run checks, several jobs at a time, and print their lines in the suite's order."""
    with ThreadPoolExecutor(at_once) as pool:
        begun = [pool.submit(_rows, checks, device, logs) for checks in jobs_of(chosen) if not checks[0].alone]
        for job in begun:
            yield from map(_printed, job.result())
    for checks in jobs_of(chosen):
        if checks[0].alone:
            yield from map(_printed, _rows(checks, device, logs))


def jobs_of(checks: Iterable[Check]) -> list[tuple[Check, ...]]:
    """Return checks by the jobs that run them, in order."""
    found: list[tuple[Check, ...]] = []
    for check in checks:
        last = found[-1] if found else ()
        is_alike = last and (last[0].ranks, last[0].backend) == (check.ranks, check.backend)
        if is_alike and len(last) < TOGETHER and not {check.name, last[0].name} & set(OF_THEIR_OWN):
            found[-1] = (*last, check)
        else:
            found.append((check,))
    return found


def _rows(checks: Sequence[Check], device: str | None, logs: Path | None) -> list[dict[str, Any]]:
    reasons = [why_not(check, device) for check in checks]
    able = [check for check, reason in zip(checks, reasons, strict=True) if not reason]
    begun = time.perf_counter()
    try:
        results = iter(run_checks(able, str(device), logs) if able else [])
    except subprocess.TimeoutExpired as error:
        results = iter([{"holds": False, "failed": f"took more than {error.timeout:.0f} s"} for _ in able])
    took_s = round(time.perf_counter() - begun, 1)
    rows = []
    for check, reason in zip(checks, reasons, strict=True):
        found = {"skipped": reason, "seconds": 0.0} if reason else next(results)
        verdict = "skipped" if reason else "holds" if found["holds"] else "FAILS"
        rows.append({"check": check.label, "verdict": verdict, "seconds": took_s, **found})
    return rows


def _printed(row: dict[str, Any]) -> dict[str, Any]:
    shown = ", ".join(
        f"{name} {_short(value)}" for name, value in row.items() if name not in {"check", "verdict", "seconds", "holds"}
    )
    print(f"{row['check']:30}{row['verdict']:9}{row['seconds']:6.1f} s  {shown}", flush=True)
    return row


def _short(value: object) -> str:
    return f"{value:.3g}" if isinstance(value, float) else str(value)


if __name__ == "__main__":
    main()
