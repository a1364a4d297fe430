"""Compares HO-Ring with torch's own collectives on every rank; small integers, so exactly."""

from __future__ import annotations

import functools
import gc
import itertools
import sys

import torch
import torch.distributed as dist

from paro_advise.errors import UsageError
from paro_advise.runtime.ho_ring import Algorithm, ChoiceTable, Collectives, HoRing, Operation, Sample
from paro_advise.runtime.ho_ring.groups import Subgroups

SIZES = (1, 5, 4097, 70_001)
DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int32, torch.int64, torch.uint8)


def values(seed, size, dtype):
    return torch.randint(0, 4, (size,), generator=torch.Generator().manual_seed(seed)).to(dtype)


def all_values(seed, size, dtype):
    return [values(seed + rank, size, dtype) for rank in range(dist.get_world_size())]


def reduced(parts, op):
    stacked = torch.stack([part.to(torch.float64) for part in parts])
    if op == dist.ReduceOp.MAX:
        return stacked.max(0).values
    return stacked.sum(0) if op == dist.ReduceOp.SUM else stacked.mean(0)


def check(ring, size, dtype):
    world, rank = dist.get_world_size(), dist.get_rank()
    blocks = all_values(10, size, dtype)
    output = torch.empty(world * size, dtype=dtype)
    ring.all_gather(output, blocks[rank])
    assert torch.equal(output, torch.cat(blocks))
    in_place = torch.zeros(world * size, dtype=dtype)
    mine = in_place[rank * size : (rank + 1) * size]
    mine.copy_(blocks[rank])
    ring.all_gather(in_place, mine)
    assert torch.equal(in_place, torch.cat(blocks))
    operations = [dist.ReduceOp.SUM, dist.ReduceOp.MAX]
    operations += [dist.ReduceOp.AVG] if dtype.is_floating_point else []
    for op in operations:
        buffers = all_values(100, world * size, dtype)
        before = buffers[rank].clone()
        block = torch.empty(size, dtype=dtype)
        ring.reduce_scatter(block, buffers[rank], op)
        expected = reduced(buffers, op)[rank * size : (rank + 1) * size].to(dtype)
        assert torch.equal(block, expected), (size, dtype, op)
        assert torch.equal(buffers[rank], before)
        tensors = all_values(200, size + 3, dtype)  # no multiple of the ranks
        mine = tensors[rank].clone()
        ring.all_reduce(mine, op)
        assert torch.equal(mine, reduced(tensors, op).to(dtype)), (size, dtype, op)


def check_refusals(ring):
    world = dist.get_world_size()
    wrong = [
        lambda: ring.all_gather(torch.empty(world * 4 + 1), torch.empty(4)),
        lambda: ring.all_gather(torch.empty(world * 4, dtype=torch.int64), torch.empty(4)),
        lambda: ring.all_gather(torch.empty(4, world).t(), torch.empty(4)),
        lambda: ring.reduce_scatter(
            torch.empty(4, dtype=torch.int32), torch.empty(4 * world, dtype=torch.int32), dist.ReduceOp.AVG
        ),
        lambda: ring.reduce_scatter(torch.empty(4), torch.empty(4 * world), dist.ReduceOp.MIN),
    ]
    for call in wrong:
        try:
            call()
        except UsageError:
            continue
        raise AssertionError("a wrong call was accepted")


class Fixed:
    """Collectives of one algorithm in the form that ``check`` wants."""

    def __init__(self, collectives, algorithm):
        self.all_gather = functools.partial(collectives.all_gather, algorithm=algorithm)
        self.reduce_scatter = functools.partial(collectives.reduce_scatter, algorithm=algorithm)
        self.all_reduce = functools.partial(collectives.all_reduce, algorithm=algorithm)


def check_choice(per_node):
    """All algorithms agree, and a calibration gives all ranks the same table."""
    collectives = Collectives.of(ranks_per_node=per_node)
    for algorithm in collectives.algorithms:
        check(Fixed(collectives, algorithm), 4097, torch.float32)
    table = collectives.calibrate(sizes=(4096, 65536), budget_s=1.0)
    tables = [None] * dist.get_world_size()
    dist.all_gather_object(tables, table)
    assert tables == [table] * dist.get_world_size()
    assert {sample.operation for sample in table.samples} == (
        set(Operation) if len(collectives.algorithms) > 1 else set()
    )
    seconds = dict.fromkeys(collectives.algorithms, 1.0) | {Algorithm.HO_RING: 0.5}
    collectives.table = ChoiceTable((Sample(operation=Operation.ALL_GATHER, num_bytes=64, seconds=seconds),))
    before = collectives.ho_ring.sent_between.messages
    check(collectives, 5, torch.float32)
    assert (collectives.ho_ring.sent_between.messages > before) == (collectives.ho_ring.grid.num_nodes > 1)


def destroy(groups):
    """Destroy groups that all ranks have made: gloo ends a rank that still connects when another closes its sockets."""
    dist.barrier()
    for group in groups:
        dist.destroy_process_group(group)


def check_names():
    """A script makes and destroys groups, so that as many are known as when one of ours was made: the next is another.

    A name that comes again stands for the sockets of the group that had it, of which nobody listens any more.
    """
    everyone = list(range(dist.get_world_size()))
    makers = (lambda: Subgroups([[everyone]]).of(everyone), lambda: Subgroups().of(everyone))
    groups, names = [], []
    for make in makers:
        spares = [dist.new_group(everyone) for _ in range(3)]
        groups.append(make())
        destroy(spares)
        groups.append(make())
        spares = [dist.new_group(everyone) for _ in range(2)]
        groups.append(make())
        names += [group.group_name for group in groups]
        destroy([*groups, *spares])
        groups.clear()
    assert len(set(names)) == len(names) == 6
    groups = [makers[0](), makers[1]()]
    for group in groups:
        total = torch.ones(1)
        group.allreduce([total]).wait()
        assert total.item() == len(everyone)


def main():
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    for per_node in map(int, sys.argv[1].split(",")):
        for chunks, grouped in ((None, False), (3, False), (3, True)):
            ring = HoRing(ranks_per_node=per_node, num_chunks=chunks, grouped=grouped)
            for size, dtype in itertools.product(SIZES, DTYPES):
                if size == 5 or dtype in (torch.float32, torch.bfloat16):
                    check(ring, size, dtype)
        check_refusals(ring)
        check_choice(per_node)
    check_names()
    half = list(range(dist.get_world_size() // 2))
    group = dist.new_group(half)
    if dist.get_rank() in half:
        ring = HoRing(group, ranks_per_node=1)
        mine = torch.tensor([float(dist.get_rank())])
        ring.all_reduce(mine)
        assert mine.item() == sum(half)
    gc.collect()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
