"""Parameters without a dimension, such as a temperature: no rank can hold a part of one.

Each rank keeps them whole and takes the mean of all ranks' gradients, as DDP does; their optimizers, which begin alike,
stay alike. They are sent with what all ranks tell each other at the end of a backward pass.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from paro_advise.runtime.sharding.exchange.usage import Missing

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import nn


class Singles:
    """The scalars of a model, in one order on all ranks.

    Args:
        parameters: whole, on every rank.
    """

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        self.parameters = tuple(parameters)

    def gradients(self, world_size: int) -> torch.Tensor | None:
        """Return this rank's gradients and which it has, as one buffer that the ranks divide; None where none train."""
        training = [parameter for parameter in self.parameters if parameter.requires_grad]
        if not training or world_size == 1:
            return None
        widest = max((parameter.dtype for parameter in training), key=lambda dtype: dtype.itemsize)
        zero = training[0].new_zeros((), dtype=widest)
        own = [zero if parameter.grad is None else parameter.grad.to(widest) for parameter in training]
        has = [zero if parameter.grad is None else zero + 1 for parameter in training]
        return torch.stack([*own, *has, *[zero] * (-2 * len(training) % world_size)])

    def take(self, sums: torch.Tensor, factor: float, missing: Missing) -> None:
        """Put the means of all ranks' gradients in place.

        Args:
            sums: of all ranks' ``gradients``.
            factor: what sums over all ranks are divided by.
            missing: what a parameter gets that no rank used.
        """
        training = [parameter for parameter in self.parameters if parameter.requires_grad]
        counts: list[float] = []
        for place, parameter in enumerate(training):
            is_used = missing != Missing.NONE or parameter.grad is not None
            if not is_used:
                # Only for a parameter without a gradient on this rank the host waits for a device.
                counts = counts or sums[len(training) : 2 * len(training)].tolist()
                is_used = counts[place] > 0
            if is_used:
                parameter.grad = (sums[place] / factor).to(parameter.dtype)
