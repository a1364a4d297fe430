"""Bytes that the model states of one rank take under a strategy."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from paro_advise.policies.strategy import Level

if TYPE_CHECKING:
    from paro_advise.policies.strategy import Strategy
    from paro_advise.policies.traffic import Shape


@dataclass(frozen=True, slots=True, kw_only=True)
class Widths:
    """Bytes per element of each state; the defaults are mixed-precision Adam.

    ``optimizer_bytes``: fp32 master copy and two moments (ZeRO paper, section 3.1).
    """

    parameter_bytes: float = 2.0
    gradient_bytes: float = 2.0
    optimizer_bytes: float = 12.0


MIXED_PRECISION_ADAM = Widths()


@dataclass(frozen=True, slots=True, kw_only=True)
class StateBytes:
    """Bytes of each state on one rank."""

    parameter: float
    gradient: float
    optimizer: float

    @property
    def total(self) -> float:
        """Return the bytes of all three."""
        return self.parameter + self.gradient + self.optimizer


def shards(level: Level, shape: Shape) -> int:
    """Return over how many ranks a level spreads a state."""
    match level:
        case Level.N:
            return 1
        case Level.I:
            return shape.group_size
        case Level.G:
            return shape.world_size


def state_bytes(
    strategy: Strategy,
    shape: Shape,
    parameters: float,
    trainable: float | None = None,
    widths: Widths = MIXED_PRECISION_ADAM,
) -> StateBytes:
    """Return the bytes of the model states on one rank (docs/strategies.md, memory).

    Args:
        strategy: the triple.
        shape: groups and their size.
        parameters: number of parameters.
        trainable: how many of them train, None for all; only they have gradients and optimizer states.
        widths: bytes per element.
    """
    trained = parameters if trainable is None else trainable
    return StateBytes(
        parameter=widths.parameter_bytes * parameters / shards(strategy.parameter, shape),
        gradient=widths.gradient_bytes * trained / shards(strategy.gradient, shape),
        optimizer=widths.optimizer_bytes * trained / shards(strategy.optimizer, shape),
    )


def transient_bytes(
    strategy: Strategy, shape: Shape, largest_unit: float, parameter_bytes: float = 2.0, gradient_bytes: float = 2.0
) -> float:
    """Return a bound of what our runtime holds beside states and activations while it computes.

    Counted in copies of the largest unit (the root with embedding and head is one):

    - Parameters that are not kept whole: one unit is computed, the next one is gathered and copied out
      of its buffer, or put in order: 4. Whole ones: the buffer that an update arrives in.
    - Gradients that are not kept whole: autograd's own of one unit, three buffers that wait for or take
      part in a reduction, the one being filled, and two for the reduction's parts and sums: 7. Whole
      ones are a state; the same without autograd's at the boundary: 6.

    It holds however slow the network is; what is taken where reductions keep up: usual_transient_bytes().

    Args:
        strategy: the triple.
        shape: groups and their size.
        largest_unit: its elements.
        parameter_bytes, gradient_bytes: per element, as computed and reduced in.
    """
    gathered = 1.0 if shards(strategy.parameter, shape) == 1 else 4.0
    reduced = 6.0 if shards(strategy.gradient, shape) == 1 else 7.0
    return largest_unit * (gathered * parameter_bytes + reduced * gradient_bytes)


def usual_transient_bytes(
    strategy: Strategy, shape: Shape, largest_unit: float, parameter_bytes: float = 2.0, gradient_bytes: float = 2.0
) -> float:
    """Return what our runtime holds beside states and activations at the peak of a step, where reductions keep up.

    Counted in copies of the largest unit, as measured (``make bench-memory``, first model):

    - Parameters that are not kept whole: the unit that is computed and the next one: 2.
    - Gradients that are not kept whole: autograd's own, the buffer being filled, one in its reduction: 3.
    - Whole gradients of whole optimizer states: the buffers of an all-reduce that waits, 6, as bounded. Those
      of sharded ones: none, since at the boundary they become less from unit to unit.

    Args:
        strategy: the triple.
        shape: groups and their size.
        largest_unit: its elements.
        parameter_bytes, gradient_bytes: per element, as computed and reduced in.
    """
    gathered = 0.0 if shards(strategy.parameter, shape) == 1 else 2.0
    whole = 6.0 if shards(strategy.optimizer, shape) == 1 else 0.0
    reduced = 3.0 if shards(strategy.gradient, shape) > 1 else whole
    return largest_unit * (gathered * parameter_bytes + reduced * gradient_bytes)


def least_transient_bytes(
    strategy: Strategy, shape: Shape, largest_unit: float, parameter_bytes: float = 2.0, gradient_bytes: float = 2.0
) -> float:
    """Return what any runtime holds beside states while it computes: the largest unit whole, and its gradients.

    What a measured peak has beyond it and the states counts as activations; what of that were the
    runtime's own buffers is counted twice in a plan, never left out.

    Args:
        strategy: the triple.
        shape: groups and their size.
        largest_unit: its elements.
        parameter_bytes, gradient_bytes: per element, as computed and reduced in.
    """
    gathered = 0.0 if shards(strategy.parameter, shape) == 1 else parameter_bytes
    reduced = 0.0 if shards(strategy.gradient, shape) == 1 else gradient_bytes
    return largest_unit * (gathered + reduced)
