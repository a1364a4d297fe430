"""Named systems and the strategies they are, in both directions.

Source: reference strategies 1.1 and 2.4, reference prediction 5.8.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from paro_advise.policies.strategy import KNOWN_SYSTEMS, Strategy


class Relation(StrEnum):
    """How exactly a system is a triple."""

    EXACT = "exact"
    AT_REST = "at_rest"  # sharded so between steps, coarser while it computes
    EXTRA_COPY = "extra_copy"  # holds a second copy of the parameters
    OFFLOADED = "offloaded"  # keeps states outside of the device


@dataclass(frozen=True, slots=True, kw_only=True)
class System:
    """A system that people know by name.

    Attributes:
        name: as its users say.
        strategy: between steps.
        peak: while it computes, where that differs.
        relation: how exactly it is that triple.
        note: what differs, for people.
    """

    name: str
    strategy: Strategy
    peak: Strategy | None = None
    relation: Relation = Relation.EXACT
    note: str = ""


def _system(name: str, strategy: str, relation: Relation, note: str, peak: str | None = None) -> System:
    return System(
        name=name,
        strategy=Strategy.parse(strategy),
        peak=Strategy.parse(peak) if peak else None,
        relation=relation,
        note=note,
    )


SYSTEMS: tuple[System, ...] = (
    *(System(name=name, strategy=strategy) for name, strategy in KNOWN_SYSTEMS.items()),
    _system("ZeroRedundancyOptimizer", "NNG", Relation.EXACT, "with DDP; updated parameters are broadcast"),
    _system(
        "FSDP shard grad op", "GGG", Relation.AT_REST, "gathered once per micro-batch and kept for backward", "NGG"
    ),
    _system(
        "FSDP hybrid shard zero2",
        "III",
        Relation.AT_REST,
        "gathered once per micro-batch inside the group and kept for backward",
        "NII",
    ),
    _system("ZeRO++ hpZ", "GGG", Relation.EXTRA_COPY, "a second 16-bit copy of the parameters at level I"),
    _system("ZeRO++ qwZ", "GGG", Relation.EXACT, "gathers quantised parameters: half the bytes"),
    _system("ZeRO++ qgZ", "GGG", Relation.EXACT, "reduces quantised gradients: a quarter of the bytes"),
    _system("Megatron distributed optimizer", "NNG", Relation.EXACT, "one optimizer instance"),
    _system("Megatron distributed optimizer, several instances", "NNI", Relation.EXACT, "I = ranks of an instance"),
    _system("Megatron-FSDP HFSDP", "IIG", Relation.EXACT, "outer sharding strategy optim"),
    _system("ZeRO-Offload", "NGG", Relation.OFFLOADED, "optimizer states and step on the host"),
    _system("ZeRO-Infinity", "GGG", Relation.OFFLOADED, "states on the host or NVMe"),
)


def systems_of(strategy: Strategy) -> tuple[System, ...]:
    """Return the systems that are a strategy, at rest or while they compute."""
    return tuple(system for system in SYSTEMS if strategy in (system.strategy, system.peak))


def strategy_of(name: str) -> System | None:
    """Return the system of a name, without regard to case and punctuation; None for an unknown one."""
    wanted = _plain(name)
    return next((system for system in SYSTEMS if _plain(system.name) == wanted), None)


def _plain(name: str) -> str:
    return "".join(letter for letter in name.lower() if letter.isalnum() or letter == "+")
