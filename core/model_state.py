"""The model states whose communication is told apart."""

from __future__ import annotations

from enum import StrEnum


class State(StrEnum):
    """What a collective moves."""

    PARAMETER = "parameter"
    GRADIENT = "gradient"
    OPTIMIZER = "optimizer"  # updated parameters, and gradients on their way to the optimizer's level
    OTHER = "other"  # TP, PP, MoE, norms, losses, barriers
    UNKNOWN = "unknown"


STATES = tuple(State)
MODEL_STATES = (State.PARAMETER, State.GRADIENT, State.OPTIMIZER)  # in the order of a strategy's letters
