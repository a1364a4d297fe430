"""What people ask of a plan: another cluster or batch, or how far a target holds (pure).

``nodes=64``, ``inter-gbps=50``, ``intra-gbps=300`` and ``micro-batches=4`` change the run, joined by commas all at
once; each rank keeps its work unless micro-batches are named. ``communication=10%`` asks for the bandwidth between
nodes that keeps exposed communication below that share of a step, ``efficiency=80%`` up to how many nodes a rank stays
that quick.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from paro_advise.advisor.prediction.advice.what_if import anchored_us, quantiles, wider
from paro_advise.advisor.prediction.candidates import aligned_sizes, candidates
from paro_advise.advisor.prediction.constants import (
    BEYOND_NODES,
    LINK_FACTORS,
    NUM_HALVINGS,
    ON_CPU_SIGMA,
    OTHER_SIGMA,
    REPEAT_SIGMA,
    SCALING_SIGMA,
)
from paro_advise.advisor.prediction.sampler import Sampler
from paro_advise.advisor.prediction.scoring import score
from paro_advise.advisor.prediction.step_replay import arithmetic_us, floor_us, step_us
from paro_advise.core.collective import Op
from paro_advise.core.plural import plural
from paro_advise.errors import UsageError
from paro_advise.policies.plan import Answer
from paro_advise.policies.strategy import Level

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

    from paro_advise.advisor.prediction.advice.what_if import Basis
    from paro_advise.advisor.prediction.calibration import Calibration
    from paro_advise.advisor.prediction.candidates import Candidate
    from paro_advise.advisor.prediction.cluster_links import Links
    from paro_advise.advisor.prediction.scoring import Limits
    from paro_advise.policies.plan import Quantiles

_COUNTS = ("nodes", "micro-batches")
_RATES = {"inter-gbps": "inter_gbps", "intra-gbps": "intra_gbps"}
_TARGETS = ("communication", "efficiency")
_UNMEASURED_US = 1e30  # of a step that a question changes: no bound for its parts
_LAST_ALONE = (
    "as where gradients are added up across groups in the last micro-batch alone: DDP and FSDP1 by no_sync(), FSDP2 by "
    "set_requires_all_reduce(False) in the others"
)
_MOST = 1 << 20  # nodes, micro-batches or GB/s that anyone would mean


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """What is asked.

    Attributes:
        text: as it was written.
        changes: by name, of the run.
        target: "communication" or "efficiency", "" for changes.
        share: of the target, from 0 to 1.
    """

    text: str
    changes: tuple[tuple[str, float], ...] = ()
    target: str = ""
    share: float = 0.0

    @classmethod
    def parse(cls, text: str) -> Question:
        """Read "nodes=64,micro-batches=2" or "efficiency=80%".

        Raises:
            UsageError: it is no such question.
        """
        found: dict[str, float] = {}
        for part in text.split(","):
            name, sign, value = (piece.strip() for piece in part.partition("="))
            if not sign or name not in (*_COUNTS, *_RATES, *_TARGETS) or name in found:
                raise _no_question(text)
            found[name] = _number(name, value, text)
        targets = [name for name in found if name in _TARGETS]
        if not targets:
            return cls(text=text, changes=tuple(found.items()))
        if len(found) > 1:
            raise _no_question(text)
        return cls(text=text, target=targets[0], share=found[targets[0]] / 100)


def _no_question(text: str) -> UsageError:
    return UsageError(
        f"--what-if must change nodes, micro-batches (whole numbers from 1 on), inter-gbps or intra-gbps (above 0), or "
        f"name one target (above 0 %, at most 100 %), got {text!r}",
        hint="for example nodes=64, inter-gbps=50, nodes=64,micro-batches=2, communication=10% or efficiency=80%",
    )


def _number(name: str, text: str, whole: str) -> float:
    try:
        value = float(text.removesuffix("%") if name in _TARGETS else text)
    except ValueError as error:
        raise _no_question(whole) from error
    least, most = (0.01, 100.0) if name in _TARGETS else (1e-3, float(_MOST))
    if name in _TARGETS and value <= 1 and not text.endswith("%"):
        raise UsageError(
            f"a target of --what-if must be in percent, {whole!r} may be a share",
            hint=f"write {name}={100 * value:g}%, or {name}={value:g}% if that is meant",
        )
    if not least <= value <= most or (name in _COUNTS and value != int(value)):
        raise _no_question(whole)
    return value


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerLimits:
    """What an answer may recommend.

    Attributes:
        limits: memory.
        may_choose: tells candidates that a plan may choose.
    """

    limits: Limits
    may_choose: Callable[[Candidate], bool]


def answer(question: Question, basis: Basis, choices: AnswerLimits, seed: int = 0) -> Answer:
    """Answer a question.

    Args:
        question: what is asked.
        basis: the run and the plan.
        choices: what may be recommended.
        seed: of the uncertainty.

    Raises:
        UsageError: what is asked cannot be.
    """
    _need_a_network(question, basis.calibration)
    if question.target == "communication":
        return Answer(asked=question.text, text=_least_bandwidth(question.share, basis))
    if question.target == "efficiency":
        return Answer(asked=question.text, text=_most_nodes(question.share, basis))
    changed, times = changed_run(question, basis, seed)
    base, chosen = (wider(candidate, basis.calibration, changed) for candidate in (basis.base, basis.chosen))
    said = [f"{changed.world_size} data-parallel ranks on {plural(nodes_of(changed), 'node')}"]
    said = said if changed.world_size != basis.calibration.world_size else []
    if basis.calibration.micro_batches == 1 < changed.micro_batches and base.strategy.gradient != Level.G:
        said.append(_LAST_ALONE)  # a run of one micro-batch does not show whether its script does that
    misfits = dict.fromkeys(item.group_size for item in (base, chosen) if not _fits(item, changed))
    said += [f"groups of {size} do not fit them" for size in misfits]
    limits = replace(choices.limits, run=None)  # what was measured is another run
    scored = [score(changed, item, limits, times(item)) for item in candidates(changed) if choices.may_choose(item)]
    fitting = [item for item in scored if not item.reason]
    best = min(fitting, key=lambda item: float(np.median(item.times)), default=None)
    return Answer(
        asked=question.text,
        text="; ".join(said),
        baseline=base.name,
        baseline_step_us=step_of(basis.base, basis, changed, times),
        chosen=chosen.name,
        chosen_step_us=step_of(basis.chosen, basis, changed, times),
        best=best.candidate.name if best else "",
        best_step_us=quantiles(best.times) if best else None,
    )


def _need_a_network(question: Question, calibration: Calibration) -> None:
    """Make sure that what lies between nodes is known where an answer depends on it.

    Raises:
        UsageError: the run has one node, and nothing states or measured what lies between several.
    """
    changes = dict(question.changes)
    is_wider = changes.get("nodes", 1) > 1 and "inter-gbps" not in changes
    if calibration.knows_no_network and (is_wider or question.target == "efficiency"):
        stated = "state it (nodes=4,inter-gbps=25), or " if is_wider else ""
        raise UsageError(
            f"a run on one node tells nothing of the inter-node network, which {question.text!r} asks about",
            hint=f"{stated}give nccl-tests output of several nodes beside the traces",
        )


def changed_run(
    question: Question, basis: Basis, seed: int, inter_factor: float = 1.0
) -> tuple[Calibration, Callable[[Candidate], NDArray[np.float64]]]:
    """Return the run as a question changes it, and what tells draws of a candidate's step there (us).

    Args:
        question: what is changed.
        basis: the run and the plan.
        seed: of the uncertainty.
        inter_factor: times the inter-node bandwidth.

    Raises:
        UsageError: what is asked cannot be.
    """
    changed, links = _change_basis(question, basis)
    links = replace(links, inter_gbps=links.inter_gbps * inter_factor, pod_gbps=links.pod_gbps * inter_factor)
    doublings = abs(math.log2(changed.world_size / basis.calibration.world_size))
    sigma = math.hypot(OTHER_SIGMA if changed.is_gpu else ON_CPU_SIGMA, SCALING_SIGMA * doublings)
    sampler = Sampler(seed)
    noise, repeats = (sampler.factors(one, len(basis.anchor)) for one in (sigma, REPEAT_SIGMA))

    def times(candidate: Candidate) -> NDArray[np.float64]:
        return anchored_us(basis, changed, candidate, links, noise, repeats)

    return changed, times


def step_of(
    candidate: Candidate, basis: Basis, changed: Calibration, times: Callable[[Candidate], NDArray[np.float64]]
) -> Quantiles | None:
    """Return a candidate's step in a changed run (us), None where its groups do not fit the nodes."""
    there = wider(candidate, basis.calibration, changed)
    return quantiles(times(there)) if _fits(there, changed) else None


def _change_basis(question: Question, basis: Basis) -> tuple[Calibration, Links]:
    calibration, links = basis.calibration, basis.links
    # A bandwidth is stated for the nodes as they are changed, whichever is written first.
    for name, value in sorted(question.changes, key=lambda change: change[0] in _RATES):
        if name == "nodes":
            calibration = _on_nodes(calibration, int(value), question.text)
        elif name == "micro-batches":
            calibration = _with_micro_batches(calibration, int(value))
        else:
            links = replace(links, **{_RATES[name]: getattr(links, _RATES[name]) * value / _today(name, calibration)})
    return calibration, links


def _with_micro_batches(calibration: Calibration, micro_batches: int) -> Calibration:
    share = micro_batches / calibration.micro_batches
    return replace(
        calibration,
        micro_batches=micro_batches,
        compute_us=calibration.passes_us * share + calibration.update.measured_us,
        aside_us=calibration.aside_us * share,
        host_floor_us=calibration.host_floor_us * share,
        host_work_us=calibration.host_work_us * share,
        step_us=_UNMEASURED_US,
    )


def _today(name: str, calibration: Calibration) -> float:
    """Return the bandwidth that a run has, on its nodes as they are or as a question changes them (1e9 bytes/s)."""
    if name != "inter-gbps":
        return calibration.intra_gbps.value
    if calibration.shaped is None:
        return calibration.port_gbps
    nodes = max(2, calibration.num_nodes)
    of_group = calibration.shaped.rates.busbw_gbps(Op.ALL_GATHER, nodes, calibration.ranks_per_node)
    return of_group * calibration.groups_per_node


def nodes_of(calibration: Calibration) -> int:
    """Return the nodes of a run's whole job."""
    return max(1, calibration.job_world_size // calibration.job_ranks_per_node)


def _fits(candidate: Candidate, calibration: Calibration) -> bool:
    """Tell whether a candidate's groups fill nodes, or are parts of them, where any of its states uses groups."""
    return not candidate.uses_groups or candidate.group_size in aligned_sizes(calibration)


def _on_nodes(calibration: Calibration, nodes: int, text: str) -> Calibration:
    now = nodes_of(calibration)
    world, rest = divmod(calibration.world_size * nodes, now)
    if world < 2 or rest or (world > calibration.ranks_per_node and world % calibration.ranks_per_node):
        raise UsageError(
            f"--what-if must leave two or more data-parallel ranks that fill their nodes, got {text!r}",
            hint=f"the run has {calibration.world_size} of them on {now} nodes",
        )
    return replace(
        calibration,
        world_size=world,
        ranks_per_node=min(world, calibration.ranks_per_node),
        job_world_size=calibration.job_ranks_per_node * nodes,
    )


def _least_bandwidth(share: float, basis: Basis) -> str:
    """Say from which inter-node bandwidth on exposed communication stays below a share of the step."""
    calibration, links = basis.calibration, basis.links.typical()
    if calibration.num_nodes == 1:
        return "one node: nothing moves between nodes"
    value = calibration.port_gbps
    parts = []
    for candidate in _both(basis):

        def exposed(factor: float, candidate: Candidate = candidate) -> float:
            quick = replace(links, inter_gbps=links.inter_gbps * factor, pod_gbps=links.pod_gbps * factor)
            step = float(step_us(calibration, candidate, quick))
            # Arithmetic that a collective beside it slows counts as arithmetic, as in the analysis of a run.
            arithmetic = max(float(arithmetic_us(calibration, candidate, quick)), floor_us(calibration, candidate))
            return max(0.0, step - arithmetic) / step

        low, high = LINK_FACTORS
        now = f"{exposed(1.0):.0%} at today's {value:.3g} GB/s"
        if exposed(high) > share:
            left = exposed(high)
            parts.append(f"{candidate.name}: not by inter-node bandwidth alone, {left:.0%} would remain; {now}")
            continue
        if exposed(low) <= share:
            parts.append(f"{candidate.name}: at any from {value * low:.3g} GB/s on, as far as was looked; {now}")
            continue
        for _ in range(NUM_HALVINGS):
            middle = math.sqrt(low * high)
            low, high = (low, middle) if exposed(middle) <= share else (middle, high)
        parts.append(f"{candidate.name}: from {value * high:.3g} GB/s between nodes; {now}")
    return "; ".join(parts)


def _most_nodes(share: float, basis: Basis) -> str:
    """Say up to how many nodes a rank keeps a share of today's speed, with equal work per rank."""
    calibration, links = basis.calibration, basis.links.typical()
    job_nodes = nodes_of(calibration)
    parts = []
    for candidate in _both(basis):
        now = float(step_us(calibration, candidate, links))

        def holds(factor: int, candidate: Candidate = candidate, now: float = now) -> bool:
            more = replace(calibration, world_size=factor * calibration.world_size)
            return now / float(step_us(more, wider(candidate, calibration, more), links)) >= share

        # Groups fill multiples of the nodes that the run has.
        low, high = 1, BEYOND_NODES
        if holds(BEYOND_NODES):
            parts.append(f"{candidate.name} beyond {job_nodes * BEYOND_NODES} nodes")
            continue
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if holds(middle) else (low, middle)
        parts.append(f"{candidate.name} up to {plural(low * job_nodes, 'node')}")
    return f"with equal work per rank a rank keeps {share:.0%} of today's speed: " + "; ".join(parts)


def _both(basis: Basis) -> tuple[Candidate, ...]:
    return (basis.base,) if basis.base.name == basis.chosen.name else (basis.base, basis.chosen)
