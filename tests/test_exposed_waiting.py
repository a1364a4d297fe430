"""What is exposed of waiting decides what limits a step, and indexes of devices which ranks share a node."""

from __future__ import annotations

import pytest
from helpers import analyze, write_run
from test_judgements import evidence
from trace_builder import TraceBuilder, fsdp_rank

from paro_advise.advisor.analysis.regimes import Regime, judge_state
from paro_advise.core.model_state import State


@pytest.mark.parametrize(
    ("devices", "per_node"),
    [((0, 1, 2, 3), 4), ((0, 1, 0, 1), 2), ((0, 0, 0, 0), 4), ((3, 2, 1, 0), 4), ((0, None, 0, 1), 4)],
    ids=["one node", "two ranks on each of two nodes", "each sees its own", "another order", "one unknown"],
)
def test_indexes_of_devices_tell_nodes_that_are_not_filled(devices, per_node, tmp_path):
    builders = [fsdp_rank(rank, 4) for rank in range(4)]  # of nodes with eight devices
    for builder, device in zip(builders, devices, strict=True):
        for event in builder.events:
            if event["cat"] == "kernel" and device is not None:
                event["args"]["device"] = device
    run = analyze(write_run(tmp_path / "run", builders)).run
    assert (run.gpus_per_node, run.num_nodes) == (per_node, 4 // per_node)


def test_waiting_is_said_where_most_of_what_is_exposed_is_that():
    """Most of the transfers are hidden here, and most of what is exposed is waiting for a late rank."""
    numbers = {"count": 9, "total_us": 33_500.0, "exposed_us": 18_700.0, "wait_us": 16_000.0}
    found = judge_state(State.PARAMETER, evidence(**numbers, exposed_wait_share=0.85), 90_100.0)
    assert found.regime == Regime.BANDWIDTH_INTER  # of all its time
    assert "(20.8% of the step), 85% of that waiting for other ranks" in found.text
    hidden = judge_state(State.PARAMETER, evidence(**numbers, exposed_wait_share=0.1), 90_100.0)
    assert "waiting" not in hidden.text


def test_a_step_whose_exposed_communication_mostly_waits_is_bound_by_waiting(tmp_path):
    """Transfers of 100 us are hidden but for 10; one of 60 us begins when the last rank comes, 140 us late."""

    def rank(number):
        trace = TraceBuilder(number, 4)
        for step in range(4):
            base = 1000.0 * step
            trace.step(step, base, 1000.0)
            trace.backward(base + 300, 400, sequence=step + 1)
            trace.compute(base, 790)
            for place in range(3):
                start = base + 300 + 110 * place
                trace.collective(
                    "ReduceScatter", start, 100, nelems=1 << 24, issue=start - 100, seq=10 * step + place,
                    owners=("FSDP::post_backward_reduce (blocks.0)",),
                )  # fmt: skip
            late = 140.0 if number == 2 else 0.0
            trace.collective(
                "ReduceScatter", base + 790 + late, 200 - late, nelems=1 << 24, issue=base + 600, seq=10 * step + 9,
                owners=("FSDP::root_post_backward_callback", "FSDP::post_backward_reduce"),
            )  # fmt: skip
        return trace

    analysis = analyze(write_run(tmp_path / "run", [rank(number) for number in range(4)]))
    gradient = analysis.states["gradient"]
    assert gradient.wait_us < 0.5 * gradient.total_us
    assert "bandwidth bound" not in analysis.verdict.text
    assert analysis.verdict.regime == "straggler"
