"""Saves and loads a sharded model through torch.distributed.checkpoint.

A checkpoint holds whole tensors by qualified names in the layout of torch's own helpers
(``{"model": ..., "optimizer": {"state", "param_groups"}}``): any strategy, world or group size, and
plain FSDP2, can load it.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from paro_advise.errors import BrokenInputError, NoInputError, OutputError, UsageError, WouldOverwriteError
from paro_advise.runtime.ho_ring.groups import group_timeout
from paro_advise.runtime.ho_ring.worker import reaching_all_ranks
from paro_advise.runtime.sharding.agreement import agree
from paro_advise.runtime.sharding.module import engine_of
from paro_advise.runtime.sharding.states import states

if TYPE_CHECKING:
    from concurrent.futures import Future

    from torch import nn

    from paro_advise.runtime.sharding.engine import Engine
    from paro_advise.runtime.torch_types import StateDict

_COMPLETE = ".metadata"  # written last, by one rank, when all others are done


@cache
def _background_group() -> dist.ProcessGroup:
    """Return the group of background saves, made once: training goes on with the other groups meanwhile."""
    group: dist.ProcessGroup = dist.new_group(backend="gloo", timeout=group_timeout())
    return group


@cache
def _writer() -> ThreadPoolExecutor:
    """Return the thread of background saves."""
    return ThreadPoolExecutor(1, thread_name_prefix="paro_advise checkpoint")


def save_checkpoint(path: str | Path, model: nn.Module, *, extra: StateDict | None = None, force: bool = False) -> None:
    """Save model, optimizer and extra values; every rank calls it.

    Args:
        path: a folder to make.
        model: sharded.
        extra: more values, such as the step and the scheduler's state.
        force: replace a complete checkpoint of that name.

    Raises:
        WouldOverwriteError: there is a complete checkpoint already.
        OutputError: a rank could not write.
        CommunicationError: a rank is gone.
    """
    save_parts(path, model, extra=extra, force=force)


def save_parts(
    path: str | Path,
    model: nn.Module,
    *,
    extra: StateDict | None = None,
    without: frozenset[str] = frozenset(),
    force: bool = False,
) -> None:
    """Save as ``save_checkpoint`` does, without some of the model's parameters, by name."""
    _check_free(Path(path), force=force)
    contents = _contents(engine_of(model), extra)
    contents["model"] = {name: value for name, value in contents["model"].items() if name not in without}
    _save(contents, path, None)


def save_checkpoint_async(
    path: str | Path, model: nn.Module, *, extra: StateDict | None = None, force: bool = False
) -> Future[Any]:
    """Save in the background: like ``save_checkpoint``, but returns once everything is copied.

    Returns:
        Done when this rank has written its part; the checkpoint counts when it is complete.
    """
    _check_free(Path(path), force=force)
    _background_group()
    # torch 2.13's own staging cannot copy the empty shards of short parameters.
    contents = _copy(_contents(engine_of(model), extra))
    return _writer().submit(_save, contents, path, _background_group())


def _save(contents: StateDict, path: str | Path, group: dist.ProcessGroup | None) -> None:
    try:
        with reaching_all_ranks("the parts of a checkpoint"):
            save(contents, checkpoint_id=path, process_group=group)
    except CheckpointException as error:
        raise OutputError(
            f"every rank must write its part of a checkpoint, got: {_reason(error)}",
            where=str(path),
            hint="the folder has no .metadata and does not count; the checkpoint before it does",
        ) from error


def load_checkpoint(path: str | Path, model: nn.Module, *, extra: StateDict | None = None) -> StateDict:
    """Load model and optimizer in place, saved under any strategy or by plain FSDP2.

    Args:
        path: a complete checkpoint.
        model: sharded, of the same parameters.
        extra: values to load beside them, with defaults.

    Returns:
        The extra values.

    Raises:
        NoInputError: there is no complete checkpoint.
        BrokenInputError: it is damaged, or of another model.
        CommunicationError: a rank is gone.
    """
    return load_parts(path, model, extra=extra)


def load_parts(
    path: str | Path,
    model: nn.Module,
    *,
    extra: StateDict | None = None,
    with_optimizer: bool = True,
    keeps_missing: bool = False,
) -> StateDict:
    """Load as ``load_checkpoint`` does, or the model alone; what is not in it of the model may stay as it is."""
    engine = engine_of(model)
    path = Path(path)
    if not is_complete(path):
        raise NoInputError(
            "a checkpoint must be complete, got a folder without its metadata"
            if path.is_dir()
            else "no checkpoint there",
            where=str(path),
            hint="an interrupted save leaves such a folder; load the one before",
        )
    stored = FileSystemReader(path).read_metadata().state_dict_metadata
    engine.gradients.discard()
    has_optimizer = with_optimizer and any(name.startswith("optimizer.state.") for name in stored)
    if has_optimizer:
        engine.shards.ensure_state()
    contents = _contents(engine, extra)
    if not has_optimizer:
        del contents["optimizer"]
    if keeps_missing:
        contents["model"] = {name: value for name, value in contents["model"].items() if f"model.{name}" in stored}
    try:
        with reaching_all_ranks("the parts of a checkpoint"):
            load(contents, checkpoint_id=path)
    except (CheckpointException, OSError) as error:
        raise BrokenInputError(
            f"a checkpoint must hold all parameters of the model, got: {_reason(error)}", where=str(path)
        ) from error
    # Before anything else looks at the optimizer, which would take the model's parameters for what was changed.
    engine.updates.publish()
    engine.edits.note_all()
    if has_optimizer:
        states.load_optimizer_state(engine, contents["optimizer"])
    loaded: StateDict = contents.get("extra", {})
    return loaded


def is_complete(path: str | Path) -> bool:
    """Tell whether a folder is a complete checkpoint."""
    return (Path(path) / _COMPLETE).is_file()


def latest_checkpoint(folder: str | Path) -> Path | None:
    """Return the newest complete checkpoint among the folders in a folder."""
    found = [path for path in Path(folder).iterdir() if is_complete(path)] if Path(folder).is_dir() else []
    return max(found, key=lambda path: (path / _COMPLETE).stat().st_mtime_ns, default=None)


def _contents(engine: Engine, extra: StateDict | None) -> StateDict:
    """Return what a checkpoint holds.

    Raises:
        UsageError: the model has parameters that each rank has for itself, of which it would hold one rank's.
    """
    ignored = engine.own_parameters
    if ignored:
        raise UsageError(
            f"a checkpoint must hold what all ranks share, got {len(ignored)} parameters that no strategy moves",
            where=next(iter(ignored)),
            hint="save model.state_dict() and optimizer.state_dict() on each rank, in a file of its own",
        )
    contents: StateDict = {"model": states.model_state(engine), "optimizer": states.optimizer_state(engine)}
    return {**contents, "extra": extra} if extra else contents


def _copy(value: Any) -> Any:
    """Copy all tensors of nested values."""
    if isinstance(value, dict):
        return {key: _copy(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_copy(item) for item in value]
    return value.detach().clone() if isinstance(value, torch.Tensor) else value


def _check_free(path: Path, *, force: bool) -> None:
    taken = is_complete(path)
    agree({"checkpoint": [str(path), force]})
    if taken and not force:
        raise WouldOverwriteError("a checkpoint of that name exists", where=str(path), hint="pass force=True")
    if taken and dist.get_rank() == 0:
        (path / _COMPLETE).unlink()  # until the new one is complete, there is none
    with reaching_all_ranks("the start of a checkpoint"):
        dist.barrier()


def _reason(error: BaseException) -> str:
    failures = getattr(error, "failures", None)
    first = next(iter(failures.values()))[0] if failures else error
    return next(iter(str(first).splitlines()), type(first).__name__)
