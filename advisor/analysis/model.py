"""The analysis of a run as values; the JSON format ``paro-advise/analysis`` is exactly these.

Times are microseconds, sizes bytes, bandwidths GB/s (1e9 bytes/s). None means: cannot be known,
and ``data_quality`` says why.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from paro_advise.advisor.analysis.constants import (
    MAX_KEPT_NUMBER,
    STALLED_SHARE,
)

# The format is decoded by these types, so they are needed at run time.
from paro_advise.advisor.analysis.observed.strategy import ObservedStrategy  # noqa: TC001
from paro_advise.advisor.facts.capture_log import Captured  # noqa: TC001
from paro_advise.advisor.facts.model import CUT_CODES, LEFT_OUT_CODE, Work
from paro_advise.advisor.ranks.constants import STALL_RATIO, STALLED_STEPS_COMPUTING_ALIKE
from paro_advise.advisor.ranks.links.link import Link  # noqa: TC001
from paro_advise.advisor.ranks.slow_groups import SlowGroup  # noqa: TC001
from paro_advise.advisor.ranks.stalled_steps import stalls
from paro_advise.advisor.ranks.stragglers import Straggler  # noqa: TC001
from paro_advise.core.collective import GLOO
from paro_advise.core.documents import Format, from_json
from paro_advise.core.framework import Framework  # noqa: TC001
from paro_advise.core.model_state import MODEL_STATES
from paro_advise.core.span import GroupSpan  # noqa: TC001
from paro_advise.errors import ForeignDataError
from paro_advise.policies.strategy import Level

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence


_SIGNED = frozenset(("clock_offsets_us", "captured"))  # what may be below 0: clocks, losses, differences of noise
FORMAT = Format(
    name="paro-advise/analysis", version="1.2", hint="write it again with `paro-advise analyze PATH --json FILE`"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """What the user says about the run.

    Attributes:
        gpus_per_node: ranks on a node, None to infer.
        tokens_per_step: tokens of all ranks in one step, for MFU.
        peak_tflops: dense peak of one device, None to look it up by name.
        skip_steps: warm-up steps left out at the start.
    """

    gpus_per_node: int | None = None
    tokens_per_step: int | None = None
    peak_tflops: float | None = None
    skip_steps: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class InputEntry:
    """One input file."""

    path: str
    bytes: int
    sha256: str
    kind: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RunEntry:
    """What ran, as far as the inputs tell."""

    world_size: int | None
    ranks: tuple[int, ...]
    ranks_missing: tuple[int, ...]
    gpus_per_node: int | None
    gpus_per_node_source: str
    num_nodes: int | None
    backend: str | None
    framework: Framework
    strategy: ObservedStrategy
    num_steps: int
    micro_batches: int | None
    parameter_count: int | None
    device_name: str | None
    device_memory_bytes: int | None
    nccl_version: str | None
    metadata: dict[str, str]
    inputs: tuple[InputEntry, ...]
    computes_16_bit: bool | None = None  # of matrix products, since 1.1; None when unknown
    framework_is_guessed: bool = False  # since 1.1; no annotation names it
    total_parameter_count: int | None = None  # since 1.1; with frozen ones, where gathers show more than gradients
    ranks_follow: bool | None = None  # since 1.2; ranks of a node follow each other; None when nothing tells
    data_parallel_ranks: int | None = None  # since 1.2; that share the data; None when the world size is unknown
    unit_bytes: tuple[int, ...] = ()  # since 1.2; sent in one pass, in the order of forward; () where none shows
    steps_left_out: tuple[str, ...] = ()  # since 1.2; labels of steps that are no usual ones, as those that stalled
    copies_buckets: bool = False  # since 1.2; DDP holds its buckets beside the gradients, which it copies out of them

    @property
    def collectives_use_cores(self) -> bool:
        """Tell whether collectives share the cores with arithmetic, as gloo's; a backend that is not known has none."""
        return self.backend == GLOO


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTime:
    """Step times over steps (mean over ranks each), warm-up included.

    Attributes:
        computing: since 1.2; what devices computed in each, us, with what one that sent more than the others exposed
            beyond them; () where that is not known.
        left_out: since 1.2; of steps that stalled, which no other figure holds, us.
    """

    median: float | None
    p5: float | None
    p95: float | None
    values: tuple[float, ...]
    computing: tuple[float, ...] = ()
    left_out: tuple[float, ...] = ()

    @classmethod
    def of(cls, values: Sequence[float], computing: Sequence[float] = ()) -> StepTime:
        """Return the quantiles of some step times; None for each without any."""
        import numpy as np

        if not values:
            return cls(median=None, p5=None, p95=None, values=())
        low, middle, high = (float(np.percentile(values, share)) for share in (5, 50, 95))
        return cls(median=middle, p5=low, p95=high, values=tuple(values), computing=tuple(computing))

    @property
    def recorded(self) -> tuple[float, ...]:
        """Return the times of all steps, those that stalled as well, us."""
        return (*self.values, *self.left_out)

    @property
    def has_stalls(self) -> bool:
        """Tell whether steps that stalled hold much of the mean."""
        return bool(self.values) and self.stalled[1] > STALLED_SHARE * sum(self.values) / len(self.values)

    @property
    def stalled(self) -> tuple[int, float]:
        """Return how many steps stalled, and what they took beyond the median, us a step as a mean over all steps.

        A step that has more to compute, as with longer sequences, takes longer and does not stall.
        """
        if self.median is None:
            return 0, 0.0
        beyond = stalls(self.values, self.computing)
        return len(beyond), sum(beyond.values()) / len(self.values)

    @property
    def heavy_start(self) -> tuple[int, float, float]:
        """Return how many first steps compute far longer than the others, none of which does.

        Beside it stand how many times as long they compute, and what that adds to the mean step, us.
        """
        if not self.computing:
            return 0, 1.0, 0.0
        usual_us = sorted(self.computing)[len(self.computing) // 2]
        are_heavy = [us > STALL_RATIO * usual_us for us in self.computing]
        number = sum(are_heavy)
        is_start = all(are_heavy[:number]) and number <= STALLED_STEPS_COMPUTING_ALIKE * len(are_heavy)
        if not number or not is_start or not usual_us:
            return 0, 1.0, 0.0
        first_us = sum(self.computing[:number])
        return number, first_us / number / usual_us, (first_us - number * usual_us) / len(are_heavy)


@dataclass(frozen=True, slots=True, kw_only=True)
class Breakdown:
    """Means over ranks and steps; the four parts sum to the mean step time."""

    compute: float | None
    exposed_communication: float | None
    other: float | None
    idle: float | None

    @property
    def step_us(self) -> float:
        """Return the mean step, 0 without timed steps."""
        return sum(value or 0.0 for value in (self.compute, self.exposed_communication, self.other, self.idle))


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceUpdate:
    """What a step's optimizer takes of a device's computing; means over ranks and steps.

    Attributes:
        us: while its kernels ran.
        num_kernels: of them.
    """

    us: float
    num_kernels: float


@dataclass(frozen=True, slots=True, kw_only=True)
class PassTimes:
    """What the model's passes launch of a step's computing (us); means over ranks and steps.

    Attributes:
        forward: from where the host enters the model, or from the pass before, to the backward pass.
        backward: in backward passes, with what these compute again.
    """

    forward: float
    backward: float


@dataclass(frozen=True, slots=True, kw_only=True)
class IdleParts:
    """Why devices idle; means over ranks and steps (us).

    Attributes:
        queued: idle although the next kernel was launched already; None where launches are not known.
        data_loading: the training thread was in the DataLoader, whether or not the device idled.
        synchronisation: the host waited for the device, likewise.
    """

    queued: float | None
    data_loading: float
    synchronisation: float
    loading: float = 0.0  # since 1.2; part of the idle time that the training thread was in the DataLoader
    updating: float = 0.0  # since 1.2; part of the idle time that it was in the optimizer's step
    queue_length: float | None = None  # launched device rows that wait, on average; None where launches are not known
    host_work: float | None = None  # of a step, what the host does not wait for the device; None where it is not known


@dataclass(frozen=True, slots=True, kw_only=True)
class StateEntry:
    """One model state, per rank and step."""

    count: float
    bytes: float | None
    total_us: float | None
    exposed_us: float | None
    hidden_us: float | None
    transfer_us: float | None
    wait_us: float | None
    regime: str
    evidence: str
    text: str
    exposed_wait_us: float | None = None  # since 1.2; of what is exposed, the least that is waiting for other ranks


@dataclass(frozen=True, slots=True, kw_only=True)
class ParallelEntry:
    """Communication of one kind of model parallelism, per rank and step.

    Attributes:
        group_size: ranks of its largest group, None when unknown.
    """

    count: float
    bytes: float | None
    total_us: float
    exposed_us: float
    group_size: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryPeaks:
    """The most memory that was allocated in a phase of a step, where traces record it.

    Attributes:
        phase_bytes: by phase, the largest of all ranks and steps.
        rank: whose peak is the largest.
    """

    phase_bytes: dict[str, int]
    rank: int


@dataclass(frozen=True, slots=True, kw_only=True)
class CriticalPath:
    """What the length of a step consists of, across ranks; means over steps (us).

    Attributes:
        work_us: of each rank on the path: computing, or waiting for its host.
        transfer_us: of collectives on the path, after their last rank arrived, by state.
    """

    work_us: dict[str, float]
    transfer_us: dict[str, float]
    num_steps: int


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectiveEntry:
    """All collectives of one kind: state, operation, size and group."""

    state: str
    detail: str
    op: str
    bytes: int | None
    group_size: int | None
    span: GroupSpan
    count: float  # per rank and step
    p50_us: float | None
    p95_us: float | None
    p99_us: float | None
    exposed_us: float | None  # per rank and step
    evidence: str
    dtype: str = ""  # of the elements, since 1.1; "" when unknown


@dataclass(frozen=True, slots=True, kw_only=True)
class ModuleEntry:
    """All collectives that a module of the model issues; per rank and step.

    Attributes:
        module: its name in the model, "(root)" for what belongs to no named part.
        state_exposed_us: exposed time by state; collectives that run at the same time both count.
    """

    module: str
    count: float
    bytes: float | None
    exposed_us: float
    state_exposed_us: dict[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class RankEntry:
    """One rank, means over its steps."""

    rank: int
    node: int | None
    host: str | None
    num_steps: int
    step_time_us: float
    compute_us: float
    exposed_communication_us: float
    other_us: float
    idle_us: float
    state_exposed_us: dict[str, float]
    wait_us: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class VerdictEntry:
    """What limits the step."""

    regime: str
    limiting_state: str | None
    text: str
    case: str
    case_text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Efficiency:
    """Figures of merit; None where an ingredient is missing.

    Attributes:
        inter_node_busy_share: share of the step during which inter-node traffic transfers.
        mfu: model FLOPs utilisation, 6 * parameters * tokens / (step time * peak).
        tokens_per_step, peak_tflops: as the user gave them or from the device table.
    """

    inter_node_busy_share: float | None
    overlap_share: float | None  # communication hidden behind compute, of all communication
    mfu: float | None
    tokens_per_step: int | None
    peak_tflops: float | None
    peak_source: str
    product_tflops: float | None = None  # since 1.1; what matrix products reach while they run, None without shapes
    concurrent: dict[str, float] = field(default_factory=dict)  # since 1.2; by intra and inter: collectives at once


@dataclass(frozen=True, slots=True, kw_only=True)
class FindingEntry:
    """A finding.

    Attributes:
        code: stable identifier, the argument of ``paro-advise explain``.
        status: "applies", "does not apply" or "could not be judged".
        text: the finding with its numbers, or what is missing.
        saving_us: upper bound of what a step can win, None when it does not apply.
    """

    code: str
    status: str
    text: str
    saving_us: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class QualityEntry:
    """What was skipped, repaired, guessed or cannot be known."""

    code: str
    severity: str
    message: str
    help: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Analysis:
    """The whole analysis."""

    format: str
    format_version: str
    run: RunEntry
    step_time_us: StepTime
    breakdown_us: Breakdown
    states: dict[str, StateEntry]
    links: tuple[Link, ...]
    stragglers: tuple[Straggler, ...]
    clock_offsets_us: dict[str, float]
    clock_error_us: float | None
    verdict: VerdictEntry
    collectives: tuple[CollectiveEntry, ...]
    ranks: tuple[RankEntry, ...]
    efficiency: Efficiency
    findings: tuple[FindingEntry, ...]
    data_quality: tuple[QualityEntry, ...]
    idle_us: IdleParts | None = None  # since 1.1; None without timed steps
    lag_us: float | None = None  # since 1.1; how far devices ran behind their hosts
    update: DeviceUpdate | None = None  # since 1.1; None where no kernel of an optimizer was seen
    copied_out_us: float = 0.0  # since 1.2; of a step's computing, what lays gathered parameters out
    copied_in_us: float = 0.0  # since 1.2; likewise, what lays gradients out for their reduction
    modules: tuple[ModuleEntry, ...] = ()  # since 1.1; those exposed longest first, () where no trace names them
    work: Work | None = None  # since 1.1; what computes, None where nothing was timed
    captured: Captured | None = None  # steps without the profiler, where a capture logged them
    model_parallel: dict[str, ParallelEntry] = field(default_factory=dict)  # since 1.1; "tensor", "pipeline", ...
    critical_path: CriticalPath | None = None  # since 1.1; None without two ranks on one clock
    memory: MemoryPeaks | None = None  # since 1.1; None where traces do not record memory
    slow_groups: tuple[SlowGroup, ...] = ()  # since 1.1; process groups whose links are slower than their peers'
    late_once_us: float = 0.0  # since 1.2; waiting that is left where ranks wait for each other once a step only
    passes: PassTimes | None = None  # since 1.2; None where it is not known what launched most of the computing
    uneven_us: float = 0.0  # since 1.2; how much longer than ranks on average one computes in each step, the longest
    uneven_anew_us: float = 0.0  # since 1.2; of it, what differs from step to step, as sequences of unlike length do

    @property
    def exposed_together_us(self) -> float:
        """Return how much of a step counts as exposed for several states, as their collectives run at once."""
        parts = sum(entry.exposed_us or 0.0 for entry in self.states.values())
        return max(0.0, parts - (self.breakdown_us.exposed_communication or 0.0))

    @property
    def is_cut(self) -> bool:
        """Tell whether the figures hold traces that end early or are damaged: what is missing looks like idle time."""
        codes = {entry.code for entry in self.data_quality}
        return bool(codes.intersection(CUT_CODES)) and LEFT_OUT_CODE not in codes


def analysis_from_json(data: bytes, where: str) -> Analysis:
    """Read an analysis back.

    Raises:
        ForeignDataError: not an analysis, of another major version, or with numbers that none has.
    """
    import msgspec

    found = from_json(data, FORMAT, Analysis, where)
    wrong = next(_impossible(msgspec.json.decode(data), ""), None)
    triple = found.run.strategy.triple
    if wrong is None and triple is not None and (len(triple) != len(MODEL_STATES) or not set(triple) <= {*Level}):
        wrong = f"run.strategy.triple {triple!r}"
    times = found.step_time_us
    if wrong is None and times.computing and len(times.computing) != len(times.values):
        wrong = f"step_time_us.computing of {len(times.computing)} steps and step_time_us.values of {len(times.values)}"
    if wrong is not None:
        raise ForeignDataError(
            f"an analysis must hold what `analyze` writes, got {wrong}", where=where, hint="run `analyze` again"
        )
    return found


def _impossible(value: object, path: str) -> Iterator[str]:
    """Yield what no analysis holds: numbers below 0, or beyond all that is counted or timed."""
    match value:
        case bool():
            return
        case int() | float():
            if not 0 <= value <= MAX_KEPT_NUMBER:
                yield f"{path} {value}"
        case dict():
            for name, item in value.items():
                if name not in _SIGNED:
                    yield from _impossible(item, f"{path}.{name}" if path else name)
        case list():
            for item in value:
                yield from _impossible(item, path)
