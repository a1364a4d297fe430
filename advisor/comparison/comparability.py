"""Whether two runs can be compared: the same work on the same number of ranks (pure)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from paro_advise.advisor.comparison.constants import SAME_COUNT_SHARE, SAME_WORK_SHARE, WIDTH_TOLERANCE
from paro_advise.advisor.comparison.metrics import mean_us
from paro_advise.advisor.comparison.rank_parts import common_ranks
from paro_advise.core.dtypes import is_of_bytes, plain_dtype
from paro_advise.core.framework import Framework
from paro_advise.core.model_state import State
from paro_advise.errors import UnlikeRunsError
from paro_advise.trace_parsers.kineto.constants import NO_STEPS_CODE

if TYPE_CHECKING:
    from collections.abc import Collection

    from paro_advise.advisor.analysis.model import Analysis

FACTS = (
    "world_size", "data_parallel_ranks", "batch", "micro_batches", "precision", "parameters", "device", "steps",
)  # fmt: skip
_UNMARKED = "not marked"


def check_comparability(before: Analysis, after: Analysis, allowed: Collection[str]) -> tuple[str, ...]:
    """Return in what the runs differ although the user allows it.

    Raises:
        UnlikeRunsError: they differ in something that was not allowed.
    """
    found = []
    for fact, one, other in _facts(before, after):
        text = f"{fact} {one} before and {other} after"
        if fact not in allowed:
            raise UnlikeRunsError(
                f"both runs must do the same work, got {text}",
                hint=f"capture both in the same way, or pass --allow-unlike {fact} if you know what it means",
            )
        found.append(text)
    return tuple(found)


def work_caveat(before: Analysis, after: Analysis) -> str:
    """Return that computing differs where nothing tells that both runs had batches of one size, "" elsewhere."""
    common = common_ranks(before, after)
    if common is None:
        first, second = before.breakdown_us.compute, after.breakdown_us.compute
    else:
        first, second = (
            mean_us([rank.compute_us for rank in side.ranks if rank.rank in common]) for side in (before, after)
        )
    are_told = before.captured is not None and after.captured is not None
    if are_told or not first or not second or abs(second - first) <= SAME_WORK_SHARE * first:
        return ""
    return (
        f" Computing takes {second / first:.2f} times as long, and traces do not tell the size of a batch: whether "
        "both runs do the same work is not known (recordings of `capture` tell)."
    )


def _facts(before: Analysis, after: Analysis) -> list[tuple[str, str, str]]:
    """Return (fact, before, after) of each that is known of both and differs."""
    pairs: list[tuple[str, object, object]] = [
        ("world_size", before.run.world_size, after.run.world_size),
        ("data_parallel_ranks", before.run.data_parallel_ranks, after.run.data_parallel_ranks),
        ("micro_batches", before.run.micro_batches, after.run.micro_batches),
    ]
    pairs.append(("device", before.run.device_name, after.run.device_name))
    if before.captured and after.captured:
        one, other = before.captured, after.captured
        pairs.append(("batch", ", ".join(one.inputs), ", ".join(other.inputs)))
        pairs.append(("precision", one.autocast or "no autocast", other.autocast or "no autocast"))
    else:
        types = _gathered_types(before), _gathered_types(after)
        # What goes as bytes names no type: FSDP2 gathers several types so, and parameters that are cast to 8 bits.
        pairs.append(("precision", *(types if any(types) else (_gathered_width(before), _gathered_width(after)))))
    if Framework.RUNTIME not in (before.run.framework, after.run.framework):  # it sums in no fewer bits than they do
        pairs.append(("precision", _reduced_type(before), _reduced_type(after)))
    first, second = before.run.parameter_count, after.run.parameter_count
    parts = [_num_parts(side) for side in (before, after)]
    if first and second and all(parts):
        first, second = first * (parts[0] or 1), second * (parts[1] or 1)
    if first and second and abs(first - second) > SAME_COUNT_SHARE * first:
        pairs.append(("parameters", first, second))
    found = [(name, str(one), str(other)) for name, one, other in pairs if one and other and one != other]
    marks = [_marks(before), _marks(after)]
    if _UNMARKED in marks:
        found.append(("steps", marks[0], marks[1]))
    return found


def _gathered_types(analysis: Analysis) -> str:
    """Return the types of elements in which parameters are gathered, "" where none are or bytes stand for any type."""
    types = {plain_dtype(entry.dtype) for entry in analysis.collectives if entry.state == State.PARAMETER.value}
    return "" if any(map(is_of_bytes, types)) else " and ".join(sorted(types - {""}))


def _gathered_width(analysis: Analysis) -> str:
    """Return how many bytes of each parameter forward gathers, "" where not each pass gathers all of them once."""
    count, micro = analysis.run.parameter_count, analysis.run.micro_batches
    entries = [
        entry
        for entry in analysis.collectives
        if entry.state == State.PARAMETER.value and entry.detail.startswith("forward") and entry.bytes
    ]
    reduced = [item for item in analysis.collectives if item.state == State.GRADIENT.value and item.detail != "replica"]
    passes = sum(item.count for item in entries), sum(item.count for item in reduced)
    if not count or not micro or abs(passes[0] - passes[1]) > WIDTH_TOLERANCE * passes[1]:
        return ""
    width = sum(entry.count * (entry.bytes or 0) for entry in entries) / (count * micro)
    usual = min((1, 2, 4), key=lambda bytes_: abs(bytes_ - width))
    return f"{usual}-byte parameters gathered" if abs(width - usual) <= WIDTH_TOLERANCE * usual else ""


def _num_parts(analysis: Analysis) -> int | None:
    """Return into how many parts tensor and pipeline parallelism cut the model, None where that is not known."""
    run = analysis.run
    return run.world_size // run.data_parallel_ranks if run.world_size and run.data_parallel_ranks else None


def _reduced_type(analysis: Analysis) -> str:
    """Return in which type most bytes of gradients are reduced, "" where nothing tells."""
    moved: dict[str, float] = {}
    for entry in analysis.collectives:
        if entry.state == State.GRADIENT.value and entry.dtype and entry.bytes:
            name = plain_dtype(entry.dtype)
            moved[name] = moved.get(name, 0.0) + entry.count * entry.bytes
    most = max(moved, key=lambda name: (moved[name], name), default="")
    return f"gradients reduced in {most}" if most and not is_of_bytes(most) else ""


def _marks(analysis: Analysis) -> str:
    """Return whether steps are known apart; else what was recorded counts as one step, however many it holds."""
    are_timed = analysis.captured is not None and analysis.captured.steps
    codes = {notice.code for notice in analysis.data_quality}
    return _UNMARKED if NO_STEPS_CODE in codes and not are_timed else "marked"
