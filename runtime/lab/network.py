"""Namespaces, cables and token buckets of the lab.

A node is held by a process that only sleeps: the first one of a new process namespace, in a new
network namespace. It dies with us (parent-death signal), and with it everything in the node. The
switch is one more such holder with a bridge, so nothing ever appears in the host's network.
"""

from __future__ import annotations

import shutil
import subprocess
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from paro_advise.errors import ParoAdviseError
from paro_advise.runtime.lab.constants import (
    BURST,
    ERROR_CHARACTERS,
    MTU_BYTES,
    QUEUE_LATENCY,
    START_POLL_S,
    START_S,
)
from paro_advise.runtime.lab.spec import Isolation

if TYPE_CHECKING:
    from paro_advise.runtime.lab.spec import LabSpec

PORT_DEVICE = "eth0"
_TOOLS = ("ip", "tc", "unshare", "nsenter", "setpriv", "sleep")


class LabError(ParoAdviseError):
    """The lab could not be built or a command in it could not be started."""

    code = "E500"


@dataclass(frozen=True, slots=True, kw_only=True)
class Holder:
    """A namespace holder: the process we started and the first process inside."""

    process: subprocess.Popen[bytes]
    inner_pid: int
    isolation: Isolation

    def command(self, *words: str) -> list[str]:
        """Return the command line that runs words inside."""
        enter = ["nsenter", f"--target={self.inner_pid}", "--net", "--pid", "--mount"]
        if self.isolation == Isolation.USER_NAMESPACES:
            enter += ["--user", "--preserve-credentials"]
        # Entering a mount namespace leads to its root: go back to where we are.
        return [*enter, "--", "sh", "-c", 'cd "$0" && exec "$@"', str(Path.cwd()), *words]

    def run(self, *words: str) -> None:
        """Run a network tool inside.

        Raises:
            LabError: it failed; the message quotes it.
        """
        done = subprocess.run(self.command(*words), capture_output=True, text=True, check=False)
        if done.returncode:
            raise LabError(f"`{' '.join(words)}` failed in the lab: {done.stderr.strip()[:ERROR_CHARACTERS]}")

    def stop(self) -> None:
        """End the holder and with it every process inside."""
        self.process.kill()
        # Reads to the end and closes the pipe of what the holder said.
        self.process.communicate()


class Network:
    """The switch and the nodes' ports. Use ``build`` and ``stop``."""

    def __init__(self, isolation: Isolation) -> None:
        self.isolation = isolation
        self.nodes: list[Holder] = []
        self._switch: Holder | None = None

    @classmethod
    def build(cls, spec: LabSpec, isolation: Isolation) -> Network:
        """Build all nodes; whatever was built is taken down again when a step fails.

        Raises:
            LabError: the machine forbids it.
        """
        network = cls(isolation)
        try:
            network._connect(spec)
        except (LabError, OSError):
            network.stop()
            raise
        return network

    def stop(self) -> None:
        """Take everything down."""
        for holder in (*self.nodes, *([self._switch] if self._switch else [])):
            holder.stop()
        self.nodes, self._switch = [], None

    def address(self, node: int) -> str:
        """Return a node's address on the switch."""
        return f"10.77.{node // 250}.{node % 250 + 1}"

    def set_port(self, node: int, port_mbit: float) -> None:
        """Change the rate of a node's port in both directions (Mbit/s)."""
        if self._switch is not None:
            self.nodes[node].run(*_limit_rate(PORT_DEVICE, port_mbit, change=True))
            self._switch.run(*_limit_rate(f"port{node}", port_mbit, change=True))

    def _connect(self, spec: LabSpec) -> None:
        switch = self._switch = hold(self.isolation)
        switch.run("ip", "link", "add", "bridge0", "type", "bridge")
        switch.run("ip", "link", "set", "bridge0", "up")
        for node in range(spec.nodes):
            holder = hold(self.isolation, inside=switch)
            self.nodes.append(holder)
            port, rate = f"port{node}", spec.port_mbit_of(node)
            mtu = ("mtu", str(MTU_BYTES))
            switch.run("ip", "link", "add", port, *mtu, "type", "veth", "peer", "name", PORT_DEVICE, *mtu)
            self._move(switch, holder)
            switch.run("ip", "link", "set", port, "master", "bridge0", "up")
            holder.run("ip", "link", "set", "lo", "up")
            holder.run("ip", "address", "add", f"{self.address(node)}/16", "dev", PORT_DEVICE)
            holder.run("ip", "link", "set", PORT_DEVICE, "up")
            holder.run(*_limit_rate(PORT_DEVICE, rate))
            switch.run(*_limit_rate(port, rate))

    @staticmethod
    def _move(switch: Holder, node: Holder) -> None:
        """Move the cable's end into the node. Process ids count in the host's namespace here."""
        enter = ["nsenter", f"--target={switch.inner_pid}", "--net"]
        if switch.isolation == Isolation.USER_NAMESPACES:
            enter += ["--user", "--preserve-credentials"]
        words = ["ip", "link", "set", PORT_DEVICE, "netns", str(node.inner_pid)]
        done = subprocess.run([*enter, "--", *words], capture_output=True, text=True, check=False)
        if done.returncode:
            raise LabError(f"`{' '.join(words)}` failed in the lab: {done.stderr.strip()[:ERROR_CHARACTERS]}")


def hold(isolation: Isolation, inside: Holder | None = None) -> Holder:
    """Start a holder of new network and process namespaces.

    Args:
        isolation: with or without root.
        inside: a holder whose user namespace the new one shares.

    Raises:
        LabError: the machine forbids it.
    """
    unshare = ["unshare", "--net", "--pid", "--fork", "--mount-proc", "--kill-child=KILL"]
    prefix: list[str] = []
    if isolation == Isolation.USER_NAMESPACES:
        if inside is None:
            unshare += ["--user", "--map-root-user"]
        else:
            prefix = ["nsenter", f"--target={inside.inner_pid}", "--user", "--preserve-credentials", "--"]
    process = subprocess.Popen(
        ["setpriv", "--pdeathsig", "KILL", "--", *prefix, *unshare, "sleep", "infinity"],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
    )
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline and process.poll() is None:
        inner = _sleeper_below(process.pid)
        if inner is not None:
            return Holder(process=process, inner_pid=inner, isolation=isolation)
        time.sleep(START_POLL_S)
    process.kill()
    _, errors = process.communicate()
    raise LabError(f"a namespace could not be made: {errors.decode(errors='replace').strip()[:ERROR_CHARACTERS]}")


def _sleeper_below(pid: int) -> int | None:
    """Return the sleeping process at the end of a chain of single children."""
    for _ in range(4):
        try:
            children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        except OSError:
            return None
        if not children:
            return None
        pid = int(children[0])
        with suppress(OSError):
            if Path(f"/proc/{pid}/comm").read_text().strip() == "sleep":
                return pid
    return None


def best_isolation() -> tuple[Isolation, str]:
    """Return the best isolation that this machine allows, and why not better ("" for the best)."""
    missing = [tool for tool in _TOOLS if shutil.which(tool) is None]
    if missing:
        return Isolation.LOOPBACK, f"these tools are missing: {', '.join(missing)} (Debian: iproute2, util-linux)"
    reasons = []
    for isolation in (Isolation.NAMESPACES, Isolation.USER_NAMESPACES):
        try:
            _check(isolation)
        except (LabError, OSError) as error:
            reasons.append(f"{isolation}: {error}")
            continue
        return isolation, "; ".join(reasons)
    return Isolation.LOOPBACK, "; ".join(reasons)


def _check(isolation: Isolation) -> None:
    """Make a namespace with a limited port, and end it.

    Raises:
        LabError: the machine forbids it.
        OSError: a tool could not be started.
    """
    holder = hold(isolation)
    try:
        holder.run("ip", "link", "add", "probe0", "type", "veth", "peer", "name", "probe1")
        holder.run(*_limit_rate("probe0", 1.0))
    finally:
        holder.stop()


def _limit_rate(device: str, port_mbit: float, *, change: bool = False) -> list[str]:
    """Return the command that puts a token bucket on a device, or changes the one that is there."""
    bucket = ["tbf", "rate", f"{port_mbit:g}mbit", "burst", BURST, "latency", QUEUE_LATENCY]
    return ["tc", "qdisc", "change" if change else "add", "dev", device, "root", *bucket]
