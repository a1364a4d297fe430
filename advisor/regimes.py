"""What binds each state's communication, and the whole step, in one sentence each."""

from __future__ import annotations

from dataclasses import dataclass

from paro_advise.advisor.states import Regime, State
from paro_advise.advisor.units import time_text

HIDDEN_SHARE = 0.02  # reference: formats, regime of a state
_WAIT_SHARE = 0.5
_LATENCY_SHARE = 0.5  # reference: prediction section 3.7
_CONTENTION_RATIO = 1.3
_CONTENTION_SHARE = 0.5
_HOST_IDLE_SHARE = 0.2
_COMPUTE_SHARE = 0.05
UNSEEN = "waiting for a rank that has no trace"


@dataclass(frozen=True, slots=True, kw_only=True)
class StateEvidence:
    """The numbers that decide a state's regime; per rank and step.

    None where a number cannot be known (waiting needs two ranks, latency needs two sizes).
    """

    count: float
    total_us: float
    exposed_us: float
    wait_us: float | None
    alpha_share: float | None  # share of the transfer that is latency
    inter_share: float | None  # share of the transfer that crosses nodes; None: nodes unknown
    overlapped_slowdown: float | None  # same collective while computing over while not
    overlapped_share: float  # share of the state's time while something computes
    sees_all_ranks: bool  # else a late rank without a trace looks like a slow link


@dataclass(frozen=True, slots=True, kw_only=True)
class Judgement:
    """A regime and the sentence that carries the deciding numbers."""

    regime: Regime
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """The verdict on the whole step.

    ``case`` names the boundary case of the PaRO literature that the run resembles: one of
    communication_bound, memory_bound_few_nodes, fast_fabric, or "" for none.
    """

    regime: Regime
    limiting_state: str | None
    text: str
    case: str


def judge_state(state: State, evidence: StateEvidence, step_time_us: float) -> Judgement:
    """Name the regime of a state."""
    if evidence.count == 0:
        return Judgement(regime=Regime.ABSENT, text=f"no {state} communication was seen")
    share = evidence.exposed_us / step_time_us if step_time_us > 0 else 0.0
    exposed = f"{time_text(evidence.exposed_us)} of {time_text(evidence.total_us)} exposed ({share:.1%} of the step)"
    if share < HIDDEN_SHARE:
        return Judgement(regime=Regime.HIDDEN, text=f"{exposed}: hidden behind compute or negligible")
    wait_share = evidence.wait_us / evidence.total_us if evidence.wait_us is not None and evidence.total_us else None
    if wait_share is not None and wait_share > _WAIT_SHARE:
        return Judgement(
            regime=Regime.STRAGGLER,
            text=f"{exposed}; {wait_share:.0%} of it is waiting for a later rank, not transfer",
        )
    doubt = "" if evidence.sees_all_ranks else f", or {UNSEEN}"
    if evidence.alpha_share is not None and evidence.alpha_share > _LATENCY_SHARE:
        return Judgement(
            regime=Regime.LATENCY,
            text=f"{exposed}; {evidence.alpha_share:.0%} of the transfer is latency of "
            f"{evidence.count:.0f} calls a step{doubt}",
        )
    slowdown = evidence.overlapped_slowdown
    if slowdown is not None and slowdown > _CONTENTION_RATIO and evidence.overlapped_share > _CONTENTION_SHARE:
        return Judgement(
            regime=Regime.CONTENTION,
            text=f"{exposed}; transfers are {slowdown:.2f}x slower while something computes",
        )
    cause = f"its bandwidth binds it{doubt}"
    time = "transfer" if wait_share is not None else "time"
    if evidence.inter_share is None:
        return Judgement(regime=Regime.UNKNOWN, text=f"{exposed}; {cause}; where its ranks lie is unknown")
    if evidence.inter_share > 0.5:
        return Judgement(
            regime=Regime.BANDWIDTH_INTER,
            text=f"{exposed}; {evidence.inter_share:.0%} of the {time} crosses nodes and {cause}",
        )
    return Judgement(
        regime=Regime.BANDWIDTH_INTRA,
        text=f"{exposed}; {1 - evidence.inter_share:.0%} of the {time} stays inside nodes and {cause}",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class StepEvidence:
    """The numbers that decide the verdict (means per rank and step)."""

    step_time_us: float
    compute_us: float
    exposed_us: float
    idle_us: float
    exposed_by_state: dict[State, float]
    regime_by_state: dict[State, Regime]
    num_nodes: int | None
    inter_gbps: float | None  # fitted bus bandwidth across nodes
    intra_gbps: float | None
    shards_globally: bool
    sees_all_ranks: bool
    is_cut: bool  # the traces end early: what is missing looks idle


def judge_step(evidence: StepEvidence) -> Verdict:
    """Name what limits the step."""
    step = evidence.step_time_us
    if step <= 0:
        return Verdict(
            regime=Regime.UNKNOWN,
            limiting_state=None,
            text="the input carries no step times, so what limits the step cannot be told",
            case="",
        )
    if evidence.is_cut:
        return Verdict(
            regime=Regime.UNKNOWN,
            limiting_state=None,
            text="No verdict: the trace ends early, and what is missing would look like idle time. "
            "The figures below cover what is there; record it again.",
            case="",
        )
    comm, idle, compute = (value / step for value in (evidence.exposed_us, evidence.idle_us, evidence.compute_us))
    split = f"compute {compute:.0%}, exposed communication {comm:.0%}, idle {idle:.0%} of {time_text(step)}"
    state = max(evidence.exposed_by_state, key=lambda key: evidence.exposed_by_state[key], default=None)
    if idle > _HOST_IDLE_SHARE and idle > comm:
        return Verdict(
            regime=Regime.HOST_BOUND,
            limiting_state=None,
            text=f"Host bound: the devices wait for work ({split}). Sharding will not help.",
            case="",
        )
    if comm < _COMPUTE_SHARE or state is None:
        return Verdict(
            regime=Regime.COMPUTE_BOUND,
            limiting_state=None,
            text=f"Compute bound: {split}. No change of sharding can gain more than {comm:.1%}.",
            case="fast_fabric" if (evidence.num_nodes or 0) > 1 else "",
        )
    regime = evidence.regime_by_state[state]
    share = evidence.exposed_by_state[state] / max(evidence.exposed_us, 1e-9)
    # States that run at the same time are each exposed: shares may sum to more than one.
    return Verdict(
        regime=regime,
        limiting_state=state.value,
        text=f"{_headline(regime, evidence)} {state} communication limits the step: "
        f"{time_text(evidence.exposed_by_state[state])} exposed, "
        f"{min(share, 1.0):.0%} of all exposed communication ({split}).",
        case=_case(evidence, comm),
    )


_HEADLINE = {
    Regime.BANDWIDTH_INTER: "Inter-node bandwidth bound:",
    Regime.BANDWIDTH_INTRA: "Intra-node bandwidth bound:",
    Regime.LATENCY: "Latency bound:",
    Regime.STRAGGLER: "Straggler bound:",
    Regime.CONTENTION: "Contention bound:",
    Regime.HIDDEN: "Many small exposures:",
    Regime.UNKNOWN: "Communication bound, by what cannot be told:",
}


def _headline(regime: Regime, evidence: StepEvidence) -> str:
    headline = _HEADLINE[regime]
    if regime not in (Regime.STRAGGLER, Regime.HIDDEN) and not evidence.sees_all_ranks:
        return headline.rstrip(":") + f", or {UNSEEN}:"
    return headline


CASES = {
    "communication_bound": "communication-bound pretraining over several nodes: replicating or group-sharding "
    "states buys most here",
    "memory_bound_few_nodes": "few nodes with everything sharded: memory, not the network, decides how much can "
    "be replicated",
    "fast_fabric": "fast fabric: inter-node links keep up, so sharding globally costs little",
}


def _case(evidence: StepEvidence, exposed_share: float) -> str:
    nodes = evidence.num_nodes or 0
    if nodes < 2:
        return ""
    fast = (
        evidence.inter_gbps is not None
        and evidence.intra_gbps is not None
        and evidence.inter_gbps > 0.5 * evidence.intra_gbps
    )
    if fast or exposed_share < 0.1:
        return "fast_fabric"
    if nodes <= 2 and evidence.shards_globally:
        return "memory_bound_few_nodes"
    return "communication_bound" if exposed_share >= 0.25 else ""
