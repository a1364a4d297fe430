"""What a rank computes: its kernels, on a CPU run its operators, by name and by kind."""

from __future__ import annotations

import re
from enum import StrEnum
from typing import TYPE_CHECKING

import numpy as np

from paro_advise.advisor.facts.constants import HELD_WITHIN_US, MAX_KERNEL_NAME, MAX_NAMED_KERNELS, OPTIMIZER_STEP
from paro_advise.advisor.facts.intervals import EMPTY, Intervals
from paro_advise.advisor.facts.model import KernelTime, Work
from paro_advise.trace_parsers.kernel_kinds import KernelKind

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from paro_advise.trace_parsers.tables import EventTables


class WorkKind(StrEnum):
    """What a kernel or an operator does."""

    MATRIX = "matrix product"
    ATTENTION = "attention"
    CONVOLUTION = "convolution"
    NORM = "normalisation"
    SOFTMAX = "softmax and loss"
    EMBEDDING = "embedding"
    OPTIMIZER = "optimizer"
    REDUCTION = "reduction"
    COPY = "copy and layout"
    ELEMENTWISE = "elementwise"
    FUSED = "fused by a compiler"
    OTHER = "other"


_HOST_COPIES = ("Memcpy HtoD", "Memcpy DtoH")  # as CUPTI and roctracer name them
# In this order: a flash-attention kernel is built from CUTLASS, a convolution may be an implicit GEMM.
_KINDS: tuple[tuple[re.Pattern[str], WorkKind], ...] = tuple(
    (re.compile(pattern, re.IGNORECASE), kind)
    for pattern, kind in (
        (r"adam|lamb(?!da)|optimizer|_sgd_|aten::_foreach_(?!norm)", WorkKind.OPTIMIZER),
        (r"flash|fmha|attention|_attn_|sdpa", WorkKind.ATTENTION),
        (r"conv(?!ert)|scudnn|fprop|dgrad|wgrad|winograd|im2col|col2im", WorkKind.CONVOLUTION),
        (r"(?<!fb)gemm|cutlass|matmul|cijk_|nvjet|xmma|_mm_|(?:aten::|^)(?:addmm|addmv|mm|bmm|baddbmm|linear|mv|dot)\b",
         WorkKind.MATRIX),
        (r"layer_?norm|rms_?norm|batch_?norm|group_?norm|welford|\bbn_(?:fw|bw)", WorkKind.NORM),
        (r"softmax|cross_entropy|nll_loss", WorkKind.SOFTMAX),
        (r"embedding|index_?select|indexing_backward", WorkKind.EMBEDDING),
        (r"^triton_red|^triton_per|reduce|lpnorm|aten::(?:sum|mean|norm|linalg_vector_norm|max|amax|all|any|_foreach_norm)\b",
         WorkKind.REDUCTION),
        (r"^triton_", WorkKind.FUSED),
        (r"copy|catarray|aten::cat\b|transpose|fill|split_with_sizes|chunk_cat|permute|aten::(?:clone|contiguous|zero_)\b",
         WorkKind.COPY),
        (r"elementwise|vectorized|TensorOp|unrolled|multi_tensor|aten::(?:add|sub|mul|div|gelu|relu|silu|tanh|sigmoid|pow|sqrt)",
         WorkKind.ELEMENTWISE),
        (r"aten::(?:rsqrt|neg|exp|log|where|(?:native_)?dropout|threshold|addcmul|addcdiv|lerp)", WorkKind.ELEMENTWISE),
    )
)  # fmt: skip
_NOISE = re.compile(r"\bvoid |at::native::|\(anonymous namespace\)::|std::")


def work_kind(name: str) -> WorkKind:
    """Return what a kernel or an operator of this name does."""
    return next((kind for pattern, kind in _KINDS if pattern.search(name)), WorkKind.OTHER)


def work_of(
    events: EventTables, windows_us: Sequence[tuple[float, float]], updates: tuple[NDArray[np.float64], ...]
) -> Work | None:
    """Sum up what computes within the steps, None where nothing does.

    Kernels count whole, also those that run at the same time; operators of a CPU run count what they do outside
    the operators that they call.

    Args:
        events: of one rank.
        windows_us: begin and end of each step.
        updates: starts and ends of the optimizer's kernels, which need not say so in their names.
    """
    if not windows_us:
        return None
    device = events.device
    start, code = device["start_us"].to_numpy(), device["name"].to_numpy()
    end = device["end_us"].to_numpy()
    spent = end - start if events.is_gpu else own_times(start, end, device["stream"].to_numpy())
    lows, highs = np.array(windows_us).T
    place = np.searchsorted(lows, start, side="right") - 1
    mine = (place >= 0) & (start < highs[np.maximum(place, 0)]) & (device["kind"].to_numpy() == KernelKind.COMPUTE)
    if not mine.any():
        return None
    of_update = mine & np.isin(start, updates[0]) if len(updates[0]) else np.zeros(len(start), dtype=bool)
    num_steps = len(windows_us)
    names = events.names
    shares: dict[tuple[str, WorkKind], tuple[float, float]] = {}
    for rows, kind in ((mine & ~of_update, None), (of_update, WorkKind.OPTIMIZER)):
        times = np.bincount(code[rows], weights=spent[rows], minlength=len(names))
        counts = np.bincount(code[rows], minlength=len(names))
        for number in np.flatnonzero(counts).tolist():
            key = short_name(names[number]), kind or work_kind(names[number])
            before = shares.get(key, (0.0, 0.0))
            shares[key] = before[0] + float(times[number]), before[1] + float(counts[number])
    by_kind: dict[str, float] = {}
    for (_, kind), (time_us, _) in shares.items():
        by_kind[kind.value] = by_kind.get(kind.value, 0.0) + time_us / num_steps
    flops = device["flops"].to_numpy() if "flops" in device.columns else np.zeros(len(start))
    products = mine & (flops > 0)
    longest = sorted(shares.items(), key=lambda item: (-item[1][0], item[0]))[:MAX_NAMED_KERNELS]
    return Work(
        kind_us=by_kind,
        kernels=tuple(
            KernelTime(name=name, kind=kind.value, us=time_us / num_steps, count=count / num_steps)
            for (name, kind), (time_us, count) in longest
        ),
        product_flops=float(flops[products].sum()) / num_steps,
        product_us=float(spent[products].sum()) / num_steps,
    )


def own_times(
    start_us: NDArray[np.float64], end_us: NDArray[np.float64], thread: NDArray[np.int64]
) -> NDArray[np.float64]:
    """Return what each span of a thread lasts outside the spans directly inside it (us)."""
    own = end_us - start_us
    order = np.lexsort((start_us - end_us, start_us, thread))
    starts, ends, threads = (column[order].tolist() for column in (start_us, end_us, thread))
    inside = np.zeros(len(own))
    open_rows: list[int] = []
    for row in range(len(starts)):
        while open_rows and (threads[open_rows[-1]] != threads[row] or ends[open_rows[-1]] <= starts[row]):
            open_rows.pop()
        if open_rows:
            inside[open_rows[-1]] += min(ends[row], ends[open_rows[-1]]) - starts[row]
        open_rows.append(row)
    own[order] -= inside
    return np.maximum(own, 0.0)


def short_name(name: str) -> str:
    """Return a kernel's name without its arguments and the parts that all kernels share."""
    text = _NOISE.sub("", name).strip()
    # A template's arguments tell kernels apart (which functor), a function's do not.
    depth = 0
    for place, char in enumerate(text):
        depth += (char == "<") - (char == ">")
        if char == "(" and depth == 0 and place:
            text = text[:place]
            break
    return text if len(text) <= MAX_KERNEL_NAME else text[: MAX_KERNEL_NAME - 3] + "..."


def holding_copies(events: EventTables, compute: Intervals) -> Intervals:
    """Return when copies between host and device hold up what computes: it begins as they end.

    So it does with activations or states that are kept on the host; what else runs meanwhile does not hold it.
    """
    copies = np.array([name.startswith(_HOST_COPIES) for name in events.names], dtype=np.bool_)
    if not events.is_gpu or not copies.any() or not len(compute.start_us):
        return EMPTY
    mine = copies[events.device["name"].to_numpy()]
    start, end = (events.device[column].to_numpy()[mine] for column in ("start_us", "end_us"))
    begins = compute.start_us
    place = np.searchsorted(begins, end)
    holds = (place < len(begins)) & (begins[np.minimum(place, len(begins) - 1)] - end <= HELD_WITHIN_US)
    return Intervals.union_of(start[holds], end[holds]).minus(compute)


def update_kernels(events: EventTables) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return start and end of the computing kernels of the optimizer's steps (us)."""
    device = events.device
    on_host = [span for span in events.spans if span.name.startswith(OPTIMIZER_STEP)]
    # One optimizer may step within another.
    spans = Intervals.of_pairs([(span.start_us, span.end_us) for span in events.updates or on_host])
    lows, highs = spans.start_us, spans.end_us
    if not events.is_gpu or not len(lows):
        return np.empty(0), np.empty(0)
    start, end = device["start_us"].to_numpy(), device["end_us"].to_numpy()
    # Without the device's own spans the host's tell, by what they launched.
    moment = start if events.updates else device["launch_us"].to_numpy()
    # A span begins and ends with kernels, whose times may be rounded otherwise.
    place = np.searchsorted(lows, (start + end) / 2 if events.updates else moment, side="right") - 1
    mine = (place >= 0) & (moment < highs[np.maximum(place, 0)]) & (device["kind"].to_numpy() == KernelKind.COMPUTE)
    return start[mine], end[mine]
