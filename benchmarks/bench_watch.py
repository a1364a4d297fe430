"""How soon `watch` tells of a port that becomes slow, and how often it tells of one that does not.

    python benchmarks/bench_watch.py [--throttles N] [--quiet N] [--factor F] [--keep FOLDER]

One DDP job trains on an emulated cluster of two nodes with a rank each. After every N quiet steps a node's port is
given less of its rate for 12 steps, at a step that is drawn at random. The alarms are those that `watch` gives for the
job's own logs. Asked is an alarm within ten steps. The last line of the output is JSON.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
import threading
import time
from pathlib import Path

from paro_advise.advisor.watching.constants import BASELINE_STEPS, RUN_STEPS, WATCH_WARM_UP_STEPS
from paro_advise.advisor.watching.job import find_alarms, job_steps
from paro_advise.runtime.capture.request import CaptureRequest
from paro_advise.runtime.job import job_environment
from paro_advise.runtime.lab import Isolation, Lab, LabSpec
from paro_advise.trace_parsers.bytes.blocks import SourceRef
from paro_advise.trace_parsers.logs.step_log import read_step_logs

SCRIPT = Path(__file__).resolve().parent.parent / "examples/frameworks/train_ddp.py"
MODEL = ("--width", "96", "--layers", "2", "--vocabulary", "512", "--micro-batches", "1", "--batch", "1")
PORT_MBIT = 200.0
THROTTLED_STEPS, ASKED_STEPS = 12, 10
SEED = 20_261_124
TAIL_BYTES = 4096  # at the end of a log, more than its last step takes


def newest_step(log: Path) -> int:
    """Return the number of the last step that a rank has logged, -1 before the first."""
    try:
        with log.open("rb") as file:
            file.seek(max(0, log.stat().st_size - TAIL_BYTES))
            lines = file.read().splitlines()
    except FileNotFoundError:
        return -1
    rows = (json.loads(line) for line in reversed(lines) if line.startswith(b"{") and line.endswith(b"}"))
    return next((row["step"] for row in rows if "step" in row), -1)


class Throttle(threading.Thread):
    """Takes a part of a port's rate away at given steps of a job, and gives it back.

    Attributes:
        spans: of steps, in each of which the port was slow: after the first, until the second at least.
    """

    def __init__(self, lab: Lab, log: Path, begins: list[int], factor: float) -> None:
        super().__init__(daemon=True)
        self.lab, self.log, self.begins, self.factor = lab, log, begins, factor
        self.spans: list[tuple[int, int]] = []

    def _wait_for(self, step: int) -> int:
        while (found := newest_step(self.log)) < step:
            time.sleep(0.005)
        return found

    def run(self) -> None:
        """Go through all spans."""
        for begin in self.begins:
            first = self._wait_for(begin)
            self.lab.set_port(1, PORT_MBIT * self.factor)
            self._wait_for(first + THROTTLED_STEPS)
            self.lab.set_port(1, PORT_MBIT)
            self.spans.append((first, newest_step(self.log)))


def train(folder: Path, begins: list[int], steps: int, factor: float) -> list[tuple[int, int]]:
    """Run the job; return the spans in which the port was slow."""
    environment = job_environment({}, CaptureRequest.of(folder, "3:4").to_environment())
    with Lab(LabSpec(nodes=2, ranks_per_node=1, port_mbit=PORT_MBIT)) as lab:
        if lab.isolation == Isolation.LOOPBACK:
            sys.exit(f"this machine forbids network namespaces ({lab.reason}): nothing to measure")
        throttle = Throttle(lab, folder / "steps.rank0.jsonl", begins, factor)
        throttle.start()
        command = ["torchrun", str(SCRIPT), *MODEL, "--steps", str(steps)]
        result = lab.run(command, folder / "logs", timeout_s=3600, environment=environment)
    if not result.ok:
        sys.exit(f"the job failed:\n{result.nodes[0].log.read_text()[-3000:]}")
    throttle.join(10)
    if len(throttle.spans) < len(begins):
        sys.exit(f"only {len(throttle.spans)} of {len(begins)} times the port was made slow")
    return throttle.spans


def main() -> None:
    """Run, judge and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--throttles", type=int, default=100)
    parser.add_argument("--quiet", type=int, default=80, help="steps between two throttles, and up to a quarter more")
    parser.add_argument("--factor", type=float, default=0.5, help="of the port's rate that is left")
    parser.add_argument("--keep", type=Path)
    args = parser.parse_args()
    draw = random.Random(SEED)
    begins, step = [], WATCH_WARM_UP_STEPS + args.quiet
    for _ in range(args.throttles):
        begins.append(step + draw.randrange(args.quiet // 4))
        step = begins[-1] + THROTTLED_STEPS + args.quiet
    folder = args.keep or Path(tempfile.mkdtemp(prefix="bench_watch"))
    spans = train(folder, begins, step + args.quiet, args.factor)
    logs, _ = read_step_logs([SourceRef(path=path) for path in sorted(folder.glob("steps.rank*.jsonl"))])
    alarms, times = find_alarms(logs), dict(job_steps(logs))
    late = []
    for first, last in spans:
        told = [alarm.step - first for alarm in alarms if first < alarm.step <= last + RUN_STEPS]
        late.append(min(told, default=None))
    in_time = sum(1 for steps in late if steps is not None and steps <= ASKED_STEPS)
    slow = {step for first, last in spans for step in range(first + 1, last + RUN_STEPS + 1)}
    quiet = [step for step in times if step not in slow]
    # Of these, the ones whose baseline is as quiet: after slow steps in it a false alarm could not come.
    looked = [step for step in quiet if slow.isdisjoint(range(step - RUN_STEPS - BASELINE_STEPS, step))]
    false = [alarm for alarm in alarms if alarm.step not in slow]
    slow_us = [times[step] for first, last in spans for step in range(first + 2, last) if step in times]
    quiet_us = sorted(times[step] for step in quiet)
    median_quiet, median_slow = quiet_us[len(quiet_us) // 2], sorted(slow_us)[len(slow_us) // 2]
    known = sorted(steps for steps in late if steps is not None)
    print(f"port at {args.factor:g} of its rate: steps of {median_quiet / 1e3:.1f} ms take {median_slow / 1e3:.1f} ms")
    print(f"told within {ASKED_STEPS} steps   {in_time} of {len(spans)} (95 of 100 asked)")
    if known:
        print(f"told after           {known[len(known) // 2]} steps (median), {known[-1]} at the most")
    print(f"false alarms         {len(false)} in {len(looked)} quiet windows (1 in 1,000 asked)")
    found = {"throttles": len(spans), "in_time": in_time, "late": late, "false": len(false), "windows": len(looked)}
    print(json.dumps(found))


if __name__ == "__main__":
    main()
