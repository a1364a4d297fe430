"""What parts of a step changed, over the ranks of two runs."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from paro_advise.advisor.comparison.bootstrap import change_between, typical, widened
from paro_advise.advisor.comparison.constants import LEAST_OF_STEP
from paro_advise.advisor.comparison.metrics import mean_us, metric_of
from paro_advise.advisor.comparison.model import ChangeVerdict, Metric
from paro_advise.core.model_state import MODEL_STATES, State
from paro_advise.core.plural import plural

if TYPE_CHECKING:
    from collections.abc import Callable

    from paro_advise.advisor.analysis.model import Analysis, RankEntry

WAITING = "waiting"  # name of a metric; docs/formats.md, comparison


def over_ranks(before: Analysis, after: Analysis, name: str, get: Callable[[RankEntry], float | None]) -> Metric:
    """Compare a mean of the profiled steps; its range is based on the ranks.

    Args:
        before: the run before.
        after: the run after.
        name: of the metric.
        get: returns the time of a rank in us, None where it is not known.
    """
    common = common_ranks(before, after)
    if common is not None and name == WAITING:  # what is waited for shows only where the others are
        return metric_of(name, "us", None, None, samples="ranks")
    one, other = (
        {
            rank.rank: value
            for rank in side.ranks
            if (value := get(rank)) is not None and (not common or rank.rank in common)
        }
        for side in (before, after)
    )
    means = [mean_us(list(side.values())) for side in (one, other)]
    change = None
    are_alike = common is None or bool(common)
    if are_alike and one and other and 0 not in means:
        sides = [[side[rank] for rank in sorted(side)] for side in (one, other)]
        change = change_between(sides[0], sides[1], paired=one.keys() == other.keys(), trim=0.0)
        # Means of ranks hold what single steps had more, on all of them alike.
        change = widened(change, before.step_time_us.values, after.step_time_us.values) if change else None
    found = metric_of(name, "us", means[0], means[1], change, samples="ranks")
    if means[0] is None or means[1] is None or not are_alike:
        return found
    steps_us = [typical(side.step_time_us.values) for side in (before, after) if side.step_time_us.values]
    most = max(abs(change.low), abs(change.high)) * means[0] if change is not None else abs(means[1] - means[0])
    if one == other or most < LEAST_OF_STEP * min(steps_us, default=0.0):
        return replace(found, verdict=ChangeVerdict.SAME)
    if change is not None or 0 not in means:
        return found
    # It came up or went away on all ranks, or was there on none: that has no ratio, and is certain.
    came_up, went_away = ChangeVerdict.WORSE, ChangeVerdict.BETTER
    verdict = ChangeVerdict.SAME if means[0] == means[1] else went_away if means[1] == 0 else came_up
    return replace(found, verdict=verdict)


def common_ranks(before: Analysis, after: Analysis) -> frozenset[int] | None:
    """Return the ranks that two recordings of some ranks share; None where each run is compared as a whole."""
    first, second = (frozenset(rank.rank for rank in side.ranks) for side in (before, after))
    if first == second or not (before.run.ranks_missing or after.run.ranks_missing):
        return None
    return first & second


def ranks_caveat(before: Analysis, after: Analysis) -> str:
    """Say that two recordings hold other ranks, and what that leaves to compare; "" where they do not."""
    common = common_ranks(before, after)
    if common is None:
        return ""
    if not common:
        return " The recordings have no rank in common: how the parts of a step changed is not judged."
    return (
        f" The recordings hold different ranks: parts of a step are those of the {plural(len(common), 'rank')} in both."
    )


def exposed_us(state: str, unseen: set[str], rank: RankEntry) -> float | None:
    """Return a state's exposed time on a rank; None where it is among those that nothing tells of."""
    return None if state in unseen else rank.state_exposed_us.get(state)


def unattributed_states(analysis: Analysis) -> list[str]:
    """Return the states of which nothing was seen in a run whose communication is not attributed for the most part."""
    exposed_us = {state: entry.exposed_us or 0.0 for state, entry in analysis.states.items()}
    unknown_us = exposed_us.get(State.UNKNOWN, 0.0)
    if not unknown_us or 2 * unknown_us < sum(exposed_us.values()):
        return []
    return [state for state in MODEL_STATES if not (state in analysis.states and analysis.states[state].count)]
