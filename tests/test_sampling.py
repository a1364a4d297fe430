"""A sample of the ranks states a range that holds what all ranks say, and reads a small part of them."""

from __future__ import annotations

import json
import os
import random

import pytest
from helpers import analyze
from trace_builder import TraceBuilder

from paro_advise.advisor.cli import run
from paro_advise.advisor.facts.sampling import judge_sample, sampling_order

NUM_RANKS = 64


def write_ranks(folder, seed, *, spread):
    """Write a run whose ranks expose different shares: some by chance, some by their node, one far more than others."""
    rng = random.Random(seed)
    mean = rng.uniform(0.15, 0.5)
    nodes = [rng.gauss(0.0, spread / 2) for _ in range(NUM_RANKS // 8)]
    folder.mkdir()
    shares = []
    for rank in range(NUM_RANKS):
        share = min(0.9, max(0.02, mean + nodes[rank // 8] + rng.gauss(0.0, spread)))
        shares.append(share)
        trace = TraceBuilder(rank, NUM_RANKS)
        for number in range(2):
            base = number * 1000.0
            trace.step(number, base, 1000.0)
            trace.compute(base, 1000.0 * (1 - share))
            trace.collective(
                "AllGather", base + 1000.0 * (1 - share), 1000.0 * share, nelems=1 << 20, issue=base + 1, seq=number,
                owners=("FSDP::pre_forward", "FSDP::all_gather"),
            )  # fmt: skip
        trace.write(folder / f"rank{rank}.json", "compact")
    return sum(shares) / NUM_RANKS


@pytest.fixture(autouse=True)
def inside(tmp_path, monkeypatch):
    """Which ranks are read follows from their paths: relative ones are the same wherever a test runs."""
    monkeypatch.chdir(tmp_path)


def sampled(folder, capsys):
    """Return how many ranks were read, and the stated share with its half range."""
    assert run(["analyze", os.path.relpath(folder), "--sample", "--json", "-", "--no-cache"]) == 0
    told = capsys.readouterr()
    analysis = json.loads(told.out)
    note = next(item["message"] for item in analysis["data_quality"] if item["code"] == "Q323")
    assert "[Q323]" in next(line for line in told.err.splitlines() if "[Q" in line)
    share, half = (float(text) for text in note.split("communication is ")[1].split(" of a step")[0].split(" % ± "))
    return len(analysis["run"]["ranks"]), share / 100, half / 100


def test_stated_ranges_hold_what_all_ranks_say(tmp_path, capsys):
    """20 runs of 64 ranks that differ a little: 9 of 10 ranges hold the mean of all; a tenth of the ranks is read."""
    inside = read = 0
    for seed in range(20):
        folder = tmp_path / str(seed)
        true = write_ranks(folder, seed, spread=0.008)
        num_read, share, half = sampled(folder, capsys)
        assert half <= 0.02
        inside += abs(share - true) <= half + 0.0005  # the note has one decimal
        read += num_read
    assert inside >= 18
    assert read <= 0.1 * 20 * NUM_RANKS


def test_ranks_that_differ_much_are_read_in_larger_numbers(tmp_path, capsys):
    true = write_ranks(tmp_path / "run", 1, spread=0.06)
    num_read, share, half = sampled(tmp_path / "run", capsys)
    assert num_read > 16
    assert abs(share - true) <= half + 0.0005


def test_a_sample_that_ends_with_all_ranks_is_none(tmp_path):
    """Six ranks are all read at once: the analysis is that of all."""
    write_ranks(tmp_path / "run", 2, spread=0.01)
    for rank in range(6, NUM_RANKS):
        (tmp_path / "run" / f"rank{rank}.json").unlink()
    assert run(["analyze", str(tmp_path / "run"), "--sample", "-q"]) == 0
    assert not [item for item in analyze(tmp_path / "run").data_quality if item.code == "Q323"]


def test_what_is_no_trace_never_ends_a_sample(tmp_path, capsys):
    """A README beside the traces, and a first round of which no trace can be read."""
    write_ranks(tmp_path / "run", 3, spread=0.008)
    (tmp_path / "run" / "README.md").write_text("about this run")
    num_read, *_ = sampled(tmp_path / "run", capsys)
    assert num_read < NUM_RANKS
    paths = sorted((tmp_path / "run").glob("*.json"), key=lambda path: int(path.stem[4:]))
    for path in sampling_order([str(path) for path in paths], str)[:6]:
        (tmp_path / "run" / path.rpartition("/")[2]).write_text('{"traceEvents": [')
    num_read, *_ = sampled(tmp_path / "run", capsys)
    assert 0 < num_read < NUM_RANKS


def test_a_sample_states_what_the_analysis_counts(tmp_path, capsys):
    """Half of the traces are cut, and each first step is left out: neither is in the figures."""
    write_ranks(tmp_path / "run", 4, spread=0.008)
    paths = sorted((tmp_path / "run").glob("*.json"), key=lambda path: int(path.stem[4:]))
    for path in sampling_order(paths, str)[1::2]:  # which ranks these are, the folder's name decides
        text = path.read_bytes()
        path.write_bytes(text[: int(0.6 * len(text))])
    assert run(["analyze", str(tmp_path / "run"), "--sample", "--json", "-", "--no-cache", "--skip-steps", "1"]) == 0
    analysis = json.loads(capsys.readouterr().out)
    note = next(item["message"] for item in analysis["data_quality"] if item["code"] == "Q323")
    stated = float(note.split("communication is ")[1].split(" %")[0]) / 100
    parts = analysis["breakdown_us"]
    assert stated == pytest.approx(parts["exposed_communication"] / sum(parts.values()), abs=0.001)


def test_a_sample_of_several_jobs_is_refused(tmp_path, capsys):
    for number in range(2):
        write_ranks(tmp_path / f"run{number}", number, spread=0.008)
        for path in (tmp_path / f"run{number}").glob("*.json"):
            path.rename(path.with_name(f"job{number}_{path.name}"))
    assert run(["analyze", str(tmp_path), "--sample", "--no-cache"]) == 2
    assert "one job" in capsys.readouterr().err


def test_the_order_spreads_over_the_job_and_is_the_same_every_time():
    ranks = list(range(256))
    order = sampling_order(ranks, str)
    assert order == sampling_order(ranks, str)
    assert sorted(order) == ranks
    assert sorted(rank // 8 for rank in order[:32]) == list(range(32))
    assert len({rank // 64 for rank in order[:6]}) > 1  # not all of one corner of the job


def test_without_timed_steps_nothing_is_claimed():
    assert judge_sample([], 10, 4).half_range == pytest.approx(float("inf"))
