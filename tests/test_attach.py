"""A job that runs already is recorded from outside by torch's own daemon protocol, and nothing else is touched."""

from __future__ import annotations

import gzip
import json
import os
import signal
import socket
import stat
import struct
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from conftest import ROOT

from paro_advise.advisor.cli import run
from paro_advise.errors import InputError, UsageError
from paro_advise.runtime.attach import recording
from paro_advise.runtime.attach.listener import Listener
from paro_advise.runtime.attach.messages import Question, Registration, answer, parse, registered, settings
from paro_advise.runtime.attach.processes import Place, Process, are_all, chosen, place_of, ranks_of
from paro_advise.runtime.attach.recording import AttachRequest, record

# Sizes and fields of dynolog/src/ipcfabric: a size_t, a char[32]; then three integers of 4, 4 and 8 bytes.
QUESTION = b"\x18" + bytes(7) + b"req".ljust(32, b"\0") + struct.pack("<iiqii", 3, 2, 17, 1371, 1323)
REGISTRATION = b"\x10" + bytes(7) + b"ctxt".ljust(32, b"\0") + struct.pack("<iiq", 0, 1371, 17)


def test_messages_are_read_as_kineto_writes_them():
    assert parse(QUESTION) == Question(processes=(1371, 1323), job=17, is_free=True)
    assert parse(QUESTION.replace(b"\x03", b"\x01", 1)) == Question(processes=(1371, 1323), job=17, is_free=False)
    assert parse(REGISTRATION) == Registration(process=1371)
    assert answer("A=1\n") == b"\x04" + bytes(7) + b"req".ljust(32, b"\0") + b"A=1\n"
    assert answer("") == bytes(8) + b"req".ljust(32, b"\0")
    assert registered(1) == b"\x04" + bytes(7) + b"ctxt".ljust(32, b"\0") + b"\x01\0\0\0"


@pytest.mark.parametrize(
    "data",
    [
        b"",
        QUESTION[:39],
        QUESTION[:-1],
        QUESTION + b"\0",
        QUESTION.replace(b"req", b"ask"),
        b"\x10" + QUESTION[1:56],  # no process at all
        QUESTION[:44] + struct.pack("<i", 1 << 30) + QUESTION[48:],
        QUESTION[:44] + struct.pack("<i", -1) + QUESTION[48:],
        REGISTRATION[:-1],
    ],
)
def test_what_is_no_message_is_none(data):
    assert parse(data) is None


def test_what_a_process_is_told():
    text = settings(trace="/a/trace.json", start_unix_s=1_800_000_000.5, seconds=1.5, warm_up_s=1)
    assert dict(line.split("=") for line in text.splitlines()) == {
        "ACTIVITIES_LOG_FILE": "/a/trace.json",
        "PROFILE_START_TIME": "1800000000500",
        "ACTIVITIES_DURATION_MSECS": "1500",
        "ACTIVITIES_WARMUP_PERIOD_SECS": "1",
        "PROFILE_REPORT_INPUT_SHAPES": "true",
    }


@pytest.mark.parametrize(
    ("environment", "place"),
    [
        ({"RANK": "3", "WORLD_SIZE": "8", "LOCAL_WORLD_SIZE": "4"}, Place(rank=3, world_size=8, local_world_size=4)),
        ({"SLURM_PROCID": "3", "SLURM_NTASKS": "8"}, Place(rank=3, world_size=8)),
        ({"OMPI_COMM_WORLD_RANK": "1", "RANK": "x"}, Place(rank=1)),
        ({"RANK": "8", "WORLD_SIZE": "8"}, None),
        ({"RANK": "-1"}, None),
        ({"RANK": "²"}, None),
        ({}, None),
    ],
)
def test_where_a_process_stands(environment, place):
    assert place_of(environment) == place


def process(*line, rank=None, local=None, job=0, first=True):
    place = None if rank is None else Place(rank=rank, world_size=4, local_world_size=local)
    return Process(number=line[0], line=line, job=job, place=place, is_first=first and place is not None)


def test_launchers_and_what_ranks_start_are_no_ranks():
    launcher, zero, one = process(10), process(11, 10, rank=0), process(12, 10, rank=1)
    loader = process(13, 12, 10, rank=1, first=False)
    assert ranks_of([loader, one, launcher, zero]) == [zero, one]
    assert ranks_of([process(8), process(7)]) == [process(7), process(8)]


def test_all_ranks_are_there_when_each_has_asked_itself():
    zero, one = process(11, 10, rank=0, local=2), process(12, 10, rank=1, local=2)
    assert are_all([zero, one])
    assert not are_all([zero])
    assert not are_all([zero, process(13, 12, 10, rank=1, local=2, first=False)])
    assert not are_all([process(11, 10, rank=0)])
    assert not are_all([])


def test_two_jobs_are_not_taken_for_one():
    jobs = [process(11, 10, rank=0, job=1), process(21, 20, rank=0, job=2)]
    with pytest.raises(UsageError, match="11 and 21 are both rank 0") as caught:
        ranks_of(jobs)
    assert "--pid" in caught.value.hint
    assert chosen(jobs, below=20, job=None) == [jobs[1]]
    assert chosen(jobs, below=11, job=None) == [jobs[0]]
    assert chosen(jobs, below=None, job=2) == [jobs[1]]


@pytest.mark.parametrize(
    ("given", "word"),
    [
        ({"seconds": 0}, "--seconds"),
        ({"seconds": float("nan")}, "--seconds"),
        ({"seconds": 1e4}, "--seconds"),
        ({"folder": "a\nACTIVITIES_ITERATIONS=9"}, "control character"),
        ({"folder": "a#b"}, "'#'"),
        ({"start_unix_s": 0}, "--at"),
        ({"start_unix_s": 4e9}, "--at"),
    ],
)
def test_what_cannot_be_asked_for(tmp_path, given, word):
    folder = tmp_path / given.pop("folder", "now")
    with pytest.raises(UsageError, match=word):
        AttachRequest(folder=folder, **given)


# ---- the socket ---------------------------------------------------------------------------------


class Asker:
    """Stands for a process of a job."""

    def __init__(self, folder, name):
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self.socket.bind(str(folder / name))
        self.to = str(folder / "dynolog")
        self.socket.settimeout(60)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.socket.close()

    def send(self, data):
        self.socket.sendto(data, self.to)

    def ask(self, *line):
        content = struct.pack(f"<iiq{len(line)}i", 3, len(line), 0, *line)
        self.send(struct.pack("<Q32s", len(content), b"req") + content)


@pytest.fixture
def folder(tmp_path_factory):
    """A folder whose path is short enough for sockets."""
    return tmp_path_factory.mktemp("s")


def test_only_questions_are_answered(folder):
    with Listener(str(folder)) as listener, Asker(folder, "a") as asker:
        assert stat.S_IMODE((folder / "dynolog").stat().st_mode) == 0o600
        asker.send(b"no message")
        asker.send(REGISTRATION)
        asker.ask(os.getpid(), os.getppid())
        listener.hear(time.monotonic() + 60, lambda *_: "A=1")
        assert asker.socket.recv(100) == registered(1)
        assert asker.socket.recv(100) == answer("A=1")
        assert listener.num_unread == 1
        assert [item.number for item in listener.processes.values()] == [os.getpid()]
    assert not (folder / "dynolog").exists()


def test_a_process_that_has_ended_is_forgotten(folder):
    with Listener(str(folder)) as listener:
        with Asker(folder, "a") as asker:
            asker.ask(1)
        listener.hear(time.monotonic() + 60, lambda *_: "")
        assert listener.processes == {}


def test_processes_of_others_hear_nothing(folder):
    if os.geteuid():
        pytest.skip("only root can be somebody else")
    other = (
        "import os, socket, sys; os.setuid(65534); s = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)\n"
        "s.sendto(bytes.fromhex(sys.argv[2]), sys.argv[1])"
    )
    with Listener(str(folder)) as listener, Asker(folder, "a") as asker:
        for path in (folder, *folder.parents):
            if path.stat().st_uid == 0 and path != path.parent and "pytest" in str(path):
                path.chmod(0o755)
        (folder / "dynolog").chmod(0o666)
        subprocess.run([sys.executable, "-c", other, asker.to, QUESTION.hex()], check=True, timeout=60)
        asker.ask(1)
        listener.hear(time.monotonic() + 60, lambda *_: "")
        assert listener.num_foreign == 1
        assert [item.line for item in listener.processes.values()] == [(1,)]


def test_there_is_one_listener(folder):
    with Listener(str(folder)), pytest.raises(UsageError, match="another process listens"):
        Listener(str(folder))
    (folder / "dynolog").touch()
    with pytest.raises(UsageError):
        Listener(str(folder))
    assert (folder / "dynolog").exists()
    with pytest.raises(InputError):
        Listener(str(folder / "no folder"))


def test_a_socket_that_was_left_over_is_replaced(folder):
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as left_over:
        left_over.bind(str(folder / "dynolog"))
    with Listener(str(folder)) as listener, Asker(folder, "a") as asker:
        asker.ask(1)
        listener.hear(time.monotonic() + 60, lambda *_: "")
        assert len(listener.processes) == 1


# ---- a recording --------------------------------------------------------------------------------


@pytest.fixture
def hurried(monkeypatch):
    """Waits that suit processes which ask at once."""
    monkeypatch.setattr(recording, "GATHER_S", 1.0)
    monkeypatch.setattr(recording, "LEAD_S", 3.0)


def test_without_a_job_it_says_what_to_do(folder, hurried, monkeypatch, capsys, tmp_path):
    monkeypatch.setenv("KINETO_IPC_SOCKET_DIR", str(folder))
    assert run(["attach", "-o", str(tmp_path / "now")]) == 2
    told = capsys.readouterr().err
    assert "KINETO_USE_DAEMON=1" in told
    assert "Traceback" not in told
    assert not (tmp_path / "now").exists()


ENDS_WHEN_TOLD = """
import os, socket, struct, sys
s = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
s.bind(sys.argv[1] + "/ends")
told = b""
while len(told) <= 40:  # nothing wanted
    s.sendto(struct.pack("<Q32siiqi", 20, b"req", 3, 1, 0, os.getpid()), sys.argv[1] + "/dynolog")
    told = s.recv(1000)
"""


def test_what_each_process_did_not_bring_is_said(folder, hurried, tmp_path):
    """One writes its trace, one is busy, one asks once only, one is told and ends."""
    target = tmp_path / "now"
    told = threading.Event()
    failed = []

    def jobs(askers):
        try:
            for number, asker in askers.items():
                asker.ask(number)
                assert asker.socket.recv(1000) == answer("")
            assert told.wait(60)
            busy = struct.pack("<iiqi", 1, 1, 0, 3)
            askers[3].send(struct.pack("<Q32s", len(busy), b"req") + busy)
            askers[2].ask(2)
            lines = askers[2].socket.recv(1000)[40:].decode().splitlines()
            path = dict(line.split("=") for line in lines)["ACTIVITIES_LOG_FILE"].replace(".json", "_2.json")
            with Path(path).open("w") as file:
                file.write('{"traceEvents": [')
                file.flush()
                time.sleep(4)  # a trace that is half written is not taken, however long this is
                file.write("]}")
        except Exception as error:  # noqa: BLE001 - for the thread that judges
            failed.append(error)

    with Listener(str(folder)) as listener, Asker(folder, "2") as two, Asker(folder, "3") as three:
        child = subprocess.Popen([sys.executable, "-c", ENDS_WHEN_TOLD, str(folder)])
        with Asker(folder, "4") as four:
            thread = threading.Thread(target=jobs, args=({2: two, 3: three, 4: four},))
            thread.start()
            waiting = threading.Thread(target=child.wait)  # so that it leaves /proc
            waiting.start()

            def say(line):
                if "recording" in line:
                    told.set()

            made = record(AttachRequest(folder=target, seconds=0.1), listener, say)
            thread.join()
            waiting.join()
    assert failed == []
    assert {item.line[0]: name for item, name in made.written.items()} == {2: "process2.json.gz"}
    with gzip.open(target / "process2.json.gz") as file:
        assert json.load(file) == {"traceEvents": []}
    assert [item.line[0] for item in made.busy] == [3]
    assert sorted(item.line[0] for item in made.told) == sorted([2, child.pid])
    assert [(item.line[0], why) for item, why in made.lost.items()] == [
        (child.pid, "it ended before its trace was written")
    ]
    assert [path.name for path in target.iterdir()] == ["process2.json.gz"]


@pytest.mark.distributed
def test_a_running_job_is_recorded_and_goes_on(folder, tmp_path, capsys, monkeypatch):
    """A real job on gloo that knows nothing of ours: each rank's trace, its rank, and a verdict on them."""
    pytest.importorskip("torch")
    monkeypatch.setenv("KINETO_IPC_SOCKET_DIR", str(folder))
    environment = {**os.environ, "KINETO_USE_DAEMON": "1", "KINETO_LOG_LEVEL": "5", "OMP_NUM_THREADS": "1"}
    script = ROOT / "tests/workers/until_told.py"
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(script)]
    target = tmp_path / "now"
    with subprocess.Popen([*command, str(tmp_path / "stop")], env=environment, stderr=subprocess.PIPE) as job:
        try:
            while not (tmp_path / "stop.begun").exists():
                assert job.poll() is None, job.stderr.read()
                time.sleep(0.05)
            assert run(["attach", "-o", str(target), "--seconds", "2"]) == 0
            assert "traces of 2 of 2 ranks" in capsys.readouterr().err
            assert run(["attach", "-o", str(target), "--seconds", "2"]) == 1
            (tmp_path / "stop").touch()
            errors = job.communicate(timeout=300)[1]
        finally:
            job.send_signal(signal.SIGTERM)
    assert job.returncode == 0, errors
    assert sorted(path.name for path in target.iterdir()) == ["rank0.json.gz", "rank1.json.gz"]
    capsys.readouterr()
    assert run(["analyze", str(target), "--json", "-", "--no-cache"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [rank["rank"] for rank in found["ranks"]] == [0, 1]
    assert found["run"]["framework"] == "DDP"
    assert "Q306" not in {note["code"] for note in found["data_quality"]}  # each trace says its rank
