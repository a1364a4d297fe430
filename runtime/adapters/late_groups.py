"""Refuses, before anything trains, what Lightning would ask for in the middle: more parameters for an optimizer."""

from __future__ import annotations

from functools import wraps
from typing import TYPE_CHECKING

import torch.distributed as dist

from paro_advise.errors import TrainingError
from paro_advise.runtime.adapters.constants import NO_PLAN
from paro_advise.runtime.import_hooks import when_imported

if TYPE_CHECKING:
    from types import ModuleType

    from paro_advise.runtime.adapters.session import Session

_MODULES = ("lightning.pytorch.callbacks.finetuning", "pytorch_lightning.callbacks.finetuning")


def install(session: Session) -> None:
    """Have callbacks that unfreeze layers refused when ``fit`` begins."""

    def refuse_in(module: ModuleType) -> None:
        begin = module.BaseFinetuning.on_fit_start

        @wraps(begin)
        def on_fit_start(self: object, *args: object) -> object:
            if dist.is_initialized() and dist.get_world_size() > 1:
                session.refuse(
                    TrainingError(
                        "an optimizer under a plan must hold all that trains from the first pass on, got "
                        f"{type(self).__name__}, which adds layers to it in a later epoch",
                        hint=NO_PLAN,
                    )
                )
            return begin(self, *args)

        module.BaseFinetuning.on_fit_start = on_fit_start

    for name in _MODULES:
        when_imported(name, refuse_in)
