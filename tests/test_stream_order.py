"""Communication on streams, as on GPUs: proved on CPUs, where a simulated device judges the order of every operator."""

from __future__ import annotations

import contextlib
import gc
import weakref
from functools import partial
from pathlib import Path

import pytest
import torch
from ranks import run_ranks
from torch import nn

from paro_advise.runtime.sharding.exchange.streams import StreamExecutor
from paro_advise.runtime.sharding.exchange.usage import Missing
from paro_advise.runtime.sharding.phases.singles import Singles

WORKER = Path(__file__).parent / "workers" / "stream_order.py"


@pytest.mark.parametrize(
    "strategies",
    ["NNN,NNI,NNG,NII,NIG,NGG,INI", pytest.param("ING,III,IIG,IGG,GNG,GIG,GGG", marks=pytest.mark.variant)],
)
def test_streams_are_in_order_and_the_host_never_waits(strategies):
    """Equal to one process; nothing is read too early, written or given away too soon; no step asks for a number."""
    done = run_ranks(WORKER, strategies)
    assert done.returncode == 0, done.stdout + done.stderr[-6000:]
    assert [line.split()[1] for line in done.stdout.splitlines() if line.startswith("held")] == strategies.split(",")


def test_an_executor_that_leaves_an_order_out_is_found():
    """Without waiting for a job, without waiting for what a job reads, without waiting before memory is let go."""
    done = run_ranks(WORKER, "broken")
    assert done.returncode == 0, done.stdout + done.stderr[-6000:]
    for name in ("drain", "submit", "release"):
        assert f"without {name} found" in done.stdout


class _RecordingStream:
    """A stream that only remembers what it was asked to wait for."""

    def __init__(self):
        self.waited = []

    def record_event(self):
        return object()

    def wait_event(self, event):
        self.waited.append(event)


class _RecordingStreams:
    def __init__(self):
        self.script, self.own = _RecordingStream(), _RecordingStream()

    def current(self):
        return self.script

    def create(self):
        return self.own

    def using(self, _):
        return contextlib.nullcontext()


class _Model:
    """What a job uses, and what holds the executor itself."""

    def __init__(self, executor):
        self.executor = executor


def test_a_model_whose_jobs_are_pending_is_freed_and_its_memory_is_waited_for():
    """An update that goes on, or a backward pass that broke off: what ends the executor may not keep the model."""
    streams = _RecordingStreams()
    model = _Model(StreamExecutor("an update", streams, depth=3))
    weakref.finalize(model, model.executor.ending()).atexit = False
    for _ in range(2):
        model.executor.submit(partial(vars, model))
    assert streams.script.waited == []
    is_there = weakref.ref(model)
    del model
    gc.collect()
    assert is_there() is None
    assert len(streams.script.waited) == 2, "the script's stream gets the memory of both jobs"


def test_a_model_whose_jobs_were_waited_for_waits_no_more():
    streams = _RecordingStreams()
    executor = StreamExecutor("an update", streams, depth=1)
    for _ in range(3):
        executor.submit(lambda: None)
    executor.drain()
    waited = len(streams.script.waited)
    executor.ending()()
    assert len(streams.script.waited) == waited


def test_scalars_with_gradients_on_this_rank_are_taken_without_reading_numbers(monkeypatch):
    """To read a number of a device's tensor stops the host: CLIP's temperature would do so in each step."""
    scalars = [nn.Parameter(torch.tensor(value)) for value in (0.5, 2.0)]
    singles = Singles(scalars)
    for parameter, gradient in zip(scalars, (3.0, 5.0), strict=True):
        parameter.grad = torch.tensor(gradient)
    sums = singles.gradients(2) * 2  # another rank with the same
    monkeypatch.setattr(torch.Tensor, "tolist", lambda _: pytest.fail("a number was read"))
    singles.take(sums, 2.0, Missing.NONE)
    assert [
        torch.equal(scalar.grad, torch.tensor(value)) for scalar, value in zip(scalars, (3.0, 5.0), strict=True)
    ] == [True] * 2


def test_a_scalar_without_a_gradient_gets_the_mean_only_where_another_rank_has_one():
    used, unused = scalars = [nn.Parameter(torch.tensor(value)) for value in (0.5, 2.0)]
    singles = Singles(scalars)
    sums = singles.gradients(2)
    sums += torch.tensor([4.0, 0.0, 1.0, 0.0])
    singles.take(sums, 2.0, Missing.NONE)
    assert used.grad.item() == 2.0
    assert unused.grad is None
