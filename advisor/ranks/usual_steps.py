"""Steps in which more ran than a step of training: an evaluation or a checkpoint that happened to be recorded."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from paro_advise.advisor.ranks.constants import FULLER_RATIO, USUAL_SPREAD, USUAL_STEPS_SHARE
from paro_advise.core.model_state import MODEL_STATES
from paro_advise.core.plural import plural
from paro_advise.trace_parsers.notice import Notice, Severity

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from paro_advise.advisor.ranks.source import Source

FULLER_CODE = "Q337"


def without_fuller_steps(
    timed: Sequence[tuple[int, Source]],
) -> tuple[list[tuple[int, Source]], tuple[Notice, ...]]:
    """Leave out steps that gather parameters or compute much more than the usual ones, and else do as they do.

    A step in which the model is evaluated as well gathers it once more for each batch, and computes without a backward
    pass. One that reduces more gradients or updates more, too, ends what several others accumulated; longer
    sequences run longer backward too. Where the numbers of most steps differ, none is the usual one and all stay.

    Args:
        timed: (rank, source) as in Run.

    Returns:
        the same without those steps, and a notice that says so.
    """
    votes: Counter[str] = Counter()
    seen: Counter[str] = Counter()
    for _, item in timed:
        counts = _counts(item)
        if len(counts) < len(item.steps):
            continue  # steps of one name, which cannot be told apart
        usual = _usual(counts)
        seen.update(counts.keys())
        if usual is None:
            continue
        if usual.parameter:
            votes.update(label for label, count in counts.items() if _is_fuller(count, usual))
        else:
            votes.update(label for label in _compute_more(item) if counts[label] == usual)
    fuller = {label for label, count in votes.items() if 2 * count > seen[label]}
    if not fuller:
        return list(timed), ()
    names = ", ".join(label.replace("ProfilerStep#", "step ") for label in sorted(fuller)[:4])
    computes, reduces = ("computes", "reduces") if len(fuller) == 1 else ("compute", "reduce")
    notice = Notice(
        code=FULLER_CODE,
        severity=Severity.WARNING,
        message=f"{plural(len(fuller), 'step gathers', 'steps gather')} parameters more often than the others, or "
        f"{computes} longer outside of backward, and {reduces} no more gradients, as where the model is evaluated in "
        f"between: left out of all figures ({names}" + (", ...)" if len(fuller) > 4 else ")"),
        help="record steps that do nothing but train",
    )
    return [(rank, without_labels(item, fuller)) for rank, item in timed], (notice,)


class _Counts(NamedTuple):
    """How many collectives of a step move each model state."""

    parameter: int
    gradient: int
    optimizer: int


def _counts(item: Source) -> dict[str, _Counts]:
    held = Counter(item.collectives.select("step", "state").iter_rows())
    return {
        step.label: _Counts(*(held[number, state.value] for state in MODEL_STATES))
        for number, step in enumerate(item.steps)
    }


def _usual(counts: dict[str, _Counts]) -> _Counts | None:
    """Return what most steps have, None where they differ or reduce no gradients."""
    (usual, times), *_ = Counter(counts.values()).most_common(1) or [(_Counts(0, 0, 0), 0)]
    return usual if usual.gradient and times > USUAL_STEPS_SHARE * len(counts) else None


def _is_fuller(count: _Counts, usual: _Counts) -> bool:
    return count.parameter >= FULLER_RATIO * usual.parameter and count[1:] == usual[1:]


def _compute_more(item: Source) -> list[str]:
    """Return the steps that compute longer than most, though backward takes no longer."""
    # The optimizer's step may be of some steps only, as where micro-batches are marked.
    known = [(step.label, step.compute_us - step.update_us, step.backward_us) for step in item.steps]
    parts = [(label, whole, back) for label, whole, back in known if back is not None]
    if len(parts) < max(3, len(known)):
        return []
    compute, backward = (float(np.median([part[place] for part in parts])) for place in (1, 2))
    return [
        label
        for label, whole, back in parts
        if whole >= FULLER_RATIO * compute and 0 < back <= (1 + USUAL_SPREAD) * backward
    ]


def without_labels(item: Source, labels: Collection[str]) -> Source:
    """Leave out the steps of a rank that have one of some labels; all stay where none would."""
    import polars as pl

    kept = [number for number, step in enumerate(item.steps) if step.label not in labels]
    if len(kept) in (0, len(item.steps)):
        return item
    places = dict(zip(kept, range(len(kept)), strict=True))
    by_length = np.argsort([item.steps[number].wall_us for number in kept], kind="stable")
    middle = int(by_length[(len(kept) - 1) // 2])
    return replace(
        item,
        steps=tuple(item.steps[number] for number in kept),
        typical_step=places.get(item.typical_step, middle),
        collectives=item.collectives.with_columns(
            pl.col("step").replace_strict(places, default=-1, return_dtype=item.collectives.schema["step"])
        ),
    )
