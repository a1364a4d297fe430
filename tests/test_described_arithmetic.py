"""What a described step tells of arithmetic: little where communication may fill it."""

from __future__ import annotations

import pytest
from test_descriptions import described, described_text

from paro_advise.advisor.description.calibrate import calibrate_described
from paro_advise.advisor.prediction.candidates import candidates
from paro_advise.advisor.prediction.recommend import recommend
from paro_advise.advisor.prediction.scoring import Limits
from paro_advise.advisor.prediction.step_replay import measured_links, step_us
from paro_advise.errors import InputError

ETHERNET = """
[model]
parameters = 1.09e9
layers = 16
sequence_length = 8192
gradient_type = "fp32"
[cluster]
nodes = 2
gpus_per_node = 8
device = "A100"
inter_gbps = 9.9
[run]
framework = "fsdp2"
strategy = "GGG"
micro_batches = 4
step_time_ms = 1
"""


@pytest.mark.parametrize("stated", [8.8, 9.9, 11.4])
def test_a_step_that_communication_may_fill_tells_little_of_arithmetic(stated):
    """What the true links and arithmetic make of the run is described, with links as people state them, up to 15 % off."""
    true = calibrate_described(described(ETHERNET), micro_batch_us=350_000.0)
    hybrid = next(item for item in candidates(true) if item.name == "III/8 native")
    truth = float(step_us(true, hybrid, measured_links(true)))
    words = {"inter_gbps = 9.9": f"inter_gbps = {stated}", "step_time_ms = 1": f"step_time_ms = {true.step_us / 1e3}"}
    run = calibrate_described(described(described_text(ETHERNET, **words)))
    assert "the step tells little of the arithmetic" in " ".join(run.assumptions)
    plan = recommend(run, Limits())
    assert abs(plan.confidence.replay_error_pct) < 2
    (found,) = [
        item.predicted.step_time_us
        for item in plan.candidates
        if (item.triple, item.group_size, item.collectives, item.variant) == ("III", 8, "native", "")
    ]
    assert found.p10 < truth < found.p90


def test_measured_rates_that_leave_no_time_are_refused():
    """At 5 GB/s the gathers of 1.09e9 parameters alone, four times forward and backward, take longer than the step."""
    words = {"inter_gbps = 9.9": "inter_gbps = 5", "step_time_ms = 1": "step_time_ms = 3334"}
    with pytest.raises(InputError, match="leave time for arithmetic"):
        calibrate_described(described(described_text(ETHERNET, **words)))


LORA = """
[model]
parameters = 70e9
trained_parameters = 7e9
layers = 80
sequence_length = 4096
[cluster]
nodes = 2
gpus_per_node = 8
device = "H100"
[run]
framework = "fsdp2"
strategy = "GGG"
compute_mfu_pct = [50, 50.001]
"""


def test_frozen_parameters_have_no_gradients_to_compute():
    """Two operations forward and two back to the layer before; two more where a gradient is made. 989 TFLOPS a H100."""
    tokens = 4096 * 16
    by_hand_us = (4 * 63e9 + 6 * 7e9) * tokens / (16 * 0.5 * 989e12) * 1e6
    run = calibrate_described(described(LORA))
    assert run.compute_us - run.update.measured_us == pytest.approx(by_hand_us, rel=1e-3)
    assert run.backward_share == pytest.approx((2 * 63 + 4 * 7) / (4 * 63 + 6 * 7))
    assert "48% of the arithmetic is forward" in " ".join(run.assumptions)


@pytest.mark.parametrize("stated", ["mfu_pct = 0.35", "compute_mfu_pct = [0.3, 0.5]"])
def test_a_fraction_is_no_percentage(stated):
    """0.35 % would be a step of minutes."""
    with pytest.raises(InputError, match="must be in percent"):
        calibrate_described(described(described_text(LORA, **{"compute_mfu_pct = [50, 50.001]": stated})))
