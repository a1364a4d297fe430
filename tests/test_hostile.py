"""Hostile input: damage of every format, bombs, deep nesting, evil pickles. Never a traceback."""

from __future__ import annotations

import bz2
import gzip
import json
import lzma
import os
import pickle
import random
import resource
import signal
from contextlib import contextmanager

import pytest
from fuzz_case import MAX_CPU_S, LateError, make_case, run_case
from trace_builder import fsdp_rank

from paro_advise.advisor.cli import run
from paro_advise.errors import ForeignDataError, HostileInputError, InputError
from paro_advise.policies.plan import plan_from_json
from paro_advise.trace_parsers.bytes.blocks import BlockReader, SourceRef

NUM_MUTATIONS = 1200  # `make fuzz` runs more
NUM_SHARDS = 20
SECONDS_EACH = 20


@contextmanager
def deadline(seconds):
    def stop(_signal, _frame):
        raise LateError(f"longer than {seconds} s")

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(round(seconds))
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


@pytest.mark.parametrize(
    "shard",
    [pytest.param(shard, marks=pytest.mark.variant if shard >= NUM_SHARDS // 2 else ()) for shard in range(NUM_SHARDS)],
)
def test_damage_of_any_format_is_bounded_escaped_and_said(tmp_path, shard):
    each = NUM_MUTATIONS // NUM_SHARDS
    for number in range(shard * each, (shard + 1) * each):
        folder = tmp_path / str(number)
        folder.mkdir()
        with deadline(6 * MAX_CPU_S):
            outcome = run_case(make_case(0, number), folder)
        assert not outcome.failures, f"python benchmarks/fuzz_readers.py --only {number}"


def peak_mb():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def test_a_zip_bomb_is_refused_early(tmp_path):
    bomb = tmp_path / "bomb.json.gz"
    chunk = gzip.compress(b"\0" * (64 << 20), 9)
    bomb.write_bytes(chunk * 8)  # 512 MiB out of half a MiB
    before = peak_mb()
    with pytest.raises(HostileInputError, match="expand at most"):
        for _ in BlockReader(SourceRef(path=bomb)):
            pass
    assert peak_mb() - before < 100
    assert run(["analyze", str(bomb)]) == 3


def test_a_bomb_inside_an_archive_is_refused(tmp_path):
    import io
    import tarfile

    with tarfile.open(tmp_path / "bomb.tar.gz", "w:gz") as archive:
        info = tarfile.TarInfo("rank0.json")
        info.size = 300 << 20
        archive.addfile(info, io.BytesIO(bytes(300 << 20)))
    assert run(["analyze", str(tmp_path / "bomb.tar.gz")]) == 3


def test_one_endless_event_does_not_fill_memory(tmp_path):
    path = tmp_path / "rank0.json"
    head = b'{"schemaVersion": 1, "traceEvents": [\n  {"ph": "X", "name": "'
    path.write_bytes(gzip.compress(head + random.Random(1).randbytes(1 << 20).hex().encode() * 100, 1))
    before = peak_mb()
    assert run(["analyze", str(path), "--no-cache"]) == 3
    assert peak_mb() - before < 900


def test_deep_nesting(tmp_path):
    event = (
        '{"ph": "X", "cat": "kernel", "name": "k", "ts": 1, "dur": 1, "args": ' + '{"a":' * 50_000 + "1" + "}" * 50_001
    )
    (tmp_path / "rank0.json").write_text('{"schemaVersion": 1, "traceEvents": [' + event + "]}")
    assert run(["analyze", str(tmp_path / "rank0.json")]) in (0, 3)
    (tmp_path / "deep.json").write_text('{"schemaVersion": ' + "[" * 200_000)
    assert run(["analyze", str(tmp_path / "deep.json")]) == 3


class Evil:
    def __init__(self, target):
        self.target = target

    def __reduce__(self):
        return (os.system, (f"touch {self.target}",))


def test_names_cannot_ask_for_millions_of_ranks(tmp_path, capsys):
    """A name of ours is short whatever group it stands for; a hundred of them are refused, not expanded."""
    row = {"ph": "X", "cat": "cpu_op", "pid": 1, "tid": 1, "dur": 5.0}
    names = [f"paro_advise::all_gather Float 8->{number} ranks 0:65536:1" for number in range(100)]
    events = [row | {"name": name, "ts": 10.0 * place} for place, name in enumerate(names)]
    path = tmp_path / "rank0.json"
    path.write_text(
        json.dumps({"schemaVersion": 1, "distributedInfo": {"backend": "gloo", "rank": 0}, "traceEvents": events})
    )
    with deadline(SECONDS_EACH):
        assert run(["analyze", str(path), "--no-cache"]) == 3
    assert "at most 4,194,304 ranks" in capsys.readouterr().err


@pytest.mark.parametrize("protocol", range(6))
def test_an_evil_pickle_runs_nothing(tmp_path, protocol):
    target = tmp_path / "owned"
    dump = {"version": "2.9", "pg_config": {}, "entries": [Evil(target)]}
    (tmp_path / "nccl_trace_rank_0").write_bytes(pickle.dumps(dump, protocol))
    assert run(["analyze", str(tmp_path / "nccl_trace_rank_0")]) == 3
    assert not target.exists()


def test_a_corrupt_cache_entry_is_read_anew(tmp_path):
    from helpers import gathered

    trace = fsdp_rank(0).write(tmp_path / "rank0.json")
    cache = tmp_path / "cache"
    first = gathered(trace, cache=str(cache))
    (entry,) = cache.glob("*.facts")
    entry.write_bytes(entry.read_bytes()[:50] + b"garbage")
    assert gathered(trace, cache=str(cache)).facts[0].steps == first.facts[0].steps
    entry.write_bytes(pickle.dumps(Evil(tmp_path / "owned")))
    assert gathered(trace, cache=str(cache)).facts[0].steps == first.facts[0].steps
    assert not (tmp_path / "owned").exists()


def test_a_member_that_lies_about_its_size(tmp_path):
    import io
    import tarfile

    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        info = tarfile.TarInfo("rank0.json")
        info.size = 10
        archive.addfile(info, io.BytesIO(b"0123456789"))
    data = bytearray(buffer.getvalue())
    data[124:135] = b"77777777777"
    (tmp_path / "lies.tar").write_bytes(bytes(data))
    assert run(["analyze", str(tmp_path / "lies.tar")]) == 3


def test_errors_cross_process_borders():
    error = InputError("what", where="here", hint="do")
    copy = pickle.loads(pickle.dumps(error))
    assert (copy.what, copy.where, copy.hint, type(copy)) == ("what", "here", "do", InputError)


def test_a_folder_without_any_trace_names_what_is_there(tmp_path, capsys):
    """Not the first file alone: whoever mistook the folder sees it by the others."""
    (tmp_path / "notes.txt").write_text("hello\n")
    (tmp_path / "train.py").write_text("print(1)\n")
    (tmp_path / "config.json").write_text('{"a": 1}')
    assert run(["analyze", str(tmp_path)]) == 3
    said = capsys.readouterr().err
    assert "none of 2 files is one: config.json, notes.txt" in said
    assert "-->" not in said


def test_analyses_and_plans_that_are_no_utf8_are_refused(tmp_path, capsys):
    """Not even in fields that only a newer release knows, which are passed over."""
    trace, data, plan = (tmp_path / name for name in ("rank0.json", "run.json", "plan.json"))
    fsdp_rank(0).write(trace)
    assert run(["analyze", str(trace), "--json", str(data), "-q"]) == 0
    assert run(["recommend", str(data), "-o", str(plan), "-q"]) in (0, 3)
    for path in (data, plan):
        path.write_bytes(b'{"later": "\xf0(",' + path.read_bytes()[1:])
    capsys.readouterr()
    assert run(["recommend", str(data), "-o", str(tmp_path / "out.json")]) != 0
    told = capsys.readouterr().err
    assert "must be a paro-advise/analysis JSON" in told
    assert "defect of paro-advise" not in told
    with pytest.raises(ForeignDataError):
        plan_from_json(plan.read_bytes(), "plan.json")


@pytest.mark.parametrize(
    ("name", "pack", "told"),
    [
        ("rank0.json.bz2", bz2.compress, "packed by bzip2"),
        ("rank0.json.xz", lzma.compress, "packed by xz"),
        ("rank0.json", lambda data: data.decode().encode("utf-16"), "UTF-16"),
        ("nccl.log", lambda data: b"\xfe\xff" + data.decode().encode("utf-16-be"), "UTF-16"),
    ],
)
def test_a_form_that_is_not_read_is_named_with_what_to_do(name, pack, told, tmp_path, capsys):
    trace = fsdp_rank(0).write(tmp_path / "plain.json").read_bytes()
    (tmp_path / name).write_bytes(pack(trace))
    assert run(["analyze", str(tmp_path / name)]) == 3
    err = capsys.readouterr().err
    assert told in err
    assert "unpack it" in err or "convert it" in err
