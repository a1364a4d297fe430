"""Strategies as values: which of parameters, gradients and optimizer states is sharded how far.

Source: PaRO (arXiv 2310.06003); notation and coefficients in docs/strategies.md.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from paro_advise.errors import UsageError

_NUM_STATES = 3


class Level(StrEnum):
    """How far a model state is sharded."""

    N = "N"  # replicated on every rank
    I = "I"  # noqa: E741 - the paper's letter: sharded inside a group, replicated across groups
    G = "G"  # sharded over all ranks


class CollectiveBackend(StrEnum):
    """What moves the bytes of a strategy."""

    NATIVE = "native"  # the backend's own collectives
    HO_RING = "ho_ring"  # our hierarchical overlapped ring


@dataclass(frozen=True, slots=True, kw_only=True)
class Strategy:
    """A triple of levels for parameters, gradients and optimizer states."""

    parameter: Level
    gradient: Level
    optimizer: Level

    @classmethod
    def parse(cls, text: str) -> Strategy:
        """Read a triple such as "IIG".

        Raises:
            UsageError: not three letters of N, I, G.
        """
        letters = text.strip().upper()
        if len(letters) != _NUM_STATES or any(letter not in Level.__members__ for letter in letters):
            raise UsageError(
                f"a strategy must be three letters of N, I, G for parameters, gradients and optimizer, got {text!r}",
                hint="for example GGG (ZeRO-3), III (HSDP, MiCS), NNG (ZeRO-1), NNN (DDP)",
            )
        parameter, gradient, optimizer = (Level(letter) for letter in letters)
        return cls(parameter=parameter, gradient=gradient, optimizer=optimizer)

    @property
    def uses_groups(self) -> bool:
        """Tell whether a state is sharded inside groups."""
        return Level.I in (self.parameter, self.gradient, self.optimizer)

    def __str__(self) -> str:
        return f"{self.parameter}{self.gradient}{self.optimizer}"


ALL: tuple[Strategy, ...] = tuple(
    Strategy(parameter=parameter, gradient=gradient, optimizer=optimizer)
    for parameter in Level
    for gradient in Level
    for optimizer in Level
)

# What is left after the two dominance rules below; parameters first, from replicated to sharded globally.
KEPT: tuple[Strategy, ...] = tuple(
    map(
        Strategy.parse,
        ["NNN", "NNI", "NNG", "NII", "NIG", "NGG", "INI", "ING", "III", "IIG", "IGG", "GNG", "GIG", "GGG"],
    )
)

# Pareto points only when few parameters are trained; else the named one dominates.
PARTIAL_ONLY: dict[Strategy, Strategy] = {
    Strategy.parse(few): Strategy.parse(full) for few, full in (("ING", "NIG"), ("GNG", "NGG"), ("GIG", "IGG"))
}

_ORDER = (Level.N, Level.I, Level.G)


def finer(first: Level, second: Level) -> bool:
    """Tell whether the first level shards further than the second."""
    return _ORDER.index(first) > _ORDER.index(second)


def check_kept(strategy: Strategy) -> None:
    """Refuse a strategy that is none of the 14 kept ones.

    Raises:
        UsageError: it names a better one where there is one.
    """
    if strategy not in KEPT:
        better = dominated_by(strategy)
        raise UsageError(
            f"the strategy must be one of {', '.join(map(str, KEPT))}, got {strategy}",
            hint=f"{better} needs no more memory and sends no more" if better else None,
        )


def dominated_by(strategy: Strategy) -> Strategy | None:
    """Return a strategy that needs no more memory and traffic, None when none of the two rules applies.

    R1: the optimizer states must be at least as sharded as the gradients: they are six times
    heavier and touched once a step; swapping the two levels never adds traffic.
    R2: they must be at least as sharded as the parameters: refining them to the parameters' level
    turns an all-reduce or a gather back into a reduce-scatter.
    """
    if finer(strategy.gradient, strategy.optimizer):
        return Strategy(parameter=strategy.parameter, gradient=strategy.optimizer, optimizer=strategy.gradient)
    if finer(strategy.parameter, strategy.optimizer):
        return Strategy(parameter=strategy.parameter, gradient=strategy.gradient, optimizer=strategy.parameter)
    return None
