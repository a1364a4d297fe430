"""Latency and bandwidth of a link, told apart by sizes, by other links, or by what a backend can have."""

from __future__ import annotations

import numpy as np
import polars as pl
import pytest

from paro_advise.advisor.analysis.state_summary import latency_share
from paro_advise.advisor.ranks.links.latency import Fabric, tell_latency
from paro_advise.advisor.ranks.links.link_fit import fit_links

NCCL = Fabric(is_gloo=False, device_name=None, ranks_per_node=8)
GLOO = Fabric(is_gloo=True, device_name=None, ranks_per_node=2)


def samples(sizes, *, alpha_us, busbw_gbps, noise=0.0, slow_share=0.0, seed=0):
    rng = np.random.default_rng(seed)
    rows = []
    for size in sizes:
        for _ in range(12):
            time = alpha_us + size * 7 / 8 / busbw_gbps / 1e3
            time *= 1 + noise * abs(rng.normal())
            time *= 3.0 if rng.random() < slow_share else 1.0
            rows.append(("all_gather", "inter", 8, size, time, False))
    return pl.DataFrame(rows, schema=["op", "span", "group_size", "bytes", "time_us", "lone"], orient="row")


def test_latency_and_bandwidth_are_recovered_from_noisy_transfers():
    data = samples([1 << 16, 1 << 20, 1 << 24, 1 << 27], alpha_us=40, busbw_gbps=25, noise=0.05, slow_share=0.2)
    ((link,), impossible) = fit_links(data, NCCL)
    assert impossible == 0
    assert link.busbw_gbps == pytest.approx(25, rel=0.1)
    assert link.alpha_us == pytest.approx(40, rel=0.3)
    assert link.busbw_low_gbps <= link.busbw_gbps * 1.05
    assert link.source == "measured"
    assert latency_share([link], "all_gather", "inter", 8, 1 << 10, NCCL).low > 0.85
    assert latency_share([link], "all_gather", "inter", 8, 1 << 27, NCCL).high < 0.05


@pytest.mark.parametrize(
    ("large", "small", "algorithm"),
    [
        ("ncclDevKernel_AllReduce_Sum_f32_TREE_LL", "ncclDevKernel_AllReduce_Sum_f32_TREE_LL", "tree"),
        ("ncclDevKernel_AllReduce_Sum_f32_RING_LL", "ncclDevKernel_AllReduce_Sum_f32_TREE_LL", "ring"),
        ("ncclKernel_AllReduce_TREE_LL_Sum_float(ncclDevComm*)", "ncclKernel_AllReduce_RING_LL_Sum_float", "tree"),
        ("ncclKernel", "ncclKernel", ""),
    ],
)
def test_kernels_name_the_algorithm_by_which_most_of_the_bytes_moved(large, small, algorithm):
    sizes = {1 << 10: small, 1 << 26: large}
    data = samples(sizes, alpha_us=40, busbw_gbps=25).with_columns(
        pl.lit("all_reduce").alias("op"), pl.col("bytes").replace_strict(sizes).alias("name")
    )
    ((link,), _) = fit_links(data, NCCL)
    assert link.algorithm == algorithm
    ((gather,), _) = fit_links(data.with_columns(pl.lit("all_gather").alias("op")), NCCL)
    assert not gather.algorithm


def test_what_the_sizes_cannot_tell_stays_unknown():
    ((small,), _) = fit_links(samples([256], alpha_us=40, busbw_gbps=25), NCCL)
    assert small.busbw_gbps is None
    assert small.alpha_us == pytest.approx(40, rel=0.01)
    ((large,), _) = fit_links(samples([1 << 26], alpha_us=40, busbw_gbps=25), NCCL)
    assert large.alpha_us is None
    assert large.busbw_gbps == pytest.approx(25, rel=0.05)


@pytest.mark.parametrize("seed", range(20))
def test_a_range_holds_its_own_estimate(seed):
    rng = np.random.default_rng(seed)
    sizes = [int(size) for size in rng.integers(1 << 10, 1 << 24, size=rng.integers(1, 6))]
    data = samples(sizes, alpha_us=float(rng.uniform(5, 500)), busbw_gbps=25, noise=0.5, slow_share=0.3, seed=seed)
    (fitted, _) = fit_links(data, NCCL)
    (link,) = tell_latency(fitted, Fabric(is_gloo=False, device_name=None, ranks_per_node=8))
    assert link.alpha_low_us <= link.alpha_us <= link.alpha_high_us
    if link.busbw_gbps is not None and link.busbw_low_gbps is not None:
        assert link.busbw_low_gbps <= link.busbw_gbps <= link.busbw_high_gbps


def test_no_range_reaches_what_no_device_moves():
    """A message that may be next to nothing but latency says no bandwidth: the upper end is what is possible at all."""
    (fitted, _) = fit_links(one_size("reduce_scatter", "inter", 2_000_000, 65.0), NCCL)
    (link,) = tell_latency(fitted, NCCL)
    assert link.alpha_high_us > 64.0  # 2 MB in what is left of 65 us is more than 1750 GB/s
    assert link.busbw_high_gbps == 2000.0


H100 = Fabric(is_gloo=False, device_name="NVIDIA H100 80GB HBM3", ranks_per_node=8)


def one_size(op, span, size, time_us):
    rows = [(op, span, 8, size, float(time_us), False)] * 12
    return pl.DataFrame(rows, schema=["op", "span", "group_size", "bytes", "time_us", "lone"], orient="row")


def test_short_messages_of_one_size_are_latency_where_the_device_is_known():
    # 655,360 bytes over NVLink at 220 GB/s: 7/8 * 655360 / 220e3 = 2.6 us to move, 30 us of latency: 92 %.
    (fitted, _) = fit_links(one_size("all_gather", "intra", 655_360, 30 + 2.6), NCCL)
    (link,) = tell_latency(fitted, H100)
    share = latency_share([link], "all_gather", "intra", 8, 655_360, NCCL)
    assert share.low > 0.5
    assert share.low <= 0.92 <= share.high
    assert link.busbw_low_gbps <= 220 <= link.busbw_high_gbps
    assert link.latency_source == "data sheet"


def test_the_same_time_cannot_tell_where_the_device_is_not_known():
    (fitted, _) = fit_links(one_size("all_gather", "", 655_360, 32.6), NCCL)
    (link,) = tell_latency(fitted, Fabric(is_gloo=False, device_name=None, ranks_per_node=None))
    share = latency_share([link], "all_gather", "", 8, 655_360, NCCL)
    assert share.low < 0.5 < share.high


def test_long_messages_of_one_size_are_bandwidth_beside_a_latency_bound_scalar():
    # 1.49 GiB of all-to-all at 158 GB/s and one scalar all-reduce: the scalar does not speak for all.
    big, move_us = 1_600_000_000, 1_600_000_000 * 7 / 8 / 158e3
    data = pl.concat([one_size("all_to_all", "intra", big, move_us), one_size("all_reduce", "intra", 4, 40.0)])
    links = tell_latency(fit_links(data, NCCL)[0], H100)
    assert latency_share(links, "all_to_all", "intra", 8, big, NCCL).high < 0.05
    assert latency_share(links, "all_reduce", "intra", 8, 4, NCCL).low == 1.0


def test_other_operations_of_the_group_tell_the_latency_of_one_size():
    many = samples([1 << 16, 1 << 20, 1 << 24, 1 << 27], alpha_us=40, busbw_gbps=25)
    # As a ring an all-reduce takes twice the messages: 80 us, and 2 * 7/8 * 2 MiB / 25 GB/s = 147 us.
    links = fit_links(pl.concat([many, one_size("all_reduce", "inter", 1 << 21, 80 + 147)]), NCCL)[0]
    told = {link.op: link for link in tell_latency(links, H100)}
    assert told["all_reduce"].alpha_low_us <= 80 <= told["all_reduce"].alpha_high_us
    assert told["all_reduce"].busbw_low_gbps <= 25 <= told["all_reduce"].busbw_high_gbps
    assert told["all_reduce"].latency_source == "other links"


def of_32_ranks(op, size, time_us):
    rows = [(op, "mixed", 32, size, float(time_us), False)] * 12
    return pl.DataFrame(rows, schema=["op", "span", "group_size", "bytes", "time_us", "lone"], orient="row")


def test_no_network_takes_milliseconds_before_the_first_byte():
    """40 MB beside other traffic in 4,677 us, 240 MB alone in 5,430 (42.8 GB/s): a line gives 257 GB/s after 4.5 ms.

    The most that NCCL's constants allow 31 messages between 4 nodes is 291 us, four times that over sockets.
    """
    data = pl.concat([of_32_ranks("all_gather", 40_000_000, 4677), of_32_ranks("all_gather", 240_000_000, 5430)])
    ((line,), _) = fit_links(data, NCCL)
    assert line.busbw_gbps > 200
    (link,) = tell_latency([line], H100)
    assert link.alpha_high_us < 300
    assert 42.8 <= link.busbw_gbps <= link.busbw_high_gbps < 48


def test_latency_of_sockets_is_believed():
    """31 messages of 30 us each are three times what NCCL's constants allow."""
    sizes = (1 << 20, 1 << 23, 1 << 26)
    data = pl.concat([of_32_ranks("all_gather", size, 31 * 30 + size * 31 / 32 / 5e3) for size in sizes])
    (link,) = tell_latency(fit_links(data, NCCL)[0], H100)
    assert link.alpha_us == pytest.approx(930, rel=0.05)
    assert link.busbw_gbps == pytest.approx(5, rel=0.05)


def test_another_operation_whose_bandwidth_contradicts_tells_nothing():
    """At 25 GB/s, and at 1.6 times that, the bytes alone take longer than the collective: NCCL's constants tell."""
    many = samples([1 << 16, 1 << 20, 1 << 24, 1 << 27], alpha_us=40, busbw_gbps=25)
    took_us = 2 * 7 / 8 * (1 << 24) / 60e3  # 60 GB/s
    told = {
        link.op: link
        for link in tell_latency(
            fit_links(pl.concat([many, one_size("all_reduce", "inter", 1 << 24, took_us)]), NCCL)[0], H100
        )
    }
    assert 0 < told["all_reduce"].alpha_us < 0.9 * took_us


@pytest.mark.parametrize("noise", [-0.02, 0.02])
def test_noise_does_not_decide_what_of_a_long_message_is_latency(noise):
    """44 and 229 MB at 20 GB/s on one node: a line through them begins above or below 0, by what their times deviate."""
    sizes = {44_000_000: 1.0, 229_000_000: 1 + noise}
    rows = [
        ("all_reduce", "intra", 8, size, 2 * 7 / 8 * size / 20e3 * factor, False)
        for size, factor in sizes.items()
        for _ in range(12)
    ]
    data = pl.DataFrame(rows, schema=["op", "span", "group_size", "bytes", "time_us", "lone"], orient="row")
    links = tell_latency(fit_links(data, NCCL)[0], NCCL)
    assert latency_share(links, "all_reduce", "intra", 8, 44_000_000, NCCL).high < 0.5
    assert links[0].busbw_gbps == pytest.approx(20, rel=0.05)


def test_latency_of_gloo_hides_behind_a_port_that_ranks_share():
    """Of 8 ranks on 4 nodes a port of 50 MB/s moves a block in 3.28 ms; the 1.1 ms of a message pass meanwhile.

    Added up, they would be a quarter of the transfer, and the port would look 1.3 times as fast as it is.
    """
    size, message_us = 1_312_000, 1100.0
    rows = [("all_gather", "mixed", 8, size, message_us + size * 7 / 8 / 50, False)] * 12
    rows += [("all_reduce", "mixed", 8, 4, 2 * 7 * message_us, False)] * 12
    data = pl.DataFrame(rows, schema=["op", "span", "group_size", "bytes", "time_us", "lone"], orient="row")
    links = tell_latency(fit_links(data, GLOO)[0], GLOO)
    gather = next(link for link in links if link.op == "all_gather")
    assert gather.busbw_low_gbps <= 0.05 <= gather.busbw_high_gbps
    assert gather.busbw_gbps == pytest.approx(0.05, rel=0.01)
    assert latency_share(links, "all_gather", "mixed", 8, size, GLOO).high < 0.1
    assert gather.alpha_us + gather.hidden_us == pytest.approx(7 * message_us, rel=0.01)


@pytest.mark.parametrize(("alpha_us", "busbw_gbps"), [(40, 90), (700, 90), (2000, 5)])
def test_a_benchmark_has_the_latency_that_its_sizes_tell(alpha_us, busbw_gbps):
    """Nothing else runs beside its messages, so that a slow network, or sockets, may take any time."""
    data = samples([1 << 20, 1 << 22, 1 << 24, 1 << 27], alpha_us=alpha_us, busbw_gbps=busbw_gbps)
    fitted, _ = fit_links(data, NCCL, is_alone=True)
    (link,) = tell_latency(fitted, NCCL, alone=fitted)
    assert link.alpha_us == pytest.approx(alpha_us, rel=0.01)
    assert link.busbw_gbps == pytest.approx(busbw_gbps, rel=0.01)


def test_what_takes_no_longer_for_more_bytes_in_a_benchmark_is_latency():
    rows = [("all_gather", "inter", 2, size, 2200.0, False) for size in (1 << 20, 1 << 22, 1 << 23)] * 4
    data = pl.DataFrame(rows, schema=["op", "span", "group_size", "bytes", "time_us", "lone"], orient="row")
    (link,) = tell_latency(fit_links(data, NCCL, is_alone=True)[0], NCCL)
    assert (link.alpha_us, link.busbw_gbps) == (pytest.approx(2200.0), None)


@pytest.mark.parametrize("noise", [0.0, 0.02])
@pytest.mark.parametrize(
    "sizes",
    [(2_000_000, 8_000_000, 32_000_000), (80_000, 200_000, 500_000), (80_000, 300_000, 2_000_000, 8_000_000)],
    ids=["paced by bytes", "paced by latency", "paced by either"],
)
def test_sizes_tell_what_gloo_takes_for_others(sizes, noise):
    """8 ranks on 4 nodes with ports of 50 MB/s and 1.1 ms a message, as played; a line through it says neither."""
    message_us, rng = 1100.0, np.random.default_rng(0)

    def took_us(size):
        moving_us = size * 7 / 8 / 50
        return max(moving_us + message_us, moving_us / 4 + 7 * message_us)  # two halves under way of each of two ranks

    rows = [
        ("all_gather", "mixed", 8, size, took_us(size) * (1 + noise * rng.random()), False)
        for size in sizes
        for _ in range(12)
    ]
    data = pl.DataFrame(rows, schema=["op", "span", "group_size", "bytes", "time_us", "lone"], orient="row")
    (link,) = tell_latency(fit_links(data, GLOO)[0], GLOO)
    assert link.latency_source == "measured"
    assert link.busbw_gbps == pytest.approx(0.05, rel=0.01 + 5 * noise)
    assert link.alpha_us + link.hidden_us == pytest.approx(7 * message_us, rel=0.01 + 10 * noise)
    assert link.alpha_low_us <= link.alpha_us <= link.alpha_high_us


def test_no_message_takes_less_than_the_latency_that_others_tell_of_it():
    """Large messages that are slower than small ones hide the latency, but it is not longer than the shortest one."""
    rows = [("all_gather", "inter", 8, size, time, False) for size, time in ((1 << 20, 60.0), (1 << 24, 2000.0))] * 8
    rows += [("reduce_scatter", "inter", 8, 4096, 400.0, False)] * 8
    data = pl.DataFrame(rows, schema=["op", "span", "group_size", "bytes", "time_us", "lone"], orient="row")
    gather = next(link for link in tell_latency(fit_links(data, NCCL)[0], NCCL) if link.op == "all_gather")
    assert gather.alpha_high_us <= 60.0


def two_rings(gather_us, scatter_us):
    """Return gathers of 1.28 MB and reduce-scatters ten times as large over 32 ranks, each of one size."""
    rows = [("all_gather", "mixed", 32, 1_280_000, gather_us, False)] * 12
    rows += [("reduce_scatter", "mixed", 32, 12_800_000, scatter_us, False)] * 12
    return pl.DataFrame(rows, schema=["op", "span", "group_size", "bytes", "time_us", "lone"], orient="row")


@pytest.mark.parametrize("seed", range(20))
def test_two_rings_of_one_size_each_tell_together_what_neither_tells(seed):
    """A byte takes on the wire what it takes; reducing costs bandwidth and latency, within what is allowed for."""
    rng = np.random.default_rng(seed)
    alpha_us, gbps = rng.uniform(50, 250), rng.uniform(40, 200)
    of_scatter, of_gbps = rng.uniform(0.6, 1.7), rng.uniform(0.7, 1.4)
    gather_us = alpha_us + 1_280_000 * 31 / 32 / gbps / 1e3
    scatter_us = of_scatter * alpha_us + 12_800_000 * 31 / 32 / (of_gbps * gbps) / 1e3
    links = {link.op: link for link in tell_latency(fit_links(two_rings(gather_us, scatter_us), NCCL)[0], NCCL)}
    gather = links["all_gather"]
    assert gather.alpha_low_us <= 1.001 * alpha_us
    assert gather.alpha_high_us >= min(0.99 * gather_us, alpha_us)
    assert (gather.alpha_high_us - gather.alpha_low_us) / gather_us < 0.5


def test_a_gather_whose_latency_two_rings_tell_is_bound_by_it():
    """184 us and 90 GB/s: of 198 us 93 % are latency. Alone it may have been 94 us of them, the least of NCCL's."""
    links = tell_latency(fit_links(two_rings(198.0, 322.0), NCCL)[0], NCCL)
    assert latency_share(links, "all_gather", "mixed", 32, 1_280_000, NCCL).low > 0.75
    alone = fit_links(two_rings(198.0, 322.0).filter(pl.col("op") == "all_gather"), NCCL)[0]
    assert latency_share(tell_latency(alone, NCCL), "all_gather", "mixed", 32, 1_280_000, NCCL).low < 0.5
