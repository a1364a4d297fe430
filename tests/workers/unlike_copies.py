"""Noise that each rank draws for itself is refused where a plan keeps copies of a parameter; like noise is not."""

from __future__ import annotations

import gc

import torch
import torch.distributed as dist
from sharding_by_hand import fresh, one_pass, refused, sgd

from paro_advise.errors import DivergedError
from paro_advise.runtime import shard


def trains_with_noise(strategy, generator, place="after the step", times=1):
    """Change parameters a few times, at a place in the loop, or by the optimizer's own."""
    model = fresh()
    model, optimizer = shard(model, sgd(model), strategy, group_size=2)
    for step in range(3):
        optimizer.zero_grad()
        one_pass(model, step)
        if place == "after the step":
            optimizer.step()
        if step < times:
            at_optimizer = optimizer.param_groups[0]["params"]
            with torch.no_grad():
                for parameter in at_optimizer if place == "at the optimizer" else model.parameters():
                    parameter.mul_(1 + torch.rand((), generator=generator))
        if place != "after the step":
            optimizer.step()


def main():
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    rank = dist.get_rank()
    cases = [(strategy, "after the step") for strategy in ("NNN", "NNG", "IGG", "III")]
    # What ranks have of each other is sent anew in the step where its optimizer's rows have one owner.
    cases += [(strategy, "before the step") for strategy in ("NNN", "III")]
    cases += [(strategy, "at the optimizer") for strategy in ("NNN", "III")]
    for strategy, place in cases:
        for times in (1, 2):
            own = torch.Generator().manual_seed(rank)
            refused(
                "copies that differ",
                lambda own=own, case=(strategy, place, times): trains_with_noise(case[0], own, *case[1:]),
                DivergedError,
            )
        trains_with_noise(strategy, torch.Generator().manual_seed(0), place)
    for strategy in ("IGG", "III"):
        # Each shard is noisy in a way of its own, and its copy in the other group in the same.
        trains_with_noise(strategy, torch.Generator().manual_seed(rank % 2))
    trains_with_noise("GGG", torch.Generator().manual_seed(rank))
    print("held", flush=True)
    gc.collect()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
