"""What every rank of bench_training.py and bench_prediction.py does: trains a model under all systems in turn.

A system is there only while it is its turn: the threads of each of gloo's communicators wake a hundred
times a second, which those of twenty systems would do to whoever is measured.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import gc
import json
import os
import sys
import time
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812 - PyTorch's own convention
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.distributed_c10d import _world
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.nn.parallel import DistributedDataParallel

from paro_advise.runtime import engine_of, shard
from paro_advise.runtime.capture import capture
from paro_advise.runtime.ho_ring import Algorithm, Collectives, use_ho_ring
from paro_advise.runtime.ho_ring.fsdp2 import HoRingReduceScatter

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch import nn

    Step = Callable[[int], float]

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "examples"))
from train import Transformer  # the same model as the example's

LEARNING_RATE = 1e-3
# Of a turn; the first does not count.
STEPS = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """What is trained; as it stands 6 blocks and the root, 7 units, 10 million parameters."""

    vocabulary: int = 1480
    width: int = 352
    layers: int = 6
    heads: int = 4
    sequence: int = 32
    micro_batches: int = 4


FSDP2: dict[str, dict[str, Any]] = {
    "fsdp2_zero3": {},
    "fsdp2_zero3_ring": {"ring": True},
    "fsdp2_zero3_ho_ring": {"ho_ring": True},
    "fsdp2_zero3_int": {"reshard": "node"},
    "fsdp2_zero2": {"reshard": False},
    "fsdp2_hsdp_gated": {"hsdp": True},
    "fsdp2_hsdp_gated_zero2": {"hsdp": True, "reshard": False},
}


def tokens_of(work: Work, step: int, micro: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(10_000 * step + 100 * micro + dist.get_rank())
    return torch.randint(0, work.vocabulary, (1, work.sequence + 1), generator=generator)


def step_of(work: Work, model: nn.Module, optimizer: torch.optim.Optimizer, accumulate: Callable[[bool], Any]) -> Step:
    """Return a function that trains one step and returns this rank's loss."""

    def run(step: int) -> float:
        total = 0.0
        for micro in range(work.micro_batches):
            tokens = tokens_of(work, step, micro)
            with accumulate(micro == work.micro_batches - 1):
                loss = (
                    F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten()) / work.micro_batches
                )
                loss.backward()
            total += loss.item()
        optimizer.step()
        optimizer.zero_grad()
        return total

    return run


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, foreach=True)


def fsdp2(
    work: Work,
    first: nn.Module,
    *,
    hsdp: bool = False,
    reshard: bool | Literal["node"] = True,
    ring: bool = False,
    ho_ring: bool = False,
) -> Step:
    world, local = dist.get_world_size(), int(os.environ["LOCAL_WORLD_SIZE"])
    if hsdp:
        mesh = init_device_mesh("cpu", (world // local, local), mesh_dim_names=("replicate", "shard"))
    else:
        mesh = init_device_mesh("cpu", (world,))
    model: Any = copy.deepcopy(first)
    after = local if isinstance(reshard, str) else reshard
    for block in model.blocks:
        fully_shard(block, mesh=mesh, reshard_after_forward=after)
    fully_shard(model, mesh=mesh, reshard_after_forward=after)
    if ring:
        # Gloo's own reduce-scatter is an all-reduce: the honest baseline has a true ring.
        collectives = Collectives.of(ranks_per_node=1)
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.set_custom_reduce_scatter(HoRingReduceScatter(collectives, Algorithm.HO_RING))
    if ho_ring:
        use_ho_ring(model, algorithm=Algorithm.HO_RING)

    @contextlib.contextmanager
    def accumulate(last: bool) -> Iterator[None]:
        if hsdp:
            model.set_requires_all_reduce(last)
        yield

    return step_of(work, model, adamw(model), accumulate)


def ddp(work: Work, first: nn.Module) -> Step:
    model = DistributedDataParallel(copy.deepcopy(first))
    return step_of(work, model, adamw(model), lambda last: contextlib.nullcontext() if last else model.no_sync())


def ours(work: Work, first: nn.Module, strategy: str, group_size: int, ending: contextlib.ExitStack) -> Step:
    model: Any = copy.deepcopy(first)
    model, optimizer = shard(model, adamw(model), strategy, group_size=group_size)
    engine = engine_of(model)
    for executor in (engine.gradients.executor, engine.updates.executor):
        ending.callback(executor.ending())
    return step_of(work, model, optimizer, lambda last: contextlib.nullcontext() if last else model.no_sync())


def deepspeed(work: Work, first: nn.Module, stage: int, hpz: int = 1) -> Step:
    import deepspeed as ds

    zero: dict[str, Any] = {"stage": stage}
    if stage == 3:
        zero |= {"stage3_param_persistence_threshold": 0}
        if hpz > 1:
            zero["zero_hpz_partition_size"] = hpz
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": work.micro_batches,
        "zero_optimization": zero,
        "zero_force_ds_cpu_optimizer": False,
        "zero_allow_untested_optimizer": True,
    }
    model = copy.deepcopy(first)
    engine, *_ = ds.initialize(model=model, optimizer=adamw(model), config=config)

    def run(step: int) -> float:
        total = 0.0
        for micro in range(work.micro_batches):
            tokens = tokens_of(work, step, micro)
            loss = F.cross_entropy(engine(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
            engine.backward(loss)
            engine.step()
            total += loss.item() / work.micro_batches
        return total

    return run


def build(name: str, work: Work, first: nn.Module, ending: contextlib.ExitStack) -> Step:
    """Return the step function of a system by name, such as fsdp2_zero3, ours_NIG_2 or deepspeed_3."""
    if name in FSDP2:
        return fsdp2(work, first, **FSDP2[name])
    kind, *rest = name.split("_")
    if kind == "ddp":
        return ddp(work, first)
    if kind == "deepspeed":
        return deepspeed(work, first, int(rest[0]), int(os.environ["LOCAL_WORLD_SIZE"]) if "hpz" in rest else 1)
    return ours(work, first, rest[0], int(rest[1]), ending)


@contextlib.contextmanager
def turn_of(name: str, work: Work, first: nn.Module) -> Iterator[Step]:
    """Build a system, and take it and its communicators down.

    DeepSpeed remembers its communicators, and ours serve the next model, so both stay.
    """
    known = _world.pg_map  # there is no public list of groups
    before = set(known)
    with contextlib.ExitStack() as ending:
        yield build(name, work, first, ending)
    if not name.startswith(("deepspeed", "ours")):
        dist.barrier()
        gc.collect()
        for group in [group for group in known if group not in before]:
            dist.destroy_process_group(group)


def record(step: Step, folder: Path) -> None:
    """Capture a system as a user would: ten steps, the last three of them profiled."""
    with capture(folder, steps="7:10") as recording:
        for number in range(10):
            step(number)
            recording.step()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("systems", nargs="+")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--traces", type=Path, help="profile the first system at the end")
    for field in fields(Work):
        parser.add_argument(f"--{field.name.replace('_', '-')}", type=int, default=field.default)
    options = parser.parse_args()
    work = Work(**{field.name: getattr(options, field.name) for field in fields(Work)})
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    torch.manual_seed(0)
    first = Transformer(work.vocabulary, work.width, work.layers, work.heads)
    if dist.get_rank() == 0:
        print(json.dumps({"kind": "model", "parameters": sum(p.numel() for p in first.parameters())}), flush=True)
    for _ in range(options.rounds):
        for name in options.systems:
            with turn_of(name, work, first) as step:
                for number in range(STEPS):
                    measure(name, step, number)
                del step  # its communicators go with it
    if options.traces:
        with turn_of(options.systems[0], work, first) as step:
            record(step, options.traces)
    dist.destroy_process_group()


def measure(name: str, step: Step, number: int) -> None:
    """Take a step and print the time of the slowest rank, and the mean loss."""
    dist.barrier()
    begin = time.perf_counter()
    loss = step(number)
    took = torch.tensor([time.perf_counter() - begin], dtype=torch.float64)
    dist.all_reduce(took, dist.ReduceOp.MAX)
    mean = torch.tensor([loss])
    dist.all_reduce(mean)
    if dist.get_rank() == 0:
        row = {
            "kind": "step",
            "system": name,
            "step": number,
            "seconds": took.item(),
            "loss": mean.item() / dist.get_world_size(),
        }
        print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
