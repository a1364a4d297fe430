"""What a run says about memory: of a device, and of a rank beside its model states."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from paro_advise.errors import UsageError
from paro_advise.policies.plan import PlanInput

if TYPE_CHECKING:
    from paro_advise.advisor.analysis.model import Analysis


def device_memory_of(analysis: Analysis) -> float | None:
    """Return the memory of one device as the inputs say (bytes), None where they do not."""
    captured = analysis.captured
    return analysis.run.device_memory_bytes or (captured.device_memory_bytes if captured else None)


def other_bytes(analysis: Analysis, states: float, measured_peak: float | None) -> float:
    """Return the memory beside model states and transients, from a peak that was given, captured or traced.

    Args:
        analysis: the run.
        states: what its model states take at least.
        measured_peak: of a rank, None for what a capture saw, or else for the most that traces of GPUs record.

    Raises:
        UsageError: the peak that was given cannot be.
    """
    if measured_peak is None:
        known = _known_peak(analysis)
        return max(0.0, known - states) if known else 0.0
    return beyond_states(measured_peak, states, analysis.run.strategy.triple or "the run")


def _known_peak(analysis: Analysis) -> int | None:
    captured, traced = analysis.captured, analysis.memory
    # On a CPU the captured peak would hold Python and its libraries.
    if captured and captured.device_memory_bytes and captured.peak_memory_bytes:
        return captured.peak_memory_bytes
    return max(traced.phase_bytes.values()) if traced and not analysis.run.collectives_use_cores else None


def beyond_states(measured_peak: float, states: float, name: str) -> float:
    """Return a peak without the states of what ran.

    Raises:
        UsageError: the peak does not hold them.
    """
    if measured_peak < states:
        raise UsageError(
            f"the measured peak must hold the states of {name}, got less",
            hint="give the largest allocated memory of one rank, or leave it out",
        )
    return measured_peak - states


def inputs_of(analysis: Analysis) -> tuple[PlanInput, ...]:
    """Return the files behind an analysis as a plan names them."""
    return tuple(PlanInput(name=Path(item.path).name, sha256=item.sha256) for item in analysis.run.inputs)
