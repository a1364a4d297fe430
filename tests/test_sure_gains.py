"""What a plan says where the best gain is not sure and a smaller one is."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from test_recommend import calibration

from paro_advise.advisor.prediction.advice.decision import RankedCandidates, decide
from paro_advise.advisor.prediction.candidates import baseline_candidate, candidates
from paro_advise.advisor.prediction.recommend import recommend
from paro_advise.advisor.prediction.scoring import Limits, score
from paro_advise.core.framework import Framework
from paro_advise.errors import UsageError
from paro_advise.policies.plan import Verdict, check_runnable


def decided(times):
    """What is decided where a step takes 100 ms now, these times by some ways and 120 ms by all others."""
    made, usual = calibration(step_us=100_000.0), np.full(200, 100_000.0)
    scored = [score(made, item, Limits(), times.get(item.name, 1.2 * usual)) for item in candidates(made)]
    field = RankedCandidates(
        baseline=score(made, baseline_candidate(made), Limits(), usual),
        scored=scored,
        eligible=scored,
        usable_today=None,
        replay_error_pct=0.0,
    )
    return decide(made, Limits(), field)[0]


def test_a_sure_gain_is_named_beside_one_that_must_be_measured_first():
    """100 ms now. III/2 takes 70 or 101 in every other draw, IIG/2 95 in all."""
    unsure = np.where(np.arange(200) % 2, 70_000.0, 101_000.0)
    plan = decided({"III/2 HO-Ring": unsure, "IIG/2 HO-Ring": np.full(200, 95_000.0)})
    assert plan.verdict == "measure first"
    assert "probability of 0.50" in plan.text
    assert " Surer, and less: IIG in groups of 2 (" in plan.text
    assert plan.text.endswith("with HO-Ring, speed-up 1.05x (1.05 to 1.05).")


def test_a_surer_gain_that_is_the_larger_one_is_not_called_less():
    """94.5 ms in five of nine draws, else 102, against 93.5 ms in all draws: equal within 3 %, and the former takes less memory."""
    unsure = np.where(np.arange(200) % 9 < 5, 94_500.0, 102_000.0)
    plan = decided({"III/2 HO-Ring": unsure, "NNN HO-Ring": np.full(200, 93_500.0)})
    assert plan.verdict == "measure first"
    assert plan.chosen.triple == "III"
    assert " Surer, for more memory: NNN (" in plan.text
    assert plan.text.count("NNN (") == 1  # not once more, as what is no different beyond noise


def test_the_refusal_to_run_a_frameworks_own_way_names_the_framework_that_ran():
    made = recommend(calibration(framework=Framework.FSDP2, is_gpu=True), Limits())
    own = next(choice for choice in made.candidates if choice.variant and "fsdp2" in choice.exact_frameworks)
    with pytest.raises(UsageError, match="must be one of the runtime's own strategies") as refused:
        check_runnable(replace(made, chosen=own, verdict=Verdict.CHANGE))
    assert "--export fsdp2=FILE" in refused.value.hint
