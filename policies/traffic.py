"""Bytes and messages that a strategy moves, as integer coefficients.

Units (docs/strategies.md, traffic): with m ranks a group, g groups and N = m * g ranks, one intra
unit on a tensor of V bytes makes every rank send V * (m-1)/m inside its group in m-1 ring rounds;
one inter unit V * (g-1)/N across groups in g-1 rounds. A world all-gather or reduce-scatter is
one of each, an all-reduce two of the respective unit.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from paro_advise.core.collective import Op
from paro_advise.errors import UsageError
from paro_advise.policies.procedure import Scope, procedure_of

if TYPE_CHECKING:
    from paro_advise.policies.procedure import Hops
    from paro_advise.policies.strategy import Strategy


@dataclass(frozen=True, slots=True, kw_only=True)
class Units:
    """Intra and inter units."""

    intra: int
    inter: int

    def __add__(self, other: Units) -> Units:
        return Units(intra=self.intra + other.intra, inter=self.inter + other.inter)


# Each gathers the parameters once per micro-batch: forward and backward.
_GATHERS_PER_MICRO_BATCH = 2


def hop_units(hops: Hops) -> Units:
    """Return the units of collectives: an all-reduce takes two, one over all ranks takes both kinds."""
    intra = inter = 0
    for hop in hops:
        times = 2 if hop.op == Op.ALL_REDUCE else 1
        intra += times * (hop.scope != Scope.ACROSS)
        inter += times * (hop.scope != Scope.INSIDE)
    return Units(intra=intra, inter=inter)


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
    """Return the coefficients of a strategy (docs/strategies.md, traffic)."""
    procedure = procedure_of(strategy)
    return Coefficients(
        parameter_per_micro_batch=hop_units(procedure.gather * _GATHERS_PER_MICRO_BATCH),
        gradient_per_micro_batch=hop_units(procedure.reduce),
        gradient_sync_per_step=hop_units(procedure.synchronise),
        parameter_sync_per_step=hop_units(procedure.publish),
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
