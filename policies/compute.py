"""Arithmetic and activations of a transformer."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from paro_advise.errors import UsageError

_FLOPS_PER_PARAMETER_AND_TOKEN = 6.0
_RECOMPUTED_FORWARD = 2.0


class Recomputation(StrEnum):
    """Which activations are thrown away and computed again in backward."""

    NONE = "none"
    SELECTIVE = "selective"  # the core of attention
    FULL = "full"  # everything but a block's input


@dataclass(frozen=True, slots=True, kw_only=True)
class TransformerShape:
    """What activations depend on.

    Attributes:
        layers: transformer blocks.
        hidden: width (h).
        heads: attention heads (a).
        sequence: tokens of a sequence (s).
        micro_batch: sequences of a micro-batch on one rank (b).
        tensor_parallel: ranks that share a block (t).
        sequence_parallel: what tensor parallelism leaves whole is split over the sequence.
        fused_attention: attention never writes its s x s scores.
    """

    layers: int
    hidden: int
    heads: int
    sequence: int
    micro_batch: int
    tensor_parallel: int = 1
    sequence_parallel: bool = False
    fused_attention: bool = False

    def __post_init__(self) -> None:
        for name in ("layers", "hidden", "heads", "sequence", "micro_batch", "tensor_parallel"):
            if getattr(self, name) < 1:
                raise UsageError(f"transformer.{name} must be at least 1, got {getattr(self, name)}")


def activation_bytes(shape: TransformerShape, recomputation: Recomputation = Recomputation.NONE) -> float:
    """Return the bytes of activations that one rank keeps for backward, at 16 bits.

    Korthikanti et al., Reducing Activation Recomputation in Large Transformer Models, 2022, table 2:
    a layer keeps s*b*h*34 + 5*a*b*s^2 bytes; tensor parallelism divides 24 of the 34 and the scores,
    sequence parallelism all of it; selective recomputation drops the scores, full keeps 2*s*b*h.
    """
    tokens = shape.sequence * shape.micro_batch
    t = shape.tensor_parallel
    if recomputation == Recomputation.FULL:
        return shape.layers * 2.0 * tokens * shape.hidden
    whole, split = 10.0, 24.0
    linear = tokens * shape.hidden * ((whole + split) / t if shape.sequence_parallel else whole + split / t)
    keeps_scores = recomputation == Recomputation.NONE and not shape.fused_attention
    scores = 5.0 * shape.heads * shape.micro_batch * shape.sequence**2 / t if keeps_scores else 0.0
    return shape.layers * (linear + scores)


def step_flops(parameters: float, tokens: float, recomputation: Recomputation = Recomputation.NONE) -> float:
    """Return the arithmetic of a step: 6 per parameter and token, 8 with full recomputation.

    Kaplan et al., Scaling Laws for Neural Language Models, 2020, section 2.1: 2 forward, 4 backward.
    """
    extra = _RECOMPUTED_FORWARD if recomputation == Recomputation.FULL else 0.0
    return (_FLOPS_PER_PARAMETER_AND_TOKEN + extra) * parameters * tokens


def model_flops_utilization(parameters: float, tokens: float, seconds: float, peak_flops: float) -> float:
    """Return the share of the peak that the model's own arithmetic makes up (MFU), without recomputation.

    Args:
        parameters: that take part in every token.
        tokens: of all ranks in the time.
        seconds: the time.
        peak_flops: of all devices together, per second.
    """
    return step_flops(parameters, tokens) / (seconds * peak_flops)
