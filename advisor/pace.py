"""What a run is like without the profiler, from the steps of a capture that ran without it (pure)."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from paro_advise.advisor.replay import LEVELS, collectives_us

if TYPE_CHECKING:
    from paro_advise.advisor.calibration import Calibration, Estimate
    from paro_advise.advisor.captured import Captured

_MIN_STEP, _MIN_CORES, _SLOWED = 0.3, 0.2, 0.95


def unprofiled(traced: Calibration, captured: Captured | None) -> Calibration:
    """Return a run as it is when nobody looks.

    The profiler takes time on the cores, none on the links. Where collectives run on the cores that
    compute, how much longer the training thread works is measured, bytes on the wire take as long as ever,
    and what is left of a step is what the cores add to each byte.

    Args:
        traced: as the trace shows it.
        captured: steps of the same run that ran without the profiler, None without any.
    """
    timed = captured.median_step_us if captured else None
    step = min(1.0, max(_MIN_STEP, timed / traced.step_us)) if timed else 1.0
    if traced.is_gpu:
        found, where = _beside_a_gpu(traced, step), "that is taken off the gaps between kernels"
    else:
        slowdown = captured.profiler_cpu_slowdown if captured and timed else None
        cores = min(1.0, max(_MIN_CORES, 1 / slowdown)) if slowdown else step
        found, where = _on_cores(traced, step, cores), f"the work of its cores {1 / cores:.2f}x"
        if not timed:
            found = _said(found, "the profiler is taken to slow nothing; a capture also times steps without it")
    return _said(found, f"the profiler made steps {1 / step:.2f}x longer; {where}") if step < _SLOWED else found


def _said(calibration: Calibration, note: str) -> Calibration:
    return replace(calibration, assumptions=(*calibration.assumptions, note))


def _on_cores(traced: Calibration, step: float, cores: float) -> Calibration:
    """Return a step whose collectives run on the cores that compute.

    Args:
        traced: as the trace shows it.
        step, cores: the share that is left of the step, and of the training thread's work.
    """
    work, real_us = traced.compute_us + traced.fixed_us, step * traced.step_us
    cores = min(cores, real_us / work) if work else cores
    alone = replace(traced, wait_us=0.0)
    exposed = traced.step_us - work
    known = traced.transfer_us is not None
    total = (traced.transfer_us or 0.0) + collectives_us(traced) - collectives_us(alone) if known else exposed
    # What is exposed shrinks as all that collectives take does, hidden or not.
    left = max(0.0, real_us - cores * work) * (total / exposed if exposed > 0 else 1.0)
    silent = replace(alone, **{name: replace(getattr(traced, name), value=0.0) for name in _delays(traced)})
    wire, delay = collectives_us(silent), collectives_us(alone) - collectives_us(silent)
    moved = collectives_us(replace(silent, host_us_per_byte=1.0)) - wire
    links = min(1.0, left / wire) if wire else 1.0
    delays = min(1.0, max(0.0, left - wire) / delay) if delay else 1.0
    changed = {name: _paced(getattr(traced, name), links) for name in LEVELS if name.endswith("gbps")}
    for name in _delays(traced):
        changed[name] = replace(getattr(traced, name), value=delays * getattr(traced, name).value)
    return replace(
        traced,
        step_us=real_us,
        compute_us=cores * traced.compute_us,
        fixed_us=cores * traced.fixed_us,
        wait_us=0.0,
        transfer_us=None,
        host_us_per_byte=max(0.0, left - wire - delay) / moved if moved else 0.0,
        published_us=None if traced.published_us is None else step * traced.published_us,
        **changed,
    )


def _delays(traced: Calibration) -> tuple[str, ...]:
    """Return the latencies that the run's own collectives have."""
    return ("inter_alpha_us",) if traced.num_nodes > 1 else ("intra_alpha_us",)


def _paced(estimate: Estimate, links: float) -> Estimate:
    return estimate if estimate.source == "prior" else replace(estimate, value=estimate.value / max(links, 1e-3))


def _beside_a_gpu(traced: Calibration, step: float) -> Calibration:
    """Take the difference off what the host leaves idle, then off everything."""
    excess = (1 - step) * traced.step_us
    fixed = max(0.0, traced.fixed_us - excess)
    rest = min(1.0, (step * traced.step_us - fixed) / max(traced.step_us - traced.fixed_us, 1.0))
    levels = {name: _paced(getattr(traced, name), rest) for name in LEVELS if name.endswith("gbps")}
    return replace(
        traced,
        step_us=step * traced.step_us,
        compute_us=rest * traced.compute_us,
        fixed_us=fixed,
        wait_us=rest * traced.wait_us,
        transfer_us=None if traced.transfer_us is None else rest * traced.transfer_us,
        published_us=None if traced.published_us is None else step * traced.published_us,
        **levels,
    )
