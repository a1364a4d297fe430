"""The words of the analysis: model states, evidence, regimes."""

from __future__ import annotations

from enum import StrEnum


class State(StrEnum):
    """What a collective moves."""

    PARAMETER = "parameter"
    GRADIENT = "gradient"
    OPTIMIZER = "optimizer"  # updated parameters, and gradients on their way to the optimizer's level
    OTHER = "other"  # TP, PP, MoE, norms, losses, barriers
    UNKNOWN = "unknown"


class Evidence(StrEnum):
    """What an attribution rests on, strongest first."""

    ANNOTATION = "annotation"
    GROUP = "group"
    STACK = "stack"
    PHASE = "phase"
    REPETITION = "repetition"
    NONE = "none"


class Regime(StrEnum):
    """What binds a state's communication, or the whole step."""

    ABSENT = "absent"
    HIDDEN = "hidden"
    BANDWIDTH_INTER = "bandwidth_inter"
    BANDWIDTH_INTRA = "bandwidth_intra"
    LATENCY = "latency"
    STRAGGLER = "straggler"
    CONTENTION = "contention"
    UNKNOWN = "unknown"
    COMPUTE_BOUND = "compute_bound"  # verdict only
    HOST_BOUND = "host_bound"  # verdict only


EVIDENCE_ORDER = tuple(Evidence)
STATES = tuple(State)
