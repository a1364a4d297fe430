"""Attributes each collective to a model state, with the evidence that this is based on.

Order of evidence (docs/traces.md, attribution): annotations around the issuing call, the
process group's description, Python stacks, the phase of training together with the operation,
the operation with its size. What none of them tells stays unknown.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

from paro_advise.advisor.facts.constants import SCALAR_ELEMENTS
from paro_advise.core.collective import REDUCTIONS, Op
from paro_advise.core.dtypes import dtype_bytes, is_of_counts
from paro_advise.core.model_state import State
from paro_advise.trace_parsers.kernel_kinds import NORM_OPERATOR, TENSOR_PARALLEL_FUNCTIONS

if TYPE_CHECKING:
    import polars as pl

_GATHERS = (Op.ALL_GATHER, Op.BROADCAST)

_OTHER_GROUP = re.compile(
    r"TENSOR_MODEL|TENSOR_PARALLEL|EXPERT_TENSOR|CONTEXT_PARALLEL_GROUP$|PIPELINE|EXPERT_MODEL_PARALLEL"
    r"|EMBEDDING|^MODEL_PARALLEL|^mesh_(?:tp|pp|cp|ep|sp)$"
)
_DATA_GROUP = re.compile(r"DATA_PARALLEL|DISTRIBUTED_OPTIMIZER|^mesh_(?:dp|fsdp|shard|replicate|efsdp)")
_STACK_RULES: tuple[tuple[re.Pattern[str], State], ...] = (
    (
        re.compile(r"avg_scatter|reduce_ipg|reduce_independent|allreduce_gradients|average_tensor"),
        State.GRADIENT,
    ),
    (re.compile(r"_post_step|all_gather_dp_groups|all_gather_into_tensor_dp_groups"), State.OPTIMIZER),
    (re.compile(r"fetch_sub_module|all_gather_params|all_gather_coalesced"), State.PARAMETER),
    (re.compile(r"start_grad_sync|finish_grad_sync"), State.GRADIENT),
    (re.compile(r"start_param_sync|finish_param_sync"), State.PARAMETER),
    (re.compile(r"get_grad_norm|has_overflow|check_overflow|clip_grad_norm"), State.OTHER),
)


class Evidence(StrEnum):
    """What an attribution is based on, strongest first."""

    ANNOTATION = "annotation"
    GROUP = "group"
    STACK = "stack"
    PHASE = "phase"
    REPETITION = "repetition"
    NONE = "none"


EVIDENCE_ORDER = tuple(Evidence)


@dataclass(frozen=True, slots=True, kw_only=True)
class Attribution:
    """A state, a finer label for people, and the evidence."""

    state: State
    detail: str
    evidence: Evidence


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """What is known about a collective when it is attributed."""

    op: Op
    bytes: int | None
    dtype: str
    group: str  # ranks as text, or description; tells groups apart
    group_desc: str
    owner: str
    phase: str
    group_size: int | None = None

    @property
    def elements(self) -> int | None:
        """Return the elements of the full buffer, None when unknown."""
        size = dtype_bytes(self.dtype) if self.dtype else None
        return None if self.bytes is None or not size else self.bytes // size


@dataclass(frozen=True, slots=True, kw_only=True)
class RunContext:
    """What the rest of the trace says about a call.

    Attributes:
        is_ddp: DistributedDataParallel runs here.
        forward_reductions: (group, op, bytes) of reductions issued in forward: activations.
        largest_bytes: the largest collective of the trace.
        has_update_mark: an Optimizer.step annotation tells the update phase.
        names_gathers: the framework annotates every gather of parameters, or makes none.
        scatters: large reduce-scatters are there, as where gradients are sharded.
        scattered: (group, bytes) of what they leave on each rank.
        gathers_parameters: FSDP gathers parameters for the passes, so that no step brings updated ones back.
        gathers_again: groups that share the data gather in backward, as no optimizer does with what it updated.
        gathered: (group, bytes) of gathers in passes that are not the framework's own, where it annotates what it
            gathers and what it reduces.
    """

    is_ddp: bool
    forward_reductions: frozenset[tuple[str, str, int | None]]
    largest_bytes: int
    has_update_mark: bool
    names_gathers: bool = False
    scatters: bool = False
    scattered: frozenset[tuple[str, int]] = frozenset()
    gathers_parameters: bool = False
    gathers_again: bool = False
    gathered: frozenset[tuple[str, int | None]] = frozenset()

    @classmethod
    def of(cls, calls: list[Call], owners: str = "") -> RunContext:
        """Collect the context from all calls of a trace.

        Args:
            calls: distinct calls.
            owners: names of all annotations, joined.
        """
        largest = max((call.bytes or 0 for call in calls), default=0)
        names_gathers = any(
            name in owners for name in ("FSDP::all_gather", "FullyShardedDataParallel.", "DistributedDataParallel")
        )
        names_reductions = names_gathers and any(
            call.op in REDUCTIONS and any(name in call.owner for name in _REDUCTIONS_OF_FRAMEWORKS) for call in calls
        )
        return cls(
            is_ddp="DistributedDataParallel" in owners,
            forward_reductions=frozenset(
                (call.group, call.op, call.bytes) for call in calls if call.phase == "forward" and call.op in REDUCTIONS
            ),
            largest_bytes=largest,
            scatters=any(call.op == Op.REDUCE_SCATTER and (call.bytes or 0) * 100 >= largest for call in calls),
            scattered=frozenset(
                (call.group, call.bytes // call.group_size)
                for call in calls
                if call.op == Op.REDUCE_SCATTER and call.bytes and call.group_size
            ),
            gathers_parameters=any(call.op == Op.ALL_GATHER and _is_gathered_by_fsdp(call) for call in calls),
            gathers_again=any(
                call.op == Op.ALL_GATHER
                and call.phase == "backward"
                and "evaluate_function" in call.owner  # an unmarked step's first gather may follow its backward pass
                and (call.bytes or 0) * 100 >= largest
                and _shares_data(call)
                for call in calls
            ),
            has_update_mark="Optimizer.step#" in owners,
            names_gathers=names_gathers,
            gathered=frozenset(
                (call.group, call.bytes)
                for call in calls
                if names_reductions
                and call.op == Op.ALL_GATHER
                and call.bytes
                and call.phase in ("forward", "backward")
                and not _is_gathered_by_fsdp(call)
            ),
        )

    def scatters_in_forward(self, call: Call) -> bool:
        """Tell whether forward scatters sums in a call's group, as sequence parallelism does with activations."""
        return any(
            group == call.group and op == Op.REDUCE_SCATTER and (call.group or num_bytes == call.bytes)
            for group, op, num_bytes in self.forward_reductions
        )

    def is_between_groups(self, call: Call) -> bool:
        """Tell whether a reduction brings together what reduce-scatters in other groups have left, as HSDP does."""
        return call.op == Op.ALL_REDUCE and any(
            size == call.bytes and (group != call.group or not group) for group, size in self.scattered
        )


# Annotations of FSDP2, FSDP1 and DDP around what they reduce.
_REDUCTIONS_OF_FRAMEWORKS = (
    "FSDP::post_backward_reduce", "FullyShardedDataParallel._post", "AccumulateGrad", "reducer::",
)  # fmt: skip


def _is_gathered_by_fsdp(call: Call) -> bool:
    return "FSDP::all_gather" in call.owner or "FullyShardedDataParallel._" in call.owner


def attribute(call: Call, context: RunContext) -> Attribution:
    """Attribute one collective."""
    if call.op in REDUCTIONS and is_of_counts(call.dtype):
        # Such as DDP's marks of the parameters that were used, which stand where gradients do.
        return Attribution(state=State.OTHER, detail="counts", evidence=Evidence.PHASE)
    return (
        _by_annotation(call, context)
        or _by_group(call, context)
        or _by_stack(call)
        or _by_phase(call, context)
        or _by_operation(call, context)
        or Attribution(state=State.UNKNOWN, detail="", evidence=Evidence.NONE)
    )


def _annotated(state: State, detail: str) -> Attribution:
    return Attribution(state=state, detail=detail, evidence=Evidence.ANNOTATION)


def _by_annotation(call: Call, context: RunContext) -> Attribution | None:
    owner = call.owner
    if not owner:
        return None
    if "paro_advise::" in owner:
        for state in (State.PARAMETER, State.GRADIENT, State.OPTIMIZER):
            if f"paro_advise::{state.value}" in owner:
                return _annotated(state, "runtime")
    if "FSDP::post_backward_reduce" in owner:
        return _annotated(State.GRADIENT, "replica" if call.op == Op.ALL_REDUCE else "reduce")
    if "FSDP::all_gather" in owner:
        backward = "FSDP::pre_backward" in owner or "FSDP::backward_prefetch" in owner
        prefetched = "_prefetch" in owner
        return _annotated(State.PARAMETER, _gather_detail(backward=backward, prefetched=prefetched))
    if "FullyShardedDataParallel._" in owner or "FullyShardedDataParallel.forward" in owner:
        return _by_fsdp1(call, context)
    if "Optimizer.step#" in owner and call.op == Op.ALL_GATHER and context.gathers_parameters:
        return _annotated(State.OTHER, OF_OPTIMIZER)
    if "Optimizer.step#" in owner and call.op in _GATHERS:
        return _annotated(State.OPTIMIZER, "updated parameters")
    in_ddp_forward = "DistributedDataParallel.forward" in owner and "evaluate_function" not in owner
    if in_ddp_forward and call.op in (Op.BROADCAST, Op.ALL_REDUCE):
        return _annotated(State.OTHER, "DDP buffers or buckets")
    if "SyncBatchNorm" in owner:
        return _annotated(State.OTHER, "batch norm")
    in_accumulate = "AccumulateGrad" in owner or "reducer::" in owner
    if context.is_ddp and in_accumulate and call.op == Op.ALL_REDUCE and not _is_scalar(call):
        return _annotated(State.GRADIENT, "reduce")
    return next((_annotated(State.OTHER, detail) for pattern, detail in _OF_OTHERS if pattern.search(owner)), None)


def _by_fsdp1(call: Call, context: RunContext) -> Attribution | None:
    owner = call.owner
    if "_post_backward" in owner and call.op in REDUCTIONS:
        is_between_groups = call.op == Op.ALL_REDUCE and context.scatters  # NO_SHARD reduces by it alone
        return _annotated(State.GRADIENT, "replica" if is_between_groups else "reduce")
    if call.op in _GATHERS:
        backward = "_pre_backward" in owner or "_post_backward" in owner
        return _annotated(State.PARAMETER, _gather_detail(backward=backward, prefetched="_prefetch" in owner))
    return None


def _gather_detail(*, backward: bool, prefetched: bool) -> str:
    return ("backward" if backward else "forward") + (", prefetched" if prefetched else "")


def _shares_data(call: Call) -> bool:
    """Tell whether a group's description is one of Megatron's for ranks that share the data."""
    description = call.group_desc
    named = "DATA_PARALLEL" in description or "DISTRIBUTED_OPTIMIZER" in description
    return named and (not _OTHER_GROUP.search(description) or bool(_DATA_GROUP.search(description)))


def _by_group(call: Call, context: RunContext) -> Attribution | None:
    description = call.group_desc
    if _OTHER_GROUP.search(description) and not _DATA_GROUP.search(description):
        return Attribution(state=State.OTHER, detail=description, evidence=Evidence.GROUP)
    if _shares_data(call):
        if call.op == Op.REDUCE_SCATTER:
            return Attribution(state=State.GRADIENT, detail="reduce", evidence=Evidence.GROUP)
        if call.op == Op.ALL_REDUCE and not _is_scalar(call) and call.phase in ("backward", "boundary"):
            # Several instances of the distributed optimizer sum between them what each has scattered.
            detail = "replica" if description.startswith("INTER_") else "reduce"
            return Attribution(state=State.GRADIENT, detail=detail, evidence=Evidence.GROUP)
        if call.op == Op.ALL_GATHER and context.gathers_again and call.phase in ("forward", "backward"):
            return Attribution(state=State.PARAMETER, detail=call.phase, evidence=Evidence.GROUP)
        if call.op == Op.ALL_GATHER:
            # The distributed optimizer gathers what it updated, under the next forward or after.
            return Attribution(state=State.OPTIMIZER, detail="updated parameters", evidence=Evidence.GROUP)
    return None


def _by_stack(call: Call) -> Attribution | None:
    frames = [part for part in call.owner.split(" > ") if ".py(" in part or ".py:" in part]
    for frame in reversed(frames):
        for pattern, state in _STACK_RULES:
            if pattern.search(frame):
                return Attribution(state=state, detail="", evidence=Evidence.STACK)
    return None


def _is_scalar(call: Call) -> bool:
    elements = call.elements
    return elements is not None and elements <= SCALAR_ELEMENTS


def _by_phase(call: Call, context: RunContext) -> Attribution | None:
    if call.op in (Op.BARRIER, Op.SEND, Op.RECV, Op.SEND_RECV, Op.ALL_TO_ALL, Op.GATHER, Op.SCATTER):
        return Attribution(state=State.OTHER, detail=call.op.value, evidence=Evidence.PHASE)
    if not call.phase:
        return None
    state, detail = State.UNKNOWN, ""
    if call.op in _GATHERS:
        match call.phase:
            case "forward" | "backward" if call.op == Op.ALL_GATHER and context.names_gathers:
                state, detail = State.OTHER, "gather outside of FSDP"
            case "forward" | "backward" if call.op == Op.ALL_GATHER and context.scatters_in_forward(call):
                state, detail = State.OTHER, "activations"
            case "forward" | "backward" if call.op == Op.ALL_GATHER:
                state, detail = State.PARAMETER, call.phase
            case "update" if context.gathers_parameters:
                state, detail = State.OTHER, "gather outside of FSDP"  # of a checkpoint, such as a whole state dict
            case "update":
                state, detail = State.OPTIMIZER, "updated parameters"
            case "boundary" if not context.has_update_mark and call.op == Op.ALL_GATHER:
                state, detail = State.OPTIMIZER, "updated parameters"
            case "forward":
                state, detail = State.OTHER, "broadcast"
    elif call.op in REDUCTIONS:
        state, detail = _reduced_by_phase(call, context)
    if state == State.UNKNOWN:
        return None
    return Attribution(state=state, detail=detail, evidence=Evidence.PHASE)


def _reduced_by_phase(call: Call, context: RunContext) -> tuple[State, str]:
    is_activation = (call.group, call.op, call.bytes) in context.forward_reductions
    # What the script gathers, as a contrastive loss or attention over pieces of a sequence does, it sums in backward.
    is_activation |= context.names_gathers and (
        (call.group, call.bytes) in context.gathered or _GATHERS_BACKWARD.search(call.owner) is not None
    )
    # Frameworks that annotate their reductions leave norms; others flush their last bucket here, however small.
    small = _is_scalar(call) or (
        context.names_gathers and (call.bytes is None or call.bytes * 1000 < context.largest_bytes)
    )
    if call.phase == "forward" or is_activation:
        return State.OTHER, "activations or loss"
    if call.phase == "update" and "Optimizer.step#" not in call.owner and call.op == Op.ALL_REDUCE and not small:
        return State.OTHER, AVERAGES  # gradients have been used by then
    gradient = State.GRADIENT, "replica" if context.is_between_groups(call) else "reduce"
    if call.phase == "backward":
        return (State.OTHER, "scalar") if _is_scalar(call) else gradient
    is_flushed = call.op == Op.REDUCE_SCATTER or not small
    return gradient if is_flushed else (State.OTHER, "norm or overflow check")


def _by_operation(call: Call, context: RunContext) -> Attribution | None:
    """Judge by operation and size alone, for traces without host rows.

    Only what repeats and is large is trusted: a reduce-scatter reduces gradients, when the trace scatters, its large
    gathers fetch parameters, and what a scatter leaves is summed between groups in one piece.
    """
    if call.phase or call.bytes is None or _is_scalar(call):
        return None
    if context.scatters and context.is_between_groups(call):
        return Attribution(state=State.GRADIENT, detail="replica", evidence=Evidence.REPETITION)
    if call.bytes * 100 < context.largest_bytes:
        return None
    if call.op == Op.REDUCE_SCATTER:
        return Attribution(state=State.GRADIENT, detail="reduce", evidence=Evidence.REPETITION)
    if call.op == Op.ALL_GATHER and context.scatters:
        return Attribution(state=State.PARAMETER, detail="", evidence=Evidence.REPETITION)
    return None


# Gathers in the step of an optimizer that takes whole matrices of shards, as Muon's orthogonalisation does.
OF_OPTIMIZER = "of the optimizer's own"
# What is averaged after the optimizer's step, as local SGD does with parameters.
AVERAGES = "averages after the step"
TENSOR_PARALLEL = "tensor parallel"  # detail of activations that tensor parallelism sends
_OF_OTHERS = (
    (re.compile("|".join(TENSOR_PARALLEL_FUNCTIONS)), TENSOR_PARALLEL),
    (re.compile(NORM_OPERATOR), "gradient norm"),
)

# The node of the backward pass that a gather of the script's own leaves, by its operator or its class.
_GATHERS_BACKWARD = re.compile(r"evaluate_function: \w*all_?gather\w*Backward", re.IGNORECASE)

# FSDP2's annotations around a collective name the module that it is for, some versions the group as well ("[pg=1]");
# the root has no name.
_MODULE = r".*FSDP::(?:all_gather|post_backward_reduce)\w*(?: \(([^)\s]*)[^)]*\))?(?: \[[^\]]*\])?(?: >|$)"
ROOT_MODULE = "(root)"


def with_modules(collectives: pl.DataFrame) -> pl.DataFrame:
    """Add the column "module": the one that FSDP2 says a collective is for, null where its owner names none.

    Args:
        collectives: RankFacts' table or a part of it; owner may be null.
    """
    import polars as pl

    owner = pl.col("owner").fill_null("")
    module = owner.str.extract(_MODULE, 1).fill_null(ROOT_MODULE)
    return collectives.with_columns(pl.when(owner.str.contains(_MODULE)).then(module).alias("module"))
