"""What the collectives of a run show of its model: units, buckets, types, and how often each is moved."""

from __future__ import annotations

import math
from collections import Counter
from typing import TYPE_CHECKING, NamedTuple

from paro_advise.advisor.analysis.constants import FROZEN_RATIO
from paro_advise.advisor.analysis.observed.strategy import StrategySource
from paro_advise.advisor.prediction.constants import ALL_TRAINED_SHARE, ASSUMED_UNITS, FEW_UNITS, FRONT_RATIO
from paro_advise.core.dtypes import dtype_bytes, is_of_bytes
from paro_advise.core.framework import Framework
from paro_advise.core.model_state import MODEL_STATES, State
from paro_advise.core.plural import plural
from paro_advise.errors import InputError
from paro_advise.policies.strategy import Level

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from paro_advise.advisor.analysis.model import Analysis, CollectiveEntry


class Pieces(NamedTuple):
    """What the traces show of the model: see the attributes of Calibration of these names."""

    unit_bytes: tuple[float, ...]
    bucket_bytes: tuple[float, ...] | None
    element_bytes: int
    root_bytes: float = 0.0
    front_bytes: float = 0.0
    passed_by: tuple[bool, ...] = ()

    @property
    def num_sent(self) -> int:
        """Return how many pieces the run itself sends at once in a pass."""
        return len(self.bucket_bytes or self.unit_bytes)


def model_of(analysis: Analysis, world: int, micro: int, notes: list[str]) -> Pieces:
    """Return the model's units.

    Raises:
        InputError: no collective tells them.
    """
    run = analysis.run
    units, element_bytes = _units(analysis, world, micro)
    if not units:
        moved = [entry for entry in analysis.collectives if entry.state in MODEL_STATES]
        raise InputError(
            "a recommendation must know the model's size, got "
            + ("collectives whose sizes are not recorded" if moved else "no collective of parameters or gradients"),
            hint="record with record_shapes=True" if moved else "record whole forward and backward passes of a step",
        )
    if len(units) >= FEW_UNITS or run.framework.is_fsdp or run.framework == Framework.RUNTIME:
        if run.framework.is_ddp:
            notes.append(
                f"the model's blocks are not in the traces: the {len(units)} buckets stand for them; fewer, larger "
                "blocks would make ways that gather parameters quicker than predicted, more and smaller ones slower"
            )
        root = _root_bytes(analysis, units, micro)
        front = 0.0 if root else _front_bytes(units)
        ordered = _root_last(units, root)
        return Pieces(ordered, None, element_bytes, root, front, _passed_by(analysis, ordered, micro))
    # Another strategy runs block by block, which costs more calls than a few large buckets.
    notes.append(
        f"the model's blocks are not in the traces, which show {plural(len(units), 'bucket')}: {ASSUMED_UNITS} assumed"
    )
    front = _front_bytes(units)
    blocks = ((sum(units) - front) / ASSUMED_UNITS,) * ASSUMED_UNITS
    assumed = (front, *blocks) if front else blocks
    return Pieces(assumed, units, element_bytes, front_bytes=front)


def width_of(analysis: Analysis, state: State) -> int | None:
    """Return the bytes of an element of most of a state's traffic, None where no type is recorded."""
    moved: dict[int, float] = {}
    for entry in kinds_of(analysis, state, lambda entry: bool(entry.dtype) and not is_of_bytes(entry.dtype)):
        if width := dtype_bytes(entry.dtype):
            moved[width] = moved.get(width, 0.0) + entry.count * float(entry.bytes or 0)
    return max(moved, key=lambda width: moved[width], default=None)


def gather_width(analysis: Analysis, model: Pieces) -> int:
    """Return the bytes of a parameter that is gathered: as seen, else of what matrix products take."""
    seen = width_of(analysis, State.PARAMETER) or width_of(analysis, State.OPTIMIZER)
    return seen or (2 if analysis.run.computes_16_bit else model.element_bytes)


def _units(analysis: Analysis, world: int, micro: int) -> tuple[tuple[float, ...], int]:
    """Return the bytes of each unit, from gathers in forward, else from reductions of gradients."""
    forward, reductions = _forward_gathers(analysis), reductions_of(analysis)
    forwards = forwards_of(analysis, micro)
    found = _expand(forward, _gather_passes(analysis, micro) * math.ceil(forwards))
    passes = reductions_per_step(analysis, reductions, micro)
    if found and forwards > 1 and analysis.run.total_parameter_count is None:
        # Gathered again and again, but each unit that trains is reduced once.
        found = [size for entry in reductions for size in _as_gathered(analysis, entry, passes)]
    if not found:
        # What was scattered inside groups arrives at the next hop cut in m.
        largest = max((entry.bytes or 0 for entry in reductions), default=0)
        whole = [entry for entry in reductions if entry.group_size == world or (entry.bytes or 0) * 4 > largest]
        found = _expand(whole, passes)
    if not found:
        return (), 4
    found = _in_order(found, analysis.run.unit_bytes)
    recorded = width_of(analysis, State.PARAMETER if forward else State.GRADIENT)
    if recorded:
        return tuple(found), recorded
    elements = sum(found)
    count = analysis.run.parameter_count
    width = elements / count if count else 4.0
    return tuple(found), min((1, 2, 4, 8), key=lambda size: abs(math.log(size / width)))


def _in_order(units: Sequence[float], order: Sequence[int]) -> list[float]:
    """Return units as forward meets them; those of one size together where sizes take turns otherwise.

    By size where the order holds other sizes, or none.
    """
    if Counter(order) == Counter(units):
        return [float(size) for size in order]
    places: dict[float, list[int]] = {}
    for place, size in enumerate(order):
        places.setdefault(float(size), []).append(place)
    if not all(size in places for size in units):
        return sorted(units)
    return sorted(units, key=lambda size: (sum(places[size]) / len(places[size]), size))


def _front_bytes(units: Sequence[float]) -> float:
    """Return the bytes of the first unit where it is larger than all others, as embeddings are; 0 where it is not."""
    return units[0] if len(units) > 2 and units[0] >= FRONT_RATIO * max(units[1:]) else 0.0


def _root_bytes(analysis: Analysis, units: Sequence[float], micro: int) -> float:
    """Return the bytes of FSDP's root, which stays gathered for backward where blocks are gathered again; 0 without.

    Where no unit is gathered again it is the one that only embeddings make so large.
    """
    backward = kinds_of(analysis, State.PARAMETER, _is_of_backward)
    if not analysis.run.framework.is_fsdp or len(units) < 2:
        return 0.0
    if not backward:
        return _front_bytes(units)
    passes = _gather_passes(analysis, micro)
    again = Counter(_expand(backward, passes))
    kept = Counter(_expand(_forward_gathers(analysis), passes)) - again
    kept = kept & _trained_units(analysis, passes) or kept  # frozen units are not gathered again either
    # The last block may stay gathered as well, as torchtitan has it; it is as large as the others.
    roots = [size for size in kept.elements() if size not in again] or list(kept.elements())
    return roots[0] if len(roots) == 1 and roots[0] in units else 0.0


def _passed_by(analysis: Analysis, units: tuple[float, ...], micro: int) -> tuple[bool, ...]:
    """Return which units forward gathers alone, with no gather or reduction in backward; () where none is, or unknown.

    Of equal units, those are first that forward meets first: what trains behind them needs no gradient of theirs.
    """
    passes = _gather_passes(analysis, micro)
    gathered, trained = Counter(_expand(_forward_gathers(analysis), passes)), _trained_units(analysis, passes)
    if not analysis.run.framework.is_fsdp or Counter(units) != gathered or trained - gathered:
        return ()
    again = Counter(_expand(kinds_of(analysis, State.PARAMETER, _is_of_backward), passes))
    left = gathered - (again | trained)
    flags = []
    for size in units:
        flags.append(left[size] > 0)
        left[size] -= flags[-1]
    return tuple(flags) if any(flags) and not all(flags) else ()


def _is_of_backward(entry: CollectiveEntry) -> bool:
    return entry.detail.startswith("backward")


def _trained_units(analysis: Analysis, passes: int) -> Counter[float]:
    """Return the bytes, as gathered, of the units whose gradients are reduced."""
    reductions = reductions_of(analysis)
    return Counter(size for entry in reductions for size in _as_gathered(analysis, entry, passes))


def _root_last(units: tuple[float, ...], root: float) -> tuple[float, ...]:
    if not root:
        return units
    place = units.index(root)
    return (*units[:place], *units[place + 1 :], root)


def _as_gathered(analysis: Analysis, reduction: CollectiveEntry, passes: int) -> list[float]:
    """Return the bytes of the units of a kind of reduction in the type of parameters."""
    reduced = dtype_bytes(reduction.dtype)
    scale = (width_of(analysis, State.PARAMETER) or reduced) / reduced if reduced else 1.0
    return [scale * size for size in _expand([reduction], passes)]


def _forward_gathers(analysis: Analysis) -> list[CollectiveEntry]:
    return kinds_of(analysis, State.PARAMETER, lambda entry: entry.detail.startswith("forward"))


def reductions_of(analysis: Analysis) -> list[CollectiveEntry]:
    """Return the reductions of gradients, without those that only bring replicas together."""
    return kinds_of(analysis, State.GRADIENT, lambda entry: entry.detail != "replica")


def forwards_of(analysis: Analysis, micro: int) -> float:
    """Return how often a micro-batch gathers a parameter for forward, on average; 1 where the model is not known."""
    gathered = _forward_share(analysis) / _gather_passes(analysis, micro)
    return gathered if gathered > FROZEN_RATIO else 1.0


def _forward_share(analysis: Analysis) -> float:
    """Return the parameters that forward passes gather in a step, as a multiple of the model's; 0 where not known."""
    width, run = width_of(analysis, State.PARAMETER), analysis.run
    known = run.total_parameter_count or run.parameter_count
    if not width or not known or run.strategy.source == StrategySource.METADATA:
        return 0.0
    return sum(entry.count * float(entry.bytes or 0) for entry in _forward_gathers(analysis)) / width / known


def _gather_passes(analysis: Analysis, micro: int) -> int:
    """Return in how many passes of a step parameters are gathered for forward: in each, or once where they stay whole.

    FSDP2 keeps them over the micro-batches of a step with ``set_reshard_after_backward(False)``.
    """
    gathered = _forward_share(analysis)
    computing = analysis.run.strategy.computing
    stays = computing is not None and computing.parameter == Level.N and gathered
    return min((1, micro), key=lambda passes: abs(math.log(gathered / passes))) if stays else micro


def trained_share(analysis: Analysis, model: Pieces) -> float:
    """Return the share of the parameters that have gradients, where gathers show those that have none."""
    count = analysis.run.parameter_count
    if not _forward_gathers(analysis) or not count or analysis.run.strategy.source == StrategySource.METADATA:
        return 1.0
    share = count * model.element_bytes / sum(model.unit_bytes)
    return share if share < ALL_TRAINED_SHARE else 1.0


def reductions_per_step(analysis: Analysis, reductions: Sequence[CollectiveEntry], micro: int) -> int:
    """Return how often a step reduces each gradient.

    Gradients that every rank holds whole need it once, but DDP does it on every micro-batch unless
    told otherwise: then the bytes of a step are too many for any element type.
    """
    computing = analysis.run.strategy.computing
    if computing is not None and computing.gradient != Level.N:
        return micro
    count = analysis.run.parameter_count
    if not count or micro == 1:
        return 1
    moved = sum(entry.count * float(entry.bytes or 0) for entry in reductions)
    if moved <= 0 or count <= 0:
        return 1
    return min((1, micro), key=lambda passes: min(abs(math.log(moved / passes / count / width)) for width in (2, 4)))


def kinds_of(analysis: Analysis, state: State, wanted: Callable[[CollectiveEntry], bool]) -> list[CollectiveEntry]:
    """Return the kinds of a state's collectives of known size that are wanted."""
    return [entry for entry in analysis.collectives if entry.state == state.value and entry.bytes and wanted(entry)]


def _expand(entries: Sequence[CollectiveEntry], passes: int) -> list[float]:
    found: list[float] = []
    for entry in entries:
        found += [float(entry.bytes or 0)] * max(1, round(entry.count / passes))
    return found
