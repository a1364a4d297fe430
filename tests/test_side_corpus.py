"""What the readers make of real logs and dumps, where ../shared/corpus holds them."""

from __future__ import annotations

import json
import pickle
from pathlib import Path

import pytest

from paro_advise.errors import BrokenInputError
from paro_advise.trace_parsers import flight_recorder, nsys
from paro_advise.trace_parsers.bytes.readable import Readable
from paro_advise.trace_parsers.logs import comms_logger, nccl_log, nccl_tests, train_log
from paro_advise.trace_parsers.nccl import inspector, profiler_plugin
from paro_advise.trace_parsers.nccl import topology as nccl_topology
from paro_advise.trace_parsers.tables import SourceFile, SourceKind

SHARED = Path(__file__).resolve().parents[1].parent / "shared"
STREAMED = (
    flight_recorder,
    nccl_topology,
    profiler_plugin,
    inspector,
    nccl_log,
    nccl_tests,
    comms_logger,
    train_log,
)


def source(path):
    return SourceFile(path=path, bytes=0, sha256="", kind=SourceKind.NCCL_LOG)


def codes(parsed):
    return [notice.code for notice in parsed.notices]


def corpus():
    index = SHARED / "corpus" / "INDEX.tsv"
    if not index.is_file():
        return []
    rows = [line.split("\t") for line in index.read_text(encoding="utf-8").splitlines()[1:]]
    return [(SHARED / "corpus" / row[0], row[5]) for row in rows if row[5] not in {"a", "f"}]


def parse_any(path):
    data = path.read_bytes()
    if nsys.looks_like(data[:65536]):
        return nsys.parse(path, source(str(path)))
    for module in STREAMED:
        if module.looks_like(data[:65536]):
            return module.parse(Readable([data], 1 << 30), source(str(path)))
    raise AssertionError(f"nobody recognises {path}")


needs_corpus = pytest.mark.skipif(not corpus(), reason="the folder ../shared/corpus with real files is absent")


@needs_corpus
@pytest.mark.parametrize(
    ("path", "kind"),
    [pytest.param(path, kind, id=path.name[:40]) for path, kind in corpus()] or [(None, None)],
)
def test_every_real_file_parses_or_says_why(path, kind):
    if path.name == "output.log":  # a plotting tool's own log, though the index calls it nccl-tests output
        with pytest.raises(BrokenInputError):
            parse_any(path)
        return
    first, second = parse_any(path), parse_any(path)
    assert first.collectives.equals(second.collectives) and first.link_samples.equals(second.link_samples)
    assert (first.header, first.notices) == (second.header, second.notices)
    assert first.collectives.height or first.link_samples.height or first.events or first.header.metadata


def real(name):
    (path,) = [path for path, _ in corpus() if str(path).endswith(name)]
    return path


@needs_corpus
def test_real_inspector_bandwidth_equals_what_inspector_printed():
    path = real("stone-pid3326096.log")
    printed = [json.loads(line)["coll_perf"]["coll_busbw_gbs"] for line in path.read_text().splitlines()]
    assert parse_any(path).link_samples["busbw_gbps"].to_list() == pytest.approx(printed, abs=1e-6)


@needs_corpus
def test_real_nccl_log_volume_and_torn_table():
    path = real("Timez-zx+nccl-tests/nccl.log")
    parsed = parse_any(path)
    counts = [int(part.split()[0]) for part in path.read_text().split(" count ")[1:] if part[:1].isdigit()]
    assert parsed.collectives["bytes"].sum() == 4 * sum(counts)
    assert parsed.link_samples["busbw_gbps"][-1] == 216.60
    assert parsed.link_samples["bytes"].to_list() == [8 << 20 << power for power in range(11)]
    assert parsed.header.metadata["tuning_AllReduce_RING_SIMPLE"] == str(
        path.read_text().count("-> Algo RING proto SIMPLE")
    )


@needs_corpus
def test_real_flight_recorder_ranks_and_open_entries():
    for path in sorted((SHARED / "corpus").glob("NVIDIA*/tests/attribution/unit/fr_traces/*/_dump_*")):
        with path.open("rb") as file:
            raw = pickle.load(file)  # a file of known origin, as the oracle
        parsed = parse_any(path)
        assert parsed.header.rank == int(path.name.removeprefix("_dump_"))
        assert parsed.header.world_size == 16
        assert parsed.collectives["name"].to_list() == [entry["profiling_name"] for entry in raw["entries"]]
        has_open = any(entry["state"] != "completed" for entry in raw["entries"])
        assert ("Q250" in codes(parsed)) == has_open


@needs_corpus
def test_real_training_logs():
    medians = {
        "093732_sd-1.log": "5668.200",
        "1832555.out": None,
        "meg_ds_3d_gpt2_perf_n16-ds-on.out": "137138.400",
    }
    for name, expected in medians.items():
        header = parse_any(real(name)).header
        assert header.metadata.get("median_iteration_ms") == expected
        assert header.metadata["zero_stage"] == {"0937": "1", "1832": "3", "meg_": "0"}[name[:4]]
    zero = parse_any(real("meg_ds_zero_gpt2_perf_n16-1999616.out")).header
    assert (zero.world_size, zero.num_nodes, zero.gpus_per_node) == (64, 16, 4)
    assert zero.metadata["iteration_count"] == "4"
