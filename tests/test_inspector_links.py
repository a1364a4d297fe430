"""Links by NCCL Inspector: each rank's time holds its waiting, a single message its latency, and means only means."""

from __future__ import annotations

import json

import pytest
from helpers import analyze

from paro_advise.advisor.rendering.analyses.analysis_tables import link_table
from paro_advise.advisor.rendering.texts.analysis_text import analysis_text, latency_text

RANKS, COLLECTIVES, NUM_BYTES = 4, 20, 100_000_000
TRANSFER_US, WAIT_US = 1000, 3000
FACTOR = 2 * (RANKS - 1) / RANKS  # of an all-reduce: nccl-tests' PERFORMANCE.md


def record(rank, number, time_us, num_bytes=NUM_BYTES):
    coll = {"coll": "AllReduce", "coll_sn": number, "coll_msg_size_bytes": num_bytes, "coll_exec_time_us": time_us}
    end_us = 1_766_407_620_000_000 + 10_000 * number
    return {
        "header": {"id": "0xa", "rank": rank, "n_ranks": RANKS, "nnodes": 1},
        "metadata": {"inspector_output_format_version": "v4.0", "dump_timestamp_us": end_us, "hostname": "n0"},
        "coll_perf": coll | {"coll_timing_source": "kernel_gpu"},
    }


def write(folder, records):
    for rank, rows in records.items():
        (folder / f"n0-pid{rank}.log").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def late_rank(ranks):
    """Rank 3 comes last to every all-reduce: the others' times hold 3 ms of waiting for it."""
    return {
        rank: [record(rank, number, TRANSFER_US + WAIT_US * (rank != 3)) for number in range(COLLECTIVES)]
        for rank in ranks
    }


def test_the_last_to_arrive_tells_what_moves_not_who_waits(tmp_path):
    (link,) = analyze(write(tmp_path, late_rank(range(RANKS)))).links
    assert link.num_samples == COLLECTIVES
    assert link.busbw_gbps == pytest.approx(NUM_BYTES * FACTOR / TRANSFER_US / 1e3, rel=0.05)
    assert not link.is_lower_bound


def test_where_ranks_are_missing_a_link_is_a_lower_bound(tmp_path):
    analysis = analyze(write(tmp_path, late_rank([0, 1])))
    assert analysis.links[0].is_lower_bound
    reached = NUM_BYTES * FACTOR / (TRANSFER_US + WAIT_US) / 1e3
    assert f"all-reduces over 4 ranks reach at least {reached:.3g} GB/s" in analysis.verdict.text
    # The same in the list of links, and in the page: not the least of single messages, nor as if it were all.
    (row,) = link_table(analysis).rows
    assert [cell.text for cell in row.cells if "GB/s" in cell.text] == [f"at least {reached:.3g} GB/s"]
    assert f"(intra): at least {reached:.3g} GB/s" in analysis_text(analysis)


def test_waiting_for_missing_ranks_is_no_latency_that_could_be_taken_off(tmp_path):
    """Four sizes at 400 GB/s and 20 us; short ones wait longest: what is left of a long one's time is too little."""
    rows, number = [], 0
    for num_bytes, waits_us in ((4 << 20, 150), (16 << 20, 120), (64 << 20, 60), (256 << 20, 5)):
        for _ in range(5):
            transfer_us = 20 + num_bytes * FACTOR / 400e3
            rows.append(record(0, number, transfer_us + waits_us, num_bytes))
            number += 1
    (link,) = analyze(write(tmp_path, {0: rows})).links
    assert link.is_lower_bound
    assert link.reached_gbps <= 400.0
    assert link.reached_gbps == pytest.approx((256 << 20) * FACTOR / rows[-1]["coll_perf"]["coll_exec_time_us"] / 1e3)
    assert latency_text(link).startswith("at most ")


def test_a_single_message_tells_what_was_reached_and_no_more(tmp_path):
    """1 MiB in 10 us: which part was latency nobody knows."""
    analysis = analyze(write(tmp_path, {rank: [record(rank, 0, 10, 1 << 20)] for rank in range(RANKS)}))
    reached = (1 << 20) * FACTOR / 10 / 1e3
    assert f"all-reduces over 4 ranks reach {reached:.3g} GB/s bus bandwidth" in analysis.verdict.text
    (link,) = analysis.links
    assert link.busbw_low_gbps == pytest.approx(reached)
    assert f"({link.busbw_low_gbps:.3g} to {link.busbw_high_gbps:,.0f})" in analysis_text(analysis)


LABELS = 'version="v5.1",node="n0",comm_name="pg",n_nodes="1",nranks="8",collective="AllReduce",message_size="32-64MB"'


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_a_mean_rate_is_taken_as_nccl_took_it(order, tmp_path):
    """The mean of rates times the mean of times is more than any message of the range holds: 10 GB/s were moved."""
    lines = [
        f"nccl_bus_bandwidth_gbs{{{LABELS}}} 10.0",
        f"nccl_collective_exec_time_microseconds{{{LABELS}}} 25000.0",
    ]
    (tmp_path / "a.prom").write_text("".join(lines[place] + "\n" for place in order))
    (link,) = analyze(tmp_path / "a.prom").links
    assert link.reached_gbps == pytest.approx(10.0, rel=1e-6)


def test_metrics_sorted_by_name_find_each_other(tmp_path):
    labels = [LABELS.replace("32-64MB", size) for size in ("32-64MB", "64-128MB")]
    rates = [f"nccl_bus_bandwidth_gbs{{{item}}} 10.0\n" for item in labels]
    times = [f"nccl_collective_exec_time_microseconds{{{item}}} 8000.0\n" for item in labels]
    alone = f"nccl_bus_bandwidth_gbs{{{LABELS.replace('32-64MB', '1-2MB')}}} 10.0\n"
    (tmp_path / "a.prom").write_text("".join([*rates, alone, *times]))
    analysis = analyze(tmp_path / "a.prom")
    assert analysis.links[0].num_samples == 2
    assert any(
        "lines of NCCL Inspector's metrics broken or out of range, left out: 1" in notice.message
        for notice in analysis.data_quality
    )


def test_collectives_are_named_as_people_write_them(tmp_path):
    rows = [record(0, 0, 10)]
    rows[0]["coll_perf"]["coll"] = "Gossip"
    text = analyze(write(tmp_path, {0: rows})).verdict.text
    assert "unknown over" not in text
