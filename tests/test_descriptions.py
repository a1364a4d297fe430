"""A run in people's own words: link rates by group shape, the calibration that follows, plans, questions."""

from __future__ import annotations

import codecs
import hashlib
import re
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path

import pytest

from paro_advise.advisor.cli import run
from paro_advise.advisor.description.benchmarks import with_benchmarks
from paro_advise.advisor.description.calibrate import calibrate_described
from paro_advise.advisor.description.read import description_from_toml
from paro_advise.advisor.prediction.candidates import baseline_candidate, candidates
from paro_advise.advisor.prediction.recommend import recommend
from paro_advise.advisor.prediction.scoring import Limits, score
from paro_advise.advisor.prediction.step_replay import demand_us, measured_links, step_us
from paro_advise.advisor.ranks.links.link import Link
from paro_advise.core.collective import Op
from paro_advise.core.span import GroupSpan
from paro_advise.errors import InputError, UsageError
from paro_advise.policies.link_rates import LinkRates
from paro_advise.policies.plan import read_plan
from paro_advise.policies.strategy import CollectiveBackend, Strategy

ROOT = Path(__file__).resolve().parents[1]
# Rates that hold no latency, and no device, whose optimizer would take time: what is left can be written by hand.
PLAIN = """
[model]
parameters = 1e9
layers = 10
gradient_type = "fp32"
[cluster]
nodes = 4
gpus_per_node = 8
links = { message = "1TB", all_gather = { 1 = 200, 4 = 100 }, reduce_scatter = { 1 = 200, 4 = 80 }, all_reduce = { 1 = 400, 4 = 160 } }
[run]
strategy = "NNN"
step_time_ms = 1000
reductions_beside_backward = []
"""
GPUS = """
[model]
parameters = 8.86e9
layers = 32
sequence_length = 4096
[cluster]
nodes = 16
gpus_per_node = 8
device = "H100"
device_memory = "80GB"
inter_gbps = 200
[run]
framework = "fsdp2"
strategy = "GGG"
micro_batches = 2
mfu_pct = 27
"""


def described_text(text, **changes):
    for old, new in changes.items():
        assert old in text
        text = text.replace(old, new)
    return text


def described(text=PLAIN):
    return description_from_toml(text.encode(), "run.toml")


def latency_ms(messages, ranks=32, local=8):
    """Of ring all-reduces: 2 (n - 1) messages after each other, one of each node's to another one (14 us), the rest inside (5 us)."""
    return messages * 2 * (ranks - 1) * (14 + (local - 1) * 5) / local / 1e3


def without_latency(calibration):
    found = {name: replace(getattr(calibration, name), value=1e-9) for name in ("inter_alpha_us", "intra_alpha_us")}
    return replace(calibration, **found)


def native(calibration, triple):
    return next(
        item
        for item in candidates(calibration)
        if str(item.strategy) == triple and item.collectives == CollectiveBackend.NATIVE and not item.variant
    )


# ---- link rates ---------------------------------------------------------------------------------------------

RATES = LinkRates(
    ranks_per_node=8,
    num_bytes=256e6,
    gbps={Op.ALL_GATHER: ((1, 250.0), (2, 184.0), (8, 64.0)), Op.ALL_REDUCE: ((1, 430.0), (2, 360.0), (8, 100.0))},
)


def test_listed_rates_are_what_whole_nodes_get():
    assert RATES.busbw_gbps(Op.ALL_GATHER, 2, 8) == 184.0
    assert RATES.busbw_gbps(Op.ALL_REDUCE, 8, 8) == 100.0
    assert RATES.busbw_gbps(Op.REDUCE_SCATTER, 2, 8) == 184.0  # not listed: as the gather, which sends as much
    # Four is half way between two and eight on a scale of doublings.
    assert RATES.busbw_gbps(Op.ALL_GATHER, 4, 8) == pytest.approx((184.0 * 64.0) ** 0.5)
    assert RATES.busbw_gbps(Op.ALL_GATHER, 64, 8) == 64.0


def test_groups_with_fewer_ranks_of_a_node_miss_network_cards():
    """The cards of 8 ranks move 184 GB/s at best, so one moves 23: what they take of a byte's time grows by those missing."""
    by_hand = 1 / (1 / 64.0 + 1 / 23.0 - 1 / 184.0)
    assert RATES.busbw_gbps(Op.ALL_GATHER, 8, 1) == pytest.approx(by_hand)
    assert RATES.busbw_gbps(Op.ALL_GATHER, 1, 2) == 250.0  # inside a node there are none


def test_without_sums_in_the_network_an_all_reduce_is_a_scatter_and_a_gather():
    rates = LinkRates(
        ranks_per_node=8,
        num_bytes=1e12,
        gbps={Op.ALL_GATHER: ((4, 50.0),), Op.REDUCE_SCATTER: ((4, 100.0),), Op.ALL_REDUCE: ((4, 200.0),)},
        sums_in_network=False,
    )
    assert rates.busbw_gbps(Op.ALL_REDUCE, 4, 8) == pytest.approx(2 / (1 / 50.0 + 1 / 100.0))


def test_latency_is_not_counted_twice():
    """A message of the benchmark's own size takes what the benchmark measured, latency included."""
    size, hop_us = 2 * 8, 5.0
    wire = RATES.wire_gbps(Op.ALL_GATHER, 2, 8, hop_us)
    sent = 256e6 * (size - 1) / size
    assert sent / (wire * 1e3) + (size - 1) * hop_us == pytest.approx(sent / (184.0 * 1e3))


@pytest.mark.parametrize(
    "rates", [{}, {Op.ALL_GATHER: ((0, 1.0),)}, {Op.ALL_GATHER: ((1, 0.0),)}, {Op.BROADCAST: ((1, 1.0),)}]
)
def test_rates_that_cannot_be_are_refused(rates):
    with pytest.raises(UsageError):
        LinkRates(ranks_per_node=8, num_bytes=1e6, gbps=rates)


def rates_of(text):
    calibration = calibrate_described(described(text))
    return calibration.shaped.rates, calibration


def test_stated_cards_move_as_much_between_two_nodes_as_between_many():
    rates, _ = rates_of(GPUS)
    assert [rates.busbw_gbps(Op.ALL_GATHER, nodes, 8) for nodes in (2, 3, 16, 64)] == [200.0] * 4


def test_what_is_stated_counts_where_nothing_is_listed():
    rates, calibration = rates_of(
        GPUS.replace("inter_gbps = 200", "intra_gbps = 100").replace("mfu_pct = 27", "mfu_pct = 5")
    )
    assert rates.busbw_gbps(Op.ALL_GATHER, 1, 8) == 100.0
    assert calibration.intra_gbps.source == "stated"
    assert any("inter-node bandwidth: 25 GB/s assumed" in note for note in calibration.assumptions)
    listed = GPUS.replace("inter_gbps = 200", "inter_gbps = 150\nlinks = { all_gather = { 1 = 250 } }")
    rates, calibration = rates_of(listed)
    assert (rates.busbw_gbps(Op.ALL_GATHER, 1, 8), rates.busbw_gbps(Op.ALL_GATHER, 4, 8)) == (250.0, 150.0)
    assert (calibration.intra_gbps.source, calibration.inter_gbps.source) == ("benchmark", "stated")


def test_what_is_stated_beside_listed_rates_is_said_not_to_count():
    _, calibration = rates_of(
        GPUS.replace("inter_gbps = 200", "inter_gbps = 150\nlinks = { all_gather = { 2 = 190 } }")
    )
    assert any("cluster.inter_gbps of 150 is not used" in note for note in calibration.assumptions)


def test_an_unknown_device_is_said():
    _, calibration = rates_of(GPUS.replace("H100", "FOO9000").replace("mfu_pct = 27", "step_time_ms = 1631"))
    assert any("cluster.device is not known" in note for note in calibration.assumptions)


def test_many_micro_batches_take_no_longer_to_replay():
    """A step of a million micro-batches has three kinds of them."""
    calibration = calibrate_described(described(GPUS.replace("micro_batches = 2", "micro_batches = 1000000")))
    candidate = baseline_candidate(calibration)
    few = replace(calibration, micro_batches=10)
    links = measured_links(calibration)
    assert demand_us(calibration, candidate, links) >= demand_us(few, candidate, links)


# ---- calibration --------------------------------------------------------------------------------------------


def test_arithmetic_is_what_the_described_step_leaves_beside_communication():
    """4e9 bytes of gradients in 10 messages on 32 ranks, all-reduced at 160 GB/s behind backward."""
    calibration = calibrate_described(described())
    all_reduce_ms = 2 * 4e9 * 31 / 32 / 160e9 * 1e3
    assert calibration.compute_us / 1e3 == pytest.approx(1000 - all_reduce_ms - latency_ms(10), rel=1e-4)
    assert float(step_us(calibration, baseline_candidate(calibration), measured_links(calibration))) == pytest.approx(
        1e6, rel=1e-6
    )


def test_another_strategy_pays_its_own_bytes_at_its_own_rates():
    """ZeRO-1 of the same run: gradients scattered at 80 GB/s, parameters of 2 bytes gathered at 100 GB/s."""
    calibration = without_latency(calibrate_described(described()))
    before_ms, scatter_ms, gather_ms = (
        volume * 31 / 32 / rate * 1e3 for volume, rate in ((8e9, 160e9), (4e9, 80e9), (2e9, 100e9))
    )
    predicted = float(step_us(calibration, native(calibration, "NNG"), measured_links(calibration))) / 1e3
    assert predicted == pytest.approx(1000 - before_ms - latency_ms(10) + scatter_ms + gather_ms, rel=1e-4)


def test_hybrid_groups_use_the_rates_of_their_shape():
    """III/8: gathers and scatters at 200 GB/s inside, all-reduces of an eighth by one card of each rank between nodes."""
    calibration = without_latency(calibrate_described(described()))
    inside_ms = (2e9 * 2 - 2e9 / 10 + 4e9) * 7 / 8 / 200e9 * 1e3  # the last unit stays gathered for backward
    card = 100.0 / 8
    rail = 1 / (1 / 160.0 + 1 / card - 1 / 100.0) * 1e9
    between_ms = 2 * 4e9 / 8 * 3 / 4 / rail * 1e3
    candidate = replace(native(calibration, "III"), group_size=8, overlaps_gathers=False)
    predicted = float(step_us(calibration, candidate, measured_links(calibration))) / 1e3
    assert predicted == pytest.approx(calibration.compute_us / 1e3 + inside_ms + between_ms, rel=1e-3)


def test_what_runs_beside_backward_costs_half_its_time():
    """100 layers: all but the last reduction run beside backward, which takes longer by half of their time."""
    text = PLAIN.replace("layers = 10", "layers = 100").replace("reductions_beside_backward = []", "")
    calibration = calibrate_described(described(text))
    all_reduce_ms = 2 * 4e9 * 31 / 32 / 160e9 * 1e3
    assert calibration.compute_us / 1e3 == pytest.approx(1000 - (all_reduce_ms + latency_ms(100)) / 2, rel=0.003)


def test_tensor_parallelism_cuts_the_model_and_takes_ranks_of_a_node():
    calibration = calibrate_described(described(PLAIN.replace("[run]", "[parallel]\ntensor = 4\n[run]")))
    assert (calibration.world_size, calibration.ranks_per_node, calibration.parameters) == (8, 2, pytest.approx(0.25e9))
    assert calibration.job_world_size == 32


def test_tensor_parallelism_across_nodes_leaves_nothing_to_hide_behind():
    text = PLAIN.replace("reductions_beside_backward = []", "").replace("[run]", "[parallel]\ntensor = 16\n[run]")
    calibration = calibrate_described(described(text))
    assert (calibration.world_size, calibration.ranks_per_node) == (2, 1)
    assert calibration.beside_backward == frozenset()
    assert not baseline_candidate(calibration).overlaps_reductions
    assert any("spans nodes" in note for note in calibration.assumptions)


def test_pipelines_are_said_not_to_be_modelled():
    text = PLAIN.replace("[run]", "[parallel]\npipeline = 2\n[run]")
    plan = recommend(calibrate_described(described(text)), Limits())
    assert plan.verdict != "change"
    assert any("pipeline parallelism is not modelled" in note for note in plan.assumptions)


def test_the_optimizer_moves_30_bytes_a_parameter_through_the_memory():
    """Adam on fp32 states and gradients, 16-bit parameters; 80 % of an H100's 3.35 TB/s; a sharded one less."""
    calibration = calibrate_described(
        described(PLAIN.replace("gpus_per_node = 8", 'gpus_per_node = 8\ndevice = "H100"'))
    )
    whole_us = 30 * 1e9 / (0.8 * 3.35e12) * 1e6
    assert calibration.update.us(1) == pytest.approx(whole_us)
    assert calibration.update.us(32) == pytest.approx(whole_us / 32)


def test_states_take_the_bytes_that_are_stated():
    text = PLAIN.replace(
        "[cluster]", "bytes_per_parameter = { parameter = 2, gradient = 6, optimizer = 12 }\n[cluster]"
    )
    calibration = calibrate_described(described(text))
    import numpy as np

    candidate = replace(baseline_candidate(calibration), strategy=Strategy.parse("NNG"))
    assert score(calibration, candidate, Limits(), np.ones(1)).memory.total == pytest.approx(1e9 * (8 + 12 / 32))


@pytest.mark.parametrize(("reduced", "taken"), [("bf16", 2), ("fp32", 4)])
def test_whole_gradients_take_the_type_that_they_are_reduced_in(reduced, taken):
    """FSDP2 adds up what it does not reduce yet in ``reduce_dtype``: a plan that counts 2 bytes runs out of memory."""
    import numpy as np

    calibration = calibrate_described(described(PLAIN.replace('"fp32"', f'"{reduced}"')))
    for strategy, expected in (("GNG", taken), ("NNG", taken), ("GGG", 2 / 32)):
        candidate = replace(baseline_candidate(calibration), strategy=Strategy.parse(strategy))
        memory = score(calibration, candidate, Limits(), np.ones(1)).memory
        assert memory.gradient == pytest.approx(expected * 1e9), strategy
    assert memory.total == pytest.approx(1e9 * 16 / 32)  # sharded ones are among the 16 bytes of mixed precision


def test_speed_in_tokens_and_in_mfu_is_the_same_step():
    """6 operations a parameter and token: 8.86e9 parameters, 2 x 4,096 tokens a rank at 27 % of 989e12 a second."""
    step_s = 6 * 8.86e9 * 2 * 4096 / (0.27 * 989e12)
    by_mfu = calibrate_described(described(GPUS))
    by_tokens = calibrate_described(
        described(GPUS.replace("mfu_pct = 27", f"tokens_per_s = {128 * 2 * 4096 / step_s}"))
    )
    assert by_mfu.step_us == pytest.approx(step_s * 1e6)
    assert by_tokens.step_us == pytest.approx(step_s * 1e6)


def test_before_anything_ran_a_range_of_arithmetic_widens_every_range():
    narrow = recommend(calibrate_described(described(GPUS)), Limits())
    wide = recommend(
        calibrate_described(described(GPUS.replace("mfu_pct = 27", "compute_mfu_pct = [30, 60]"))), Limits()
    )

    def width(plan):
        step = plan.candidates[0].predicted.step_time_us
        return step.p90 / step.p10

    assert width(wide) > 1.5 > width(narrow)
    assert any("nothing was measured" in note for note in wide.assumptions)
    assert "no trace was read" in wide.confidence.text


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("layers = 10", "layer = 10", "layer"),
        ("nodes = 4", 'nodes = "four"', "cluster.nodes"),
        ("nodes = 4", "nodes = 0", "cluster.nodes"),
        ('strategy = "NNN"', "", "strategy"),
        ('message = "1TB"', 'message = "much"', "size such as"),
        ("step_time_ms = 1000", "", "how fast"),
        ("step_time_ms = 1000", "step_time_ms = 1000\nmfu_pct = 30", "once"),
        ("step_time_ms = 1000", "step_time_ms = 40", "leave time for arithmetic"),
        ("step_time_ms = 1000", "tokens_per_s = 1000", "sequence_length"),
        ("[run]", "[parallel]\ntensor = 3\n[run]", "tensor x pipeline"),
        ("[run]", "[parallel]\ntensor = 32\n[run]", "two or more data-parallel ranks"),
        ('strategy = "NNN"', 'strategy = "III/5"', "divide"),
        ("parameters = 1e9", "parameters = 1e9\ntrained_parameters = 2e9", "at most"),
        ("[model]", "[model", "TOML"),
        ("parameters = 1e9", "parameters = nan", "parameters"),
        ("layers = 10", "layers = 100000000", "layers"),
        ("all_reduce = { 1 = 400", "all_reduce = { 1 = 1e-320", "all_reduce"),
        ('message = "1TB"', 'message = "1B"', "1MB or more"),
        ("step_time_ms = 1000", "step_time_ms = 1000\ncompute_mfu_pct = [30, 40]", "once"),
        ('strategy = "NNN"', 'strategy = "III/16"\n', None),
        ('strategy = "NNN"', 'strategy = "III/3"', "divide"),
        ("nodes = 4", "nodes = 3\nnodes_per_pod = 2", "nodes_per_pod must divide"),
        ("nodes = 4", "nodes = 4\nnodes_per_pod = 2", "must come without"),
    ],
)
def test_what_a_description_gets_wrong_is_named(old, new, said):
    if said is None:  # groups of two nodes are right
        assert calibrate_described(described(PLAIN.replace(old, new, 1))).baseline_group_size == 16
        return
    with pytest.raises(InputError, match=said):
        calibrate_described(described(PLAIN.replace(old, new, 1)))


@pytest.mark.parametrize("named", ["foo", "III/8"])
def test_what_runs_beside_backward_is_named_by_triples(named):
    with pytest.raises(UsageError):
        calibrate_described(
            described(PLAIN.replace("reductions_beside_backward = []", f'reductions_beside_backward = ["{named}"]'))
        )


def test_benchmarks_of_one_rank_a_node_are_no_whole_nodes():
    links = [Link(op=Op.ALL_GATHER, span=span, group_size=16, num_samples=4, alpha_us=1.0, busbw_gbps=rate,
                  busbw_low_gbps=rate, busbw_high_gbps=rate, source="x")
             for span, rate in ((GroupSpan.INTER, 20.0), (GroupSpan.MIXED, 150.0))]  # fmt: skip
    description, unused = with_benchmarks(described(GPUS), links)
    assert dict(description.cluster.links.all_gather) == {2: 150.0}
    assert unused == ("all_gather of 16 ranks (inter)",)
    with pytest.raises(InputError, match="all 8 ranks"):
        with_benchmarks(described(GPUS), links[:1])


def test_an_unknown_strategy_is_refused():
    with pytest.raises(UsageError):
        calibrate_described(described(PLAIN.replace("NNN", "XYZ")))


def test_the_same_way_to_run_is_never_a_change():
    """A large model whose arithmetic hides all communication: noise must not say that the run is quicker than itself."""
    changes = {"8.86e9": "70e9", "layers = 32": "layers = 80", "nodes = 16": "nodes = 8", "= 200": "= 400"}
    text = described_text(GPUS, **changes, **{"mfu_pct = 27": "compute_mfu_pct = [30, 60]", '"fsdp2"': '"deepspeed"'})
    plan = recommend(calibrate_described(described(text)), Limits(device_memory_bytes=80e9))
    assert plan.verdict == "keep"
    assert plan.chosen.triple == plan.baseline.triple
    assert plan.chosen.predicted.speedup.p50 == pytest.approx(1.0)


def test_arithmetic_that_nobody_measured_may_be_quicker_than_its_median():
    """All candidates share it: none is held at the median while the run as it is gets quicker."""
    plan = recommend(
        calibrate_described(described(GPUS.replace("mfu_pct = 27", "compute_mfu_pct = [30, 60]"))), Limits()
    )
    baseline = plan.baseline.predicted.step_time_us
    same = next(
        item for item in plan.candidates if (item.triple, item.variant, item.collectives) == ("GGG", "", "native")
    )
    assert same.predicted.step_time_us.p10 == pytest.approx(baseline.p10, rel=0.05)


# ---- the command --------------------------------------------------------------------------------------------


@pytest.fixture
def gpus_toml(tmp_path):
    path = tmp_path / "run.toml"
    path.write_text(GPUS, encoding="utf-8")
    return path


def test_a_description_becomes_a_plan(gpus_toml, tmp_path, capsys):
    plan = tmp_path / "plan.json"
    assert run(["recommend", str(gpus_toml), "-o", str(plan), "--html", str(tmp_path / "plan.html")]) == 0
    made = read_plan(str(plan))
    assert made.baseline.triple == "GGG"
    assert made.preconditions.world_size == 128
    assert made.preconditions.device_memory_bytes == 80e9
    assert "No trace was read" in capsys.readouterr().out


def test_a_byte_order_mark_changes_neither_description_nor_plan(gpus_toml, tmp_path, capsys):
    plan = tmp_path / "plan.json"
    gpus_toml.write_bytes(codecs.BOM_UTF8 + gpus_toml.read_bytes())
    assert run(["recommend", str(gpus_toml), "-o", str(plan)]) == 0
    expected = read_plan(str(plan))
    plan.write_bytes(codecs.BOM_UTF8 + plan.read_bytes())
    assert read_plan(str(plan)) == expected


def test_a_plan_says_what_it_was_made_from(gpus_toml, tmp_path):
    plan = tmp_path / "plan.json"
    assert run(["recommend", str(gpus_toml), "-o", str(plan)]) == 0
    origin = read_plan(str(plan)).origin
    digest = hashlib.sha256(gpus_toml.read_bytes()).hexdigest()
    assert [(item.name, item.sha256) for item in origin.inputs] == [("run.toml", digest)]
    assert (origin.tool_version, origin.framework) == (version("paro-advise"), "FSDP2")
    assert (origin.data_parallel_ranks, origin.model_parallel_ranks) == (128, 1)
    links = {link.what: (link.value, link.source) for link in origin.links}
    assert links["inter_gbps"] == (200.0, "stated")
    assert links["inter_alpha_us"][1] == "prior"


def test_benchmarks_beside_a_description_give_the_links(gpus_toml, tmp_path, capsys):
    """nccl-tests of 8 and of 16 ranks: 300 and 150 GB/s of bus bandwidth at every size, inside a node and on two."""
    for size, rate in ((8, 300.0), (16, 150.0)):
        rows = []
        for num_bytes in (1 << 20, 1 << 24, 1 << 28, 1 << 32):
            algbw = rate * size / (size - 1)
            row = f"{num_bytes / algbw / 1e3:.2f} {algbw:.2f} {rate:.2f} 0"
            rows.append(f"{num_bytes} {num_bytes // 4} float none -1 {row} {row}")
        head = "# nThread 1 nGpus 1\n# Collective test starting: all_gather_perf\n"
        ranks = "".join(
            f"#  Rank {i} Group 0 Pid 1 on node{i // 8} device {i % 8} [0x00] NVIDIA H100\n" for i in range(size)
        )
        columns = "#       size         count      type   redop    root     time   algbw   busbw #wrong     time   algbw   busbw #wrong\n"
        (tmp_path / f"gather{size}.txt").write_text(head + ranks + columns + "\n".join(rows) + "\n", encoding="utf-8")
    gpus_toml.write_text(GPUS.replace("inter_gbps = 200\n", "").replace("nodes = 16", "nodes = 2"), encoding="utf-8")
    plan = tmp_path / "plan.json"
    logs = [str(tmp_path / f"gather{size}.txt") for size in (8, 16)]
    assert run(["recommend", str(gpus_toml), *logs, "-o", str(plan)]) == 0
    values = {item.what: (item.value, item.source) for item in read_plan(str(plan)).sensitivities}
    assert values.get("inter-node bandwidth (GB/s)", (150, "benchmark")) == (pytest.approx(150, rel=0.03), "benchmark")
    assert values.get("intra-node bandwidth (GB/s)", (300, "benchmark")) == (pytest.approx(300, rel=0.03), "benchmark")
    assert "assumed, no rate" not in capsys.readouterr().out


def test_options_that_a_description_says_itself_are_refused(gpus_toml, capsys):
    assert run(["recommend", str(gpus_toml), "--gpus-per-node", "4"]) == 2
    assert "cluster.gpus_per_node" in capsys.readouterr().err


def test_a_description_that_is_none_ends_with_a_message(tmp_path, capsys):
    path = tmp_path / "run.toml"
    path.write_bytes(b"\x00" * 100)
    assert run(["recommend", str(path)]) == 3
    path.write_bytes(b"#" * (2 << 20))
    assert run(["recommend", str(path)]) == 3
    assert run(["recommend", str(tmp_path / "none.toml")]) == 3
    assert capsys.readouterr().err.count("error[") == 3


def test_the_descriptions_of_the_documentation_are_read(tmp_path):
    """The whole one of docs/descriptions.md, alone and with the table of links that the page shows."""
    page = (ROOT / "docs" / "descriptions.md").read_text(encoding="utf-8")
    whole, links = re.findall(r"^```toml\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
    for text in (whole, whole + links):
        path = tmp_path / "run.toml"
        path.write_text(text, encoding="utf-8")
        assert run(["recommend", str(path), "-q", "-o", str(tmp_path / "plan.json"), "--force"]) == 0
    assert {link.what: link.source for link in read_plan(str(tmp_path / "plan.json")).origin.links}[
        "inter_gbps"
    ] == "benchmark"
