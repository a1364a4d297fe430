"""The lab: real ports with real limits, everything gone afterwards, an honest fallback."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from paro_advise.errors import ParoAdviseError, UsageError
from paro_advise.runtime.lab import Isolation, Lab, LabSpec
from paro_advise.runtime.lab.network import best_isolation

pytestmark = pytest.mark.distributed

BEST, REASON = best_isolation()
needs_namespaces = pytest.mark.skipif(BEST == Isolation.LOOPBACK, reason=f"this machine forbids namespaces: {REASON}")

# Node 1 sends to node 0; node 0 prints the seconds from first to last byte.
TRANSFER = """
import os, socket, struct, sys, time
size, host, port = int(sys.argv[1]), os.environ["MASTER_ADDR"], 29700
if os.environ["NODE_RANK"] == "0":
    with socket.create_server(("", port)) as server:
        peer, _ = server.accept()
        got = b""
        while len(got) < 8 + size:
            got += peer.recv(1 << 16)
        # All nodes are this machine and its clock: what waited unread in between has crossed the port too.
        print(time.monotonic() - struct.unpack("d", got[:8])[0], flush=True)
elif os.environ["NODE_RANK"] == os.environ.get("SENDER", "1"):
    for _ in range(100):
        try:
            peer = socket.create_connection((host, port), timeout=30)
            break
        except OSError:
            time.sleep(0.05)
    peer.sendall(struct.pack("d", time.monotonic()) + bytes(size))
    peer.recv(1)
"""


def seconds_of(folder):
    return float((folder / "node0.log").read_text().split()[-1])


@needs_namespaces
def test_a_port_passes_no_more_than_its_rate(tmp_path):
    size, mbit = 2_000_000, 40
    with Lab(LabSpec(nodes=2, port_mbit=mbit)) as lab:
        assert lab.isolation == BEST
        result = lab.run(["python", "-c", TRANSFER, str(size)], tmp_path, timeout_s=60)
    assert result.ok, (tmp_path / "node1.log").read_text()
    # The first 64 kB are the bucket's; the rest cannot be faster than the port.
    assert seconds_of(tmp_path) >= 0.9 * (size - 64_000) * 8 / (mbit * 1e6)


@needs_namespaces
def test_one_node_may_have_a_slower_port(tmp_path):
    size = 500_000
    with Lab(LabSpec(nodes=3, port_mbit=400, slow_node=2, slow_port_mbit=8)) as lab:
        slow = lab.run(
            ["python", "-c", TRANSFER, str(size)], tmp_path / "slow", timeout_s=60, environment={"SENDER": "2"}
        )
        fast = lab.run(["python", "-c", TRANSFER, str(size)], tmp_path / "fast", timeout_s=60)
    assert slow.ok
    assert fast.ok
    assert seconds_of(tmp_path / "slow") >= 0.9 * (size - 64_000) * 8 / 8e6


@needs_namespaces
def test_a_port_may_become_slower_and_fast_again(tmp_path):
    size = 500_000
    command = ["python", "-c", TRANSFER, str(size)]
    with Lab(LabSpec(nodes=2, port_mbit=400)) as lab:
        lab.set_port(1, 2)
        assert lab.run(command, tmp_path / "slow", timeout_s=60).ok
        lab.set_port(1, 400)
        assert lab.run(command, tmp_path / "fast", timeout_s=60).ok
    slowest_s = (size - 64_000) * 8 / 2e6
    assert seconds_of(tmp_path / "slow") >= 0.9 * slowest_s
    assert seconds_of(tmp_path / "fast") < slowest_s


def test_without_a_network_no_port_can_become_slower():
    with Lab(LabSpec(nodes=2), Isolation.LOOPBACK) as lab, pytest.raises(ParoAdviseError, match="over loopback"):
        lab.set_port(1, 8)


@needs_namespaces
def test_nothing_stays_in_the_host(tmp_path):
    before = subprocess.run(["ip", "-o", "link"], capture_output=True, text=True, check=True).stdout
    with Lab(LabSpec(nodes=2)) as lab:
        inside = subprocess.run(["ip", "-o", "link"], capture_output=True, text=True, check=True).stdout
        lab.run(["ip", "-br", "address"], tmp_path, timeout_s=20)
    after = subprocess.run(["ip", "-o", "link"], capture_output=True, text=True, check=True).stdout
    assert before == inside == after
    assert "10.77.0.2/16" in (tmp_path / "node1.log").read_text()


def alive(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@needs_namespaces
def test_a_killed_lab_takes_all_its_processes_along(tmp_path):
    script = "import os,sys,time; open(sys.argv[1] + os.environ['NODE_RANK'], 'w').write('x'); time.sleep(600)"
    lab = [sys.executable, "-m", "paro_advise.runtime.lab", "--nodes", "2", "--logs", str(tmp_path / "logs"), "--"]
    process = subprocess.Popen([*lab, "python", "-c", script, str(tmp_path / "up")], stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline and not ((tmp_path / "up0").exists() and (tmp_path / "up1").exists()):
        time.sleep(0.05)
    mine = [
        int(entry.name)
        for entry in Path("/proc").iterdir()
        if entry.name.isdigit() and str(tmp_path / "up").encode() in _command_line(entry)
    ]
    assert len(mine) >= 2
    process.kill()
    process.wait()
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline and any(alive(pid) for pid in mine):
        time.sleep(0.05)
    assert not any(alive(pid) for pid in mine)


def _command_line(entry):
    try:
        return (entry / "cmdline").read_bytes()
    except OSError:
        return b""


def test_a_command_that_runs_too_long_is_ended(tmp_path):
    with Lab(LabSpec(nodes=2)) as lab:
        result = lab.run(["python", "-c", "import time; time.sleep(600)"], tmp_path, timeout_s=1)
    assert result.timed_out
    assert not result.ok
    assert all(node.returncode != 0 for node in result.nodes)


def test_loopback_is_said_aloud(tmp_path):
    command = ["--isolation", "loopback", "--logs", str(tmp_path), "--", "python", "-c", "print('hello')"]
    done = subprocess.run(
        [sys.executable, "-m", "paro_advise.runtime.lab", *command], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0
    assert "NOT limited" in done.stderr
    assert (tmp_path / "node1.log").read_text() == "hello\n"


def test_a_failing_node_is_reported(tmp_path):
    script = "import os, sys; sys.exit(3 * int(os.environ['NODE_RANK']))"
    with Lab(LabSpec(nodes=2), Isolation.LOOPBACK) as lab:
        result = lab.run(["python", "-c", script], tmp_path, timeout_s=30)
    assert [node.returncode for node in result.nodes] == [0, 3]
    assert not result.ok


@pytest.mark.parametrize("failing", [0, 1])
def test_a_node_that_fails_ends_the_others_soon_whichever_it_is(failing, tmp_path, monkeypatch):
    monkeypatch.setattr("paro_advise.runtime.lab.cluster.FAILURE_GRACE_S", 0.2)
    command = ["sh", "-c", f'[ "$NODE_RANK" != {failing} ] || exit 3; sleep 600']
    with Lab(LabSpec(nodes=2), Isolation.LOOPBACK) as lab:
        result = lab.run(command, tmp_path, timeout_s=60)
    assert not result.timed_out
    assert result.nodes[failing].returncode == 3
    assert result.nodes[1 - failing].returncode == -signal.SIGTERM


def test_a_slow_rank_takes_longer_for_the_same_work(tmp_path):
    """CPU seconds are the work, wall seconds the time: their ratio shows the stops."""
    script = (
        "import time; begin, used = time.monotonic(), time.process_time()\n"
        "while time.process_time() - used < 1.0: pass\n"
        "print(time.monotonic() - begin)"
    )
    spec = LabSpec(nodes=1, ranks_per_node=1, slow_rank=0, slow_factor=3.0)
    with Lab(spec, Isolation.LOOPBACK) as lab:
        result = lab.run(["python", "-c", script], tmp_path, timeout_s=60, environment={"RANK": "0"})
    assert result.ok
    assert seconds_of(tmp_path) >= 1.5  # of 3.0: the process is found a moment after its start


@pytest.mark.parametrize(
    "wrong",
    [
        {"nodes": 0},
        {"ranks_per_node": 0},
        {"port_mbit": 0},
        {"slow_node": 1},
        {"slow_node": 5, "slow_port_mbit": 1},
        {"slow_rank": 4},
        {"slow_factor": 0.5},
    ],
)
def test_impossible_labs_are_refused(wrong):
    with pytest.raises(UsageError, match=r"lab\."):
        LabSpec(**wrong)


@needs_namespaces
def test_training_crosses_the_ports(tmp_path):
    """torchrun meets over the switch, and FSDP2's collectives run between the nodes."""
    pytest.importorskip("torch")
    root = Path(__file__).resolve().parents[1]
    small = ["--width", "32", "--layers", "1", "--vocabulary", "64", "--sequence", "8", "--steps", "2"]
    with Lab(LabSpec(nodes=2, ranks_per_node=1)) as lab:
        result = lab.run(["torchrun", str(root / "examples/train.py"), *small], tmp_path, timeout_s=120)
    log = (tmp_path / "node0.log").read_text()
    assert result.ok, log[-2000:]
    assert "step 1: loss" in log


@pytest.mark.skipif(os.geteuid() != 0, reason="tries the path without root from root")
def test_user_namespaces_work_without_root(tmp_path):
    try:
        lab = Lab(LabSpec(nodes=2), Isolation.USER_NAMESPACES)
        with lab:
            result = lab.run(["ip", "-br", "address"], tmp_path, timeout_s=20)
    except ParoAdviseError as error:
        pytest.skip(f"user namespaces are forbidden here: {error}")
    assert result.ok
    assert "10.77.0.2/16" in (tmp_path / "node1.log").read_text()
