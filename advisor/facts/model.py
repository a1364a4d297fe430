"""What one rank's trace says, as values.

This is all that leaves the process which read the trace, and all that the cache keeps.
"""

from __future__ import annotations

from dataclasses import dataclass, field

# The cache decodes by these types, so they are needed at run time.
from paro_advise.core.framework import Framework  # noqa: TC001
from paro_advise.trace_parsers.notice import Notice  # noqa: TC001
from paro_advise.trace_parsers.tables import SourceFile, SourceHeader  # noqa: TC001


@dataclass(frozen=True, slots=True, kw_only=True)
class StepFacts:
    """One step of one rank (us). The four parts sum to ``wall_us``."""

    label: str
    start_us: float
    wall_us: float
    compute_us: float
    exposed_communication_us: float
    other_us: float
    idle_us: float
    communication_us: float  # union, hidden or not
    state_total_us: dict[str, float]  # union of a state's collectives that start in the step
    state_exposed_us: dict[str, float]  # the part of it while nothing computes
    queued_us: float | None = None  # part of idle in which the next kernel was launched already; None: not known
    loading_us: float = 0.0  # the host was in the DataLoader
    idle_loading_us: float = 0.0  # the same, while the device idled
    idle_updating_us: float = 0.0  # the device idled while the host was in the optimizer's step
    blocked_us: float = 0.0  # the host waited for the device
    host_work_us: float | None = None  # the rest of the host's step; None: not known
    update_us: float = 0.0  # the part of compute in which a device ran the optimizer's kernels
    num_update_kernels: int = 0
    # Parts of compute that the model's forward and backward passes launched; None: not known
    forward_us: float | None = None
    backward_us: float | None = None
    copied_out_us: float = 0.0  # the part of compute in which FSDP2 lays gathered parameters out
    copied_in_us: float = 0.0  # the part of compute in which FSDP2 lays gradients out for their reduction
    memory_peaks: dict[str, int] = field(default_factory=dict)  # most allocated (bytes) by phase; {}: not recorded
    queue_length: float | None = None  # mean number of launched rows that had not begun; None: launches not known


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelTime:
    """All runs of one kernel, on a CPU run of one operator; means per rank and step."""

    name: str
    kind: str  # a WorkKind value
    us: float
    count: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """What computes; means per rank and step.

    Attributes:
        kind_us: time by kind; kernels that run at the same time both count.
        kernels: the longest ones.
        product_flops: floating-point operations of matrix products whose shapes were recorded.
        product_us: time of the kernels that run these.
    """

    kind_us: dict[str, float]
    kernels: tuple[KernelTime, ...]
    product_flops: float = 0.0
    product_us: float = 0.0

    @property
    def achieved_tflops(self) -> float | None:
        """Return what matrix products reach while they run (1e12 operations/s), None without shapes."""
        return self.product_flops / self.product_us / 1e6 if self.product_us > 0 else None


CUT_CODES = ("Q101", "Q102", "Q105", "Q108")
GRAPHS_CODE = "Q276"  # CUDA graphs are in the trace as wholes
REPLAYED_CODE = "Q125"  # collectives were replayed by CUDA graphs
SEVERAL_FRAMEWORKS_CODE = "Q325"  # the inputs are of several jobs
SEVERAL_JOBS_CODE = "Q338"  # the same, of one framework
OTHER_STEPS_CODE = "Q326"  # steps as the script marks them are not those of its optimizer
LEFT_OUT_CODE = "Q307"  # such inputs were left out, as whole ones are there


@dataclass(frozen=True, slots=True, kw_only=True)
class RankFacts:
    """Everything the analysis keeps of one source.

    Attributes:
        trains: whether a backward pass or an optimizer's step was seen; None where that cannot be told.
        typical_step: index of the step of median length, -1 without steps.
        compute_spans: of some steps, by index, when the rank computed: pairs of begin and end (us from the step's
            start) as little-endian float32, with gaps that no picture shows closed.
        lag_us: how far the device ran behind its host, 0 where it kept up.
        work: what computes in its steps, None without any.
        num_forwards: forward passes of whole models per step, None when unknown.
        num_updates: how often optimizers step in a marked step, 0 where many hold none; None when unknown.

    ``collectives_ipc`` is an Arrow IPC stream of the collective table with the columns step (i64,
    -1 outside), state, detail, evidence, exposed_us added; ``link_samples_ipc`` likewise.
    """

    source: SourceFile
    header: SourceHeader
    is_gpu: bool
    has_events: bool
    framework: Framework
    steps: tuple[StepFacts, ...]
    num_micro_batches: int | None
    collectives_ipc: bytes
    link_samples_ipc: bytes
    typical_step: int
    compute_spans: dict[int, bytes]
    notices: tuple[Notice, ...]
    num_events: int
    trains: bool | None = None
    lag_us: float = 0.0
    work: Work | None = None
    num_forwards: int | None = None
    num_updates: int | None = None

    @property
    def is_cut(self) -> bool:
        """Tell whether the input ends early or lost events, so that what is missing would look like idle time."""
        return any(notice.code in CUT_CODES for notice in self.notices)
