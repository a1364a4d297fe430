"""Whatever reads the inputs: the same analysis, and what a process takes with it when it ends is read again or said."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest
from conftest import DATA, ROOT

from paro_advise.advisor.cli import run
from paro_advise.advisor.facts.reading import all_inputs, slurm_array
from paro_advise.advisor.facts.reading.all_inputs import read_all
from paro_advise.advisor.facts.reading.cache import default_cache
from paro_advise.advisor.facts.reading.choice import EngineChoice, EngineName
from paro_advise.advisor.facts.reading.packing import packed_refs, read_packed, unpacked, unpacked_refs
from paro_advise.advisor.facts.reading.pooled import DaskEngine, LocalEngine
from paro_advise.errors import InputError, UsageError
from paro_advise.trace_parsers.bytes.blocks import SourceRef
from paro_advise.trace_parsers.discover import find_inputs

RUN = DATA / "zero_runs" / "ddp_acc4"
BUSY = 2.0  # runnable processes per core from which Ray may take longer to start than it waits
CLUSTERS = [EngineName.RAY, EngineName.DASK, EngineName.SLURM]


@dataclass(frozen=True, slots=True, kw_only=True)
class Deadly(SourceRef):
    """An input that kills whichever other process reads it, some times; an empty file counts each."""

    times: int
    marks: Path
    reader: int  # process that may read it

    @property
    def label(self):
        if os.getpid() != self.reader and len(list(self.marks.glob("*"))) < self.times:
            (self.marks / str(os.getpid())).touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return super(Deadly, self).label


@pytest.fixture(scope="module")
def ray_here():
    """Ray on this machine; classes of this file travel to its processes as they are."""
    ray = pytest.importorskip("ray", reason="reading by Ray needs it, which the extra [ray] installs")
    import sys

    from ray import cloudpickle

    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    cloudpickle.register_pickle_by_value(sys.modules[__name__])
    _start(ray)
    yield ray
    ray.shutdown()
    cloudpickle.unregister_pickle_by_value(sys.modules[__name__])


def _start(ray):
    """Start Ray's processes, for which it waits 30 s and no longer, whatever else the machine has to do."""
    others = children()
    try:
        ray.init(address="local", num_cpus=2, include_dashboard=False, log_to_driver=False)
    except Exception as error:
        if "timed out during startup" not in str(error) or os.getloadavg()[0] < BUSY * (os.cpu_count() or 1):
            raise
    else:
        return
    ray.shutdown()
    end(children() - others)
    # Ray does not wait for its processes, whose objects would tell that whenever they are gone.
    for item in gc.get_objects():
        if issubclass(type(item), subprocess.Popen) and item.returncode is None and item.pid not in others:
            item.wait(60)
    pytest.skip(f"Ray does not start in its own 30 s on a machine with {os.getloadavg()[0]:.0f} busy processes")


def children():
    """The processes that this one has started: what other tests of this worker share is among them."""
    return {int(child) for path in Path("/proc/self/task").glob("*/children") for child in path.read_text().split()}


def end(processes):
    for process in processes:
        os.kill(process, signal.SIGKILL)


def test_a_start_of_ray_that_fails_ends_nothing_but_what_it_has_started(monkeypatch):
    class Unstarted:
        def init(self, **_):
            self.own = subprocess.Popen(["sleep", "600"])
            raise RuntimeError("Ray timed out during startup")

        def shutdown(self):
            pass

    other, ray = subprocess.Popen(["sleep", "600"]), Unstarted()
    try:
        monkeypatch.setattr(os, "getloadavg", lambda: (1e6, 0.0, 0.0))
        with pytest.raises(pytest.skip.Exception):
            _start(ray)
        assert ray.own.returncode == -signal.SIGKILL
        assert other.poll() is None
    finally:
        other.kill()
        other.wait()


@pytest.fixture
def slurm(tmp_path, monkeypatch):
    """Commands that stand for Slurm's; the folder by which they are told what to do."""
    folder = tmp_path / "slurm"
    folder.mkdir()
    monkeypatch.setenv("FAKE_SLURM", str(folder))
    monkeypatch.setenv("PATH", f"{ROOT / 'tests/stand_ins/slurm'}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.chdir(tmp_path)
    for name in ("JOB_POLL_S", "QUEUE_POLL_S", "SHARED_FILES_S"):
        monkeypatch.setattr(slurm_array, name, 0.1)
    return folder


@pytest.fixture
def engines(ray_here, slurm):
    pytest.importorskip("distributed", reason="reading by Dask needs it, which the extra [dask] installs")


def refs_of(*paths):
    return find_inputs([str(path) for path in paths])[0]


def read_by(name, refs, cache=None, jobs=2):
    return read_all(refs, is_collection=True, cache=cache, choice=EngineChoice(name=name, jobs=jobs))


def test_every_engine_gives_the_same_json(engines, tmp_path, capsys):
    broken = tmp_path / "rank9.json"
    broken.write_bytes(b'{"traceEvents": [{"ph"')
    told = {}
    for name in EngineName:
        words = ["analyze", str(RUN), str(broken), "--engine", name.value, "--max-array", "3", "--jobs", "2"]
        assert run([*words, "--no-cache", "--json", "-"]) == 0
        told[name] = capsys.readouterr().out
    assert '"rank9.json could not be used' in told[EngineName.LOCAL]
    assert {name for name in EngineName if told[name] != told[EngineName.LOCAL]} == set()


def test_the_environment_chooses_an_engine(slurm, monkeypatch, capsys):
    monkeypatch.setenv("PARO_ENGINE", "slurm")
    assert run(["analyze", str(RUN), "--no-cache", "-q"]) == 0
    assert len(list(slurm.glob("*.sh"))) == 1


def pool_of_processes(monkeypatch):
    monkeypatch.setattr("paro_advise.advisor.facts.reading.pooled.POOL_BYTES", 0)


@pytest.mark.parametrize("times", [1, 2])
@pytest.mark.parametrize("name", [EngineName.LOCAL, EngineName.RAY])
def test_a_process_that_ends_takes_one_input_with_it_at_most(name, times, ray_here, tmp_path, monkeypatch, capsys):
    pool_of_processes(monkeypatch)
    refs = refs_of(RUN)
    places = [place for place, ref in enumerate(refs) if ref.file_name.startswith("rank")]
    refs[places[1]] = Deadly(path=refs[places[1]].path, times=times, marks=tmp_path, reader=os.getpid())
    whole = read_by(EngineName.LOCAL, refs_of(RUN), jobs=1)
    read = read_by(name, refs)
    assert capsys.readouterr().out == ""
    assert len(list(tmp_path.glob("*"))) == times
    said = [notice.message for notice in read.notices if "ended twice" in notice.message]
    if times == 1:
        assert read.facts == whole.facts
        assert said == []
    else:
        assert read.facts == tuple(item for item in whole.facts if item.source.path != refs[places[1]].path.as_posix())
        assert len(said) == 1
        assert refs[places[1]].file_name in said[0]


def test_a_task_of_a_slurm_array_that_is_killed_is_run_again(slurm):
    (slurm / "kill").touch()
    refs = refs_of(RUN)
    choice = EngineChoice(name=EngineName.SLURM, max_array=1)
    read = read_all(refs, is_collection=True, cache=None, choice=choice)
    assert read.facts == read_by(EngineName.LOCAL, refs, jobs=1).facts
    assert len(list(slurm.glob("*.sh"))) == 2


def test_what_slurm_loses_twice_is_said(slurm):
    (slurm / "kill_all").touch()
    read = read_by(EngineName.SLURM, refs_of(RUN))
    assert read.facts == ()
    assert {notice.code for notice in read.notices} == {"Q301"}
    assert len(read.notices) == len(refs_of(RUN))
    with pytest.raises(InputError, match="ended twice"):
        read.require_facts()


def test_slurm_that_refuses_or_is_not_there_is_told(slurm, monkeypatch, capsys):
    (slurm / "refuse").touch()
    assert run(["analyze", str(RUN), "--engine", "slurm", "--no-cache"]) == 2
    assert "invalid partition" in (said := capsys.readouterr().err)
    assert "SBATCH_PARTITION" in said
    monkeypatch.setenv("PATH", str(slurm))
    assert run(["analyze", str(RUN), "--engine", "slurm", "--no-cache"]) == 2
    assert "sbatch" in capsys.readouterr().err
    assert not [path for path in slurm.parent.glob(".paro-advise-*") if any(path.iterdir())]


def test_an_interrupted_array_is_cancelled_and_what_it_read_is_not_read_again(slurm, tmp_path, monkeypatch):
    refs = refs_of(RUN)
    cache = str(tmp_path / "cache")
    choice = EngineChoice(name=EngineName.SLURM, max_array=1)

    def interrupted(done, total, label):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        read_all(refs, is_collection=True, cache=cache, choice=choice, progress=interrupted)
    assert (slurm / "1.cancelled").exists()
    until_done(slurm / "1.running")
    work: list[SourceRef] = []

    def recording(refs):
        work.extend(refs)
        return packed_refs(refs)

    monkeypatch.setattr(slurm_array, "packed_refs", recording)
    assert read_all(refs, is_collection=True, cache=cache, choice=choice).facts
    assert not [ref for ref in work if ref.file_name.startswith("rank0")]


def until_done(path):
    import time

    while path.exists():
        time.sleep(0.05)


def test_members_of_compressed_archives_are_read_where_they_are_unpacked(slurm, tmp_path):
    import tarfile

    with tarfile.open(tmp_path / "run.tar.gz", "w:gz") as archive:
        archive.add(RUN, "run")
    refs = refs_of(tmp_path / "run.tar.gz")
    read = read_by(EngineName.SLURM, refs)
    assert len(read.facts) >= 4
    assert not list(slurm.glob("*.sh"))


def test_clusters_are_found_by_their_variables(monkeypatch):
    made = {name: all_inputs._engine_of(EngineChoice(name=name, jobs=1)) for name in CLUSTERS}
    assert isinstance(made[EngineName.DASK], DaskEngine)
    ray = pytest.importorskip("ray")
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    for address in ("127.0.0.1:1", "ray://127.0.0.1:1", "127.0.0.1:99999", "no cluster"):
        monkeypatch.setenv("RAY_ADDRESS", address)
        with pytest.raises(UsageError, match="--engine ray must reach a cluster"):
            made[EngineName.RAY].read(refs_of(RUN), None, lambda *_: None, alone=False)


def test_ray_that_does_not_start_in_time_is_told(monkeypatch):
    """Ray raises Exception itself for that."""
    ray = pytest.importorskip("ray")

    def late(**_):
        raise Exception("The current node timed out during startup.\nSee logs")

    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.setattr(ray, "init", late)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    with pytest.raises(UsageError, match="must reach a cluster: The current node timed out during startup"):
        all_inputs._engine_of(EngineChoice(name=EngineName.RAY, jobs=1)).read(refs_of(RUN), None, print, alone=False)


def test_results_and_inputs_keep_what_they_are_on_their_way(tmp_path):
    refs = refs_of(RUN)
    assert unpacked_refs(packed_refs(refs)) == refs
    missing = SourceRef(path=tmp_path / "rank0.json")
    told = unpacked(read_packed(missing, None))
    assert isinstance(told, InputError)
    assert told.where == missing.label
    assert isinstance(unpacked(b"\x00"), InputError)


def test_paths_of_any_bytes_travel(tmp_path):
    path = tmp_path / os.fsdecode(b"rank0-\xff.json")
    assert unpacked_refs(packed_refs([SourceRef(path=path)])) == [SourceRef(path=path)]


def test_a_dask_cluster_that_is_not_there_is_told(monkeypatch):
    pytest.importorskip("distributed")
    monkeypatch.setenv("DASK_SCHEDULER_ADDRESS", "nonsense://x")
    with pytest.raises(UsageError, match="--engine dask must reach a cluster"):
        DaskEngine(1).read(refs_of(RUN), None, lambda *_: None, alone=False)


def test_a_cache_that_cannot_be_is_told_once(monkeypatch, capsys):
    pytest.importorskip("obstore")
    monkeypatch.setenv("PARO_ADVISE_CACHE", "s3://")
    assert run(["analyze", str(RUN)]) == 2
    assert "must name a bucket" in capsys.readouterr().err


def test_a_cache_that_does_not_answer_is_left_out_and_said(monkeypatch, capsys):
    pytest.importorskip("obstore")
    monkeypatch.setattr("paro_advise.trace_parsers.remote.store.MAX_RETRIES", 0)
    for name, value in (("AWS_ENDPOINT_URL", "http://127.0.0.1:9"), ("AWS_ACCESS_KEY_ID", "a"),
                        ("AWS_SECRET_ACCESS_KEY", "b"), ("AWS_REGION", "us-east-1"),
                        ("PARO_ADVISE_CACHE", "s3://bucket/cache")):  # fmt: skip
        monkeypatch.setenv(name, value)
    assert run(["analyze", str(RUN)]) == 0
    assert "Q308" in (said := capsys.readouterr().err)
    assert said.count("cannot be asked") == 1


def test_machines_with_another_reader_are_refused(monkeypatch):
    data = read_packed(refs_of(RUN / "rank0.json.gz")[0], None)
    monkeypatch.setattr("paro_advise.advisor.facts.reading.packing.READER_VERSION", 1)
    with pytest.raises(UsageError, match="one version"):
        unpacked(data)


def test_a_small_run_starts_no_processes(monkeypatch):
    monkeypatch.setattr("paro_advise.advisor.facts.reading.pooled.ProcessPoolExecutor", None)
    assert LocalEngine(8).read(refs_of(RUN), None, lambda *_: None, alone=False) == {}


def test_the_cache_is_where_the_user_says(monkeypatch, tmp_path):
    monkeypatch.setenv("PARO_ADVISE_CACHE", "s3://bucket/cache")
    assert default_cache() == "s3://bucket/cache"
