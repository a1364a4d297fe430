"""Bytes and messages that a strategy moves, as integer coefficients.

Units (reference strategies 2.3): with m ranks a group, g groups and N = m * g ranks, one intra
unit on a tensor of V bytes makes every rank send V * (m-1)/m inside its group in m-1 ring rounds;
one inter unit V * (g-1)/N across groups in g-1 rounds. A world all-gather or reduce-scatter is
one of each, an all-reduce two of the respective unit.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from paro_advise.errors import UsageError
from paro_advise.policies.strategy import Level

if TYPE_CHECKING:
    from paro_advise.policies.strategy import Strategy


@dataclass(frozen=True, slots=True, kw_only=True)
class Units:
    """Intra and inter units."""

    intra: int
    inter: int

    def __add__(self, other: Units) -> Units:
        return Units(intra=self.intra + other.intra, inter=self.inter + other.inter)


NOTHING = Units(intra=0, inter=0)

# Forward and backward each gather the parameters.
_GATHER = {Level.N: NOTHING, Level.I: Units(intra=2, inter=0), Level.G: Units(intra=2, inter=2)}
_REDUCE = {Level.N: NOTHING, Level.I: Units(intra=1, inter=0), Level.G: Units(intra=1, inter=1)}

# From the gradient's level to the optimizer's, fully reduced (reference strategies 2.2, step 4).
_GRADIENT_SYNC = {
    (Level.N, Level.N): Units(intra=2, inter=2),  # world all-reduce
    (Level.N, Level.I): Units(intra=1, inter=2),  # intra reduce-scatter, inter all-reduce
    (Level.N, Level.G): Units(intra=1, inter=1),  # world reduce-scatter
    (Level.I, Level.N): Units(intra=1, inter=2),  # inter all-reduce, intra all-gather
    (Level.I, Level.I): Units(intra=0, inter=2),  # inter all-reduce
    (Level.I, Level.G): Units(intra=0, inter=1),  # inter reduce-scatter
    (Level.G, Level.N): Units(intra=1, inter=1),  # world all-gather
    (Level.G, Level.I): Units(intra=0, inter=1),  # inter all-gather
    (Level.G, Level.G): NOTHING,
}

# From the optimizer's level to the parameter's, updated parameters (step 6).
_PARAMETER_SYNC = {
    (Level.I, Level.N): Units(intra=1, inter=0),
    (Level.G, Level.N): Units(intra=1, inter=1),
    (Level.G, Level.I): Units(intra=0, inter=1),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Coefficients:
    """Units that a strategy moves.

    Attributes:
        parameter_per_micro_batch: on the parameters (P bytes).
        gradient_per_micro_batch: on the gradients of what trains (D bytes).
        gradient_sync_per_step: on D, at the accumulation boundary.
        parameter_sync_per_step: on D, after the optimizer's step.
    """

    parameter_per_micro_batch: Units
    gradient_per_micro_batch: Units
    gradient_sync_per_step: Units
    parameter_sync_per_step: Units


def coefficients(strategy: Strategy) -> Coefficients:
    """Return the coefficients of a strategy (reference strategies, section 3)."""
    return Coefficients(
        parameter_per_micro_batch=_GATHER[strategy.parameter],
        gradient_per_micro_batch=_REDUCE[strategy.gradient],
        gradient_sync_per_step=_GRADIENT_SYNC[strategy.gradient, strategy.optimizer],
        parameter_sync_per_step=_PARAMETER_SYNC.get((strategy.optimizer, strategy.parameter), NOTHING),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """The cluster and the run that traffic and memory are computed for.

    Attributes:
        group_size: ranks of a group (m).
        num_groups: groups (g).
        micro_batches: per step (s).

    Raises (on construction):
        UsageError: a number below 1.
    """

    group_size: int
    num_groups: int
    micro_batches: int = 1

    def __post_init__(self) -> None:
        for name in ("group_size", "num_groups", "micro_batches"):
            if getattr(self, name) < 1:
                raise UsageError(f"shape.{name} must be at least 1, got {getattr(self, name)}")

    @property
    def world_size(self) -> int:
        """Return the number of ranks (N)."""
        return self.group_size * self.num_groups


@dataclass(frozen=True, slots=True, kw_only=True)
class Traffic:
    """What one rank sends in a step, bytes."""

    intra_bytes: float
    inter_bytes: float


def step_traffic(strategy: Strategy, shape: Shape, parameter_bytes: float, gradient_bytes: float) -> Traffic:
    """Return the bytes that one rank sends in a step.

    Args:
        strategy: the triple.
        shape: see Shape.
        parameter_bytes: all parameters in the type they are gathered in (P).
        gradient_bytes: gradients of what trains, and updated parameters, in the type they are
            reduced in (D).
    """
    found = coefficients(strategy)
    per_step = found.gradient_sync_per_step + found.parameter_sync_per_step
    micro = shape.micro_batches
    intra_share = (shape.group_size - 1) / shape.group_size
    inter_share = (shape.num_groups - 1) / shape.world_size
    parameters, gradients = found.parameter_per_micro_batch, found.gradient_per_micro_batch
    return Traffic(
        intra_bytes=intra_share
        * (micro * parameters.intra * parameter_bytes + (micro * gradients.intra + per_step.intra) * gradient_bytes),
        inter_bytes=inter_share
        * (micro * parameters.inter * parameter_bytes + (micro * gradients.inter + per_step.inter) * gradient_bytes),
    )
