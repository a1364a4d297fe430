"""What the attribution of a collective to a model state is based on."""

from __future__ import annotations

from enum import StrEnum


class Evidence(StrEnum):
    """Kinds of evidence, strongest first."""

    ANNOTATION = "annotation"
    GROUP = "group"
    STACK = "stack"
    PHASE = "phase"
    REPETITION = "repetition"
    NONE = "none"


EVIDENCE_ORDER = tuple(Evidence)
