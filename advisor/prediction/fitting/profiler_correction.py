"""Corrects a run for the profiler, from the steps of a capture that ran without it (pure)."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from paro_advise.advisor.prediction.candidates import baseline_candidate
from paro_advise.advisor.prediction.cluster_links import LINK_QUANTITIES
from paro_advise.advisor.prediction.constants import (
    EXPLAINED_SHARE,
    MAX_HOST_US_PER_BYTE,
    MIN_CORE_SHARE,
    MIN_LINK_SHARE,
    MIN_STEP_SHARE,
    NUM_HALVINGS,
    SLOWED_SHARE,
)
from paro_advise.advisor.prediction.step_replay import collectives_us, measured_links, step_us
from paro_advise.policies.plan import EstimateSource

if TYPE_CHECKING:
    from collections.abc import Callable

    from paro_advise.advisor.facts.capture_log import Captured
    from paro_advise.advisor.prediction.calibration import Calibration
    from paro_advise.advisor.prediction.sampler import Estimate


def unprofiled(traced: Calibration, captured: Captured | None) -> Calibration:
    """Return a run without the profiler overhead.

    The profiler takes time on the cores, none on the links. Where collectives run on the cores that
    compute, how much longer the training thread works is measured, bytes on the wire take as long as ever,
    and what is left of a step is what the cores add to each byte.

    Args:
        traced: as the trace shows it.
        captured: steps of the same run that ran without the profiler, None without any.
    """
    timed = captured.median_step_us if captured else None
    step = min(1.0, max(MIN_STEP_SHARE, timed / traced.step_us)) if timed else 1.0
    if traced.is_gpu:
        corrected, where = _beside_a_gpu(traced, step), "that is taken off the gaps between kernels"
    else:
        slowdown = captured.profiler_cpu_slowdown if captured and timed else None
        cores = min(1.0, max(MIN_CORE_SHARE, 1 / slowdown)) if slowdown else step
        corrected, where = _on_cores(traced, step, cores), f"the work of its cores {1 / cores:.2f}x"
        if not timed:
            corrected = _with_note(corrected, "profiler overhead assumed zero; a capture also times steps without it")
    if step < SLOWED_SHARE:
        corrected = _with_note(corrected, f"the profiler made steps {1 / step:.2f}x longer; {where}")
    return corrected


def _with_note(calibration: Calibration, note: str) -> Calibration:
    return replace(calibration, assumptions=(*calibration.assumptions, note))


def _on_cores(traced: Calibration, step: float, cores: float) -> Calibration:
    """Return a step whose collectives run on the cores that compute.

    Its replay is brought to the measured time by what the cores add to each byte, or, where latency and
    bandwidth alone are too slow already, by less of the one and then, within bounds, more of the other.

    Args:
        traced: as the trace shows it.
        step, cores: the share that is left of the step, and of the training thread's work.
    """
    real_us = step * traced.step_us
    # The rank that the others wait for is late with work of its cores.
    asleep = traced.fixed_us - traced.gaps_us - traced.late_us
    work = traced.compute_us + traced.gaps_us + traced.late_us
    cores = min(cores, max(0.0, real_us - asleep) / work) if work else cores
    plain = replace(
        traced,
        traced_error_pct=_traced_error_pct(traced),
        step_us=real_us,
        compute_us=cores * traced.compute_us,
        aside_us=cores * traced.aside_us,
        fixed_us=min(real_us, cores * (traced.gaps_us + traced.late_us) + asleep),
        gaps_us=cores * traced.gaps_us,
        late_us=cores * traced.late_us,
        most_late_us=cores * traced.most_late_us,
        wait_us=0.0,
        transfer_us=None,
        published_us=None if traced.published_us is None else step * traced.published_us,
    )
    if _replay(plain) < real_us:
        found = _solve_for_time(lambda share: replace(plain, host_us_per_byte=share * MAX_HOST_US_PER_BYTE), real_us)
        return found if _replay(found) > EXPLAINED_SHARE * real_us else plain
    quick = _solve_for_time(lambda share: _with_delays(plain, share), real_us)
    if _replay(quick) <= real_us / EXPLAINED_SHARE:
        return quick
    return _solve_for_time(lambda share: _with_links(quick, MIN_LINK_SHARE + (1 - MIN_LINK_SHARE) * share), real_us)


def _traced_error_pct(traced: Calibration) -> float | None:
    """Return how far the sum of measured parts, put together by the replay's rules, is off the traced step.

    None where transfers and waits of one rank cannot be told apart, or no transfer lies inside the steps.
    """
    if not traced.transfer_us:
        return None
    alone = replace(traced, wait_us=0.0)
    links = collectives_us(alone)
    total = traced.transfer_us + collectives_us(traced) - links
    moved = collectives_us(replace(alone, host_us_per_byte=1.0)) - links
    if total < links:
        parts = _with_links(_with_delays(alone, total / links), total / links)
    else:
        parts = replace(alone, host_us_per_byte=(total - links) / moved if moved else 0.0)
    return 100 * (_replay(replace(parts, transfer_us=None)) / traced.step_us - 1)


def _replay(calibration: Calibration) -> float:
    return float(step_us(calibration, baseline_candidate(calibration), measured_links(calibration)))


def _solve_for_time(at: Callable[[float], Calibration], real_us: float) -> Calibration:
    """Return the calibration whose replay takes as long as the step, of those at shares from 0 to 1."""
    low, high = 0.0, 1.0
    for _ in range(NUM_HALVINGS):
        middle = (low + high) / 2
        low, high = (low, middle) if _replay(at(middle)) > real_us else (middle, high)
    return at(low)


def _with_delays(calibration: Calibration, share: float) -> Calibration:
    """Return a run whose own collectives have a share of their latency."""
    names = ("inter_alpha_us", "pod_alpha_us") if calibration.num_nodes > 1 else ("intra_alpha_us",)
    found: dict[str, Any] = {name: getattr(calibration, name) for name in names}
    return replace(calibration, **{name: replace(e, value=share * e.value) for name, e in found.items()})


def _with_links(calibration: Calibration, share: float) -> Calibration:
    """Return a run whose bytes take a share of their time."""
    names = [name for name in LINK_QUANTITIES if name.endswith("gbps")]
    levels: dict[str, Any] = {name: _slowed_link(getattr(calibration, name), share) for name in names}
    return replace(calibration, **levels)


def _slowed_link(estimate: Estimate, links: float) -> Estimate:
    return estimate if estimate.source == EstimateSource.PRIOR else replace(estimate, value=estimate.value / links)


def _beside_a_gpu(traced: Calibration, step: float) -> Calibration:
    """Take the difference off what the host leaves idle, then off everything."""
    excess = (1 - step) * traced.step_us
    fixed = max(0.0, traced.fixed_us - excess)
    rest = min(1.0, (step * traced.step_us - fixed) / max(traced.step_us - traced.fixed_us, 1.0))
    return replace(
        _with_links(traced, max(rest, MIN_LINK_SHARE)),
        step_us=step * traced.step_us,
        compute_us=rest * traced.compute_us,
        aside_us=rest * traced.aside_us,
        slower_us=rest * traced.slower_us,
        uneven_us=rest * traced.uneven_us,
        uneven_anew_us=rest * traced.uneven_anew_us,
        untraced_us=rest * traced.untraced_us,
        update=traced.update.scaled(rest),
        fixed_us=fixed,
        host_floor_us=step * traced.host_floor_us,
        host_idle_us=min(max(0.0, traced.host_idle_us - excess), fixed),
        host_rest_us=step * traced.host_rest_us,
        host_work_us=step * traced.host_work_us,
        gaps_us=min(traced.gaps_us, fixed),
        late_us=min(traced.late_us, fixed),
        most_late_us=max(min(traced.late_us, fixed), step * traced.most_late_us),
        wait_us=rest * traced.wait_us,
        transfer_us=None if traced.transfer_us is None else rest * traced.transfer_us,
        published_us=None if traced.published_us is None else step * traced.published_us,
    )
