"""Single values of sharded gradients and parameters are those of the whole tensor.

Torch returns this rank's part for ``.item()``, ``bool()`` and ``torch.equal`` of a DTensor: ranks would scale
their gradients by different norms, or part ways at an ``if``. Here such a read takes all ranks of the tensor's
mesh together first, as ``full_tensor()`` does. Ranks that read at different lines are told so.
"""

from __future__ import annotations

import functools
import hashlib
import sys
from threading import current_thread, main_thread
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Replicate, Shard, _api, _dispatch, _redistribute

from paro_advise.errors import DivergedError, UsageError
from paro_advise.runtime.ho_ring.worker import reaching_all_ranks
from paro_advise.runtime.store import job_store

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from types import ModuleType

    from torch._ops import OpOverload
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor._dtensor_spec import DTensorSpec

    from paro_advise.runtime.sharding.parameters.units import Slot
    from paro_advise.runtime.torch_types import Arguments, Keywords, StateDict

_READS = (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.equal.default)  # noqa: SLF001 - the operator's name
# Frames of these packages are not where the user's script reads.
_INNER = ("torch", "paro_advise")


class WholeReader(Protocol):
    """Makes the states whole that a script asks for, whichever ranks ask."""

    def parameters(self) -> Iterable[tuple[Slot, torch.Tensor]]:
        """Return the parameters that train, unit by unit."""

    def optimizer_state(self) -> StateDict:
        """Return the optimizer's state in torch's own layout."""

    def before_load(self) -> None:
        """Make sure that all ranks take a state dict now.

        Raises:
            UsageError: some do not.
        """


class WholeReads:
    """The reads of this process; tensors on other meshes stay as torch has them.

    Attributes:
        before: called with the line of the script and the tensor before a read; None for nothing to call.
        are_saved_whole: the script's framework lets every rank hold whole parameters, so that it may pickle one.
        before_exchange: called with the line of the script, and what is moved how, before torch itself moves parts of
            a tensor between ranks.
        frameworks_meshes: sizes of the meshes over which FSDP2 would have sharded; none without FSDP2.
    """

    before: ClassVar[Callable[[str, DTensor], None] | None] = None
    before_exchange: ClassVar[Callable[[str, str], None] | None] = None
    are_saved_whole: ClassVar[bool] = False
    frameworks_meshes: ClassVar[set[tuple[int, ...]]] = set()
    _meshes: ClassVar[set[tuple[int, ...]]] = set()
    _count: ClassVar[dict[tuple[int, ...], int]] = {}
    _is_reading: ClassVar[bool] = False

    @classmethod
    def watch(cls, mesh: DeviceMesh) -> None:
        """Make single values of tensors on a mesh whole."""
        cls._meshes.add(_ranks(mesh))
        handlers = DTensor._op_dispatcher._custom_op_handlers  # noqa: SLF001 - torch's own losses register here too
        for operator in _READS:
            handlers.setdefault(operator, cls._read)

    @classmethod
    def _read(cls, op_call: OpOverload[..., Any], args: Arguments, kwargs: Keywords) -> Any:
        if any(isinstance(item, DTensor) and _ranks(item.device_mesh) in cls._meshes for item in args):
            args = tuple(cls.whole(item) if isinstance(item, DTensor) else item for item in args)
        else:
            args = tuple(item._local_tensor if isinstance(item, DTensor) else item for item in args)  # noqa: SLF001
        return op_call(*args, **kwargs)

    @classmethod
    def whole(cls, tensor: DTensor, line: str | None = None, of: DTensor | None = None) -> torch.Tensor:
        """Gather a tensor, on all ranks of its mesh at the same line of the script.

        Args:
            tensor: a DTensor.
            line: where another rank reads it, of one that only takes part; None for the script's own line.
            of: the parameter that it is a view of, of which this rank may hold no row; None if it is none.

        Raises:
            DivergedError: they read at different lines.
            CommunicationError: one of them does not read at all.
            UsageError: it is a sum or a norm that is this rank's own in the script's framework.
        """
        is_reduced = not any(isinstance(place, Shard) for place in tensor.placements)
        if is_reduced and getattr(tensor, "is_shard_in_framework", False):
            raise UsageError(
                "a norm or a sum of gradients must not be read in a script for FSDP1: there it is that of this rank's "
                "shards, under a plan that of whole gradients",
                where=line_of_user(),
                hint="take the norm that model.clip_grad_norm_() returns, which is that of all gradients in both",
            )
        if all(isinstance(place, Replicate) for place in tensor.placements):
            return tensor._local_tensor  # noqa: SLF001 - to_local() makes a view
        here = line or line_of_user()
        if line is None and cls.before is not None:
            cls.before(here, tensor if of is None else of)
        cls._meet(tensor.device_mesh, here)
        cls._is_reading = True
        try:
            with torch.no_grad(), reaching_all_ranks("a read of a gradient or a parameter"):
                return tensor.full_tensor()
        finally:
            cls._is_reading = False

    @classmethod
    def meet_before_exchanges(cls, meet: Callable[[str, str], None]) -> None:
        """Call something before torch moves parts of watched tensors between ranks, see ``before_exchange``.

        A script's rows, products and norms of norms make torch do so, on all ranks of a mesh together.
        """
        if cls.before_exchange is None:
            for home in (_api, _dispatch, _redistribute):
                home.redistribute_local_tensor = cls._announce(home.redistribute_local_tensor)  # type: ignore[attr-defined]
        cls.before_exchange = meet

    @classmethod
    def _announce(cls, original: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        @functools.wraps(original)
        def moved(
            local: torch.Tensor, current: DTensorSpec, target: DTensorSpec, *args: object, **kwargs: object
        ) -> torch.Tensor:
            meet = cls.before_exchange
            is_ours = current.placements != target.placements and _ranks(current.mesh) in cls._meshes
            if meet is not None and is_ours and not cls._is_reading and current_thread() is main_thread():
                line, function = line_of_user(), _function_of_torch()
                meet(line, f"{current} to {target.placements} in {function or line}")
            return original(local, current, target, *args, **kwargs)

        return moved

    @classmethod
    def refuse_local(cls, tensor: DTensor) -> None:
        """Refuse that a script takes this rank's rows where its own framework would give it others.

        Raises:
            UsageError: what it adds up over its groups would be another sum.
        """
        mesh = tensor.device_mesh
        is_alike = cls.frameworks_meshes <= {(dist.get_world_size(),)} and mesh.shape == (dist.get_world_size(),)
        is_alike |= not cls.frameworks_meshes
        if not is_alike and sys._getframe(2).f_globals.get("__name__", "").partition(".")[0] not in _INNER:  # noqa: SLF001
            raise UsageError(
                "a script must not take this rank's rows (to_local) where the plan lays them out otherwise than FSDP2: "
                "sums over its groups would differ",
                where=line_of_user(),
                hint="take full_tensor(), or the norm that clip_grad_norm_ returns; or GGG, if the script shards over "
                "all ranks",
            )

    @classmethod
    def _meet(cls, mesh: DeviceMesh, here: str) -> None:
        """Make sure that the ranks of a mesh read at the same line.

        Raises:
            DivergedError: they do not.
        """
        ranks = _ranks(mesh)
        count = cls._count[ranks] = cls._count.get(ranks, 0) + 1
        store = job_store()
        # Meshes may hold the same ranks in other orders.
        prefix = f"paro_read_{hashlib.sha256(repr(ranks).encode()).hexdigest()[:16]}"
        first = store.compare_set(f"{prefix}_{count}", "", here).decode()
        if first != here:
            raise DivergedError(
                f"all ranks must read a sharded tensor at the same line, rank {dist.get_rank()} reads at {here}, "
                f"another one at {first}",
                hint="take the read out of what only some ranks run, such as `if rank == 0:`",
            )
        if dist.get_rank() == ranks[0]:
            store.delete_key(f"{prefix}_{count - 1}")  # all have met there, or none could be here


def _ranks(mesh: DeviceMesh) -> tuple[int, ...]:
    return tuple(mesh.mesh.flatten().tolist())


def _function_of_torch() -> str:
    """Return the function for models or optimizers that the script has called, "" where it works on tensors itself."""
    frame, outermost = sys._getframe(1), ""  # noqa: SLF001
    while frame.f_back is not None and frame.f_globals.get("__name__", "").partition(".")[0] in _INNER:
        module = frame.f_globals.get("__name__", "")
        if module.startswith(("torch.nn.utils", "torch.optim")):
            outermost = f"{module}.{frame.f_code.co_name}"
        frame = frame.f_back
    return outermost


def runs_inside(module: ModuleType) -> bool:
    """Tell whether a function of a module has led here."""
    frame = sys._getframe(1).f_back  # noqa: SLF001 - inspect.stack reads files
    while frame is not None:
        if frame.f_code.co_filename == module.__file__:
            return True
        frame = frame.f_back
    return False


def line_of_user() -> str:
    """Return the file and line of the script that are running."""
    frame = sys._getframe(1)  # noqa: SLF001 - inspect.stack reads files
    while frame.f_back is not None and frame.f_globals.get("__name__", "").partition(".")[0] in _INNER:
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"
