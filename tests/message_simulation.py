"""Trains with virtual ranks that send each other numpy arrays, and counts every message.

An implementation of the procedure of any triple (docs/strategies.md, procedure) that shares nothing with
the library: real ring reduce-scatters and all-gathers, nested layout, Adam.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

BETA1, BETA2, EPSILON, RATE = 0.9, 0.99, 1e-8, 0.05


@dataclass
class Counter:
    """Messages and elements that each rank has sent inside and across groups."""

    messages: dict = field(default_factory=lambda: {"intra": 0, "inter": 0})
    elements: dict = field(default_factory=lambda: {"intra": 0, "inter": 0})


class World:
    """m * g virtual ranks; rank = j * m + k for group j and local rank k."""

    def __init__(self, m, g):
        self.m, self.g, self.size = m, g, m * g
        self.counters = [Counter() for _ in range(self.size)]
        self.inside = [[j * m + k for k in range(m)] for j in range(g)]
        self.across = [[j * m + k for j in range(g)] for k in range(m)]

    def send(self, sender, values, kind):
        self.counters[sender].messages[kind] += 1
        self.counters[sender].elements[kind] += len(values)
        return values.copy()

    def gather(self, groups, kind, pieces):
        """Ring all-gather in every group: rank -> piece to rank -> pieces joined in order of members."""
        result: dict[int, Any] = {}
        for members in groups:
            p = len(members)
            held = {rank: {place: pieces[rank]} for place, rank in enumerate(members)}
            for turn in range(p - 1):
                arriving = []
                for place, rank in enumerate(members):
                    block = (place - turn) % p
                    arriving.append((members[(place + 1) % p], block, self.send(rank, held[rank][block], kind)))
                for receiver, block, values in arriving:
                    held[receiver][block] = values
            result |= {rank: np.concatenate([held[rank][place] for place in range(p)]) for rank in members}
        return result

    def scatter_sum(self, groups, kind, buffers):
        """Ring reduce-scatter in every group: rank -> buffer to rank -> its block of the sum."""
        result: dict[int, Any] = {}
        for members in groups:
            p = len(members)
            blocks = {rank: [part.copy() for part in np.split(buffers[rank], p)] for rank in members}
            for turn in range(p - 1):
                arriving = []
                for place, rank in enumerate(members):
                    block = (place - turn - 1) % p
                    arriving.append((members[(place + 1) % p], block, self.send(rank, blocks[rank][block], kind)))
                for receiver, block, values in arriving:
                    blocks[receiver][block] += values
            result |= {rank: blocks[rank][place] for place, rank in enumerate(members)}
        return result

    def intra_ag(self, pieces):
        return self.gather(self.inside, "intra", pieces)

    def intra_rs(self, buffers):
        return self.scatter_sum(self.inside, "intra", buffers)

    def inter_ag(self, pieces):
        return self.gather(self.across, "inter", pieces)

    def inter_rs(self, buffers):
        return self.scatter_sum(self.across, "inter", buffers)

    def inter_ar(self, buffers):
        return self.inter_ag(self.inter_rs(buffers))


def cut(world, level, rank, whole):
    """Return a rank's part of whole values: the slice is nested in the rank's own band."""
    if level == "N":
        return whole.copy()
    band = np.split(whole, world.m)[rank % world.m]
    return (band if level == "I" else np.split(band, world.g)[rank // world.m]).copy()


def to_whole(world, level, parts):
    """Gather parameters from a level."""
    if level == "G":
        parts = world.inter_ag(parts)
    return world.intra_ag(parts) if level != "N" else parts


def reduce_to(world, level, whole):
    """Bring one micro-batch's gradients to a level."""
    if level == "N":
        return whole
    bands = world.intra_rs(whole)
    return bands if level == "I" else world.inter_rs(bands)


def synchronize(world, source, target, parts):
    """Bring accumulated gradients to the optimizer's level, fully summed."""
    match source + target:
        case "NN":
            return world.intra_ag(world.inter_ar(world.intra_rs(parts)))
        case "NI":
            return world.inter_ar(world.intra_rs(parts))
        case "NG":
            return world.inter_rs(world.intra_rs(parts))
        case "IN":
            return world.intra_ag(world.inter_ar(parts))
        case "II":
            return world.inter_ar(parts)
        case "IG":
            return world.inter_rs(parts)
        case "GN":
            return world.intra_ag(world.inter_ag(parts))
        case "GI":
            return world.inter_ag(parts)
        case _:
            return parts


def publish(world, source, target, masters, whole_of):
    """Bring updated parameters from the optimizer's level to the parameters'."""
    match source + target:
        case "IN":
            return world.intra_ag(masters)
        case "GN":
            return world.intra_ag(world.inter_ag(masters))
        case "GI":
            return world.inter_ag(masters)
        case _ if source == target:
            return {rank: value.copy() for rank, value in masters.items()}
        case _:  # the optimizer's part holds the parameters' part
            return {rank: whole_of(rank, masters[rank]) for rank in masters}


def gradient(parameters, target):
    """Of the loss sum((p - target)^2 * (1 + index mod 3)) / 2."""
    return (parameters - target) * (1 + np.arange(len(parameters)) % 3)


def targets(step, micro, rank, size):
    return np.random.default_rng(10_000 * step + 100 * micro + rank).normal(size=size)


class Adam:
    def __init__(self, size):
        self.first, self.second, self.count = np.zeros(size), np.zeros(size), 0

    def step(self, values, mean):
        self.count += 1
        self.first = BETA1 * self.first + (1 - BETA1) * mean
        self.second = BETA2 * self.second + (1 - BETA2) * mean**2
        corrected = self.second / (1 - BETA2**self.count)
        return values - RATE * self.first / (1 - BETA1**self.count) / (np.sqrt(corrected) + EPSILON)


def train_single(m, g, micro_batches, steps, size):
    values, adam = np.linspace(-1, 1, size), Adam(size)
    for step in range(steps):
        total = sum(
            gradient(values, targets(step, micro, rank, size))
            for micro in range(micro_batches)
            for rank in range(m * g)
        )
        values = adam.step(values, total / (m * g * micro_batches))
    return values


def inner_part(world, source, target, rank, values):
    """Cut the finer part out of a coarser one that the same rank holds."""
    if source == "N":
        return cut(world, target, rank, values)
    return np.split(values, world.g)[rank // world.m].copy()  # I holds G


def train(triple, m, g, micro_batches, steps, size):
    """Return each rank's whole parameters after training, and the world with its counters.

    The last gather, which only looks at the result, is not counted.
    """
    p, gr, os = triple
    world = World(m, g)
    start = np.linspace(-1, 1, size)
    ranks = range(world.size)
    parts = {rank: cut(world, p, rank, start) for rank in ranks}
    masters = {rank: cut(world, os, rank, start) for rank in ranks}
    adams = {rank: Adam(len(masters[rank])) for rank in ranks}
    for step in range(steps):
        total = None
        for micro in range(micro_batches):
            to_whole(world, p, parts)  # for forward
            whole = to_whole(world, p, parts)  # again for backward
            local = {rank: gradient(whole[rank], targets(step, micro, rank, size)) for rank in ranks}
            reduced = reduce_to(world, gr, local)
            total = reduced if total is None else {rank: total[rank] + reduced[rank] for rank in ranks}
        final = synchronize(world, gr, os, total)
        for rank in ranks:
            masters[rank] = adams[rank].step(masters[rank], final[rank] / (world.size * micro_batches))
        parts = publish(world, os, p, masters, lambda rank, values: inner_part(world, os, p, rank, values))
    counted = [(dict(c.messages), dict(c.elements)) for c in world.counters]
    return to_whole(world, p, parts), counted
