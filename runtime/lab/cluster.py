"""Runs commands on all nodes of a lab and collects what they leave."""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Self

from paro_advise.runtime.lab.constants import END_GRACE_S, FAILURE_GRACE_S, MASTER_PORT, PROCESSES_POLL_S
from paro_advise.runtime.lab.network import PORT_DEVICE, LabError, Network, best_isolation
from paro_advise.runtime.lab.ports import reserved_port
from paro_advise.runtime.lab.slowing import Slowing
from paro_advise.runtime.lab.spec import Isolation, LabSpec

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path
    from types import TracebackType


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeResult:
    """What a command left on one node: its exit code (negative: signal) and its log file."""

    node: int
    returncode: int
    log: Path


@dataclass(frozen=True, slots=True, kw_only=True)
class LabResult:
    """What a command left on all nodes.

    Attributes:
        nodes: by node.
        timed_out: the command was ended because it ran too long.
        isolation: how the nodes were kept apart; LOOPBACK means that no rate was limited.
    """

    nodes: tuple[NodeResult, ...]
    timed_out: bool
    isolation: Isolation

    @property
    def ok(self) -> bool:
        """Tell whether every node succeeded in time."""
        return not self.timed_out and all(node.returncode == 0 for node in self.nodes)


class Lab:
    """A cluster on this machine, from ``with Lab(spec) as lab`` to the end of the block.

    Attributes:
        isolation: what the machine allowed.
        reason: why not better, "" for the best.

    Raises (on entry):
        LabError: ``isolation`` was demanded and the machine forbids it.
    """

    def __init__(self, spec: LabSpec, isolation: Isolation | None = None) -> None:
        self.spec = spec
        self._wanted = isolation
        self.isolation = Isolation.LOOPBACK
        self.reason = ""
        self._network: Network | None = None
        self._token = secrets.token_hex(8)

    def __enter__(self) -> Self:
        if self._wanted is None:
            self.isolation, self.reason = best_isolation()
        else:
            self.isolation = self._wanted
        if self.isolation != Isolation.LOOPBACK:
            self._network = Network.build(self.spec, self.isolation)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._network is not None:
            self._network.stop()
            self._network = None

    def run(
        self,
        command: Sequence[str],
        log_folder: Path,
        *,
        timeout_s: float,
        environment: Mapping[str, str] | None = None,
    ) -> LabResult:
        """Run a command once on every node.

        A command that starts with ``torchrun`` gets the rendezvous of this lab and one process per
        rank; any other one runs as it is, with NNODES, NODE_RANK, NPROC_PER_NODE, MASTER_ADDR and
        MASTER_PORT in its environment.

        Args:
            command: words; ``python`` stands for this interpreter.
            log_folder: gets ``node{i}.log`` with stdout and stderr of each node.
            timeout_s: after that, everything is ended.
            environment: added to the processes' environment.

        Raises:
            LabError: the command cannot be started.
        """
        log_folder.mkdir(parents=True, exist_ok=True)
        begin = time.monotonic()
        processes: list[subprocess.Popen[bytes]] = []
        slowing = self._start_slowing()
        timed_out = False
        with contextlib.nullcontext(MASTER_PORT) if self._network else reserved_port() as port:
            try:
                for node in range(self.spec.nodes):
                    # One by one, so that those started are ended when a later one cannot be.
                    processes += [self._start(node, command, log_folder, port, environment or {})]
                timed_out = _wait(processes, begin + timeout_s)
            finally:
                if slowing:
                    slowing.stop()
                _end(processes)
        return LabResult(
            nodes=tuple(
                NodeResult(node=node, returncode=process.returncode, log=log_folder / f"node{node}.log")
                for node, process in enumerate(processes)
            ),
            timed_out=timed_out,
            isolation=self.isolation,
        )

    def set_port(self, node: int, port_mbit: float) -> None:
        """Give a node's port another rate, also while a job runs.

        Args:
            node: whose port, in both directions.
            port_mbit: Mbit/s.

        Raises:
            LabError: this lab has no network of its own, or no such node.
        """
        if self._network is None:
            raise LabError("a port's rate must be one of a network, this lab runs over loopback")
        if not 0 <= node < self.spec.nodes:
            raise LabError(f"a node must be one of 0 to {self.spec.nodes - 1}, got {node}")
        self._network.set_port(node, port_mbit)

    def _start_slowing(self) -> Slowing | None:
        rank = self.spec.slow_rank
        return Slowing(self._token, rank, self.spec.slow_factor) if rank is not None else None

    def _start(
        self, node: int, command: Sequence[str], log_folder: Path, port: int, environment: Mapping[str, str]
    ) -> subprocess.Popen[bytes]:
        master = self._network.address(0) if self._network else "127.0.0.1"
        words = self._command_line(node, command, master, port)
        with (log_folder / f"node{node}.log").open("wb") as log:
            return subprocess.Popen(
                words,
                env={**os.environ, **self._environment(node, master, port), **environment},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def _command_line(self, node: int, command: Sequence[str], master: str, port: int) -> list[str]:
        """Return what runs a command on a node.

        Raises:
            LabError: its program does not exist.
        """
        words = [sys.executable if word == "python" else word for word in command]
        if words and words[0] == "torchrun":
            rendezvous = (
                f"--nnodes={self.spec.nodes}",
                f"--node-rank={node}",
                f"--nproc-per-node={self.spec.ranks_per_node}",
                f"--master-addr={master}",
                f"--master-port={port}",
            )
            words = [sys.executable, "-m", "torch.distributed.run", *rendezvous, *words[1:]]
        if not words or shutil.which(words[0]) is None:
            raise LabError(f"the command must be a program on this machine, got {' '.join(words)!r}")
        return self._network.nodes[node].command(*words) if self._network else words

    def _environment(self, node: int, master: str, port: int) -> dict[str, str]:
        """Return the variables that a node's processes get from the lab."""
        return {
            "OMP_NUM_THREADS": "1",
            "NNODES": str(self.spec.nodes),
            "NODE_RANK": str(node),
            "NPROC_PER_NODE": str(self.spec.ranks_per_node),
            "MASTER_ADDR": master,
            "MASTER_PORT": str(port),
            "PARO_LAB_TOKEN": self._token,
            "PARO_LAB_ISOLATION": self.isolation.value,
            "GLOO_SOCKET_IFNAME": PORT_DEVICE if self._network else "lo",
        }


def _wait(processes: Sequence[subprocess.Popen[bytes]], deadline: float) -> bool:
    """Wait for all; return whether the deadline came first. One failure gives the rest a few seconds."""
    failed_at: float | None = None
    while None in (codes := [process.poll() for process in processes]):
        now = time.monotonic()
        if now > deadline:
            return True
        if failed_at is None and any(codes):
            failed_at = now
        if failed_at is not None and now > failed_at + FAILURE_GRACE_S:
            return False
        time.sleep(PROCESSES_POLL_S)
    return False


def _end(processes: Sequence[subprocess.Popen[bytes]]) -> None:
    """End whatever still runs: politely, then by force."""
    for number, patience_s in ((signal.SIGTERM, END_GRACE_S), (signal.SIGKILL, END_GRACE_S)):
        running = [process for process in processes if process.poll() is None]
        for process in running:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, number)
        for process in running:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(patience_s)
