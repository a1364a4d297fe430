"""Acceptance criteria of a change: thresholds, and whether they are met (pure)."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

from paro_advise.advisor.comparison.constants import RANGE_TEXT, REAL_CHANGE_PCT, THROUGHPUT
from paro_advise.advisor.comparison.metrics import is_real
from paro_advise.advisor.comparison.model import Criterion
from paro_advise.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from paro_advise.advisor.comparison.model import Metric, Parity


@dataclass(frozen=True, slots=True, kw_only=True)
class Thresholds:
    """What a change must reach; None is not evaluated.

    Attributes:
        min_throughput_gain_pct: above 0 a gain to be proved, which the lower end of its range must reach; else a loss
            to be tolerated, which the whole range must exceed to fail.
        max_loss_difference_pct: of any step that both runs logged.
        min_memory_headroom_pct: of the device, at the peak after the change.
        max_recovery_s: measured by the operator, given as recovery_s.
        max_checkpoint_interval_s: the same, given as checkpoint_interval_s.
        recovery_s, checkpoint_interval_s: what the operator measured.
    """

    min_throughput_gain_pct: float | None = 0.0
    max_loss_difference_pct: float | None = 1.0
    min_memory_headroom_pct: float | None = 10.0
    max_recovery_s: float | None = None
    max_checkpoint_interval_s: float | None = None
    recovery_s: float | None = None
    checkpoint_interval_s: float | None = None

    @classmethod
    def of(cls, table: Mapping[str, Any], where: str) -> Thresholds:
        """Read thresholds from a table.

        Raises:
            UsageError: a key or a value is none of them.
        """
        known = {field.name for field in fields(cls)}
        for name, value in table.items():
            if name not in known or isinstance(value, bool) or not isinstance(value, int | float):
                raise UsageError(
                    f"an acceptance threshold must be a number named {', '.join(sorted(known))}, got {name} = {value}",
                    where=where,
                )
        return cls(**table)


def judge(
    thresholds: Thresholds,
    throughput: Metric | None,
    parity: Parity | None,
    peak_bytes: float | None,
    device_bytes: float | None,
) -> tuple[Criterion, ...]:
    """Judge all criteria.

    Args:
        thresholds: what must be reached.
        throughput: its change.
        parity: of losses.
        peak_bytes, device_bytes: after the change.
    """
    found = [_throughput(thresholds.min_throughput_gain_pct, throughput)]
    loss = parity.loss_max_pct if parity else None
    found.append(
        _check_divergence(thresholds.max_loss_difference_pct, parity)
        or _at_most(
            "loss difference, %", thresholds.max_loss_difference_pct, loss, "losses of the same steps of both runs"
        )
    )
    headroom = 100 * (1 - peak_bytes / device_bytes) if peak_bytes and device_bytes else None
    missing = "the device's memory (--device-memory)" if peak_bytes else "a captured peak"
    found.append(_at_least("memory headroom, %", thresholds.min_memory_headroom_pct, headroom, missing))
    for name, limit, measured in (
        ("recovery, s", thresholds.max_recovery_s, thresholds.recovery_s),
        ("checkpoint interval, s", thresholds.max_checkpoint_interval_s, thresholds.checkpoint_interval_s),
    ):
        found.append(_at_most(name, limit, measured, "a measured value and a limit in the thresholds"))
    return tuple(found)


def _check_divergence(limit: float | None, parity: Parity | None) -> Criterion | None:
    """Return a failure if losses turned into no numbers after the change only."""
    if limit is None or parity is None or parity.num_diverged_after <= parity.num_diverged_before:
        return None
    return Criterion(
        criterion="loss difference, %",
        threshold=limit,
        measured=None,
        passed=False,
        text=f"{parity.num_diverged_after} steps after the change have a NaN or infinite loss or gradient",
    )


def _throughput(limit: float | None, metric: Metric | None) -> Criterion:
    """Judge the throughput: above 0 a gain must be proved; else a loss fails only where it is sure and real."""
    change, low, high = (metric.change_pct, metric.low_pct, metric.high_pct) if metric else (None, None, None)
    if limit is None or change is None or low is None or high is None:
        return _open(THROUGHPUT, limit, low, "enough steps of both runs")
    span = f"its {RANGE_TEXT} is {low:+.1f} to {high:+.1f}"
    passed: bool | None = low >= limit
    if limit <= 0 and low < limit:
        passed = False if high < limit and change < 0 and is_real(change / 100) else None
        if passed is None and high < limit:
            span += f", a loss of less than the {REAL_CHANGE_PCT:g} % by which repeats of one job differ"
        elif passed is None:
            span += ", which is no sure loss beyond the limit"
    return Criterion(criterion=THROUGHPUT, threshold=limit, measured=change, passed=passed, text=span)


def _at_most(name: str, limit: float | None, measured: float | None, needs: str) -> Criterion:
    if limit is None or measured is None:
        return _open(name, limit, measured, needs)
    return Criterion(criterion=name, threshold=limit, measured=measured, passed=measured <= limit, text="at most")


def _at_least(name: str, limit: float | None, measured: float | None, needs: str) -> Criterion:
    if limit is None or measured is None:
        return _open(name, limit, measured, needs)
    return Criterion(criterion=name, threshold=limit, measured=measured, passed=measured >= limit, text="at least")


def _open(name: str, limit: float | None, measured: float | None, needs: str) -> Criterion:
    return Criterion(criterion=name, threshold=limit, measured=measured, passed=None, text=f"needs {needs}")
