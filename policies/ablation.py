"""A chosen strategy with one letter changed at a time, as the plan predicts it (pure)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from paro_advise.core.model_state import MODEL_STATES
from paro_advise.policies.strategy import PARTIAL_ONLY, Strategy, dominated_by

if TYPE_CHECKING:
    from paro_advise.policies.plan import Choice, Plan


@dataclass(frozen=True, slots=True, kw_only=True)
class Ablation:
    """One changed letter.

    Attributes:
        state: whose letter is changed.
        triple: the result.
        choice: the plan's prediction of it; None where the strategy is not run.
        reason: why there is none.
    """

    state: str
    triple: str
    choice: Choice | None
    reason: str


def ablations(plan: Plan) -> tuple[Ablation, ...]:
    """Return all neighbours of the chosen strategy, state by state."""
    chosen = plan.chosen
    found = []
    for place, state in enumerate(MODEL_STATES):
        for level in "NIG":
            if level == chosen.triple[place]:
                continue
            triple = chosen.triple[:place] + level + chosen.triple[place + 1 :]
            choice = _find(plan, triple)
            found.append(Ablation(state=state, triple=triple, choice=choice, reason="" if choice else _reason(triple)))
    return tuple(found)


def _find(plan: Plan, triple: str) -> Choice | None:
    """Return the candidate nearest to the chosen one: its collectives, its groups."""
    fitting = [choice for choice in plan.candidates if choice.triple == triple and not choice.variant]

    def distance(choice: Choice) -> tuple[bool, bool]:
        size = plan.chosen.group_size or plan.preconditions.gpus_per_node
        return choice.collectives != plan.chosen.collectives, choice.group_size not in (None, size)

    return min(fitting, key=distance, default=None)


def _reason(triple: str) -> str:
    strategy = Strategy.parse(triple)
    better = dominated_by(strategy) or PARTIAL_ONLY.get(strategy)
    return f"never better than {better}" if better else "not a candidate here"
