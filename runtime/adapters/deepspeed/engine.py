"""What ``deepspeed.initialize`` returns under a plan that DeepSpeed cannot run itself."""

from __future__ import annotations

import math
import os
import sys
import warnings
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils._pytree import tree_map

from paro_advise.errors import TrainingError
from paro_advise.runtime.adapters.constants import NO_PLAN
from paro_advise.runtime.adapters.deepspeed import checkpoints
from paro_advise.runtime.adapters.deepspeed.config import (
    STAGES,
    ZERO_3,
    batch_sizes,
    gradient_clipping,
    low_precision,
    zero_stage,
)
from paro_advise.runtime.adapters.deepspeed.settings import EngineSettings, TellsSettings
from paro_advise.runtime.adapters.planned.wrapping import Wrapping, copy_from_rank_0
from paro_advise.runtime.adapters.precision import run_unsharded
from paro_advise.runtime.sharding.exchange.usage import Missing

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from paro_advise.runtime.adapters.deepspeed.config import Scheduler, Table
    from paro_advise.runtime.adapters.session import Session
    from paro_advise.runtime.torch_types import AnyFunction, Keywords, StateDict


def _leave_gradients(set_to_none: bool = True) -> None:
    """Stand for ``zero_grad`` of ZeRO-2's optimizer, which has taken the gradients of each pass already."""


class _ActsAsEngine:
    """Lets ``isinstance(engine, deepspeed.DeepSpeedEngine)`` hold, by which scripts and libraries know an engine."""

    @property  # type: ignore[misc]  # as unittest.mock does it
    def __class__(self) -> type:
        module = sys.modules.get("deepspeed.runtime.engine")
        found: type = getattr(module, "DeepSpeedEngine", type(self))
        return found


class PlannedEngine(_ActsAsEngine, TellsSettings, nn.Module):
    """What a training script uses of DeepSpeed's engine.

    Args:
        session: the planned process.
        model, optimizer, lr_scheduler: what is trained.
        table: DeepSpeed's config.
        client_optimizer: the optimizer, or what makes it, that the script gave; None where the config describes it.
        collate_fn: joins samples to micro-batches; None for torch's.

    Attributes:
        config: as given.
        training_dataloader: over the script's training data; None without.
        global_steps, micro_steps: steps and backward passes so far.
        skipped_steps: those of the steps that were not taken, for a gradient was infinite or not a number.
        local_rank, global_rank, world_size: of this process.
    """

    def __init__(
        self,
        session: Session,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        lr_scheduler: Scheduler | None,
        table: Table,
        *,
        client_optimizer: object = None,
        collate_fn: Callable[[list[Any]], Any] | None = None,
    ) -> None:
        super().__init__()
        self.module = model
        self.optimizer = optimizer
        self.lr_scheduler = lr_scheduler
        self.config = table
        self._settings = EngineSettings(table, client_optimizer)
        self.training_dataloader: object = None
        self.global_steps = self.micro_steps = self.skipped_steps = 0
        self.local_rank = int(os.environ.get("LOCAL_RANK", "0"))
        self.global_rank, self.world_size = dist.get_rank(), dist.get_world_size()
        self._session = session
        self._collate_fn = collate_fn
        self._norm: float | None = None
        self._in_backward = self._in_no_sync = self._has_stepped = False
        self._boundary: bool | None = None
        self._has_reached_boundary, self._last_task = False, -1  # since the last step; of the newest backward pass
        self._clip = gradient_clipping(table)
        self._stage = zero_stage(table)
        # DeepSpeed's ZeRO looks for infinite gradients in each step, in bf16 unless told not to.
        low = low_precision(table)
        is_told_not_to = low.get("enabled") and low.get("check_grad_overflow") is False and self._stage < ZERO_3
        self._checks_overflow = self._stage > 0 and not is_told_not_to
        self._micro_batch, self._accumulation = batch_sizes(table)
        if self._stage == STAGES["NGG"]:
            optimizer.__dict__["zero_grad"] = _leave_gradients
        if self._stage > 0:  # as DeepSpeed's ZeRO optimizers have them; a plan refuses fp16, which alone scales losses
            optimizer.__dict__.update(overflow=False, loss_scale=1.0, cur_scale=1.0)
        copy_from_rank_0(model, list(model.buffers()))  # DeepSpeed's _broadcast_model leaves buffers alone
        self._wrapping = Wrapping(
            origin="DeepSpeed",
            param_dtype=torch.bfloat16 if low_precision(table).get("enabled") else None,
            missing_gradients=Missing.ZEROS,
            states_are_whole=self._stage < ZERO_3,  # so that rank 0 may save what it has
        )

    def __getattr__(self, name: str) -> Any:
        """Return what the model has, as DeepSpeed does, or what DeepSpeed's engine tells of its configuration.

        Raises:
            AttributeError: neither has it.
        """
        modules = self.__dict__.get("_modules", {})
        if name in modules:
            return modules[name]
        for holder in (modules.get("module"), self.__dict__.get("_settings")):
            if hasattr(holder, name):
                return getattr(holder, name)
        raise AttributeError(
            f"under a plan DeepSpeed's engine has no {name!r}, nor has the model; {NO_PLAN}", name=name, obj=self
        )

    # ---- training -----------------------------------------------------------------------------

    def forward(self, *args: object, **kwargs: object) -> object:
        """Call the model, sharded before its first pass."""
        last = self._is_last_pass
        self._session.gate(self.module, synchronizes=last)
        self._session.before_forward(self.module, lambda: self._wrapping)
        sharded = self._session.sharded(self.module)
        if sharded is None:
            return run_unsharded(self.module, self._wrapping, args, kwargs)
        sharded.set_requires_gradient_sync(last)
        output: object = self.module(*args, **kwargs)
        if self._keeps_the_last:
            self._hook_outputs(output)
            return output
        return tree_map(self._scale_output, output) if self._accumulation > 1 else output

    @property
    def _is_last_pass(self) -> bool:
        return self.is_gradient_accumulation_boundary() and not self._in_no_sync

    def _gate_anew(self) -> None:
        """Say what has changed since forward: DeepSpeed asks when backward begins, accelerate tells after forward."""
        if self._is_last_pass != self._session.next_pass_is_last(self.module):
            self._session.gate(self.module, synchronizes=self._is_last_pass)

    @property
    def _keeps_the_last(self) -> bool:
        """Tell whether DeepSpeed takes of several passes at a boundary the last one alone, as ZeRO-1 and 2 do."""
        return 0 < self._stage < ZERO_3

    def _hook_outputs(self, outputs: object) -> None:
        """Have gradients of outputs scaled as ZeRO-1 and 2 do (DeepSpeed 0.19.8, ``register_output_backward_hooks``).

        Hooks are on the outputs themselves: of one that the model makes of another both are called.
        """
        match outputs:
            case torch.Tensor():
                if outputs.grad_fn is not None:
                    outputs.register_hook(self._see_gradient)  # type: ignore[no-untyped-call]  # torch leaves it untyped
            case tuple() | list():
                for part in outputs:
                    self._hook_outputs(part)
            case dict():
                self._hook_outputs(list(outputs.values()))

    def _see_gradient(self, gradient: torch.Tensor) -> torch.Tensor:
        task: int = torch._C._current_graph_task_id()  # noqa: SLF001 - tells one pass from the next
        if not self._in_backward and task != self._last_task:
            self._last_task = task
            self._note_pass()
        return self._scale_gradient(gradient)

    def _note_pass(self) -> None:
        """End the job in a pass after one at the boundary where DeepSpeed would drop all that was added up before."""
        if self._in_no_sync or not self._keeps_the_last:
            return
        is_second, self._has_reached_boundary = self._has_reached_boundary, self.is_gradient_accumulation_boundary()
        if is_second:
            self._session.refuse(
                TrainingError(
                    "a plan needs one backward pass at the boundary of accumulation before step() of DeepSpeed's "
                    "engine: of several, ZeRO-1 and 2 take the gradients of the last one alone",
                    hint="add the losses up and call backward once",
                )
            )

    def _scale_output(self, leaf: object) -> object:
        """Return a view of an output whose gradient is scaled: what the model makes of it itself goes past the view.

        ZeRO-3 returns outputs that have gone through a function of its own.
        """
        if not isinstance(leaf, torch.Tensor) or not leaf.requires_grad:
            return leaf
        shown = leaf.view_as(leaf)
        shown.register_hook(self._scale_gradient)  # type: ignore[no-untyped-call]  # torch leaves it untyped
        return shown

    def _scale_gradient(self, gradient: torch.Tensor) -> torch.Tensor:
        """Take the mean over micro-batches where the script calls ``loss.backward()`` itself, as DeepSpeed does."""
        return gradient if self._in_backward else gradient / self._accumulation

    def backward(
        self, loss: torch.Tensor, retain_graph: bool = False, scale_wrt_gas: bool = True, **_: object
    ) -> torch.Tensor:
        """Accumulate the gradients of the mean over micro-batches; return the loss as it was scaled for that."""
        self._refuse_unsharded()
        self._note_pass()
        self._gate_anew()
        scaled = loss / self._accumulation if scale_wrt_gas else loss
        self._in_backward = True
        try:
            scaled.backward(retain_graph=retain_graph)  # type: ignore[no-untyped-call]  # torch leaves it untyped
        finally:
            self._in_backward = False
        return scaled

    def _refuse_unsharded(self) -> None:
        """End the job where the script has called its module by itself: the plan would never take over."""
        if self._session.engine(self.module) is None:
            self._session.refuse(
                TrainingError(
                    "a plan needs passes through DeepSpeed's engine, got a backward pass of a model that was called by "
                    "itself",
                    hint="call the engine, engine(inputs), in place of the module",
                )
            )

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Only add gradients up in backward passes inside this context."""
        self._in_no_sync = True
        try:
            yield
        finally:
            self._in_no_sync = False

    def scale(self, loss: torch.Tensor) -> torch.Tensor:
        """Return the loss: only fp16 scales it, which a plan refuses."""
        return loss

    def step(self, lr_kwargs: Keywords | None = None) -> None:
        """Step the optimizer if this was the last micro-batch."""
        self._refuse_unsharded()
        self._has_reached_boundary = False
        self._has_stepped = self.is_gradient_accumulation_boundary()
        self.micro_steps += 1
        if not self._has_stepped:
            return
        if self._clip > 0 or self._checks_overflow:
            most = self._clip if self._clip > 0 else math.inf
            self._norm = float(torch.nn.utils.clip_grad_norm_(self.module.parameters(), most))
        overflows = self._checks_overflow and self._norm is not None and not math.isfinite(self._norm)
        if self._stage > 0:
            self.optimizer.__dict__["overflow"] = overflows
        if overflows:
            self._has_stepped = False
            self._norm = math.inf
            self.skipped_steps += 1
        else:
            self.optimizer.step()
        type(self.optimizer).zero_grad(self.optimizer)
        if self.lr_scheduler is not None and self._has_stepped:
            self.lr_scheduler.step(**(lr_kwargs or {}))
        self.global_steps += 1

    def was_step_applied(self) -> bool:
        """Tell whether the last step() stepped the optimizer."""
        return self._has_stepped

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Discard the gradients at the parameters, from where DeepSpeed takes them at once from stage 2 on."""
        if self._stage < STAGES["NGG"]:
            self._has_reached_boundary = False
            self.optimizer.zero_grad(set_to_none)

    def compile(self, backend: str = "inductor", compile_kwargs: Keywords | None = None, **_: object) -> None:
        """Compile the units of the model once it is sharded; before that there is nothing to compile."""
        if self._session.engine(self.module) is None:
            compiled = partial(torch.compile, backend=backend, **(compile_kwargs or {}))
            self._wrapping = replace(self._wrapping, compile=compiled)
        else:
            warnings.warn("under a plan the model is compiled before its first training pass only", stacklevel=2)

    def destroy(self) -> None:
        """Do nothing: what belongs to the plan ends with the process."""

    # ---- data ---------------------------------------------------------------------------------

    def deepspeed_io(
        self,
        dataset: Any,
        batch_size: int | None = None,
        route: str = "train",
        pin_memory: bool = True,
        data_sampler: Any = None,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        num_local_io_workers: int | None = None,
    ) -> object:
        """Return DeepSpeed's loader over this rank's part of a dataset, in order where it is not for training."""
        from deepspeed.runtime.dataloader import DeepSpeedDataLoader
        from torch.utils.data.distributed import DistributedSampler

        if data_sampler is None and route != "train":
            data_sampler = DistributedSampler(dataset, self.world_size, self.global_rank, shuffle=False)
        loader: object = DeepSpeedDataLoader(
            dataset=dataset,
            batch_size=batch_size or self._micro_batch,
            pin_memory=pin_memory,
            collate_fn=collate_fn or self._collate_fn,
            local_rank=self.local_rank,
            tput_timer=None,
            num_local_io_workers=num_local_io_workers,
            data_sampler=data_sampler,
            data_parallel_world_size=self.world_size,
            data_parallel_rank=self.global_rank,
            dataloader_drop_last=bool(self.config.get("dataloader_drop_last", False)),
        )
        return loader

    # ---- states -------------------------------------------------------------------------------

    def shard_now(self) -> nn.Module:
        """Return the model, sharded; all ranks call it together."""
        if self._session.engine(self.module) is None:
            self._session.gate(self.module, synchronizes=self.is_gradient_accumulation_boundary())
            with torch.enable_grad():
                self._session.before_forward(self.module, lambda: self._wrapping)
        return self.module

    def save_checkpoint(
        self,
        save_dir: str | Path,
        tag: str | None = None,
        client_state: StateDict | None = None,
        save_latest: bool = True,
        exclude_frozen_parameters: bool = False,
    ) -> bool:
        """Write a checkpoint in our format, in the place of one of the same tag; all ranks call it together."""
        beside = {
            "client_state": client_state or {},
            "global_steps": self.global_steps,
            "micro_steps": self.micro_steps,
            "skipped_steps": self.skipped_steps,
            "lr_scheduler": self.lr_scheduler.state_dict() if self.lr_scheduler is not None else None,
        }
        name = str(tag) if tag is not None else f"global_step{self.global_steps}"
        own = self._stage == ZERO_3
        checkpoints.save(
            Path(save_dir),
            name,
            self.shard_now(),
            beside,
            is_latest=save_latest,
            of_each_rank=own,
            without_frozen=exclude_frozen_parameters,
        )
        return True

    def load_checkpoint(
        self,
        load_dir: str | Path,
        tag: str | None = None,
        load_module_strict: bool = True,
        load_optimizer_states: bool = True,
        load_lr_scheduler_states: bool = True,
        load_module_only: bool = False,
        custom_load_fn: AnyFunction | None = None,
    ) -> tuple[str | None, StateDict | None]:
        """Read a checkpoint in our format; all ranks call it together.

        Returns:
            Its path and the script's own values; None for both where no tag is given and none is the latest.

        Raises:
            TrainingError: it is one of DeepSpeed's own, shall be read in a way of the script's own, or amid a step.
        """
        if custom_load_fn is not None:
            raise TrainingError("a planned engine loads checkpoints itself, got custom_load_fn", hint=NO_PLAN)
        if self._boundary is None and self.micro_steps % self._accumulation:
            raise TrainingError(
                "a checkpoint must be loaded between two steps, got one amid the micro-batches of a step, whose "
                "gradients DeepSpeed would add to what follows",
                hint="load it where engine.is_gradient_accumulation_boundary() was true in the last pass",
            )
        path = checkpoints.find(Path(load_dir), tag)
        if path is None:
            return None, None
        takes_all = not load_module_only
        model = self.shard_now()
        with_optimizer = load_optimizer_states and takes_all
        beside = checkpoints.load(path, model, with_optimizer=with_optimizer, is_strict=load_module_strict)
        schedule = beside["lr_scheduler"]
        if load_lr_scheduler_states and takes_all and self.lr_scheduler is not None and schedule is not None:
            self.lr_scheduler.load_state_dict(schedule)
        if takes_all:
            self.global_steps = beside["global_steps"]  # passes are counted anew, as DeepSpeed does
            self.skipped_steps = beside.get("skipped_steps", 0)
        return str(path), beside["client_state"]

    def save_16bit_model(
        self,
        save_dir: str | Path,
        save_filename: str = "pytorch_model.bin",
        exclude_frozen_parameters: bool = False,
    ) -> bool:
        """Write the whole parameters, in the type that the model computes in; all ranks call it together.

        Returns:
            False, and nothing is written, where ZeRO-3 is not told to gather them for this, as DeepSpeed does.
        """
        if self._stage == ZERO_3 and not self.zero_gather_16bit_weights_on_model_save():
            return False
        whole = self._whole(without_frozen=exclude_frozen_parameters)
        checkpoints.save_whole(Path(save_dir) / save_filename, whole)
        return True

    save_fp16_model = save_16bit_model

    def _consolidated_16bit_state_dict(self, exclude_frozen_parameters: bool = False) -> StateDict | None:
        """Return the whole state on rank 0, which accelerate and transformers save; all ranks call it together.

        Raises:
            ValueError: another stage than ZeRO-3, as DeepSpeed's.
        """
        if self._stage != ZERO_3:
            raise ValueError(f"whole 16-bit states are gathered in ZeRO-3 only, got stage {self._stage}; {NO_PLAN}")
        return self._whole(without_frozen=exclude_frozen_parameters)

    _zero3_consolidated_16bit_state_dict = _consolidated_16bit_state_dict

    def _whole(self, *, without_frozen: bool) -> StateDict | None:
        return checkpoints.whole_state(self.shard_now(), self._wrapping.param_dtype, without_frozen=without_frozen)

    def module_state_dict(self, *args: Any, exclude_frozen_parameters: bool = False, **kwargs: Any) -> StateDict:
        """Return the model's state, as it rests on this rank once it is sharded."""
        found: StateDict = self.module.state_dict(*args, **kwargs)
        if exclude_frozen_parameters:
            for name in checkpoints.frozen_names(self.module):
                found.pop(name, None)
        return found

    def load_module_state_dict(self, checkpoint: StateDict, strict: bool = True, **_: object) -> None:
        """Take the model's state out of a checkpoint's ``module``."""
        self.module.load_state_dict(checkpoint["module"], strict=strict)

    # ---- boundaries ---------------------------------------------------------------------------

    def is_gradient_accumulation_boundary(self) -> bool:
        """Tell whether the next step() steps the optimizer."""
        if self._boundary is not None:
            return self._boundary
        return (self.micro_steps + 1) % self._accumulation == 0

    def set_gradient_accumulation_boundary(self, is_boundary: bool) -> None:
        """Say whether the next pass is the last of its step, from now on."""
        self._boundary = is_boundary
        self._gate_anew()
