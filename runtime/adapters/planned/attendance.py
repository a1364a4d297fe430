"""Lets one rank ask for whole states while the others go on: they come to its help at their next common point.

Scripts of DDP save on rank 0 alone, since there every rank holds everything. Under a plan the states lie on all
ranks. So at each point that all ranks pass together (a training pass forward, and backward through sharded units,
clipping, a step, a collective of the script, the end) rank 0 says in the job's store whether it goes on or gathers
something first, and the others wait to hear it. So rank 0 may also evaluate alone: it says which unit its pass gathers
next. And it may read whole parameters, as those do that keep a mean of weights on rank 0 only.
"""

from __future__ import annotations

import atexit
import contextlib
import sys
import time
from threading import Timer, current_thread, main_thread
from typing import TYPE_CHECKING, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.optim import optimizer as optimizer_module
from torch.utils._pytree import tree_leaves

from paro_advise.errors import CommunicationError, UsageError
from paro_advise.runtime.adapters.constants import FAREWELL_POLL_S, FAREWELL_S, LONG_WAIT_S
from paro_advise.runtime.adapters.planned.script_collectives import takes_all_ranks
from paro_advise.runtime.messages import tell
from paro_advise.runtime.sharding.parameters.owned import address, is_value_of
from paro_advise.runtime.sharding.parameters.reading import WholeReads, runs_inside
from paro_advise.runtime.sharding.states.whole_states import whole_moments, whole_parameters
from paro_advise.runtime.store import job_store

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from paro_advise.runtime.sharding.arrangement import Arrangement
    from paro_advise.runtime.sharding.engine import Engine
    from paro_advise.runtime.sharding.parameters.units import Slot

_R = TypeVar("_R")

PARAMETERS, OPTIMIZER, UNIT, OF_MODEL = "parameters", "optimizer", "unit ", " of model "
_GO, _IN_STATE, _READ, _OF_PARAMETER = "go", " in state ", "read at ", " of parameter "
_NORM, LOAD, BACKWARD = "a norm of gradients", "a load of weights", "a backward pass"
_EXCHANGE, _OF_PARTS, _AFTER_CHANGES = "exchange at ", " of parts ", " after changes "
_READ_HINT = (
    "take the read, or what samples by a method other than forward, out of `if rank == 0:` and only print or save "
    "there, or choose a strategy that keeps it whole: N.. for parameters, NNN for gradients"
)
BACKWARD_HINT = "make it on all ranks, or on a copy of the model"
LOAD_HINT = "load on all ranks; they may read one file"
_WAITS_LONG = (
    f"rank 0 has waited {LONG_WAIT_S:.0f} s for the others to help it read the model's whole state. They come at their "
    "next training pass, step or collective over all ranks. If they wait for rank 0 in another way (a smaller group, "
    "recv, a file), the job hangs: let them wait in torch.distributed.barrier() over all ranks"
)
_HEARD = "paro_points_heard"  # key: how many ranks know that rank 0 has gone on for the last time
# Rank 0 deletes what it said so many points ago: each step of training brings all ranks together.
_KEPT_POINTS = 1000
# What brings values of one rank to all, or makes one of all ranks'.
_EQUALIZING = ("all_reduce", "broadcast", "reduce")


class Attendance:
    """One rank's part, for all sharded models of the process."""

    def __init__(self, sum_over_ranks: Callable[[torch.Tensor], object]) -> None:
        """Begin to attend.

        Args:
            sum_over_ranks: an all-reduce that does not attend itself.
        """
        self._sum = sum_over_ranks
        self._engines: list[Engine] = []
        self._store = job_store()
        self._rank = dist.get_rank()
        self._world_size = dist.get_world_size()
        self._points = 0
        self._is_over = False
        self._inside = False
        self._slots: dict[int, tuple[Arrangement, dict[int, Slot]]] = {}  # by id of the engine
        WholeReads.before = self._before_read
        WholeReads.are_saved_whole = True
        WholeReads.meet_before_exchanges(self._before_exchange)
        atexit.register(self._leave)

    def add(self, engine: Engine) -> int:
        """Attend to one more model; return its place among them."""
        self._engines.append(engine)
        return len(self._engines) - 1

    def attend(self, passing: str = "", state: str = "") -> str:
        """Pass a common point; help rank 0 as long as it asks for something.

        Args:
            passing: which kind of a pass of a model this rank begins, "" for another point.
            state: of this rank's model, for the others to know rank 0's.

        Returns:
            Rank 0's.

        Raises:
            UsageError: rank 0 begins a pass of another kind.
        """
        if self._is_over or self._inside:
            return state
        if self._rank == 0:
            self._say(_GO + passing + _IN_STATE + state)
            return state
        while not (wanted := self._hear()).startswith(_GO):
            self._help(wanted)
        theirs, _, state = wanted.removeprefix(_GO).partition(_IN_STATE)
        if passing and theirs and passing != theirs:
            raise UsageError(
                f"all ranks must take equally many passes under this plan, rank 0 begins one {theirs}, rank "
                f"{self._rank} one {passing}",
                hint="give each rank as many micro-batches, run backward on all ranks, call train() again after an "
                "evaluation, evaluate under torch.no_grad(), or choose a strategy that replicates parameters and "
                "gradients (NN.)",
            )
        return state

    def _help(self, wanted: str) -> None:
        """Take part in what rank 0 gathers.

        Raises:
            UsageError: it is a value that only the script's line can make.
        """
        asked, _, changed = wanted.partition(_AFTER_CHANGES)
        what, _, model = asked.partition(OF_MODEL)
        if what == _NORM:
            raise UsageError(
                f"a norm of sharded gradients must be taken by all ranks, rank 0 takes one, rank {self._rank} does not",
                hint="clip on all ranks, and only print on one, or choose NNN, which keeps gradients whole",
            )
        if what == BACKWARD:
            raise UsageError(
                "backward passes of a model under a plan must be made by all ranks, rank 0 makes one of a model that "
                f"it called by itself, rank {self._rank} does not",
                hint=BACKWARD_HINT,
            )
        if what == LOAD:
            raise UsageError(
                "all ranks must load weights of a model under a plan, rank 0 calls load_state_dict, rank "
                f"{self._rank} does not",
                hint=LOAD_HINT,
            )
        if what.startswith(_EXCHANGE):
            raise UsageError(
                "parts of sharded tensors must be exchanged by all ranks, rank 0 does so at "
                f"{what.removeprefix(_EXCHANGE).partition(_OF_PARTS)[0]}, rank {self._rank} does not",
                hint=_READ_HINT,
            )
        if what.startswith(_READ) and not model:
            raise UsageError(
                "a sharded tensor must be read by all ranks at the same line, rank 0 reads at "
                f"{what.removeprefix(_READ)}, rank {self._rank} does not",
                hint=_READ_HINT,
            )
        self._inside = True
        engine = self._engines[int(model)]
        if what.startswith(_READ):
            line, _, parameter = what.removeprefix(_READ).partition(_OF_PARAMETER)
            WholeReads.whole(_resting(engine)[int(parameter)], line)
        elif what.startswith(UNIT):
            self._refuse_own_changes(engine, int(changed or 0))
            engine.homes.gather_once(engine.units[int(what.removeprefix(UNIT))])
        elif what.startswith(PARAMETERS):
            self._compare_changes(engine, what.removeprefix(PARAMETERS))
            for _ in whole_parameters(engine):
                pass
        else:
            for _ in whole_moments(engine):
                pass
        self._inside = False

    def _refuse_own_changes(self, engine: Engine, theirs: int) -> None:
        """Make sure that rank 0 does not run the model with weights of its own, of which it has kept its rows alone.

        Raises:
            UsageError: it has changed parameters more often than this rank.
        """
        if theirs > engine.edits.count_changes():
            raise UsageError(
                "sharded parameters must be changed by all ranks alike, got a pass of rank 0 after changes that rank "
                f"{self._rank} has not made",
                hint="change them on all ranks (a mean of weights too), or choose a strategy that replicates "
                "parameters (N..)",
            )

    def _compare_changes(self, engine: Engine, theirs: str) -> None:
        """Make sure that rank 0 has not changed parameters alone: its rows would be saved with those of the others.

        Raises:
            UsageError: it has.
        """
        if theirs != changes_of(engine):
            raise UsageError(
                "sharded parameters must be changed by all ranks alike, got a state dict of rank 0 after changes that "
                f"rank {self._rank} has not made",
                hint="change them on all ranks (a mean of weights too), or choose a strategy that replicates "
                "parameters (N..)",
            )

    def _before_read(self, line: str, tensor: DTensor) -> None:
        """Make sure that all ranks read a sharded tensor here; else they would wait for each other for ever.

        Where it is a parameter, those that do not read it can take part.
        """
        if self.is_needed:
            self.meet(_READ + line, _READ_HINT, self._parameter(tensor))

    def _before_exchange(self, line: str, what: str) -> None:
        """Bring all ranks together where torch moves parts of sharded tensors; help rank 0 with what it asks before.

        Raises:
            UsageError: rank 0 moves none, or others.
        """
        if not self.is_needed:
            return
        if self._rank == 0:
            self._say(f"{_EXCHANGE}{line}{_OF_PARTS}{what}")
            return
        # Ranks may call a function of torch at lines of their own.
        while not (heard := self._hear()).startswith(_EXCHANGE):
            if heard.startswith(_GO):
                raise UsageError(
                    f"parts of sharded tensors must be exchanged by all ranks, rank {self._rank} does so at {line}, "
                    "rank 0 does not",
                    hint=_READ_HINT,
                )
            self._help(heard)
        where, _, theirs = heard.removeprefix(_EXCHANGE).partition(_OF_PARTS)
        if theirs != what:
            raise UsageError(
                f"all ranks must do the same to sharded tensors in one order, rank 0 exchanges parts at {where}, rank "
                f"{self._rank} others at {line}",
                hint=_READ_HINT,
            )

    def meet_for_norm(self) -> None:
        """Bring all ranks together where the script takes a norm of gradients; help rank 0 with what it asks before.

        Raises:
            UsageError: another rank does not.
        """
        if self.is_needed:
            self.meet(_NORM, _READ_HINT)

    def _parameter(self, tensor: DTensor) -> str | None:
        """Return which parameter of which model lies where a tensor does, "" for none, None where none can be told."""
        memory = tensor._local_tensor.data_ptr()  # noqa: SLF001 - to_local() makes a view
        for model, engine in enumerate(self._engines if tensor.dim() else ()):
            for parameter, resting in enumerate(_resting(engine)):
                is_there = memory and resting._local_tensor.data_ptr() == memory  # noqa: SLF001
                is_same = is_there and resting.shape == tensor.shape and _layout(resting) == _layout(tensor)
                if resting is tensor or is_same:
                    return f"{_OF_PARAMETER}{parameter}{OF_MODEL}{model}"
        return "" if memory or not tensor.dim() else None  # this rank may hold no row of it

    @property
    def is_needed(self) -> bool:
        """Tell whether ranks must still be brought together, and are not."""
        return not (self._inside or self._is_over)

    @contextlib.contextmanager
    def meeting(self, what: str) -> Iterator[None]:
        """Bring the others to the same gathering.

        Raises:
            UsageError: they have gone.
        """
        if self._is_over and not dist.is_initialized():
            raise UsageError(
                "the whole state of a sharded model must be read while all ranks are there, got it after "
                "destroy_process_group()",
                hint="save before, or choose a strategy that replicates what is saved (NN.)",
            )
        self.meet(what, "call state_dict() on rank 0, or on all ranks in one order")
        self._inside = True
        told = Timer(LONG_WAIT_S, tell, (_WAITS_LONG,))
        told.daemon = True
        if self._rank == 0:
            told.start()
        try:
            yield
        finally:
            told.cancel()
            self._inside = False

    def meet(self, what: str, hint: str, of: str | None = "", changes: int = 0) -> None:
        """Say what is gathered next; or help rank 0 until it says so too.

        Args:
            what: all ranks say alike.
            hint: for a rank that asks alone.
            of: what of it, for those that ask for nothing, or for something else at the same line; None where this
                rank cannot tell.
            changes: that rank 0 has made of the model's parameters since its last step, of a pass by itself.

        Raises:
            UsageError: this rank asks without rank 0.
        """
        if self._rank == 0:
            self._say(what + (of or "") + (f"{_AFTER_CHANGES}{changes}" if changes else ""))
            return
        while (heard := self._hear()).partition(_AFTER_CHANGES)[0] != what + (of or "") and (
            of is not None or heard.partition(_OF_PARAMETER)[0] != what
        ):
            if heard.startswith(_GO):
                raise UsageError(
                    f"what is gathered ({what}) must be asked for by rank 0 or by all ranks, rank {self._rank} asked "
                    "and rank 0 went on",
                    hint=hint,
                )
            self._help(heard)

    def _say(self, what: str) -> None:
        self._points += 1
        self._store.set(f"paro_point_{self._points}", what)
        if self._points > _KEPT_POINTS:
            self._store.delete_key(f"paro_point_{self._points - _KEPT_POINTS}")

    def _hear(self) -> str:
        self._points += 1
        try:
            return self._store.get(f"paro_point_{self._points}").decode()
        except RuntimeError as error:
            raise CommunicationError(
                f"rank {self._rank} must hear from rank 0 before it goes on, got: {str(error).splitlines()[0]}",
                hint="look at what rank 0 printed last",
            ) from error

    def call(self, original: Callable[..., _R], args: tuple[object, ...], kwargs: dict[str, object]) -> _R:
        """Call a collective of the script, and attend before if all ranks do."""
        self._refuse_in_step(original.__name__, (args, kwargs))
        if takes_all_ranks(args, kwargs):
            self.attend()
            if original.__name__ == "destroy_process_group":
                self._part()
            if original.__name__ in _EQUALIZING:
                return self._equalize(original, args, kwargs)
        return original(*args, **kwargs)

    def _refuse_in_step(self, name: str, given: object) -> None:
        """Refuse that an optimizer exchanges what its ranks have made each of other parameters.

        Raises:
            UsageError: it sends tensors of more than one element, on all ranks that call it.
        """
        if self._inside or current_thread() is not main_thread():
            return
        # An exception that a script has caught leaves a step without a word.
        if not (any(engine.shards.is_stepping for engine in self._engines) and runs_inside(optimizer_module)):
            return
        if any(isinstance(item, torch.Tensor) and item.numel() > 1 for item in tree_leaves(given)):
            raise UsageError(
                "an optimizer under a plan must update each parameter on every rank, which holds its rows of it, got "
                f"one that calls {name} in its step, as those do that deal parameters out",
                hint="take its form for a single device (Muon has one), or train without a plan",
            )

    def _equalize(self, original: Callable[..., _R], args: tuple[object, ...], kwargs: dict[str, object]) -> _R:
        """Call a collective, unless it shall make sharded parameters equal that a script has changed.

        Raises:
            UsageError: some rank has changed what it sends since the last step, of which each rank kept its own rows;
                on all ranks.
        """
        sent = [item for item in tree_leaves((args, kwargs)) if isinstance(item, DTensor) and item.dim()]
        if not sent or self._inside:
            return original(*args, **kwargs)
        found = {id(slot) for item in sent if (slot := self._slot_at(item)) is not None}
        known = [(engine, slot) for engine in self._engines for slot in self._slots_of(engine).values()]
        is_changed = any(id(slot) in found and engine.edits.is_changed(slot) for engine, slot in known)
        # A rank that holds no row of what it sends does not know what that is: others do.
        told = torch.tensor([float(is_changed), *(float(id(slot) in found) for _, slot in known)])
        told = told.to(sent[0].device)
        self._sum(told)
        some_changed, *senders = told.tolist()
        if some_changed:
            raise UsageError(
                f"a sharded parameter that a script has changed must not be sent round before the next step, got "
                f"{original.__name__} of one: each rank keeps its own rows of a change, and nothing tells whether all "
                "ranks have made the same",
                hint="make the same change on all ranks (random values after the same seed) and leave the call out, or "
                "choose a strategy that replicates parameters (N..)",
            )
        made = original(*args, **kwargs)
        for (engine, slot), number in zip(known, senders, strict=True):
            if number:
                engine.edits.note_sent(slot)
        return made

    def _slot_at(self, tensor: DTensor) -> Slot | None:
        """Return which trained parameter of any model lies where a tensor does; this rank may hold no row of it."""
        memory = address(tensor)
        for engine in self._engines:
            slots = self._slots_of(engine)
            found = (
                slots.get(memory)
                if memory
                else next((slot for slot in slots.values() if is_value_of(tensor, slot.parameter)), None)
            )
            if found is not None and address(found.parameter) == memory:
                return found
        return None

    def _slots_of(self, engine: Engine) -> dict[int, Slot]:
        """Return a model's sharded parameters that train by where this rank's part lies, those without one below 0."""
        known = self._slots.get(id(engine))
        if known is None or known[0] is not engine.arrangement:
            slots = [
                slot for unit in engine.units for slot in unit.spec.training if isinstance(slot.parameter, DTensor)
            ]
            known = (
                engine.arrangement,
                {address(slot.parameter) or -1 - place: slot for place, slot in enumerate(slots)},
            )
            self._slots[id(engine)] = known
        return known[1]

    def _leave(self) -> None:
        """Attend at the end of a process that has not taken its groups down itself."""
        if getattr(sys, "last_value", None) is None:
            with contextlib.suppress(CommunicationError, RuntimeError):
                self.attend()
                self._part()

    def _part(self) -> None:
        """End attendance. Where rank 0's process holds the store, it waits until all have heard that it went on."""
        if self._is_over or self._inside:
            return
        self._is_over = True
        until = time.monotonic() + FAREWELL_S
        with contextlib.suppress(RuntimeError):  # a store that is gone: nobody can be waited for
            heard = self._store.add(_HEARD, int(self._rank != 0))
            while self._rank == 0 and heard < self._world_size - 1 and time.monotonic() < until:
                time.sleep(FAREWELL_POLL_S)
                heard = self._store.add(_HEARD, 0)


def changes_of(engine: Engine) -> str:
    """Return how often this rank has changed the parameters of a model since its last step, as text."""
    engine.show_parameters()
    engine.homes.rest(engine.arrangement)
    return f" changed {engine.edits.count_changes()}"


def _resting(engine: Engine) -> list[DTensor]:
    """Return the parameters of which this rank keeps a part, the optimizer's as well, in one order on all ranks."""
    engine.homes.rest(engine.arrangement)
    parameters = [slot.parameter for unit in engine.units for slot in unit.spec.slots]
    parameters += [engine.shards.shards[slot.name] for unit in engine.units for slot in unit.spec.training]
    return [parameter for parameter in parameters if isinstance(parameter, DTensor)]


def _layout(tensor: DTensor) -> tuple[object, object]:
    return tensor.device_mesh, tensor.placements
