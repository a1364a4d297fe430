"""How much of a device's trace is read, and how often: most need one reading without most of their operators."""

from __future__ import annotations

import pytest
from helpers import analyze, facts_of
from test_attribution import forward
from test_device_and_host import STEP_US, lagging_rank
from trace_builder import TraceBuilder

from paro_advise.trace_parsers.kineto import reader


@pytest.fixture
def opened(monkeypatch):
    """The files that are opened to be read, one entry for each time."""
    found, blocks = [], reader.BlockReader

    def counted(ref):
        found.append(ref)
        return blocks(ref)

    monkeypatch.setattr(reader, "BlockReader", counted)
    return found


@pytest.mark.parametrize("lag_us", [0.0, 750.0])
def test_a_trace_that_links_its_kernels_is_read_once_and_tells_their_launches(lag_us, tmp_path, opened):
    """Reading it again with its launches, wherever a device idles or lags, cost half of an analysis."""
    facts = facts_of(lagging_rank(lag_us).write(tmp_path / "rank0.json"))
    assert len(opened) == 1
    assert all(step.queue_length is not None for step in facts.steps)


def test_a_collective_inside_a_norm_is_told_although_other_operators_are_not_read(tmp_path):
    trace = TraceBuilder(0, 8)
    for step in range(3):
        base = step * STEP_US
        trace.step(step, base, STEP_US)
        trace.backward(base + 100, 300, sequence=step + 1)
        trace.row("cpu_op", "aten::linear", base + 20, 5, 1, **{"External id": trace.next_id()})
        trace.row("cpu_op", "aten::linalg_vector_norm", base + 490, 30, 1, **{"External id": trace.next_id()})
        trace.collective("AllReduce", base + 520, 50, nelems=1, issue=base + 500, seq=step)
        trace.compute(base + 600, 300)
    norm = analyze(trace.write(tmp_path / "rank0.json")).collectives[0]
    assert (norm.state, norm.evidence) == ("other", "annotation")


@pytest.mark.parametrize("is_called", [True, False])  # else rows of the collective alone were recorded
@pytest.mark.parametrize("is_flushed_late", [True, False])
def test_operators_are_read_where_gradients_may_be_reduced_behind_a_backward_pass(
    is_flushed_late, is_called, tmp_path, opened
):
    """Then the next forward operator tells whether what is reduced there is of that pass; else nothing asks for them."""
    trace = TraceBuilder(0, 2)
    trace.step(1, 0, 1000)
    for micro, begin in enumerate((0, 400)):
        forward(trace, begin + 10, 2 * micro)
        trace.backward(begin + 80, 110, 2 * micro + 1)
        issue = begin + (195 if is_flushed_late else 150)
        trace.collective("AllReduce", begin + 210, 150, nelems=1 << 20, issue=issue, seq=micro)
        trace.compute(begin + 20, 180)
    trace.annotation("Optimizer.step#AdamW.step", 800, 100)
    trace.events = [event for event in trace.events if is_called or not event["name"].startswith("c10d::")]
    found = analyze(trace.write(tmp_path / "rank0.json"))
    assert len(opened) == (2 if is_flushed_late else 1)
    assert found.states["gradient"].count == 2
