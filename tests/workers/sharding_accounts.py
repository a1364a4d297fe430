"""Counts bytes and messages of every strategy on this rank and compares them with the formulas."""

from __future__ import annotations

import gc
import sys

import torch
import torch.distributed as dist
from accounting import held_bytes, sent_bytes
from torch import nn
from torch.nn.functional import cross_entropy

from paro_advise.policies.memory import transient_bytes
from paro_advise.policies.strategy import KEPT, Strategy
from paro_advise.policies.traffic import Shape
from paro_advise.runtime import engine_of, shard
from paro_advise.runtime.measure.process_memory import forget_peak, peak_bytes, resident_bytes

# docs/strategies.md, traffic: units per micro-batch inside (on P, on D), across (P, D), and
# per step inside and across (D). Written out here, not taken from the library.
TABLE = {
    "NNN": (0, 0, 0, 0, 2, 2),
    "NNI": (0, 0, 0, 0, 2, 2),
    "NNG": (0, 0, 0, 0, 2, 2),
    "NII": (0, 1, 0, 0, 1, 2),
    "NIG": (0, 1, 0, 0, 1, 2),
    "NGG": (0, 1, 0, 1, 1, 1),
    "INI": (2, 0, 0, 0, 1, 2),
    "ING": (2, 0, 0, 0, 1, 2),
    "III": (2, 1, 0, 0, 0, 2),
    "IIG": (2, 1, 0, 0, 0, 2),
    "IGG": (2, 1, 0, 1, 0, 1),
    "GNG": (2, 0, 2, 0, 1, 1),
    "GIG": (2, 1, 2, 0, 0, 1),
    "GGG": (2, 1, 2, 1, 0, 0),
}
MICRO_BATCHES, WIDTH, WORDS, BLOCKS = 3, 16, 32, 2


class Model(nn.Module):
    """Every first dimension is a multiple of 8, so that nothing is padded."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, 64), nn.GELU(), nn.Linear(64, WIDTH)) for _ in range(BLOCKS)
        )
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, tokens):
        hidden = self.embed(tokens)
        for block in self.blocks:
            hidden = hidden + block(hidden)
        return self.head(hidden)


def backward(model, last):
    model.set_requires_gradient_sync(last)
    tokens = torch.randint(0, WORDS, (2, 9))
    cross_entropy(model(tokens[:, :-1]).flatten(0, 1).float(), tokens[:, 1:].flatten()).backward()


def check_traffic(strategy, group_size, ranks_per_node):
    model = Model()
    elements = sum(p.numel() for p in model.parameters())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    shard(model, optimizer, strategy, group_size=group_size, ranks_per_node=ranks_per_node, reshard_root=True)
    engine = engine_of(model)
    before = sent_bytes(engine)
    for micro in range(MICRO_BATCHES):
        backward(model, micro == MICRO_BATCHES - 1)
    optimizer.step()
    after = sent_bytes(engine)
    sent = {name: tuple(b - a for a, b in zip(before[name], after[name], strict=True)) for name in after}
    m, world = group_size, dist.get_world_size()
    g, units = world // m, BLOCKS + 1
    p_in, d_in, p_out, d_out, step_in, step_out = TABLE[strategy]
    inside = MICRO_BATCHES * (p_in + d_in) + step_in
    across = MICRO_BATCHES * (p_out + d_out) + step_out
    num_bytes = 4 * elements
    # Once a step an all-reduce tells which parameters have a gradient and what was gathered and reduced: 4 bytes for
    # each parameter and for each of 24 parts of digests, filled up to blocks of all ranks.
    numbers = sum(1 for _ in model.parameters()) + 24
    notes = 4 * -(-numbers // world) * world
    wanted = {
        "inside": (
            (inside * units + 2) * (m - 1),
            inside * num_bytes * (m - 1) // m + 2 * notes * (m - 1) // m,
        ),
        "across": (
            (across * units + 2) * (g - 1),
            across * num_bytes * (g - 1) // world + 2 * notes * (g - 1) // world,
        ),
    }
    if ranks_per_node == m:
        # HO-Ring spreads each of the g blocks on its own where both stages are one collective.
        assert {name: count[1] for name, count in sent.items()} == {name: count[1] for name, count in wanted.items()}
    else:
        assert sent == wanted, (strategy, m, sent, wanted)


def check_memory(strategy, mixed):
    model = Model()
    elements = sum(p.numel() for p in model.parameters())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    options = {"param_dtype": torch.bfloat16, "reduce_dtype": torch.float32} if mixed else {}
    shard(model, optimizer, strategy, group_size=2, **options)
    engine = engine_of(model)
    assert held_bytes(engine).gradient == 0
    backward(model, last=True)
    optimizer.step()
    optimizer.zero_grad()
    backward(model, last=False)
    held = held_bytes(engine)
    fraction = {"N": 1, "I": 2, "G": dist.get_world_size()}
    widths = (2, 4, 12) if mixed else (4, 4, 8)
    wanted = tuple(width * elements // fraction[letter] for width, letter in zip(widths, strategy, strict=True))
    assert (held.parameter, held.gradient, held.optimizer) == wanted, (strategy, mixed, held, wanted)
    backward(model, last=True)
    reduced = held_bytes(engine).gradient
    assert reduced == widths[1] * elements // fraction[strategy[2]], (strategy, reduced)


class Wide(Model):
    """Units of two million elements, so that activations and bookkeeping are small beside them."""

    def __init__(self):
        nn.Module.__init__(self)
        self.embed = nn.Embedding(WORDS, 1024)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(1024, 1024), nn.GELU(), nn.Linear(1024, 1024)) for _ in range(4)
        )
        self.head = nn.Linear(1024, WORDS)


def check_peak(strategy, group_size):
    """What a step takes beyond what is held between steps stays within the stated bound."""
    model = Wide()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=False)
    shard(model, optimizer, strategy, group_size=group_size)
    engine = engine_of(model)

    def step():
        backward(model, last=False)
        held = held_bytes(engine).gradient  # at their own level
        backward(model, last=True)
        held = max(held, held_bytes(engine).gradient)  # at the optimizer's
        optimizer.step()
        optimizer.zero_grad()
        return held

    step()
    gradient = step()
    gc.collect()
    rest = resident_bytes()
    forget_peak()
    step()
    transient = peak_bytes() - rest - gradient
    largest = max(sum(slot.shape.numel() for slot in unit.spec.slots) for unit in engine.units)
    shape = Shape(group_size=group_size, num_groups=dist.get_world_size() // group_size)
    bound = transient_bytes(Strategy.parse(strategy), shape, largest, 4, 4)
    if dist.get_rank() == 0:
        print(f"peak {strategy} {transient / 4 / largest:.2f} of {bound / 4 / largest:.0f} units", flush=True)
    assert transient <= bound, (strategy, group_size, transient, gradient, bound)


def main():
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    world = dist.get_world_size()
    torch.manual_seed(3)
    for strategy in map(str, KEPT):
        if "traffic" in sys.argv[1:]:
            check_traffic(strategy, 2, world)
            check_traffic(strategy, 2, 2)
            if world > 4:
                check_traffic(strategy, 4, 8)
        if "memory" in sys.argv[1:]:
            check_memory(strategy, mixed=False)
            check_memory(strategy, mixed=True)
        if "peak" in sys.argv[1:]:
            check_peak(strategy, 2)
        if dist.get_rank() == 0:
            print("counted", strategy, flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
