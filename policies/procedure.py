"""What a strategy does in a step, as collectives in order: the one definition that traffic, replay and runtime read.

Every micro-batch gathers parameters in forward and again in backward, and brings its gradients to their level;
the accumulation boundary brings them on to the optimizer's level; after the optimizer's step the updated
parameters go back to the parameters' level (docs/strategies.md, procedure; PaRO, arXiv 2310.06003).
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from functools import cache

from paro_advise.core.collective import Op
from paro_advise.policies.strategy import Level, Strategy


class Scope(StrEnum):
    """Which ranks a collective joins."""

    INSIDE = "inside"  # the ranks of a group
    ACROSS = "across"  # the ranks of equal place in all groups
    WORLD = "world"  # all ranks


@dataclass(frozen=True, slots=True)
class Hop:
    """One collective."""

    op: Op
    scope: Scope


Hops = tuple[Hop, ...]
_GATHER = {scope: Hop(Op.ALL_GATHER, scope) for scope in Scope}
_SCATTER = {scope: Hop(Op.REDUCE_SCATTER, scope) for scope in Scope}
_SUM = {scope: Hop(Op.ALL_REDUCE, scope) for scope in Scope}


@dataclass(frozen=True, slots=True, kw_only=True)
class Procedure:
    """The collectives of a strategy.

    Attributes:
        gather: of parameters, in forward and again in backward of every micro-batch.
        reduce: of gradients, in every micro-batch.
        synchronise: of what was added up, at the accumulation boundary.
        publish: of updated parameters, after the optimizer's step.
    """

    gather: Hops
    reduce: Hops
    synchronise: Hops
    publish: Hops


@cache
def procedure_of(strategy: Strategy) -> Procedure:
    """Return the procedure of any of the 27 strategies."""
    return Procedure(
        gather=gather_from(strategy.parameter),
        reduce=_reduce(strategy),
        synchronise=_synchronise(strategy),
        publish=_publish(strategy),
    )


def gather_from(level: Level) -> Hops:
    """Return what makes parameters whole that rest at a level."""
    match level:
        case Level.N:
            return ()
        case Level.I:
            return (_GATHER[Scope.INSIDE],)
        case Level.G:
            return (_GATHER[Scope.WORLD],)


def _reduce(strategy: Strategy) -> Hops:
    match strategy.gradient:
        case Level.N:
            return ()
        case Level.I:
            return (_SCATTER[Scope.INSIDE],)
        case Level.G:
            return _scatter_to_all(strategy)


def _scatter_to_all(strategy: Strategy) -> Hops:
    """Bring whole gradients to level G; FSDP2 has taken the first hop where it keeps parameters inside groups."""
    if strategy.parameter == Level.I:
        return (_SCATTER[Scope.INSIDE], _SCATTER[Scope.ACROSS])
    return (_SCATTER[Scope.WORLD],)


def _synchronise(strategy: Strategy) -> Hops:
    match strategy.gradient, strategy.optimizer:
        case Level.N, Level.N:
            return (_SUM[Scope.WORLD],)
        case Level.N, Level.I:
            return (_SCATTER[Scope.INSIDE], _SUM[Scope.ACROSS])
        case Level.N, Level.G:
            return _scatter_to_all(strategy)
        case Level.I, Level.N:
            return (_SUM[Scope.ACROSS], _GATHER[Scope.INSIDE])
        case Level.I, Level.I:
            return (_SUM[Scope.ACROSS],)
        case Level.I, Level.G:
            return (_SCATTER[Scope.ACROSS],)
        case Level.G, Level.N:
            return (_GATHER[Scope.WORLD],)
        case Level.G, Level.I:
            return (_GATHER[Scope.ACROSS],)
        case _:
            return ()


def _publish(strategy: Strategy) -> Hops:
    match strategy.optimizer, strategy.parameter:
        case Level.I, Level.N:
            return (_GATHER[Scope.INSIDE],)
        case Level.G, Level.N:
            return (_GATHER[Scope.WORLD],)
        case Level.G, Level.I:
            return (_GATHER[Scope.ACROSS],)
        case _:
            return ()
