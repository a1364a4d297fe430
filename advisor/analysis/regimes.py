"""What limits the communication of each model state, in one sentence."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

from paro_advise.advisor.analysis.constants import (
    CONTENTION_RATIO,
    CONTENTION_SHARE,
    FAR_BELOW_SHARE,
    LATENCY_SHARE,
    MAJORITY_SHARE,
    NEGLIGIBLE_SHARE,
    WAIT_SHARE,
)
from paro_advise.advisor.wording.quantities import gbps_text, time_text

if TYPE_CHECKING:
    from paro_advise.core.model_state import State


class Regime(StrEnum):
    """What limits a state's communication, or the whole step."""

    ABSENT = "absent"
    HIDDEN = "hidden"
    BANDWIDTH_INTER = "bandwidth_inter"
    BANDWIDTH_INTRA = "bandwidth_intra"
    LATENCY = "latency"
    STRAGGLER = "straggler"
    CONTENTION = "contention"
    UNKNOWN = "unknown"
    COMPUTE_BOUND = "compute_bound"  # verdict only
    HOST_BOUND = "host_bound"  # verdict only


_NAMES: dict[str, str] = {
    Regime.HIDDEN: "negligible",
    Regime.BANDWIDTH_INTER: "inter-node bandwidth",
    Regime.BANDWIDTH_INTRA: "intra-node bandwidth",
}


def regime_text(regime: str) -> str:
    """Return a regime as people read it: "inter-node bandwidth"; what is not known, as it is."""
    return _NAMES.get(regime, regime.replace("_", " "))


UNSEEN = "a rank without a trace is slow"


@dataclass(frozen=True, slots=True, kw_only=True)
class ShareRange:
    """A share that is known within a range."""

    low: float
    high: float

    @property
    def text(self) -> str:
        """Return "82 %" or "20 to 80 %"."""
        low, high = f"{self.low:.0%}", f"{self.high:.0%}"
        return high if low == high else f"{low[:-1]} to {high}"


@dataclass(frozen=True, slots=True, kw_only=True)
class StateEvidence:
    """The numbers that decide a state's regime; per rank and step.

    None where a number cannot be known (waiting needs two ranks).
    """

    count: float
    total_us: float
    exposed_us: float
    wait_us: float | None
    latency: ShareRange  # share of the transfer that is latency
    inter_share: float | None  # share of the transfer that crosses nodes; None: nodes unknown
    overlapped_slowdown: float | None  # same collective while computing over while not
    overlapped_share: float  # share of the state's time while something computes
    sees_all_ranks: bool  # else a straggler without a trace looks like a slow link
    are_sizes_known: bool = True  # of any of its messages
    exposed_wait_share: float | None = None  # of the exposed time, at least, that is waiting for other ranks
    is_sent_unpaired: bool = False  # most of what is exposed goes from rank to rank, which two is not recorded
    rate: tuple[float, float] | None = None  # its intra-node bus bandwidth and the device's (1e9 bytes/s), if known

    @property
    def mostly_waits_exposed(self) -> bool:
        """Tell whether most of what is exposed is waiting; what is overlapped delays nothing, whatever it waits for."""
        return (self.exposed_wait_share or 0.0) > WAIT_SHARE


@dataclass(frozen=True, slots=True, kw_only=True)
class Judgement:
    """A regime and the sentence that carries the deciding numbers."""

    regime: Regime
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class StepVerdict:
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
    if share < NEGLIGIBLE_SHARE:
        return Judgement(regime=Regime.HIDDEN, text=f"{exposed}: too little to matter")
    wait_share = evidence.wait_us / evidence.total_us if evidence.wait_us is not None and evidence.total_us else None
    if wait_share is not None and wait_share > WAIT_SHARE:
        return Judgement(
            regime=Regime.STRAGGLER,
            text=f"{exposed}; {wait_share:.0%} of it is waiting for other ranks, not transfer",
        )
    if evidence.is_sent_unpaired:
        return Judgement(
            regime=Regime.UNKNOWN,
            text=f"{exposed}; sent from rank to rank, whose waiting for each other cannot be told from transfer",
        )
    if evidence.mostly_waits_exposed:
        exposed += f", {evidence.exposed_wait_share:.0%} of that waiting for other ranks"
    or_unseen = "" if evidence.sees_all_ranks else f" (or {UNSEEN})"
    if evidence.latency.low > LATENCY_SHARE:
        calls = "one call" if round(evidence.count) == 1 else f"{evidence.count:.0f} calls"
        return Judgement(
            regime=Regime.LATENCY,
            text=f"{exposed}; {evidence.latency.text} of the transfer is latency of {calls} a step{or_unseen}",
        )
    if evidence.latency.high > LATENCY_SHARE:
        return Judgement(
            regime=Regime.UNKNOWN,
            text=f"{exposed}; limited by latency or bandwidth{or_unseen}: "
            + (
                f"{evidence.latency.text} of the transfer is latency, and messages of like size cannot tell"
                if evidence.are_sizes_known
                else "the sizes of its messages are not recorded"
            ),
        )
    slowdown = evidence.overlapped_slowdown
    if slowdown is not None and slowdown > CONTENTION_RATIO and evidence.overlapped_share > CONTENTION_SHARE:
        return Judgement(
            regime=Regime.CONTENTION,
            text=f"{exposed}; transfers are {slowdown:.2f}x slower while something computes{or_unseen}",
        )
    if evidence.rate is not None and evidence.rate[0] < FAR_BELOW_SHARE * evidence.rate[1]:
        got, best = evidence.rate
        return Judgement(
            regime=Regime.UNKNOWN,
            text=f"{exposed}; it moves {gbps_text(got)}, {got / best:.1%} of what the device's links carry "
            f"({gbps_text(best)}): its ranks wait for each other, or the transport is not the one intended",
        )
    if wait_share is None and not evidence.are_sizes_known:
        return Judgement(
            regime=Regime.UNKNOWN,
            text=f"{exposed}; neither the sizes of its messages nor what ranks wait for each other is recorded",
        )
    return _judge_bandwidth(exposed, evidence, "transfer" if wait_share is not None else "time")


def _judge_bandwidth(exposed: str, evidence: StateEvidence, time: str) -> Judgement:
    """Name the bandwidth that limits what nothing else does.

    Args:
        exposed: what is exposed, in words.
        evidence: of the state.
        time: what is known of its collectives: their transfer, or their time.
    """
    or_unseen = "" if evidence.sees_all_ranks else f" (or {UNSEEN})"
    network = "inter-node" if (evidence.inter_share or 0.0) > MAJORITY_SHARE else "intra-node"
    cause = f"its transfers are limited by {network} bandwidth{or_unseen}"
    if evidence.inter_share is None:
        return Judgement(
            regime=Regime.UNKNOWN,
            text=f"{exposed}; limited by bandwidth{or_unseen}; the nodes of its ranks are unknown",
        )
    if evidence.inter_share > MAJORITY_SHARE:
        return Judgement(
            regime=Regime.BANDWIDTH_INTER,
            text=f"{exposed}; {evidence.inter_share:.0%} of the {time} crosses nodes; {cause}",
        )
    return Judgement(
        regime=Regime.BANDWIDTH_INTRA,
        text=f"{exposed}; {1 - evidence.inter_share:.0%} of the {time} stays inside nodes; {cause}",
    )
