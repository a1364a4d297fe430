"""What a run must tell before anything is predicted for it, and what to do where it does not."""

from __future__ import annotations

from typing import TYPE_CHECKING

from paro_advise.advisor.analysis.constants import EVIDENCE_SHARE
from paro_advise.advisor.facts.model import OTHER_STEPS_CODE
from paro_advise.core.plural import plural
from paro_advise.errors import InputError
from paro_advise.trace_parsers.kineto.constants import NO_STEPS_CODE

if TYPE_CHECKING:
    from paro_advise.advisor.analysis.model import Analysis
    from paro_advise.policies.strategy import Strategy

_DESCRIBE = "describe the run in TOML (docs/descriptions.md)"


def known_run(analysis: Analysis) -> tuple[int, Strategy]:
    """Return world size and levels while computing of a run that tells enough to start from.

    Raises:
        InputError: it does not.
    """
    world, computing, steps = analysis.run.world_size, analysis.run.strategy.computing, analysis.step_time_us.values
    unmarked = next((item for item in analysis.data_quality if item.code == NO_STEPS_CODE), None)
    if analysis.run.micro_batches is None and unmarked is not None:
        raise InputError(
            "a recommendation must know where steps begin, got traces without step marks and backward passes: they may "
            "hold any number of steps",
            hint=unmarked.help,
        )
    if not world or world < 2:
        raise InputError(
            f"a recommendation must start from a run of several ranks, got {world or 'no number of them'}",
            hint=f"give traces of a job whose ranks talk to each other, or {_DESCRIBE}",
        )
    if not steps or min(steps) <= 0:
        raise InputError(
            f"a recommendation must start from timed steps, got {plural(len(steps), 'step')}",
            hint="record a few whole steps of some ranks with the PyTorch profiler, and call prof.step() after each",
        )
    if computing is None:
        why, next_step = _unknown_strategy(analysis)
        raise InputError(
            f"a recommendation must start from a run whose sharding strategy is known, got one that tells none: {why}",
            hint=f"{next_step}, or {_DESCRIBE}",
        )
    return world, computing


def _has(analysis: Analysis, code: str) -> bool:
    return any(item.code == code for item in analysis.data_quality)


def _unknown_strategy(analysis: Analysis) -> tuple[str, str]:
    """Return why the strategy of a run is unknown, and what to record."""
    if _has(analysis, OTHER_STEPS_CODE):
        return (
            "the steps that its script marks are not those of its optimizer",
            "call prof.step() once after each step of the optimizer, of one model at a time",
        )
    total = sum(entry.total_us or 0.0 for entry in analysis.states.values())
    unknown = analysis.states["unknown"].total_us or 0.0
    if total and unknown >= EVIDENCE_SHARE * total:
        return (
            f"{unknown / total:.0%} of its communication time has no known purpose",
            "record CPU activities and with_stack=True without CUDA graphs",
        )
    return (
        "its collectives are of no strategy that shards or replicates each step",
        "record steps in which gradients are reduced",
    )
