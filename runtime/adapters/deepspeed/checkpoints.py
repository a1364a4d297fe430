"""The checkpoints of a planned DeepSpeed engine: ours, with what DeepSpeed keeps beside the model and its optimizer."""

from __future__ import annotations

import io
import warnings
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import nn

from paro_advise.errors import TrainingError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from paro_advise.runtime.torch_types import StateDict

# The name under which what is beside model and optimizer lies in a checkpoint.
_BESIDE = "deepspeed_engine"
_BUFFERS = "buffers"
_LATEST = "latest"


def save(
    folder: Path,
    tag: str,
    model: nn.Module,
    beside: StateDict,
    *,
    is_latest: bool,
    of_each_rank: bool = False,
    without_frozen: bool = False,
) -> None:
    """Write a checkpoint, in the place of one of the same tag; all ranks call it together.

    Args:
        folder: of checkpoints.
        tag: the checkpoint's name.
        model: sharded.
        beside: more values.
        is_latest: ``find`` finds it without a tag.
        of_each_rank: each rank finds its own values and buffers again, as in ZeRO-3; else those of rank 0.
        without_frozen: leave parameters that are not trained out.
    """
    from paro_advise.runtime.sharding.saving.checkpoint import save_parts

    written = io.BytesIO()
    torch.save({**beside, _BUFFERS: dict(_persistent_buffers(model))}, written)
    if of_each_rank:
        found = [b""] * dist.get_world_size()
        dist.all_gather_object(found, written.getvalue())
    else:
        found = [written.getvalue()]
        dist.broadcast_object_list(found)
    listed = io.BytesIO()
    torch.save(found, listed)
    # Equal on all ranks: which of them writes it is not said.
    left_out = frozen_names(model) if without_frozen else frozenset()
    save_parts(folder / tag, model, extra={_BESIDE: listed.getvalue()}, without=left_out, force=True)
    if is_latest and dist.get_rank() == 0:
        _replace(folder / _LATEST, lambda path: path.write_text(tag, encoding="utf-8"))
    dist.barrier()


def find(folder: Path, tag: str | None) -> Path | None:
    """Return where a checkpoint is, the latest one without a tag; None, with a warning, where that is unknown.

    All ranks call it together.

    Raises:
        TrainingError: it is one of DeepSpeed's own.
    """
    name = str(tag) if tag is not None else None
    if name is None and dist.get_rank() == 0 and (folder / _LATEST).is_file():
        name = (folder / _LATEST).read_text(encoding="utf-8").strip()
    chosen = [name]
    dist.broadcast_object_list(chosen)
    if chosen[0] is None:
        warnings.warn(f"no file {_LATEST!r} in {folder} names a checkpoint: nothing is loaded", stacklevel=3)
        return None
    path = folder / chosen[0]
    if next(path.glob("*_states.pt"), None) is not None:
        raise TrainingError(
            "a planned engine reads its own checkpoints, got one of DeepSpeed's",
            where=str(path),
            hint="turn it into whole weights with DeepSpeed's zero_to_fp32.py, and load them into the model before "
            "deepspeed.initialize; the optimizer starts anew",
        )
    return path


def load(path: Path, model: nn.Module, *, with_optimizer: bool, is_strict: bool = True) -> StateDict:
    """Read a checkpoint, which another strategy or number of ranks may have written; all ranks call it together.

    Args:
        path: found before.
        model: sharded.
        with_optimizer: its states too.
        is_strict: all of the model must be in it; else parameters that are not stay as they are.

    Returns:
        What was saved beside model and optimizer.
    """
    from paro_advise.runtime.sharding.saving.checkpoint import load_parts

    loaded = load_parts(path, model, extra={_BESIDE: b""}, with_optimizer=with_optimizer, keeps_missing=not is_strict)
    # As trusted as all of a checkpoint: torch's own loader unpickles what is no tensor.
    found: StateDict | list[bytes] = torch.load(io.BytesIO(loaded[_BESIDE]), weights_only=False)
    if isinstance(found, dict):  # up to 0.2 without buffers
        return found
    rank = dist.get_rank() if len(found) == dist.get_world_size() else 0
    beside: StateDict = torch.load(io.BytesIO(found[rank]), weights_only=False, map_location="cpu")
    saved = beside.pop(_BUFFERS)
    with torch.no_grad():
        for name, buffer in _persistent_buffers(model):
            if name in saved:
                buffer.copy_(saved[name])
    return beside


def _persistent_buffers(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the buffers that state dicts hold, by name."""
    for prefix, module in model.named_modules():
        for name, buffer in module.named_buffers(prefix, recurse=False):
            if name.rpartition(".")[2] not in module._non_persistent_buffers_set:  # noqa: SLF001 - has no public name
                yield name, buffer


def whole_state(model: nn.Module, dtype: torch.dtype | None, *, without_frozen: bool = False) -> StateDict | None:
    """Gather the whole state dict of a model on rank 0, in the model's own order; all ranks call it together.

    Args:
        model: sharded.
        dtype: of floating-point values; None as the optimizer has them.
        without_frozen: leave parameters that are not trained out.

    Returns:
        Tensors in host memory; None on other ranks.
    """
    from paro_advise.runtime import stream_state_dict

    found = {
        name: value.to(dtype) if dtype is not None and value.is_floating_point() else value
        for name, value in stream_state_dict(model)
    }
    if dist.get_rank() != 0:
        return None
    left_out = frozen_names(model) if without_frozen else frozenset()
    names = nn.Module.state_dict(model, keep_vars=True)  # in the model's own order
    return {name: found[name] for name in names if name not in left_out}


def frozen_names(model: nn.Module) -> frozenset[str]:
    """Return the names of a model's parameters that are not trained."""
    named = model.named_parameters(remove_duplicate=False)
    return frozenset(name for name, parameter in named if not parameter.requires_grad)


def save_whole(path: Path, whole: StateDict | None) -> None:
    """Write a whole state dict by the rank that has it; all ranks call it together."""
    if whole is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        _replace(path, lambda place: torch.save(whole, place))
    dist.barrier()


def _replace(path: Path, write: Callable[[Path], object]) -> None:
    """Write a file beside its place, then put it there."""
    beside = path.with_name(f".{path.name}.partial")
    write(beside)
    beside.replace(path)
