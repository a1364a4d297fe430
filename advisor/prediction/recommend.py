"""Ranks every strategy, group size and algorithm for a run, and decides."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from paro_advise.advisor.prediction.advice.decision import RankedCandidates, choice_of, decide, median_us
from paro_advise.advisor.prediction.advice.levers import alone_text, levers
from paro_advise.advisor.prediction.advice.questions import AnswerLimits, answer
from paro_advise.advisor.prediction.advice.what_if import (
    Basis,
    budget_steps,
    ho_ring_gain,
    on_more_nodes,
    quantiles,
    sensitivities,
)
from paro_advise.advisor.prediction.candidates import (
    baseline_candidate,
    candidates,
    is_at_hand,
    may_choose,
)
from paro_advise.advisor.prediction.cluster_links import LINK_QUANTITIES, Links
from paro_advise.advisor.prediction.constants import (
    ANCHOR_RANGE,
    BEHIND_BACKWARD_SIGMA,
    FLOOR_SIGMA,
    HOST_GAP_RANGE,
    HOST_WORK_SIGMA,
    MOST_OF_PEAK,
    MOST_OF_PEAK_SIGMA,
    NUM_DRAWS,
    NUM_HALVINGS,
    ON_CPU_SIGMA,
    ONE_STEP_SIGMA,
    OTHER_SIGMA,
    OVERLAPPED_HOST_SHARE,
    PRIOR_DRAWS,
    REPEAT_SIGMA,
    ROOT_SHARE_RANGE,
    SCALING_SIGMA,
    STEP_ANCHOR_RANGE,
    UNSEEN_SIGMA,
)
from paro_advise.advisor.prediction.prediction_bias import NO_BIAS, PredictionBias
from paro_advise.advisor.prediction.sampler import Sampler, with_waits
from paro_advise.advisor.prediction.scoring import Limits, Scored, score, with_offload, with_run
from paro_advise.advisor.prediction.step_replay import (
    demand_us,
    device_floor_us,
    floor_us,
    link_demand_us,
    measured_links,
    slowdown,
    step_us,
)
from paro_advise.core.release import release
from paro_advise.errors import InputError
from paro_advise.policies.plan import (
    EstimateSource,
    Origin,
    Plan,
    PlanInput,
    PlanLink,
    Quantiles,
    Verdict,
    same_way,
    with_id,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from paro_advise.advisor.prediction.advice.questions import Question
    from paro_advise.advisor.prediction.advice.wanted import Wanted
    from paro_advise.advisor.prediction.calibration import Calibration
    from paro_advise.advisor.prediction.candidates import Candidate
    from paro_advise.advisor.prediction.sampler import Estimate


@dataclass(frozen=True, slots=True, kw_only=True)
class Recommendation:
    """A plan, and what further questions about it are answered from."""

    plan: Plan
    basis: Basis


def recommend(
    calibration: Calibration,
    limits: Limits,
    seed: int = 0,
    bias: PredictionBias = NO_BIAS,
    wanted: Wanted | None = None,
    questions: Sequence[Question] = (),
    inputs: Sequence[PlanInput] = (),
) -> Plan:
    """Return the plan for a run; arguments and errors are those of ``recommendation``."""
    return recommendation(calibration, limits, seed, bias, wanted, questions, inputs).plan


def recommendation(
    calibration: Calibration,
    limits: Limits,
    seed: int = 0,
    bias: PredictionBias = NO_BIAS,
    wanted: Wanted | None = None,
    questions: Sequence[Question] = (),
    inputs: Sequence[PlanInput] = (),
) -> Recommendation:
    """Return the plan for a run, and its basis.

    Args:
        calibration: the run.
        limits: memory.
        seed: of the draws; equal seeds give equal plans.
        bias: of predictions, learned from earlier comparisons.
        wanted: the strategy that the plan shall choose, None to let it decide.
        questions: what the plan shall answer beside.
        inputs: files that the run was read from.

    Raises:
        UsageError: what is wanted or asked cannot be.
        InputError: the run's figures give no step times.
    """
    replayed_us = float(step_us(calibration, baseline_candidate(calibration), measured_links(calibration)))
    if not 0 < replayed_us < math.inf:
        raise InputError(
            "the figures of an analysis must give step times, these give none: some are out of all range",
            hint="analyze the traces again",
        )
    predictor = _Predictor(calibration, Sampler(seed), bias)
    calibration = predictor.calibration
    limits = with_run(limits, calibration)
    baseline = score(calibration, predictor.base, limits, predictor.present())
    scored = [score(calibration, item, limits, predictor.times_of(item)) for item in candidates(calibration)]

    def chooses(candidate: Candidate) -> bool:
        return may_choose(candidate, calibration, allow_untested=limits.allow_untested)

    scored = with_offload(calibration, predictor.sampler, limits, scored, chooses)
    eligible = [item for item in scored if not item.reason and chooses(item.candidate)]
    scored.sort(key=lambda item: (bool(item.reason), median_us(item)))
    field = RankedCandidates(
        baseline=baseline,
        scored=scored,
        eligible=eligible,
        usable_today=next(
            (item for item in scored if not item.reason and is_at_hand(item.candidate, calibration.framework)), None
        ),
        replay_error_pct=predictor.replay_error_pct(),
        asked_for=str(wanted or ""),
        wanted=wanted.pick(scored, chooses, calibration) if wanted else None,
    )
    plan, chosen = decide(calibration, limits, field)
    if bias.count:
        plan = replace(plan, assumptions=(*plan.assumptions, bias.text))
    basis = Basis(
        calibration=calibration,
        links=predictor.links,
        anchor=predictor.anchor,
        arithmetic=predictor.arithmetic,
        waits_us=predictor.waits_us,
        base=predictor.base,
        chosen=chosen.candidate,
        bias=bias.mean,
    )
    choices = AnswerLimits(limits=limits, may_choose=chooses)
    answers = tuple(answer(question, basis, choices, seed) for question in questions)
    plan = replace(plan, answers=answers, levers=levers(basis, limits), origin=_origin(calibration, inputs))
    return Recommendation(plan=with_id(_with_what_ifs(plan, basis, limits, baseline, eligible, seed)), basis=basis)


def _with_what_ifs(
    plan: Plan, basis: Basis, limits: Limits, baseline: Scored, eligible: list[Scored], seed: int
) -> Plan:
    ahead = plan.verdict != Verdict.KEEP
    fitting = [(item.candidate, item.memory.total + item.transient) for item in eligible]
    run = choice_of(baseline, baseline)
    others = [choice for choice in (choice_of(item, baseline) for item in eligible) if not same_way(choice, run)]
    return replace(
        plan,
        text=plan.text + alone_text(plan, basis, limits),
        budget=budget_steps(others if baseline.reason else [run, *others]),
        outlooks=on_more_nodes(basis, seed) if ahead and not basis.calibration.knows_no_network else (),
        sensitivities=sensitivities(basis, fitting) if ahead else (),
        ho_ring=ho_ring_gain(basis.calibration, basis.chosen) if ahead else None,
    )


def _origin(calibration: Calibration, inputs: Sequence[PlanInput]) -> Origin:
    estimates = {name: getattr(calibration, name) for name in LINK_QUANTITIES}
    return Origin(
        tool_version=release(),
        inputs=tuple(inputs),
        framework=calibration.framework,
        data_parallel_ranks=calibration.world_size,
        model_parallel_ranks=max(1, calibration.job_world_size // calibration.world_size),
        compute_us=calibration.compute_us,
        step_us=calibration.step_us,
        links=tuple(PlanLink(what=name, value=item.value, source=item.source) for name, item in estimates.items()),
    )


def step_range(calibration: Calibration, candidate: Candidate, doublings: float = 0.0, seed: int = 0) -> Quantiles:
    """Return the step time (us) of one way to run, with its range.

    Args:
        calibration: the run.
        candidate: how it shall run.
        doublings: of the nodes, from those that the run was calibrated on.
        seed: of the draws.
    """
    predictor = _Predictor(calibration, Sampler(seed), NO_BIAS)
    times = predictor.times(candidate)
    if doublings > 0:
        times = times * predictor.sampler.factors(SCALING_SIGMA * doublings, NUM_DRAWS)
    return quantiles(times)


class _Predictor:
    """Draws of everything uncertain, and step times under them.

    Arithmetic and what no strategy changes are measured; only the rest of a step is uncertain. The measured
    step anchors all: links that would make it shorter or longer than it was are corrected.
    """

    def __init__(self, calibration: Calibration, sampler: Sampler, bias: PredictionBias) -> None:
        self.calibration = calibration
        self.sampler = sampler
        self._bias = bias
        self.base = baseline_candidate(calibration)
        self.links = self._drawn_links()
        if calibration.least_passes_us is not None:
            self.links = self._with_arithmetic(self.links, calibration.least_passes_us)
            calibration = self.calibration = self._with_typical_arithmetic()
        self._floor = floor_us(calibration, self.base)
        # Of all candidates alike: what nobody measured yet.
        self.arithmetic: NDArray[np.float64] = sampler.factors(calibration.compute_sigma, NUM_DRAWS)
        self.waits_us: NDArray[np.float64] | float = 0.0
        if calibration.untraced_us:
            self.waits_us = calibration.untraced_us * sampler.uniform(0.0, 1.0, NUM_DRAWS)
        if calibration.is_gpu:
            # What the replay lacks, or has too much of, it has of every candidate.
            replayed = np.maximum(step_us(calibration, self.base, self.links), 1.0)
            self.anchor: NDArray[np.float64] = np.clip(calibration.step_us / replayed, *STEP_ANCHOR_RANGE)
            return
        exposed_now = np.maximum(step_us(calibration, self.base, self.links) - self._floor, 0.0)
        self.anchor = np.clip((calibration.step_us - self._floor) / np.maximum(exposed_now, 1.0), *ANCHOR_RANGE)

    @property
    def _goes_by_replay(self) -> bool:
        """Tell whether draws are taken by how well they replay the measured step: beside a device, of a trace."""
        return self.calibration.is_gpu and not self.calibration.is_described

    def _drawn_links(self) -> Links:
        calibration = self.calibration
        number = PRIOR_DRAWS if self._goes_by_replay else NUM_DRAWS

        def draw(estimate: Estimate) -> NDArray[np.float64]:
            deviations = self.sampler.normal(number)
            above = estimate.sigma if estimate.sigma_above is None else estimate.sigma_above
            return estimate.value * np.exp(deviations * np.where(deviations > 0, above, estimate.sigma))

        drawn = {name: draw(getattr(calibration, name)) for name in LINK_QUANTITIES}
        for key in ("inter_gbps", "pod_gbps"):
            if getattr(calibration, key).source == EstimateSource.SUMS:  # what is known is the rate of all-reduces
                drawn[key] = drawn[key] / drawn["sum_ratio"]
        if self._goes_by_replay and (calibration.root_bytes or calibration.front_bytes):
            drawn["root_share"] = self.sampler.uniform(*ROOT_SHARE_RANGE, number)
        if calibration.host_work_us:
            drawn["host_share"] = self.sampler.uniform(*OVERLAPPED_HOST_SHARE, number)

        def links_of(values: dict[str, NDArray[np.float64]]) -> Links:
            slower, by_nodes = slowdown(calibration), calibration.sums_by_nodes
            return Links(**values, slowdown=slower, sums_by_nodes=by_nodes, shaped=calibration.shaped)

        if not self._goes_by_replay:
            return links_of(drawn)
        links = links_of(drawn)
        replayed = np.broadcast_to(np.maximum(step_us(calibration, self.base, links), 1.0), number)
        taken = self.sampler.pick_likely(np.log(replayed / calibration.step_us), NUM_DRAWS)
        return links_of({name: values[taken] for name, values in drawn.items()})

    def _with_arithmetic(self, links: Links, at_peak_us: float) -> Links:
        """Take draws of the links by how fast arithmetic were under each, the described step being known.

        Args:
            links: draws.
            at_peak_us: arithmetic at the devices' peak, 0 where that is not known.
        """
        passes_us = np.maximum(left_for_passes_us(self.calibration, links), 1.0)
        reached = at_peak_us / passes_us
        beyond = np.maximum(np.log(np.maximum(reached, 1e-9) / MOST_OF_PEAK), 0.0)
        taken = self.sampler.pick(np.exp(-0.5 * (beyond / MOST_OF_PEAK_SIGMA) ** 2), NUM_DRAWS)
        drawn = {name: getattr(links, name)[taken] for name in LINK_QUANTITIES}
        return replace(links, **drawn, arithmetic=passes_us[taken] / self.calibration.passes_us)

    def _with_typical_arithmetic(self) -> Calibration:
        """Return the run with the median of what its arithmetic takes, which its draws are then shares of."""
        typical = float(np.median(self.links.arithmetic))
        self.links = replace(self.links, arithmetic=self.links.arithmetic / typical)
        found = self.calibration
        return replace(found, compute_us=found.passes_us * typical + found.update.measured_us)

    def replay_error_pct(self) -> float:
        """Return how far the replay of the run as it is misses its measured step."""
        calibration = self.calibration
        if self._goes_by_replay or calibration.least_passes_us is not None:
            replayed = float(np.median(step_us(calibration, self.base, self.links)))
        else:
            replayed = float(step_us(calibration, self.base, measured_links(calibration)))
        error_pct = 100 * (replayed / calibration.step_us - 1)
        if calibration.traced_error_pct is not None:
            error_pct = max(error_pct, calibration.traced_error_pct, key=abs)
        return round(error_pct, 2) + 0.0  # no minus before a zero

    def present(self) -> NDArray[np.float64]:
        """Return draws of the step as it is (us): measured, but for arithmetic that nobody measured."""
        own = device_floor_us(self.calibration, self.base, self.links) if self.calibration.is_gpu else 0.0
        return np.asarray(self.calibration.step_us + own * (self.arithmetic - 1))

    def times_of(self, candidate: Candidate) -> NDArray[np.float64]:
        """Return the same; what a description says of the way it runs today is known already."""
        if self.calibration.is_described and candidate.name == self.base.name:
            return self.present()
        return self.times(candidate)

    def times(self, candidate: Candidate) -> NDArray[np.float64]:
        """Return draws of a candidate's step time (us)."""
        calibration, sampler = self.calibration, self.sampler
        if calibration.is_gpu:
            return self._device_times(candidate)
        own_floor = floor_us(calibration, candidate)
        host_gap_removed = self._floor - own_floor
        exposed = np.maximum(step_us(calibration, candidate, self.links) - own_floor, 0.0) * self.anchor
        # Buckets that go on at once behind backward on a CPU tell little of the links and of the host's own gaps.
        hidden = BEHIND_BACKWARD_SIGMA if self.base.overlaps_reductions else 0.0
        sigma = math.hypot(ON_CPU_SIGMA, self._bias.spread, hidden)
        noise = sampler.factors(sigma, NUM_DRAWS)
        # Arithmetic too, as far as communication shared the cores with it.
        shared = FLOOR_SIGMA * (1 - self._floor / calibration.step_us)
        floor = self._floor * sampler.factors(shared, NUM_DRAWS)
        left = floor - host_gap_removed * sampler.uniform(*HOST_GAP_RANGE, NUM_DRAWS)
        times: NDArray[np.float64] = (np.maximum(left, 0.0) + exposed * noise) * math.exp(-self._bias.mean)
        return times

    def _device_times(self, candidate: Candidate) -> NDArray[np.float64]:
        """Return draws of a candidate's step time on a device (us), never below what it asks of a link."""
        calibration = self.calibration
        floor = device_floor_us(calibration, candidate, self.links)
        exposed = np.maximum(step_us(calibration, candidate, self.links) * self.anchor - floor, 0.0)
        unseen = UNSEEN_SIGMA * (1 - calibration.seen_share)
        few = ONE_STEP_SIGMA / math.sqrt(max(1, calibration.num_steps))
        sigma = math.hypot(OTHER_SIGMA, self._bias.spread, unseen, few)
        noise = self.sampler.factors(sigma, NUM_DRAWS)
        times = (floor * self.arithmetic + exposed * noise) * math.exp(-self._bias.mean)
        if calibration.host_floor_us and candidate.name != self.base.name:
            # Other ways make other numbers of calls.
            times = times * self.sampler.factors(HOST_WORK_SIGMA, NUM_DRAWS)
        if calibration.is_described:
            times = times * self.sampler.factors(REPEAT_SIGMA, NUM_DRAWS)
        # Arithmetic that nobody measured may be quicker than its median.
        least = link_demand_us if calibration.compute_sigma else demand_us
        bounded: NDArray[np.float64] = np.maximum(times, least(calibration, candidate, self.links))
        is_as_now = candidate.name == self.base.name
        return bounded if is_as_now else with_waits(bounded, calibration.step_us, self.waits_us)


def left_for_passes_us(run: Calibration, links: Links) -> NDArray[np.float64]:
    """Return by draw what a run's step leaves for the model's passes beside its communication (us), 0 for nothing.

    Args:
        run: whose step is known, and whose arithmetic is not looked at.
        links: draws.
    """
    base = baseline_candidate(run)
    whole = replace(run, compute_us=run.step_us + run.update.measured_us)
    low, high = np.zeros_like(links.inter_gbps), np.ones_like(links.inter_gbps)
    for _ in range(NUM_HALVINGS):
        middle = (low + high) / 2
        is_long = step_us(whole, base, replace(links, arithmetic=middle)) > run.step_us
        low, high = np.where(is_long, low, middle), np.where(is_long, middle, high)
    return np.asarray(low * run.step_us)
