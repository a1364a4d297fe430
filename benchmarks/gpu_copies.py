"""What it costs to pack the parameters of a unit for its ranks: one of the checks of `make gpu`."""

from __future__ import annotations

import statistics
import time
from typing import Any

import torch

from paro_advise.runtime.sharding.parameters.layout import UnitLayout

WORLDS = (8, 64, 256, 1024)
LAUNCHES = ("cudaLaunchKernel", "cudaLaunchKernelExC", "cuLaunchKernel", "cuLaunchKernelEx")  # as profiles name them


def cost_of_copies(device: torch.device) -> dict[str, Any]:
    """Host time and kernels of ``fill`` and ``spread`` for a block of a 7-billion model, at 8 to 1,024 ranks."""
    scale = 1 if device.type == "cuda" else 16
    shapes = [(4096 // scale, 4096)] * 4 + [(11_008 // scale, 4096)] * 2 + [(4096 // scale, 11_008), (4096,), (4096,)]
    found: dict[str, Any] = {}
    for world in WORLDS:
        layout = UnitLayout.of(shapes, group_size=8, num_groups=world // 8, local=0, nested=True, by_ranks=False)
        tensors = [torch.zeros(shape, device=device) for shape in shapes]
        buffer = torch.empty(8 * layout.slab_elements, device=device)
        for name, moved in (("fill", layout.fill), ("spread", layout.spread)):
            moved(buffer, tensors)
            times = []
            for _ in range(20):
                synchronize(device)
                begun = time.perf_counter()
                moved(buffer, tensors)
                times.append(time.perf_counter() - begun)
            with torch.profiler.profile() as profile:
                moved(buffer, tensors)
                synchronize(device)
            kernels = sum(event.count for event in profile.key_averages() if event.key in LAUNCHES)
            found[f"{name} {world}"] = {"host us": round(1e6 * statistics.median(times), 1), "kernels": kernels}
    slow, quick = (found[f"fill {world}"]["host us"] for world in (WORLDS[-1], WORLDS[0]))
    # On a CPU the copies themselves count, whose rows grow shorter.
    return {**found, "holds": device.type == "cpu" or slow <= 3 * quick}


def synchronize(device: torch.device) -> None:
    """Wait for a device, if it is one that works beside the host."""
    if device.type == "cuda":
        torch.cuda.synchronize()
