"""What DeepSpeed's engine tells of its configuration alone, by DeepSpeed's own reading of the script's config."""

from __future__ import annotations

import dis
import inspect
import sys
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import torch

from paro_advise.runtime.adapters.deepspeed.config import zero_stage

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import nn

    from paro_advise.runtime.adapters.deepspeed.config import Table
    from paro_advise.runtime.adapters.planned.wrapping import Wrapping
    from paro_advise.runtime.torch_types import AnyFunction

_CONFIG = "_config"
_GIVEN = (_CONFIG, "client_optimizer")  # where DeepSpeed's engine keeps what it was given


class TellsSettings:
    """The part of an engine that tells settings and what they became: its attributes are the engine's."""

    module: nn.Module
    optimizer: torch.optim.Optimizer
    config: Table
    world_size: int
    global_steps: int
    _accumulation: int
    _micro_batch: int
    _norm: float | None
    _stage: int
    _clip: float
    _wrapping: Wrapping

    def gradient_accumulation_steps(self) -> int:
        """Return the micro-batches per step."""
        return self._accumulation

    def train_micro_batch_size_per_gpu(self) -> int:
        """Return the samples per rank in a micro-batch."""
        return self._micro_batch

    def train_batch_size(self) -> int:
        """Return the samples of all ranks in a step."""
        return int(self._micro_batch * self._accumulation * self.world_size)

    def set_train_batch_size(self, train_batch_size: int) -> None:
        """Take as many micro-batches a step from now on as make this many samples of all ranks.

        Raises:
            ValueError: none do, as DeepSpeed raises it.
        """
        passes, rest = divmod(train_batch_size, self._micro_batch * self.world_size)
        if rest or not passes:
            raise ValueError(
                f"the batch must be a multiple of the {self._micro_batch * self.world_size} samples of all ranks in a "
                f"micro-batch, got {train_batch_size}"
            )
        self._accumulation = passes

    def set_train_micro_batch_size(self, micro_batch_size: int) -> None:
        """Note that the script makes micro-batches of so many samples per rank from now on."""
        self._micro_batch = micro_batch_size

    @property
    def global_samples(self) -> int:
        """Return the samples of all ranks in all steps so far."""
        return self.global_steps * self.train_batch_size()

    def get_lr(self) -> list[float]:
        """Return the learning rate of each group."""
        return [group["lr"] for group in self.optimizer.param_groups]

    def set_lr(self, lr: float) -> None:
        """Set the learning rate of all groups."""
        for group in self.optimizer.param_groups:
            group["lr"] = lr

    def get_mom(self) -> list[Any]:
        """Return the momentum, or Adam's betas, of each group."""
        return [group.get("betas", group.get("momentum")) for group in self.optimizer.param_groups]

    def get_global_grad_norm(self) -> float | None:
        """Return the norm before the last clipping; None without, and at stage 0, where DeepSpeed keeps none."""
        return self._norm if self._stage else None

    def gradient_clipping(self) -> float:
        """Return the norm that gradients are clipped to; 0 for none."""
        return self._clip

    def steps_per_print(self) -> int | None:
        """Return the config's value; nothing is printed by it."""
        steps: int | None = self.config.get("steps_per_print")
        return steps

    def fp16_enabled(self) -> bool:
        """Return False: a plan refuses fp16."""
        return False

    def dynamic_loss_scale(self) -> bool:
        """Return False: only fp16 scales losses."""
        return False

    def bfloat16_enabled(self) -> bool:
        """Tell whether the model computes in bfloat16."""
        return self._wrapping.param_dtype is torch.bfloat16

    def zero_optimization_stage(self) -> int:
        """Return the stage in the config, in place of which the plan's strategy runs."""
        return zero_stage(self.config)

    def zero_optimization(self) -> bool:
        """Tell whether the config asks for ZeRO."""
        return self.zero_optimization_stage() > 0

    @property
    def device(self) -> torch.device:
        """Return where the model is."""
        return next(self.module.parameters()).device


class EngineSettings:
    """Answers for the methods of DeepSpeed's engine that read nothing of it but what it was given.

    Args:
        table: the script's config, with numbers for all batch sizes that it gives.
        client_optimizer: as the script gave it; None where the config describes it.
    """

    def __init__(self, table: Table, client_optimizer: object) -> None:
        self._table = table
        self.client_optimizer = client_optimizer

    def __getattr__(self, name: str) -> Any:
        """Return such a method, or the configuration that it reads.

        Raises:
            AttributeError: DeepSpeed's engine has none of this name, or it reads more than that.
        """
        if name == _CONFIG:
            from deepspeed.runtime.config import DeepSpeedConfig

            self.__dict__[_CONFIG] = DeepSpeedConfig(dict(self._table))
            return self.__dict__[_CONFIG]
        methods = vars(_engine_class())
        if name.startswith("_") or not _reads_settings_alone(methods, name, frozenset()):
            raise AttributeError(name)
        return methods[name].__get__(self)


def _engine_class() -> type:
    """Return the class of DeepSpeed's engine; one of no methods where DeepSpeed is not there."""
    return getattr(sys.modules.get("deepspeed.runtime.engine"), "DeepSpeedEngine", object)


def _reads_settings_alone(methods: Mapping[str, AnyFunction], name: str, within: frozenset[str]) -> bool:
    """Tell whether a method takes nothing, and reads of its engine what that was given and methods that do so alone."""
    method = methods.get(name)
    if name in within or not inspect.isfunction(method) or method.__code__.co_argcount != 1:
        return False
    own = method.__code__.co_varnames[0]
    read = {
        after.argval if one.argval == own and after.opname in ("LOAD_ATTR", "LOAD_METHOD") else None
        for one, after in pairwise(dis.get_instructions(method))
        if own == one.argval or (isinstance(one.argval, tuple) and own in one.argval)
    }
    return bool(read) and all(
        item in _GIVEN or (item is not None and _reads_settings_alone(methods, item, within | {name}))
        for item in read  # None: stored, or handed on as a whole
    )
