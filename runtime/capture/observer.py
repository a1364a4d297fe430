"""Watches the steps of an unchanged training script: optimizers, backward passes, losses, gradients."""

from __future__ import annotations

import contextlib
import time
from typing import TYPE_CHECKING, ParamSpec, TypeVar, cast

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence
    from types import ModuleType

    from torch import nn

_P = ParamSpec("_P")
_R = TypeVar("_R")


class Observer:
    """Counts what happens in a step.

    A step ends when the first optimizer of the script has stepped after a backward pass. Optimizers
    that call others, as ZeroRedundancyOptimizer does, count as one.

    Args:
        on_step: called at the end of each step; None if the script marks the end of its steps.
        on_error: called with what went wrong in here; the script never sees it.

    Attributes:
        backward_passes: of the step so far.
        losses: what they started from.
        gradient_norm_squared: this rank's share, of the last gradients before clipping.
        inputs: shapes and types of the tensors in the first call of a module.
        busy_us: time spent in here.
    """

    def __init__(self, on_step: Callable[[], None] | None, on_error: Callable[[Exception], None]) -> None:
        self._on_step = on_step
        self._on_error = on_error
        self._lead: int | None = None
        self._stepping: list[int] = []
        self._in_backward = False
        self._removals: list[Callable[[], None]] = []
        self._shard_weight: float | None = 1.0
        self.engine: object = None  # a framework's own object that steps in place of optimizers
        self.inputs: list[list[object]] = []
        self.autocast: str | None = None
        self.busy_us = 0.0
        self.begin()

    def begin(self) -> None:
        """Forget the last step."""
        self.backward_passes = 0
        self.losses: list[torch.Tensor] = []
        self.gradient_norm_squared: torch.Tensor | float | None = None

    def install(self) -> None:
        """Start watching."""
        for handle in (
            register_optimizer_step_pre_hook(self._guard(self._before_optimizer)),
            register_optimizer_step_post_hook(self._guard(self._after_optimizer)),
        ):
            self._removals.append(handle.remove)
        first_call = register_module_forward_pre_hook(self._guard(self._before_forward))
        self._removals.append(first_call.remove)
        self._remove_first_call = first_call.remove
        self._wrap(torch.autograd, "backward", self._backward)
        self._wrap(torch.nn.utils, "clip_grad_norm_", self._clip)
        self._wrap(torch.nn.utils.clip_grad, "clip_grad_norm_", self._clip)

    def remove(self) -> None:
        """Stop watching."""
        for removal in self._removals:
            removal()
        self._removals = []

    def loss(self) -> torch.Tensor | None:
        """Return the sum of the step's losses."""
        return torch.stack(self.losses).sum() if self.losses else None

    def _guard(self, function: Callable[_P, None]) -> Callable[_P, None]:
        def call(*args: _P.args, **kwargs: _P.kwargs) -> None:
            if torch.compiler.is_compiling():
                return
            started = time.perf_counter()
            try:
                function(*args, **kwargs)
            except Exception as error:  # noqa: BLE001 - a capture must never end a training job
                self._on_error(error)
            self.busy_us += (time.perf_counter() - started) * 1e6

        return call

    def _wrap(self, home: ModuleType, name: str, around: Callable[..., object]) -> None:
        original = getattr(home, name)

        def call(*args: object, **kwargs: object) -> object:
            return around(original, *args, **kwargs)

        setattr(home, name, call)

        def undo() -> None:
            # Someone may have wrapped it again; then ours must stay, and does nothing more.
            if getattr(home, name) is call:
                setattr(home, name, original)

        self._removals.append(undo)

    # ---- what the script calls ----------------------------------------------------------------

    def _backward(self, original: Callable[_P, _R], *args: _P.args, **kwargs: _P.kwargs) -> _R:
        if self._in_backward:  # recomputation inside a backward pass
            return original(*args, **kwargs)
        self._guard(self._note_backward)(args, kwargs)
        self._in_backward = True
        try:
            return original(*args, **kwargs)
        finally:
            self._in_backward = False

    def _note_backward(self, args: tuple[object, ...], kwargs: dict[str, object]) -> None:
        roots = args[0] if args else kwargs.get("tensors")
        first = roots[0] if isinstance(roots, (list, tuple)) and roots else roots
        if isinstance(first, torch.Tensor) and first.is_meta:  # as scripts count what a step computes
            return
        self.backward_passes += 1
        if isinstance(first, torch.Tensor) and first.numel() == 1:
            self.losses.append(first.detach().float().reshape(()))

    def _clip(self, original: Callable[..., _R], *args: object, **kwargs: object) -> _R:
        if args and self.gradient_norm_squared is None:
            given = cast("torch.Tensor | Iterable[torch.Tensor]", args[0])
            parameters = [given] if isinstance(given, torch.Tensor) else list(given)
            args = (parameters, *args[1:])  # it may have been a generator
            self._guard(self._note_norm)(parameters)
        return original(*args, **kwargs)

    def _note_norm(self, parameters: Sequence[torch.Tensor]) -> None:
        self.gradient_norm_squared = norm_share(parameters, self._shard_weight)

    def _before_forward(self, module: nn.Module, args: tuple[object, ...]) -> None:
        if "HYBRID" in str(getattr(module, "sharding_strategy", "")):
            self._shard_weight = None
        self.inputs = [[list(item.shape), str(item.dtype)] for item in args if isinstance(item, torch.Tensor)]
        if torch.is_autocast_enabled():
            self.autocast = str(torch.get_autocast_dtype("cuda"))
        elif torch.is_autocast_enabled("cpu"):
            self.autocast = str(torch.get_autocast_dtype("cpu"))
        if self.inputs:  # one call is enough; every module pays for this hook
            self._forget_first_call()

    def _forget_first_call(self) -> None:
        if self._remove_first_call in self._removals:
            self._remove_first_call()
            self._removals.remove(self._remove_first_call)

    def _before_optimizer(
        self, optimizer: torch.optim.Optimizer, args: tuple[object, ...], kwargs: dict[str, object]
    ) -> None:
        if id(optimizer) in self._stepping:  # its last step failed
            del self._stepping[self._stepping.index(id(optimizer)) :]
        self._stepping.append(id(optimizer))
        # A closure has still to make the gradients, or the last of them, and to clip them.
        has_closure = kwargs.get("closure") is not None or (len(args) > 1 and args[1] is not None)
        if len(self._stepping) == 1 and not has_closure:
            self._note_norm_of(optimizer)

    def _note_norm_of(self, optimizer: torch.optim.Optimizer) -> None:
        # A step without a backward pass before it only makes the optimizer's states, as checkpoint helpers do.
        if self.engine is None and self.gradient_norm_squared is None and self.backward_passes:
            self._note_norm([item for group in optimizer.param_groups for item in group["params"]])

    def _after_optimizer(self, optimizer: torch.optim.Optimizer, *_: object) -> None:
        if id(optimizer) in self._stepping:
            del self._stepping[self._stepping.index(id(optimizer)) :]
        if self._stepping or self.engine is not None or not self.backward_passes:
            return
        self._note_norm_of(optimizer)
        if self._lead is None:
            self._lead = id(optimizer)
        if self._lead == id(optimizer) and self._on_step is not None:
            self._end_step()

    def end_step_of_engine(self, norm: Callable[[], torch.Tensor | float | None]) -> None:
        """End a step that a framework's own engine took.

        Args:
            norm: returns this rank's share of the squared norm of its gradients.
        """

        def end() -> None:
            self.gradient_norm_squared = norm()
            self._end_step()

        self._guard(end)()

    def _end_step(self) -> None:
        self._forget_first_call()
        if self._on_step is not None:
            self._on_step()
            self.begin()


def norm_share(parameters: Iterable[torch.Tensor], shard_weight: float | None = 1.0) -> torch.Tensor | float | None:
    """Return this rank's share of the squared norm of all gradients.

    What several ranks hold alike is divided among them, so that the sum over all ranks is right.
    None where a gradient does not tell how it is laid out.

    Args:
        parameters: with gradients.
        shard_weight: of FSDP1's shards; None where they are replicated nobody knows how often.
    """
    world = dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1
    by_weight: dict[float | None, list[torch.Tensor]] = {}
    of_layout: dict[tuple[object, ...], float | None] = {}
    for parameter in parameters:
        gradient = parameter.grad
        if gradient is None:
            continue
        weight: float | None = 1.0 / world
        if isinstance(gradient, DTensor):
            layout = id(gradient.device_mesh), gradient.placements
            if layout not in of_layout:  # asking a mesh takes longer than a small gradient's norm
                of_layout[layout] = _dtensor_weight(gradient, world)
            weight = of_layout[layout]
            gradient = gradient._local_tensor  # noqa: SLF001 - to_local() makes a view in the graph
        elif hasattr(parameter, "_fsdp_flattened") or type(parameter).__name__ == "FlatParameter":
            weight = shard_weight  # FSDP1's shards
        if gradient.numel():
            by_weight.setdefault(weight, []).append(gradient)
    if not by_weight or None in by_weight:
        return None
    total: torch.Tensor | float = 0.0
    with torch.no_grad(), contextlib.suppress(NotImplementedError):
        for weight, gradients in by_weight.items():
            # A CPU adds the squares of a tensor up one after the other: in fp32 that costs six digits.
            dtype = torch.float64 if gradients[0].device.type == "cpu" else torch.float32
            norms = torch._foreach_norm(gradients, 2, dtype)  # noqa: SLF001 - torch's own clipping uses it
            assert weight is not None
            total = total + weight * torch.stack(norms).square().sum()
    return total


def _dtensor_weight(gradient: DTensor, world: int) -> float | None:
    """Return the weight of the squares of this rank's part; None where the part is not reduced yet."""
    if any(place.is_partial() for place in gradient.placements):
        return None
    # Ranks beyond the mesh hold replicas of it.
    weight = gradient.device_mesh.mesh.numel() / world
    for size, place in zip(gradient.device_mesh.shape, gradient.placements, strict=True):
        weight /= size if place.is_replicate() else 1
    return weight
