"""What Lightning asks for that a plan has otherwise, or has not."""

from __future__ import annotations

from functools import wraps
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from torch.distributed import fsdp

from paro_advise.errors import TrainingError
from paro_advise.runtime.adapters.constants import NO_PLAN
from paro_advise.runtime.import_hooks import when_imported

if TYPE_CHECKING:
    from types import ModuleType

    from paro_advise.runtime.adapters.session import Session

_FINETUNING = ("lightning.pytorch.callbacks.finetuning", "pytorch_lightning.callbacks.finetuning")
_AVERAGING = ("lightning.pytorch.callbacks.stochastic_weight_avg", "pytorch_lightning.callbacks.stochastic_weight_avg")
_FSDP2 = ("lightning.fabric.strategies.model_parallel", "lightning_fabric.strategies.model_parallel")


def install(session: Session) -> None:
    """Refuse, before anything trains, more parameters for an optimizer later; let Fabric know FSDP2's models.

    Args:
        session: the planned process.
    """

    def refuse_late_groups(module: ModuleType) -> None:
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

    for name in _FINETUNING:
        when_imported(name, refuse_late_groups)
    for name in _AVERAGING:
        when_imported(name, _copy_only_to_train)
    for name in _FSDP2:
        when_imported(name, _find_models_by_class)


def _copy_only_to_train(module: ModuleType) -> None:
    """Keep the mean of weights where nothing trains: a model sharded by then cannot be copied, and no copy is used."""
    callback = module.StochasticWeightAveraging
    set_up = callback.setup

    @wraps(set_up)
    def setup(self: object, trainer: object, model: object, stage: str) -> None:
        if stage == "fit":
            set_up(self, trainer, model, stage)

    callback.setup = setup


def _find_models_by_class(module: ModuleType) -> None:
    """Let Fabric find the model that it saves by FSDP2's class, as scripts see it: under p = N nothing is sharded."""
    has_sharded_parameters = module._has_dtensor_modules  # noqa: SLF001 - has no public name

    @wraps(has_sharded_parameters)
    def is_of_fsdp2(candidate: Any) -> bool:
        return isinstance(candidate, fsdp.FSDPModule) or bool(has_sharded_parameters(candidate))

    setattr(module, has_sharded_parameters.__name__, is_of_fsdp2)
