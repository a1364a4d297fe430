"""Strategies and choices under the names that people know: one place for all texts."""

from __future__ import annotations

from typing import TYPE_CHECKING

from paro_advise.policies.strategy import CollectiveBackend

if TYPE_CHECKING:
    from paro_advise.policies.plan import BudgetStep, Choice

KNOWN_NAMES = {
    "NNN": "DDP",
    "NNG": "ZeRO-1",
    "NGG": "ZeRO-2",
    "GGG": "full shard, ZeRO-3",
    "III": "hybrid shard, HSDP",
}
_STATES = ("parameters", "gradients", "optimizer states")
_LEVELS = {"N": "replicated", "I": "per group", "G": "global"}


def strategy_name(triple: str, group_size: int | None = None) -> str:
    """Return a triple with the name that people know, or what it does to each state.

    "GGG (full shard, ZeRO-3)", "IIG in groups of 8 (parameters per group, gradients per group, optimizer
    states global)".
    """
    known = KNOWN_NAMES.get(triple)
    if known is None:
        known = ", ".join(f"{state} {_LEVELS[letter]}" for state, letter in zip(_STATES, triple, strict=True))
    return f"{grouped_triple(triple, group_size)} ({known})"


def grouped_triple(triple: str, group_size: int | None) -> str:
    """Return a triple with its group size, if it has one: "IIG in groups of 8"."""
    return f"{triple} in groups of {group_size}" if group_size else triple


def choice_name(choice: Choice, *, is_known: bool = False) -> str:
    """Return a choice for a sentence: strategy, variant, collectives, offload.

    Args:
        choice: what is named.
        is_known: the strategy's long name stands in the sentence already.
    """
    name = (grouped_triple if is_known else strategy_name)(choice.triple, choice.group_size)
    if choice.variant:
        name += f", {choice.variant.label}"
    if choice.collectives == CollectiveBackend.HO_RING:
        name += " with HO-Ring"
    if choice.offload:
        name += f", {choice.offload.replace('+parameter', ' and parameters')} on the host"
    return name


def short_choice_name(choice: Choice) -> str:
    """Return a choice for a column: "IIG/8 HO-Ring"."""
    groups = f"/{choice.group_size}" if choice.group_size else ""
    each = " each micro-batch" if choice.reduces_each_micro_batch else ""
    return f"{choice.triple}{groups} {collectives_name(choice)}{' host' if choice.offload else ''}{each}"


def collectives_name(choice: Choice | BudgetStep) -> str:
    """Return what moves the bytes of a choice: HO-Ring, native, or a framework's setting."""
    return "HO-Ring" if choice.collectives == CollectiveBackend.HO_RING else choice.variant.label
