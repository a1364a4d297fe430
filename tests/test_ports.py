"""A port kept for a job is given to nobody else, and the job gets it."""

from __future__ import annotations

import contextlib
import shutil
import socket
import subprocess
import sys

import pytest

from paro_advise.runtime.lab.ports import reserved_port

# In a network of its own, whose system chooses among 64 ports: all that it gives are taken.
ASK_FOR_ALL = """
import contextlib, socket, subprocess, sys
from pathlib import Path
from paro_advise.runtime.lab.ports import reserved_port
subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
Path("/proc/sys/net/ipv4/ip_local_port_range").write_text("40000 40063")
with reserved_port() as port, contextlib.ExitStack() as held:
    taken = set()
    with contextlib.suppress(OSError):
        while True:
            asked = held.enter_context(socket.socket())
            asked.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, len(taken) % 2)
            asked.bind(("127.0.0.1", 0))
            asked.listen()
            taken.add(asked.getsockname()[1])
print(port, *sorted(taken))
"""


def test_a_kept_port_goes_to_nobody_who_asks_for_any():
    apart = ["unshare", "--user", "--map-root-user", "--net"]
    if shutil.which("unshare") is None or subprocess.run([*apart, "true"], check=False, capture_output=True).returncode:
        pytest.skip("this machine lets nobody have a network of its own")
    told = subprocess.run([*apart, sys.executable, "-c", ASK_FOR_ALL], check=False, capture_output=True, text=True)
    assert told.returncode == 0, told.stderr
    port, *taken = map(int, told.stdout.split())
    assert sorted([port, *taken]) == list(range(40000, 40064))


def test_a_server_listens_on_the_port_kept_for_it():
    with reserved_port() as port, socket.socket() as server:
        server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        server.bind(("127.0.0.1", port))
        server.listen()
        with socket.create_connection(("127.0.0.1", port), timeout=10) as asked:
            assert asked.getpeername()[1] == port


def test_ports_kept_at_the_same_time_differ():
    with contextlib.ExitStack() as kept:
        ports = [kept.enter_context(reserved_port()) for _ in range(500)]
        assert len(set(ports)) == len(ports)
