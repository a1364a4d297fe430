"""Every rank issues the collectives of each communicator in one order, however late its host is.

Each rank sleeps at random before blocks compute, before their gradients arrive, and before jobs of its communication
threads; what it then asks of every process group is written down and compared with the group's other members.

Usage: issue_order.py PASSES
"""

from __future__ import annotations

import collections
import gc
import os
import random
import sys
import threading
import time

import torch
import torch.distributed as dist
from torch import nn

from paro_advise.policies.strategy import KEPT
from paro_advise.runtime import shard
from paro_advise.runtime.ho_ring.worker import Worker

# All that a script, FSDP2 or our runtime may ask of a group, under the names of all versions of torch.
OPERATIONS = (
    "allgather", "_allgather_base", "all_gather_single", "allgather_into_tensor_coalesced", "allreduce",
    "allreduce_coalesced", "reduce_scatter", "_reduce_scatter_base", "reduce_scatter_single",
    "reduce_scatter_tensor_coalesced", "broadcast", "alltoall", "alltoall_base", "gather", "scatter", "reduce",
)  # fmt: skip
MOST_DELAY_S = 0.004
WIDTH, BLOCKS = 24, 4

issued: dict[str, list[tuple[str, int]]] = collections.defaultdict(list)
lock = threading.Lock()
chance = random.Random()


def size_of(argument):
    """Elements of a tensor, of a list of them, or of lists of lists."""
    if isinstance(argument, torch.Tensor):
        return argument.numel()
    return sum(map(size_of, argument)) if isinstance(argument, list | tuple) else 0


def write_down(name):
    plain = getattr(dist.ProcessGroup, name)

    def asked(group, *arguments, **options):
        with lock:
            issued[group.group_name].append((name, sum(map(size_of, arguments))))
        return plain(group, *arguments, **options)

    setattr(dist.ProcessGroup, name, asked)


def be_late(*_arguments):
    time.sleep(chance.random() * MOST_DELAY_S)


def with_late_threads():
    plain = Worker.submit

    def submit(worker, job):
        def late():
            be_late()
            return job()

        return plain(worker, late)

    Worker.submit = submit


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)
        self.outer = nn.Linear(WIDTH, WIDTH)

    def forward(self, hidden):
        be_late()
        hidden = hidden + self.outer(torch.relu(self.inner(hidden)))
        hidden.register_hook(be_late)
        return hidden


def train(strategy, passes):
    model = nn.Sequential(*(Block() for _ in range(BLOCKS)), nn.Linear(WIDTH, 4))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    shard(model, optimizer, str(strategy), group_size=2, ranks_per_node=2, native_collectives=True)
    with lock:
        issued.clear()
    for number in range(passes):
        last = number % 3 == 2 or number == passes - 1
        model.set_requires_gradient_sync(last)
        model(torch.randn(2, WIDTH)).square().mean().backward()
        if last:
            be_late()
            optimizer.step()
            optimizer.zero_grad()
    dist.barrier()


def gathered():
    """What each rank asked of each group."""
    with lock:
        mine = {name: list(asked) for name, asked in issued.items()}
    everyone = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, mine)
    return everyone


def compare(strategy, everyone):
    """Hold what each group's members asked of it against each other."""
    total = 0
    for name in sorted({name for rank in everyone for name in rank}):
        orders = [(rank, asked[name]) for rank, asked in enumerate(everyone) if name in asked]
        first, order = orders[0]
        for rank, other in orders[1:]:
            assert other == order, f"{strategy}: group {name}: rank {first} asks {order}, rank {rank} {other}"
        total += len(order)
    return total


def main():
    passes = int(sys.argv[1])
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    chance.seed(dist.get_rank())
    for name in OPERATIONS:
        if hasattr(dist.ProcessGroup, name):
            write_down(name)
    with_late_threads()
    for strategy in KEPT:
        torch.manual_seed(0)
        train(strategy, passes)
        everyone = gathered()
        total = compare(strategy, everyone)
        if dist.get_rank() == 0:
            print(strategy, total, flush=True)
    # The comparison would have seen two collectives that change places on one rank.
    changed = next(order for order in everyone[3].values() if len(set(order)) > 1)
    place = next(number for number in range(1, len(changed)) if changed[number] != changed[number - 1])
    changed[place - 1], changed[place] = changed[place], changed[place - 1]
    try:
        compare(strategy, everyone)
    except AssertionError:
        sees = True
    else:
        sees = False
    ranks = [None] * dist.get_world_size()
    dist.all_gather_object(ranks, sees)
    if dist.get_rank() == 0:
        print(f"a change is seen by {sum(ranks)} ranks", flush=True)
    gc.collect()
    dist.destroy_process_group()
    sys.stdout.flush()
    os._exit(0)  # plain torch 2.13 with gloo aborts at exit in some runs where a model is still there


if __name__ == "__main__":
    main()
