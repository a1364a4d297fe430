"""Starts jobs of several ranks that share one GPU.

NCCL refuses two ranks of one host on one GPU. Ranks that `make gpu` starts on NCCL therefore pass for hosts of their own:
each has a launcher and an ``NCCL_HOSTID`` of its own (docs.nvidia.com, NCCL environment variables), and what they send
goes through a socket. That proves what is sent, in which order and on which stream; of NCCL's speed it says nothing.
"""

from __future__ import annotations

import itertools
import math
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

LAUNCHER = (sys.executable, "-m", "torch.distributed.run")
SCRIPTS = Path(__file__).with_name("gpu_scripts.py")
LIMIT_S = 120  # of one check or job; all together shall take less than eight minutes
PARO_ADVISE = (sys.executable, "-m", "paro_advise")
_IS_ERROR = re.compile(r"(?:^|\s)\w*(?:\.\w+)*(?:Error|error\[E\d+\]): ")
_PORTS = itertools.count(20_000 + os.getpid() % 100 * 100)  # another suite beside this one begins elsewhere
GRACE_S = 10  # for launchers to end what they have started, and for ranks whose neighbour has failed


def worst_difference(got: list[float], wanted: list[float]) -> float:
    """Return the largest relative difference of two lists of numbers, infinite where any that differ are not finite."""
    pairs = [(one, other) for one, other in zip(got, wanted, strict=True) if one != other]
    if not all(math.isfinite(value) for pair in pairs for value in pair):
        return math.inf
    return max((abs(one - other) / max(abs(one), abs(other)) for one, other in pairs), default=0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """How a job ended.

    Attributes:
        code: 0, the first launcher's that failed, or None where it was stopped for its time.
        output: of all launchers, the first one's first.
        errors: likewise.
    """

    code: int | None
    output: str
    errors: str

    @property
    def reason(self) -> str:
        """Return what is most likely the reason of a failure, "" for none."""
        if self.code == 0:
            return ""
        if self.code is None:
            return "took too long"
        lines = [line for line in self.errors.splitlines() if _IS_ERROR.search(line)]
        return lines[0] if lines else f"exit {self.code}"


def run(
    script: Sequence[str],
    *,
    ranks: int,
    hosts: bool,
    limit_s: float,
    under: Sequence[str] = (),
    variables: Mapping[str, str] | None = None,
) -> Ended:
    """Run a script on ranks that share what this machine has.

    Args:
        script: and its arguments.
        ranks: how many.
        hosts: each is a host of its own.
        limit_s: it is stopped after that.
        under: words before each launcher of torchrun, such as those of `paro-advise run`; without any there is none.
        variables: of its environment, beside those it needs.
    """
    environment = {
        **os.environ,
        **(variables or {}),
        "OMP_NUM_THREADS": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(_port()),
    }
    if hosts:
        environment |= {"NCCL_SOCKET_IFNAME": "lo", "NCCL_IB_DISABLE": "1", "GLOO_SOCKET_IFNAME": "lo"}
    launches = []
    for rank in range(ranks):
        own = environment | ({"NCCL_HOSTID": f"host{rank}"} if hosts else {})
        if not under:  # without launchers, which take as long as the ranks to begin
            place = (0, 1) if hosts else (rank, ranks)
            names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
            of_rank = zip(names, map(str, (rank, ranks, *place)), strict=True)
            launches.append(([sys.executable, *script], own | dict(of_rank)))
        elif hosts:
            meeting = [f"--nnodes={ranks}", f"--node-rank={rank}", "--nproc-per-node=1", "--master-addr=127.0.0.1"]
            launches.append(([*under, *LAUNCHER, *meeting, f"--master-port={own['MASTER_PORT']}", *script], own))
    if under and not hosts:
        launches = [([*under, *LAUNCHER, "--standalone", f"--nproc-per-node={ranks}", *script], environment)]
    with tempfile.TemporaryDirectory() as folder:
        return _wait(launches, Path(folder), limit_s)


def advise(*words: object) -> subprocess.CompletedProcess[str]:
    """Run a command of `paro-advise` to its end; whether it wrote what it was to write, the caller looks at."""
    return subprocess.run(
        [*PARO_ADVISE, *map(str, words)], capture_output=True, text=True, timeout=LIMIT_S, check=False
    )


def why_nothing(done: subprocess.CompletedProcess[str]) -> dict[str, object]:
    """Return the row of a command that did not write what it was to write."""
    return {"holds": False, "failed": f"{done.args[len(PARO_ADVISE)]}: {done.stderr.splitlines()[:1]}"}


def _wait(launches: Sequence[tuple[list[str], dict[str, str]]], folder: Path, limit_s: float) -> Ended:
    ends_at = time.monotonic() + limit_s
    running = []
    for number, (words, environment) in enumerate(launches):
        # Into files: a pipe that nobody reads would stop a rank that prints much.
        with (folder / f"{number}.out").open("wb") as out, (folder / f"{number}.err").open("wb") as err:
            running.append(subprocess.Popen(words, env=environment, stdout=out, stderr=err, start_new_session=True))
    while any(process.poll() is None for process in running) and time.monotonic() < ends_at:
        if any(process.poll() for process in running):
            ends_at = min(ends_at, time.monotonic() + GRACE_S)  # the others wait for the one that failed
        time.sleep(0.05)
    codes = [process.poll() for process in running]
    for kind in (
        signal.SIGTERM,
        signal.SIGKILL,
    ):  # launchers end their ranks, which are groups of their own, at the first
        for process in running:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, kind)
        for process in running:
            with suppress(subprocess.TimeoutExpired):
                process.wait(GRACE_S)
    texts = [
        "".join((folder / f"{n}.{kind}").read_text(encoding="utf-8", errors="replace") for n in range(len(launches)))
        for kind in ("out", "err")
    ]
    failed = sorted((code for code in codes if code != 0), key=lambda code: code is None)
    return Ended(code=failed[0] if failed else 0, output=texts[0], errors=texts[1])


def _port() -> int:
    for port in _PORTS:  # below those that systems give away, of which jobs that begin together could get the same
        with socket.socket() as one, suppress(OSError):
            one.bind(("127.0.0.1", port))
            return port
    raise RuntimeError("no port is free")
