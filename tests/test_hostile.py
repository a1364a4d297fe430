"""Hostile input: mutated real layouts, bombs, deep nesting, evil pickles. Never a traceback."""

from __future__ import annotations

import gzip
import json
import os
import pickle
import random
import resource
import signal
from contextlib import contextmanager

import pytest
from conftest import SHARED
from trace_builder import LAYOUTS, fsdp_rank

from paro_advise.advisor.cli import run
from paro_advise.errors import HostileInputError, InputError
from paro_advise.trace_parsers.bytes.blocks import BlockReader, SourceRef

NUM_MUTATIONS = 2000
NUM_SHARDS = 20
SECONDS_EACH = 20
SMALL_REAL_FILES = (
    "corpus/facebookresearch+HolisticTraceAnalysis/tests/data/cpu_only/rank-34.Jul_15_10_52_41.1074.pt.trace.json.gz",
    "corpus/facebookresearch+HolisticTraceAnalysis/tests/data/amd_trace/mi250_minitoy_train_ROCm6_2_kineto.json.gz",
    "corpus/NVIDIA+nvidia-resiliency-ext/tests/attribution/unit/fr_traces/gpu_error_1st/_dump_12",
    "corpus/aws-samples+awsome-distributed-training/micro-benchmarks/nccl-tests/README.md",
    "corpus/issue_excerpts/pytorch_98432_unescaped_backslash.json",
    "corpus/Timez-zx+nccl-tests/nccl_topo_dump.xml",
    "corpus/deepspeedai+DeepSpeed/docs/_tutorials/comms-logging.md",
    "nccl_like/ddp-big/traces/rank0_trace.json.gz",
)
NASTY = (
    b"</script><script>alert(1)</script>",
    b"9" * 400,
    b"-1e999",
    b"18446744073709551616",
    b"[" * 3000,
    b'{"a":' * 3000,
    b"\x00" * 64,
    b"\xff\xfe\xfd",
    b"\\",
    b'"',
    b"\n",
    b"NaN",
    b"\x1b]0;x\x07",
    b"../../../../etc/passwd",
    b"__import__('os').system('true')",
)


@contextmanager
def deadline(seconds):
    def stop(_signal, _frame):
        raise TimeoutError(f"longer than {seconds} s")

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def mutate(data, rng):
    """Return data after one to four edits of any kind."""
    body = bytearray(data)
    for _ in range(rng.randint(1, 4)):
        if not body:
            break
        at = rng.randrange(len(body))
        match rng.randrange(7):
            case 0:
                for _ in range(rng.randint(1, 30)):
                    place = rng.randrange(len(body))
                    body[place] ^= 1 << rng.randrange(8)
            case 1:
                del body[at:]
            case 2:
                del body[at : at + rng.randint(1, 2000)]
            case 3:
                body[at:at] = rng.choice(NASTY)
            case 4:
                other = rng.randrange(len(body))
                body[at:at] = body[other : other + rng.randint(1, 3000)]
            case 5:
                digits = [index for index in range(at, min(at + 4000, len(body))) if 48 <= body[index] <= 57]
                for index in digits[:: rng.randint(1, 9)]:
                    body[index] = rng.choice(b"0123456789.-e")
            case 6:
                body[at : at + 1] = bytes([rng.randrange(256)])
    return bytes(body)


def sources():
    """The files to mutate: every layout of a built trace, and small real files where present."""
    trace = fsdp_rank(0)
    found = {f"{name}.json": trace.text(name).encode() for name in LAYOUTS}
    for name in SMALL_REAL_FILES:
        path = SHARED / name
        if path.exists():
            found[path.name] = path.read_bytes()
    return sorted(found.items())


@pytest.mark.parametrize("shard", range(NUM_SHARDS))
def test_mutations_never_end_in_a_traceback(tmp_path, shard, capsys):
    files = sources()
    for number in range(NUM_MUTATIONS // NUM_SHARDS):
        rng = random.Random(shard * 1_000_003 + number)
        name, data = rng.choice(files)
        packed = data.startswith(b"\x1f\x8b")
        if packed and rng.random() < 0.7:
            data = gzip.compress(mutate(gzip.decompress(data), rng), 1)
        else:
            data = mutate(data, rng)
        path = tmp_path / name
        path.write_bytes(data)
        outputs = ["-o", str(tmp_path / "r.html"), "--json", str(tmp_path / "r.json"), "--force", "--no-cache"]
        with deadline(SECONDS_EACH):
            code = run(["analyze", str(path), *(outputs if number % 3 == 0 else ["--no-cache", "-q"])])
        out, err = capsys.readouterr()
        text = f"{name} shard {shard} number {number}: {err[-500:]}"
        assert code in (0, 3), text
        assert "Traceback" not in err, text
        assert "E100" not in err, text
        assert "defect of paro-advise" not in err, text
        assert "\x1b" not in out + err, text
        if code == 0 and number % 3 == 0:
            assert b"<script>alert" not in (tmp_path / "r.html").read_bytes(), text
            json.loads((tmp_path / "r.json").read_text())


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
    first = gathered(trace, cache=cache)
    (entry,) = cache.glob("*.facts")
    entry.write_bytes(entry.read_bytes()[:50] + b"garbage")
    assert gathered(trace, cache=cache).facts[0].steps == first.facts[0].steps
    entry.write_bytes(pickle.dumps(Evil(tmp_path / "owned")))
    assert gathered(trace, cache=cache).facts[0].steps == first.facts[0].steps
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
