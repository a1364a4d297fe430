"""Copies between a device and the host's memory."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Sequence


def copies_on_host(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return copies in the host's memory, for which the host waits once.

    Those of a device are pinned, or each would be copied twice, and waited for by itself.
    """
    copies = [torch.empty_like(tensor, device="cpu", pin_memory=tensor.device.type != "cpu") for tensor in tensors]
    for copy, tensor in zip(copies, tensors, strict=True):
        copy.copy_(tensor, non_blocking=True)
    for device in {tensor.device for tensor in tensors if tensor.device.type != "cpu"}:
        torch.accelerator.current_stream(device).synchronize()
    return copies


def pinned_for(device: torch.device, tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor of the host's that a device copies from beside the host's work."""
    return tensor.pin_memory() if tensor.device.type == "cpu" and device.type != "cpu" else tensor
