"""Trains as on a device with streams: equal to one process, nothing used too early or too late, the host never waits.

Usage: stream_order.py STRATEGIES | stream_order.py broken
"""

from __future__ import annotations

import copy
import gc
import sys

import torch
import torch.distributed as dist
from sharding_worker import (
    Model,
    compare,
    compare_parameters,
    data,
    loss_of,
    optimizer_of,
    train_sharded,
    train_single,
    whole_parameters,
)
from stream_races import SimulatedDevice

from paro_advise.runtime import shard
from paro_advise.runtime.sharding import engine as engine_module
from paro_advise.runtime.sharding.exchange.streams import Fence, StreamExecutor, StreamJob

STEPS = range(2)
made = []


def executor_for(_device, what, depth=2):
    made.append(StreamExecutor(what, devices[-1], depth))
    return made[-1]


devices: list[SimulatedDevice] = []


def sharded(first, strategy, kind="adamw", **options):
    devices.append(SimulatedDevice())
    model = copy.deepcopy(first)
    return shard(model, optimizer_of(kind, model), strategy, group_size=2, native_collectives=True, **options)


def one_step(model, optimizer, step):
    """A step that asks for no number; two micro-batches, clipping."""
    for micro in range(2):
        model.set_requires_gradient_sync(micro == 1)
        loss_of(model, data(step, micro, dist.get_rank())).backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()


def hold(strategies):
    torch.manual_seed(0)
    first = Model()
    reference = copy.deepcopy(first)
    wanted = train_single(reference, "adamw", STEPS)
    parameters = dict(reference.named_parameters())
    for strategy in strategies:
        model, optimizer = sharded(first, strategy)
        with devices[-1]:
            got = train_sharded(model, optimizer, STEPS)
        compare(strategy, got, wanted, 1e-6)
        compare_parameters(strategy, whole_parameters(model), parameters, 1e-6)
        assert not devices[-1].problems, (strategy, devices[-1].problems[:5])
        # Adam asks for the number of its steps, which it keeps on the host; SGD asks for nothing.
        model, optimizer = sharded(first, strategy, "sgd", overlap_updates=True)
        with devices[-1]:
            for step in STEPS:
                one_step(model, optimizer, step)
        assert not devices[-1].problems, (strategy, devices[-1].problems[:5])
        assert not devices[-1].host_waits, (strategy, devices[-1].host_waits)
        if dist.get_rank() == 0:
            print("held", strategy, flush=True)


def without(name, replacement, owner):
    """Take one of the executor's orders away, and return what the device says of a training step."""
    plain = getattr(owner, name)
    setattr(owner, name, replacement)
    try:
        torch.manual_seed(0)
        found = set()
        for strategy in ("NNG", "III"):
            model, optimizer = sharded(Model(), strategy)
            with devices[-1]:
                one_step(model, optimizer, 0)
                one_step(model, optimizer, 1)
            found |= {problem.split(" on ")[0] for problem in devices[-1].problems}
        return found
    finally:
        setattr(owner, name, plain)


def broken():
    def drain(self):
        self._pending.clear()
        self._unwaited.clear()

    def release(self):
        self._uses = None

    def submit(self, job):
        owner = self._streams.current()
        with self._streams.using(self._stream), torch.no_grad():
            job()
        issued = Fence(owner, self._stream.record_event())
        self._pending.append(StreamJob(self._streams, issued, job))
        self._unwaited.append(issued)
        return self._pending[-1]

    for name, replacement, owner in (
        ("drain", drain, StreamExecutor),
        ("submit", submit, StreamExecutor),
        ("release", release, StreamJob),
    ):
        found = without(name, replacement, owner)
        if dist.get_rank() == 0:
            print("without", name, "found" if found else "nothing", sorted(found)[:4], flush=True)


def main():
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    engine_module.executor_for = executor_for
    if sys.argv[1] == "broken":
        broken()
    else:
        hold(sys.argv[1].split(","))
    gc.collect()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
