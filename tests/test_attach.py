"""A job that runs already is recorded from outside by torch's own daemon protocol, and nothing else is touched."""

from __future__ import annotations

import datetime
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
from paro_advise.advisor.commands.jobs import attach
from paro_advise.errors import InputError, UsageError
from paro_advise.runtime.attach import recording
from paro_advise.runtime.attach.listener import Listener
from paro_advise.runtime.attach.messages import TraceQuery, answer, parse, settings
from paro_advise.runtime.attach.processes import Place, Process, members, place_of, ranks_of, unheard
from paro_advise.runtime.attach.recording import AttachRequest, record

# Sizes and fields of dynolog/src/ipcfabric: a size_t, a char[32]; then three integers of 4, 4 and 8 bytes.
QUESTION = b"\x18" + bytes(7) + b"req".ljust(32, b"\0") + struct.pack("<iiqii", 3, 2, 17, 1371, 1323)
REGISTRATION = b"\x10" + bytes(7) + b"ctxt".ljust(32, b"\0") + struct.pack("<iiq", 0, 1371, 17)


def test_messages_are_read_as_kineto_writes_them():
    assert parse(QUESTION) == TraceQuery(processes=(1371, 1323), job=17, is_free=True)
    assert parse(QUESTION.replace(b"\x03", b"\x01", 1)) == TraceQuery(processes=(1371, 1323), job=17, is_free=False)
    assert answer("A=1\n") == b"\x04" + bytes(7) + b"req".ljust(32, b"\0") + b"A=1\n"


@pytest.mark.parametrize(
    "data",
    [
        b"",
        QUESTION[:39],
        QUESTION[:-1],
        QUESTION + b"\0",
        QUESTION.replace(b"req", b"ask"),
        b"\x10" + QUESTION[1:44] + bytes(4) + QUESTION[48:56],  # no process at all
        QUESTION[:44] + struct.pack("<i", 1 << 30) + QUESTION[48:],
        QUESTION[:44] + struct.pack("<i", -1) + QUESTION[48:],
        REGISTRATION,  # an answer is not needed
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
        (
            {"RANK": "3", "WORLD_SIZE": "8", "LOCAL_WORLD_SIZE": "4"},
            Place(rank=3, world_size=8, local_world_size=4, is_torchs=True, job=("",) * 5),
        ),
        (
            {"SLURM_PROCID": "3", "SLURM_NTASKS": "8", "SLURM_JOB_ID": "17", "MASTER_PORT": "29500"},
            Place(rank=3, world_size=8, job=("", "", "29500", "17", "")),
        ),
        ({"OMPI_COMM_WORLD_RANK": "1", "RANK": "x"}, Place(rank=1, job=("",) * 5)),
        ({"RANK": "8", "WORLD_SIZE": "8"}, None),
        ({"RANK": "-1"}, None),
        ({"RANK": "²"}, None),
        ({}, None),
    ],
)
def test_where_a_process_stands(environment, place):
    assert place_of(environment) == place


def process(*line, rank=None, local=None, launcher=False, port="1", job=0, namespace=""):
    """Return a process that this machine cannot see."""
    place = None
    if rank is not None:
        place = Place(rank=rank, world_size=4, local_world_size=local, is_torchs=not launcher, job=(port,))
    return Process(number=0, line=line, namespace=namespace, job=job, place=place)


def of_a_job(*processes, below=None, job=None):
    return members(processes, below=below, job=job)


ZERO, ONE = process(11, 10, rank=0, local=2), process(12, 10, rank=1, local=2)


@pytest.mark.parametrize(
    ("others", "ranks"),
    [
        ([process(10)], [ZERO, ONE]),
        ([process(10, rank=0, launcher=True)], [ZERO, ONE]),  # srun torchrun
        ([process(10, rank=0)], [ZERO, ONE]),  # a pod's rank in RANK, as Kubeflow sets it
        ([process(13, 12, 10, rank=1, local=2)], [ZERO, ONE]),  # a data loader
    ],
)
def test_launchers_and_what_ranks_start_are_no_ranks(others, ranks):
    found = of_a_job(ONE, *others, ZERO)
    assert set(found) == {ZERO, ONE, *others}
    assert list(ranks_of(found, [])) == ranks  # where no torch optimizer takes steps
    assert ranks_of(found, ranks) == {ZERO: 0, ONE: 1}
    assert unheard(found) == 0


def test_ranks_of_other_launchers():
    slurm = [process(20 + rank, rank=rank, launcher=True) for rank in range(2)]
    assert of_a_job(*slurm) == slurm  # srun python
    assert ranks_of(slurm, []) == {slurm[0]: 0, slurm[1]: 1}
    assert of_a_job(process(7), process(8, 7)) == [process(7), process(8, 7)]


def test_what_took_no_step_is_no_rank():
    bare = process(11, rank=0, launcher=True)  # its script sets RANK, and then starts a loader that inherits it
    assert ranks_of([bare, process(14, 11, rank=0)], [bare]) == {bare: 0}
    spawned = [process(30 + number, 12, 10, rank=1) for number in range(2)]
    assert ranks_of([ONE, *spawned], spawned) == dict.fromkeys(spawned)  # mp.spawn under a launcher
    assert ranks_of([process(7), process(8, 7)], [process(8, 7)]) == {process(8, 7): None}


def test_ranks_that_never_asked_are_counted():
    assert unheard([ZERO, ONE]) == 0
    assert unheard([ZERO]) == 1
    assert unheard([process(1)]) == 0


@pytest.mark.parametrize(
    "jobs",
    [
        (process(11, 10, rank=0, job=1), process(21, 20, rank=0, port="2", job=2)),
        (process(11, 10, rank=0, job=1), process(21, 20, rank=1, port="2", job=2)),
        (process(11, 10, job=1), process(21, 20, job=2)),
        (process(7, namespace="a", job=1), process(9, 7, 20, namespace="b", job=2)),
    ],
)
def test_two_jobs_are_not_taken_for_one(jobs):
    with pytest.raises(UsageError, match="one job, got 2") as caught:
        of_a_job(*jobs)
    assert "--pid" in caught.value.hint
    assert of_a_job(*jobs, below=20) == [jobs[1]]
    assert of_a_job(*jobs, job=1) == [jobs[0]]


def test_what_has_ended_is_no_member():
    with subprocess.Popen([sys.executable, "-c", ""]) as child:
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
        assert of_a_job(Process(number=child.pid, line=(child.pid,))) == []  # not yet waited for
    assert of_a_job(Process(number=child.pid, line=(child.pid,))) == []
    here = Process(number=os.getpid(), line=(os.getpid(),))
    assert of_a_job(here) == [here]


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
        ({"ahead_s": 25}, "--at"),
    ],
)
def test_what_cannot_be_asked_for(tmp_path, given, word):
    given = dict(given)
    folder = tmp_path / given.pop("folder", "now")
    if "ahead_s" in given:
        given = {"start_unix_s": time.time() + given.pop("ahead_s")}
    with pytest.raises(UsageError, match=word):
        AttachRequest(folder=folder, **given)


@pytest.mark.parametrize(
    ("now", "at", "day"), [("23:59:40", "00:00:30", 3), ("14:29:00", "14:30:00", 2), ("00:01:00", "23:59:30", 1)]
)
def test_a_time_without_a_day_is_the_nearest(now, at, day):
    here = datetime.datetime.fromisoformat(f"2026-01-02T{now}").astimezone()
    found = attach.unix_s(datetime.datetime.strptime(at, "%H:%M:%S"), here)
    assert found == datetime.datetime.fromisoformat(f"2026-01-{day:02}T{at}").timestamp()


# ---- the socket ---------------------------------------------------------------------------------


class Asker:
    """Stands for a process of a job."""

    def __init__(self, folder, name):
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self.socket.bind(f"{folder}/{name}")
        self.to = f"{folder}/dynolog"
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
        asker.ask(os.getpid(), os.getppid())
        listener.hear(time.monotonic() + 60, lambda *_: "")
        listener.hear(time.monotonic() + 60, lambda *_: "A=1")
        assert asker.socket.recv(100) == answer("A=1")  # a process that asks again must not find an older answer
        assert [item.number for item in listener.processes.values()] == [os.getpid()]
    assert not (folder / "dynolog").exists()


def test_a_process_that_has_ended_stops_nothing(folder):
    with Listener(str(folder)) as listener:
        with Asker(folder, "a") as asker:
            asker.ask(1)
        listener.hear(time.monotonic() + 60, lambda *_: "A=1")


def test_a_folder_of_another_name_is_not_answered(folder):
    """torch ends the process that gets an answer from a path that does not begin with its own name for the folder."""
    other = folder.with_name(f"{folder.name}.link")
    other.symlink_to(folder)
    with Listener(str(folder)) as listener:
        for number, name in enumerate((other, f"{folder}/")):
            with Asker(name, f"a{number}") as asker:
                asker.ask(1)
                listener.hear(time.monotonic() + 0.2, lambda *_: "A=1")
        assert (listener.num_elsewhere, listener.processes) == (2, {})
    with Listener(f"{folder}/") as listener, Asker(f"{folder}/", "b") as asker:
        asker.ask(1)
        listener.hear(time.monotonic() + 60, lambda *_: "A=1")
        data, address = asker.socket.recvfrom(100)
        assert (data, address) == (answer("A=1"), f"{folder}//dynolog")


def test_a_listener_leaves_the_socket_of_another(folder):
    with Listener(str(folder)):
        (folder / "dynolog").unlink()
        (folder / "dynolog").touch()
    assert (folder / "dynolog").exists()


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
    monkeypatch.setattr(recording, "START_LEAD_S", 4.0)


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
s.settimeout(0.1)
while not told:
    s.sendto(struct.pack("<Q32siiqii", 24, b"req", 3, 2, 0, os.getpid(), 1), sys.argv[1] + "/dynolog")
    try:
        told = s.recv(1000)
    except TimeoutError:
        pass  # nothing wanted
"""


def test_what_each_process_did_not_bring_is_said(folder, hurried, tmp_path):
    """One writes its trace, one is busy, one asks once only, one is told and ends."""
    target = tmp_path / "now"
    told = threading.Event()
    failed = []

    def jobs(askers):
        try:
            for number, asker in askers.items():
                asker.ask(number, 1)
            assert told.wait(60)
            busy = struct.pack("<iiqii", 1, 2, 0, 3, 1)
            askers[3].send(struct.pack("<Q32s", len(busy), b"req") + busy)
            askers[2].ask(2, 1)
            lines = askers[2].socket.recv(1000)[40:].decode().splitlines()
            path = dict(line.split("=") for line in lines)["ACTIVITIES_LOG_FILE"].replace(".json", "_2.json")
            with Path(path).open("w") as file:
                file.write('{"traceEvents": [{"name": "Optimizer.step#SGD.step"}')
                file.flush()
                time.sleep(4)  # a trace that is half written is not taken, however long this is
                file.write('], "traceName": "a"}')
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

            made = record(AttachRequest(folder=target, seconds=0.1, below=1), listener, say)
            thread.join()
            waiting.join()
    assert failed == []
    name = f"process2.{socket.gethostname()}.json.gz"
    assert {item.line[0]: name for item, name in made.written.items()} == {2: name}
    with gzip.open(target / name) as file:
        assert json.load(file)["traceEvents"] == [{"name": "Optimizer.step#SGD.step"}]
    assert {item.line[0]: why for item, why in made.missing.items()} == {
        3: "another profiler is at work there",
        4: "it did not ask again before the start",
        child.pid: "it ended before its trace was written",
    }
    assert not made.are_ranks_known
    assert [path.name for path in target.iterdir()] == [name]


DIFFERENT_WAYS = {
    "a folder's sockets, under srun": ("folder", {"SLURM_PROCID": "0", "SLURM_NTASKS": "1", "SLURM_JOB_ID": "17"}),
    "names without a folder": ("name", {}),
}


def record_both_ranks(options, capsys):
    """On a machine that is too busy for torch's own thread a rank may ask too late: then it is told, and asked again."""
    for attempt in range(5):
        assert run([*options, *["--force"][:attempt]]) == 0
        told = capsys.readouterr().err
        if "traces of 2 ranks" in told:
            return
        assert "it did not ask again before the start" in told, told
    pytest.fail(told)


@pytest.mark.distributed
@pytest.mark.parametrize(
    "way", ["a folder's sockets, under srun", pytest.param("names without a folder", marks=pytest.mark.variant)]
)
def test_a_running_job_is_recorded_and_goes_on(way, folder, tmp_path, capsys, monkeypatch):
    """A real job on gloo that knows nothing of ours: each rank's trace, its rank, and a verdict on them; then again."""
    pytest.importorskip("torch")
    kind, variables = DIFFERENT_WAYS[way]
    if kind == "folder":
        monkeypatch.setenv("KINETO_IPC_SOCKET_DIR", f"{folder}/")  # torch puts another "/" behind it
    else:
        monkeypatch.delenv("KINETO_IPC_SOCKET_DIR", raising=False)
    daemon = {"KINETO_USE_DAEMON": "1", "KINETO_LOG_LEVEL": "5", "OMP_NUM_THREADS": "1"}
    script = ROOT / "tests/workers/plain_ddp.py"
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(script)]
    target = tmp_path / "now"
    environment = {**os.environ, **daemon, **variables}
    with subprocess.Popen([*command, str(tmp_path / "stop")], env=environment, stderr=subprocess.PIPE) as job:
        try:
            while not (tmp_path / "stop.begun").exists():
                assert job.poll() is None, job.stderr.read()
                time.sleep(0.05)
            options = ["attach", "-o", str(target), "--seconds", "2", "--pid", str(job.pid)]
            record_both_ranks(options, capsys)
            assert run(options) == 1
            if kind == "name":  # such a socket is where an answer that nobody reads would stay
                first = {path.name: path.stat().st_mtime_ns for path in target.iterdir()}
                record_both_ranks([*options, "--force"], capsys)
                assert all(path.stat().st_mtime_ns != first[path.name] for path in target.iterdir())
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


def test_what_was_there_stays_until_there_is_something_new(folder, hurried, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("KINETO_IPC_SOCKET_DIR", str(folder))
    (tmp_path / "rank0.json.gz").write_bytes(b"old")
    assert run(["attach", "-o", str(tmp_path), "--force"]) == 2
    assert (tmp_path / "rank0.json.gz").read_bytes() == b"old"
    (tmp_path / "rank0.json.gz").rename(tmp_path / "process7.here.json.gz")
    assert run(["attach", "-o", str(tmp_path)]) == 1
    assert "already holds a capture" in capsys.readouterr().err
