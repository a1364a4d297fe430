"""What limits a step in a few words, and which typical case that is."""

from __future__ import annotations

from typing import TYPE_CHECKING

from paro_advise.advisor.analysis.constants import (
    BOUND_SHARE,
    FAST_FABRIC_SHARE,
    FEW_NODES,
    MOSTLY_SHARE,
    UNBOUND_SHARE,
)
from paro_advise.advisor.analysis.regimes import UNSEEN, Regime
from paro_advise.core.model_state import State

if TYPE_CHECKING:
    from paro_advise.advisor.analysis.judgement.step_evidence import StepEvidence

MOSTLY_COMPUTE = "Mostly compute"
_HEADLINE = {
    Regime.BANDWIDTH_INTER: "Inter-node bandwidth bound:",
    Regime.BANDWIDTH_INTRA: "Intra-node bandwidth bound:",
    Regime.LATENCY: "Latency bound:",
    Regime.STRAGGLER: "Bound by waiting for other ranks:",
    Regime.CONTENTION: "Contention bound:",
    Regime.HIDDEN: "Many small exposures:",
    Regime.UNKNOWN: "Communication bound, cause unknown:",
}

# Of transfers from rank to rank, by the parallelism that they serve; "" where no group tells it.
_EXCHANGES = {
    (Regime.UNKNOWN, "pipeline"): "Bound by the pipeline, by its bubble, a slower stage or the links between stages:",
    (Regime.UNKNOWN, "context"): "Bound by what ranks of context parallelism send each other, or by their waiting:",
    (Regime.UNKNOWN, ""): "Bound by what ranks send each other, as stages of a pipeline do, or by their waiting:",
    (Regime.STRAGGLER, "pipeline"): "Bound by the pipeline's bubble, a slower stage or a slow link:",
}


def headline_of(regime: Regime, state: State, evidence: StepEvidence) -> str:
    """Return what limits a step, with a colon, by the state that exposes most."""
    headline = _HEADLINE[regime]
    if state == State.OTHER and evidence.exchange is not None:
        headline = _EXCHANGES.get((regime, evidence.exchange), _EXCHANGES.get((regime, ""), headline))
        if evidence.slow_stage and regime in (Regime.STRAGGLER, Regime.UNKNOWN):
            headline = f"Bound by the slowest stage of the pipeline ({evidence.slow_stage}):"
    share = evidence.compute_us / evidence.step_time_us
    if share >= MOSTLY_SHARE and evidence.exposed_us < MOSTLY_SHARE * evidence.compute_us:
        headline = f"{MOSTLY_COMPUTE} ({share:.0%} of the step); beside it {headline[:1].lower()}{headline[1:]}"
    if regime not in (Regime.STRAGGLER, Regime.HIDDEN) and not evidence.sees_all_ranks:
        return headline.rstrip(":") + f" (or {UNSEEN}):"
    return headline


CASES = {
    "communication_bound": "communication-bound pretraining over several nodes: whether states are sharded over all "
    "ranks, in groups or not at all decides the step; `recommend` weighs it for these traces",
    "memory_bound_few_nodes": "few nodes with everything sharded: how much is replicated, so that less crosses the "
    "network, is a question of memory",
    "fast_fabric": "fast fabric: inter-node links keep up, so sharding globally costs little",
}


def case_of(evidence: StepEvidence, exposed_share: float) -> str:
    """Return the name of the typical case of a step that the network limits, "" for none."""
    nodes = evidence.num_nodes or 0
    if nodes < 2:
        return ""
    fast = (
        evidence.inter_gbps is not None
        and evidence.intra_gbps is not None
        and evidence.inter_gbps > FAST_FABRIC_SHARE * evidence.intra_gbps
    )
    if fast or exposed_share < UNBOUND_SHARE:
        return "fast_fabric"
    if nodes <= FEW_NODES and evidence.shards_globally:
        return "memory_bound_few_nodes"
    return "communication_bound" if exposed_share >= BOUND_SHARE else ""
