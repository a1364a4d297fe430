"""What a way to run gathers of the units at once, what it reduces at once, and what copies and updates of them take."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from paro_advise.advisor.prediction.candidates import baseline_candidate
from paro_advise.policies.memory import shards
from paro_advise.policies.strategy import Level
from paro_advise.policies.traffic import Shape

if TYPE_CHECKING:
    from paro_advise.advisor.prediction.calibration import Calibration
    from paro_advise.advisor.prediction.candidates import Candidate


class UnitKind(NamedTuple):
    """What units that are alike have in common.

    Attributes:
        num_bytes: of each.
        is_looked_up: it holds embeddings.
        is_passed_by: backward does not reach it.
    """

    num_bytes: float
    is_looked_up: bool
    is_passed_by: bool


def unit_kinds(calibration: Calibration, candidate: Candidate) -> list[UnitKind]:
    """Return the kind of each unit, in order of forward."""
    units, passed = candidate.unit_bytes or calibration.unit_bytes, passed_by(calibration, candidate)
    looked_up = len(units) - 1 if calibration.root_bytes else 0 if calibration.front_bytes else None
    return [UnitKind(size, place == looked_up, by) for place, (size, by) in enumerate(zip(units, passed, strict=True))]


def passed_by(calibration: Calibration, candidate: Candidate) -> tuple[bool, ...]:
    """Return which units backward does not reach; not known of units other than the run's, nor modelled on a CPU."""
    units = candidate.unit_bytes or calibration.unit_bytes
    known = calibration.is_gpu and units == calibration.unit_bytes and len(calibration.passed_by) == len(units)
    return calibration.passed_by if known else (False,) * len(units)


def more_copies_us(calibration: Calibration, candidate: Candidate) -> float:
    """Return what laying gathered parameters out takes in a step beyond what it takes in the run."""
    if calibration.copy_us_per_byte:
        passes = calibration.micro_batches if candidate.strategy.gradient != Level.N else 1
        laid_out, laid_in = laid_out_and_in(calibration, candidate)
        gathered = laid_out * calibration.micro_batches * gathered_bytes(calibration, candidate)
        return gathered + laid_in * passes * sum(candidate.unit_bytes or calibration.unit_bytes)
    if not calibration.copied_out_us:
        return 0.0
    base = gathered_bytes(calibration, baseline_candidate(calibration))
    return calibration.copied_out_us * (gathered_bytes(calibration, candidate) / base - 1) if base else 0.0


def laid_out_and_in(calibration: Calibration, candidate: Candidate) -> tuple[float, float]:
    """Return what copies of gathered parameters take by bytes of units, and those of gradients beyond the run's.

    Of a run that has none they are FSDP2's: gradients are read in the type that is computed in, and written in the one
    that they are reduced in. FSDP1, which gathers into the model's own memory, has no second copy: FSDP2 keeps one.
    """
    gathered = gathered_bytes(calibration, baseline_candidate(calibration)) * calibration.micro_batches
    if gathered and not (candidate.variant.keeps_copy and calibration.copy_us_per_byte):
        is_sharded = candidate.strategy.parameter != Level.N
        return calibration.copied_out_us / gathered if is_sharded else 0.0, 0.0
    if not (gathered or candidate.holds_back):
        return 0.0, 0.0
    of_element = calibration.copy_us_per_byte / calibration.element_bytes
    laid_in = of_element * (calibration.gather_width + calibration.reduce_width) / 2
    return of_element * calibration.gather_width, laid_in


def updates_us(calibration: Calibration, candidate: Candidate) -> tuple[float, float]:
    """Return what the optimizer takes of the device, and of the host; each updates what the rank holds."""
    if candidate.offload:
        return 0.0, 0.0
    run = baseline_candidate(calibration)
    held, in_run = (
        shards(
            item.strategy.optimizer,
            Shape(group_size=item.group_size, num_groups=max(1, calibration.world_size // item.group_size)),
        )
        for item in (candidate, run)
    )
    return calibration.update.us(held), calibration.host_update_us * in_run / held


def gathered_bytes(calibration: Calibration, candidate: Candidate) -> float:
    """Return what is gathered in a micro-batch: for forward, and again for backward, as bytes of units."""
    if candidate.strategy.parameter == Level.N:
        return 0.0
    units, passed = candidate.unit_bytes or calibration.unit_bytes, passed_by(calibration, candidate)
    again = (size for size, by in zip(units[:-1], passed[:-1], strict=True) if not by)
    return calibration.forwards * sum(units) + (0.0 if candidate.gathers_once else sum(again))


def buckets(units: tuple[float, ...], bucket_bytes: float) -> list[tuple[int, int]]:
    """Return the first unit, and the one behind the last, of each bucket that backward fills from the last unit on."""
    found, end, filled = [], len(units), 0.0
    for place in range(len(units) - 1, -1, -1):
        if filled and filled + units[place] > bucket_bytes:
            found.append((place + 1, end))
            end, filled = place + 1, 0.0
        filled += units[place]
    return [*found, (0, end)]
