"""Everything that only a GPU can tell, in one command: a table, and JSON. It says what it cannot run.

    python benchmarks/gpu.py [--json FILE] [--on-cpu] [--only NAME ...]

One GPU is enough: NCCL at world size 1, and four ranks that share the GPU and talk by gloo. ``--on-cpu`` runs the
same checks with gloo on the CPU, to test the checks themselves; that says nothing about GPUs.
"""

from __future__ import annotations

import argparse
import datetime
import json
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
CHECKS = Path(__file__).with_name("gpu_checks.py")
LIMIT_S = 120  # of one check; all together shall take less than eight minutes


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """A check.

    Attributes:
        name: of a function in gpu_checks.py, or "capture".
        ranks: processes that share the GPU.
        backend: of their collectives.
        on_cpu: it makes sense without a GPU.
    """

    name: str
    ranks: int
    backend: str
    on_cpu: bool = True

    @property
    def label(self) -> str:
        """Return it for the table."""
        return f"{self.name} ({self.ranks} x {self.backend})"


SUITE = (
    *(Check(name=name, ranks=1, backend="nccl", on_cpu=False) for name in ("parity_fp32", "parity_bf16", "compiled")),
    *(
        Check(name=name, ranks=4, backend="gloo")
        for name in (
            "parity_fp32", "parity_bf16", "side_stream", "repeatable", "memory", "out_of_memory", "compiled",
            "checkpointing", "grad_scaler", "traces", "step_times",
        )
    ),
    Check(name="layouts", ranks=1, backend="gloo"),
    Check(name="capture", ranks=1, backend="nccl"),
)  # fmt: skip


def why_not(check: Check, device: str | None) -> str:
    """Return why a check cannot run here, "" where it can."""
    if device is None:
        return "torch finds no GPU"
    if device == "cpu" and not check.on_cpu:
        return "NCCL needs a GPU"
    return ""


def find_device(*, on_cpu: bool) -> tuple[str | None, str]:
    """Return "cuda", "cpu" or None for none, and what it is."""
    import torch

    if on_cpu:
        return "cpu", "CPU: a test of the checks, not of a GPU"
    if not torch.cuda.is_available():
        return None, f"no GPU (torch {torch.__version__})"
    return "cuda", f"{torch.cuda.get_device_name()}, torch {torch.__version__}, CUDA {torch.version.cuda}"


def run_check(check: Check, device: str) -> dict[str, Any]:
    """Run one check in processes of its own."""
    if check.name == "capture":
        return capture()
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={check.ranks}"]
    words = [*launcher, str(CHECKS), check.name, "--device", device, "--backend", check.backend]
    try:
        done = subprocess.run(words, capture_output=True, text=True, timeout=LIMIT_S, check=False)
    except subprocess.TimeoutExpired:
        return {"holds": False, "failed": f"took more than {LIMIT_S} s"}
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    if done.returncode == 0 and lines:
        found: dict[str, Any] = json.loads(lines[-1])
        return found
    errors = [line for line in done.stderr.splitlines() if "Error" in line or "error" in line]
    return {"holds": False, "failed": errors[0] if errors else f"exit {done.returncode}"}


def capture() -> dict[str, Any]:
    """Train the lab's script alone and under `paro-advise capture`, in turn; then read the trace."""
    script = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=1"]
    script += ["-m", "paro_advise.runtime.lab.train", "--steps", "30", "--layers", "2"]
    seconds: dict[str, list[float]] = {"alone": [], "captured": []}
    with tempfile.TemporaryDirectory() as folder:
        for number in range(2):
            target = Path(folder) / f"run{number}"
            captured = [sys.executable, "-m", "paro_advise.advisor", "capture", "-o", str(target), "--", *script]
            for kind, words in (("alone", script), ("captured", captured)):
                begun = time.perf_counter()
                done = subprocess.run(words, capture_output=True, text=True, timeout=LIMIT_S, check=False)
                if done.returncode:
                    return {"holds": False, "failed": f"{kind}: {done.stderr.splitlines()[-1:]}"}
                seconds[kind].append(time.perf_counter() - begun)
        analyze = [sys.executable, "-m", "paro_advise.advisor", "analyze", str(target), "-q"]
        read = subprocess.run(analyze, capture_output=True, text=True, timeout=LIMIT_S, check=False)
    alone, under = (min(seconds[kind]) for kind in ("alone", "captured"))
    return {"alone s": round(alone, 2), "captured s": round(under, 2), "holds": read.returncode == 0}


def main() -> None:
    """Print the table; exit 1 where a check has failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write the table as JSON")
    parser.add_argument("--on-cpu", action="store_true")
    parser.add_argument("--only", nargs="+", default=[check.name for check in SUITE])
    args = parser.parse_args()
    device, what = find_device(on_cpu=args.on_cpu)
    today = datetime.datetime.now(tz=datetime.UTC).date().isoformat()
    print(f"{what}, {today}\n", flush=True)
    rows = []
    for check in SUITE:
        if check.name not in args.only:
            continue
        reason, begun = why_not(check, device), time.perf_counter()
        found = {"skipped": reason} if reason else run_check(check, str(device))
        took_s = time.perf_counter() - begun
        verdict = "skipped" if reason else "holds" if found["holds"] else "FAILS"
        shown = ", ".join(f"{name} {_short(value)}" for name, value in found.items() if name != "holds")
        print(f"{check.label:30}{verdict:9}{took_s:6.1f} s  {shown}", flush=True)
        rows.append({"check": check.label, "verdict": verdict, "seconds": round(took_s, 1), **found})
    if args.json:
        args.json.write_text(json.dumps({"device": what, "date": today, "rows": rows}, indent=1) + "\n")
    if any(row["verdict"] == "FAILS" for row in rows):
        sys.exit(1)


def _short(value: object) -> str:
    return f"{value:.3g}" if isinstance(value, float) else str(value)


if __name__ == "__main__":
    main()
