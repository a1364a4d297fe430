"""All 27 triples, message by message: they train like one process and send what the coefficients say."""

from __future__ import annotations

import numpy as np
import pytest
from message_simulation import train, train_single

from paro_advise.policies.strategy import ALL
from paro_advise.policies.traffic import Shape, coefficients, step_traffic

STEPS = 2


@pytest.mark.parametrize(("m", "g", "micro_batches"), [(2, 2, 1), (2, 3, 3), (4, 2, 2), (3, 4, 2)])
def test_all_27_triples(m, g, micro_batches):
    size = 2 * m * g
    wanted = train_single(m, g, micro_batches, STEPS, size)
    for strategy in ALL:
        whole, counted = train(str(strategy), m, g, micro_batches, STEPS, size)
        for values in whole.values():
            np.testing.assert_allclose(values, wanted, rtol=1e-9)
        found = coefficients(strategy)
        per_micro = found.parameter_per_micro_batch + found.gradient_per_micro_batch
        per_step = found.gradient_sync_per_step + found.parameter_sync_per_step
        traffic = step_traffic(strategy, Shape(group_size=m, num_groups=g, micro_batches=micro_batches), size, size)
        for messages, elements in counted:
            assert messages["intra"] == STEPS * (micro_batches * per_micro.intra + per_step.intra) * (m - 1), strategy
            assert messages["inter"] == STEPS * (micro_batches * per_micro.inter + per_step.inter) * (g - 1), strategy
            assert elements["intra"] == pytest.approx(STEPS * traffic.intra_bytes), strategy
            assert elements["inter"] == pytest.approx(STEPS * traffic.inter_bytes), strategy
