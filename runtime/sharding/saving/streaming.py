"""A whole state dict that no device has to hold."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch.distributed as dist
from torch import nn

from paro_advise.runtime.sharding.module import engine_of
from paro_advise.runtime.sharding.states.whole_states import whole_parameters

if TYPE_CHECKING:
    from collections.abc import Iterator

    import torch


def stream_state_dict(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Gather a model's state dict unit by unit into rank 0's host memory; all ranks iterate to the end.

    At no time does a device hold more than one unit whole. The other ranks get nothing. So Hugging Face's files are
    written with ``model.save_pretrained(folder, state_dict=dict(stream_state_dict(model)))`` on all ranks, and
    larger models file by file while this goes on.

    Args:
        model: sharded.

    Yields:
        Names as in ``model.state_dict()``, and whole tensors in the type the optimizer works in.

    Raises:
        UsageError: the model is not sharded.
    """
    engine = engine_of(model)
    is_first = dist.get_rank() == 0
    done: set[str] = set()
    for slot, value in whole_parameters(engine):
        done.update(slot.aliases)
        if is_first:
            kept = value.detach().cpu()
            yield from ((alias, kept) for alias in slot.aliases)
    if is_first:
        for name, value in nn.Module.state_dict(model).items():
            if name not in done:
                yield name, value.detach().cpu()
