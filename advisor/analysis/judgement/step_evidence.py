"""The numbers of a step that decide what limits it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from paro_advise.advisor.analysis.regimes import Regime
    from paro_advise.core.model_state import State


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
    inter_gbps: float | None  # fitted inter-node bus bandwidth
    intra_gbps: float | None
    shards_globally: bool
    sees_all_ranks: bool
    is_cut: bool  # the traces end early: what is missing looks idle
    hides_graphs: bool = False  # CUDA graphs are in the traces as wholes
    total_by_state: dict[State, float] = field(default_factory=dict)
    operations: dict[State, str] = field(default_factory=dict)  # the collectives of a state in words
    exchange: str | None = None  # the parallelism that most of what moves no model state goes from rank to rank for
    queued_us: float | None = None  # of the idle time, with the next kernel launched already; None: not known
    loading_us: float = 0.0  # of the idle time, the training thread was in the DataLoader
    updating_us: float = 0.0  # of the idle time, it was in the optimizer's step
    copied_us: float = 0.0  # a device copied, and nothing computed or communicated on it
    blocked_us: float = 0.0  # the host waited for the device
    updates_whole_us: float = 0.0  # of computing, the optimizer's step where each rank makes all of it
    laid_out_us: float = 0.0  # of computing, copies of gathered parameters
    trains: bool | None = None  # None: cannot be told
    slow_stage: str = ""  # the ranks of a pipeline that compute longest, and how long, in words
