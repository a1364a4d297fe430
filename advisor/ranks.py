"""Sorts the facts of all inputs into ranks of one run, and says what is missing or double."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from paro_advise.errors import UsageError
from paro_advise.trace_parsers.notice import Notice, Severity
from paro_advise.trace_parsers.tables import SourceKind

if TYPE_CHECKING:
    from collections.abc import Sequence

    from paro_advise.advisor.rank_facts import RankFacts
    from paro_advise.trace_parsers.peek import Peek


_CUT_CODES = ("Q101", "Q102", "Q105")


@dataclass(frozen=True, slots=True, kw_only=True)
class RankSet:
    """The inputs of one run.

    Attributes:
        timed: (rank, facts) of inputs that time steps, by rank, one per rank.
        untimed: logs and dumps.
        world_size: None when nothing tells.
        missing: ranks of the world without a timed input.
        untimed_ranks: ranks that logs and dumps name.
        framework: as most ranks say.
    """

    timed: tuple[tuple[int, RankFacts], ...]
    untimed: tuple[RankFacts, ...]
    world_size: int | None
    missing: tuple[int, ...]
    untimed_ranks: tuple[int, ...]
    framework: str
    notices: tuple[Notice, ...]

    @property
    def is_cut(self) -> bool:
        """Tell whether the figures rest on traces that end early."""
        return any(is_cut(item) for _, item in self.timed)

    @property
    def sees_all(self) -> bool:
        """Tell whether every rank of the world has a trace, so that every wait can be seen."""
        return self.world_size is not None and len(self.timed) >= self.world_size


def rank_set(facts: Sequence[RankFacts], skip_steps: int = 0) -> RankSet:
    """Sort inputs into ranks.

    Args:
        facts: all usable inputs, in order of path.
        skip_steps: warm-up steps to leave out at the start of each rank.
    """
    notices: list[Notice] = []
    timed_inputs = [item for item in facts if item.has_events]
    untimed = tuple(item for item in facts if not item.has_events)
    timed_inputs = _whole_ones(_one_run(timed_inputs, notices), notices)
    timed = _one_per_rank(timed_inputs, notices)
    if skip_steps and skip_steps >= max((len(item.steps) for _, item in timed), default=skip_steps + 1):
        raise UsageError(f"--skip-steps must leave a step, the traces hold at most {skip_steps}")
    if skip_steps:
        timed = [(rank, _without_warmup(item, skip_steps)) for rank, item in timed]
    world = _world_size([item for _, item in timed] or list(untimed), timed)
    missing = tuple(sorted(set(range(world or 0)) - {rank for rank, _ in timed})) if timed else ()
    if missing and world:
        notices.append(
            Notice(
                code="Q303",
                severity=Severity.INFO,
                message=f"{len(timed)} of {world} ranks have a trace; missing: {_ranges(missing)}",
                help="figures are means over the ranks that are there",
            )
        )
    untimed_ranks = tuple(sorted({item.header.rank for item in untimed if item.header.rank is not None}))
    frameworks = Counter(item.framework for _, item in timed if item.framework != "unknown")
    return RankSet(
        timed=tuple(timed),
        untimed=untimed,
        world_size=world,
        missing=missing,
        untimed_ranks=untimed_ranks,
        framework=min(frameworks, key=lambda name: (-frameworks[name], name), default="unknown"),
        notices=tuple(notices),
    )


def _belongs(item: RankFacts, world_size: int) -> bool:
    header = item.header
    if header.world_size is not None:
        return header.world_size == world_size
    return header.rank is not None and header.rank < world_size


def _one_run(inputs: list[RankFacts], notices: list[Notice]) -> list[RankFacts]:
    """Keep the traces of the largest run when world sizes differ."""
    sizes = Counter(item.header.world_size for item in inputs if item.header.world_size)
    if not sizes:
        return inputs
    chosen = max(sizes, key=lambda size: (sizes[size], size))
    kept = [item for item in inputs if _belongs(item, chosen)]
    left = len(inputs) - len(kept)
    if not left:
        return inputs
    notices.append(
        Notice(
            code="Q304",
            severity=Severity.WARNING,
            message=f"the traces come from different runs: {left} that do not belong to the one with "
            f"{chosen} ranks were left out",
            help="analyze one run at a time",
        )
    )
    return kept


def is_cut(item: RankFacts) -> bool:
    """Tell whether the input ends early, so that what is missing would look like idle time."""
    return any(notice.code in _CUT_CODES for notice in item.notices)


def _whole_ones(inputs: list[RankFacts], notices: list[Notice]) -> list[RankFacts]:
    """Leave out traces that end early when whole ones are there."""
    cut = [item for item in inputs if is_cut(item)]
    if not cut or len(cut) == len(inputs):
        return inputs
    notices.append(
        Notice(
            code="Q307",
            severity=Severity.WARNING,
            message=f"{len(cut)} traces that end early are left out of all figures: "
            + ", ".join(_name(item) for item in cut[:4])
            + (", ..." if len(cut) > 4 else ""),
            help="what is missing at their end would look like idle time: record them again",
        )
    )
    return [item for item in inputs if not is_cut(item)]


def _one_per_rank(inputs: list[RankFacts], notices: list[Notice]) -> list[tuple[int, RankFacts]]:
    by_rank: dict[int, RankFacts] = {}
    unnamed: list[RankFacts] = []
    doubles: list[str] = []
    for item in inputs:
        rank = item.header.rank
        if rank is None:
            unnamed.append(item)
        elif rank in by_rank:
            kept = by_rank[rank]
            if (len(item.steps), item.num_events) > (len(kept.steps), kept.num_events):
                by_rank[rank], item = item, kept
            if item.source.sha256 != by_rank[rank].source.sha256:
                doubles.append(f"{_name(item)} (rank {rank})")
        else:
            by_rank[rank] = item
    if doubles:
        notices.append(
            Notice(
                code="Q305",
                severity=Severity.WARNING,
                message=f"{len(doubles)} traces of a rank that has another one were left out: "
                + ", ".join(doubles[:4])
                + (", ..." if len(doubles) > 4 else ""),
                help="analyze one recording of a run at a time",
            )
        )
    free = (number for number in range(len(inputs) + len(by_rank) + 1) if number not in by_rank)
    for item in unnamed:
        number = next(free)
        by_rank[number] = item
        if len(inputs) > 1 or item.header.world_size not in (1, None):
            notices.append(
                Notice(
                    code="Q306",
                    severity=Severity.WARNING,
                    message=f"{_name(item)} does not say its rank; it counts as rank {number}",
                    help="name files rank0.json, rank1.json, ... or record after init_process_group",
                )
            )
    return sorted(by_rank.items())


def _name(item: RankFacts) -> str:
    return item.source.path.replace("\\", "/").rsplit("/", 1)[-1]


def _without_warmup(item: RankFacts, skip_steps: int) -> RankFacts:
    """Leave out the first steps; the last one always stays."""
    import io

    import polars as pl
    from paro_advise.advisor.rank_facts import read_table

    skip = min(skip_steps, max(0, len(item.steps) - 1))
    if not skip:
        return item
    table = read_table(item.collectives_ipc).with_columns((pl.col("step") - skip).clip(-1))
    buffer = io.BytesIO()
    table.write_ipc_stream(buffer)
    return replace(
        item,
        steps=item.steps[skip:],
        collectives_ipc=buffer.getvalue(),
        timeline_step=max(0, item.timeline_step - skip),
    )


def ranks_text(peeked: Peek) -> str:
    """Say which ranks are there, missing and double, from a first look at the inputs."""
    if not peeked.ranks:
        return "no trace says its rank" if peeked.num_unnamed else "no traces, only logs and dumps"
    world = peeked.world_size
    text = f"ranks {_ranges(sorted(peeked.ranks))}" + (f" of {world}" if world else "")
    if world and world <= 1 << 20 and peeked.missing:
        text += f"; missing {_ranges(peeked.missing)}"
    if peeked.doubles:
        text += f"; several traces of {_ranges(peeked.doubles)}"
    if peeked.num_unnamed:
        text += f"; {peeked.num_unnamed} traces without a rank"
    return text


def _world_size(inputs: Sequence[RankFacts], timed: Sequence[tuple[int, RankFacts]]) -> int | None:
    said = Counter(item.header.world_size for item in inputs if item.header.world_size)
    if said:
        return max(said, key=lambda size: (said[size], size or 0))
    groups = [group.size for item in inputs for group in item.header.groups]
    if groups:
        return max(groups)
    if timed and all(item.header.rank is not None for _, item in timed) and len(timed) > 1:
        return max(rank for rank, _ in timed) + 1
    is_log = any(item.source.kind != SourceKind.KINETO for item in inputs)
    return None if is_log or not timed else (len(timed) if len(timed) > 1 else None)


def _ranges(numbers: Sequence[int]) -> str:
    """Write 1-3, 7 for 1, 2, 3, 7; at most eight pieces."""
    pieces: list[list[int]] = []
    for number in numbers:
        if pieces and number == pieces[-1][1] + 1:
            pieces[-1][1] = number
        else:
            pieces.append([number, number])
    text = [f"{low}-{high}" if high > low else str(low) for low, high in pieces]
    return ", ".join(text[:8]) + (", ..." if len(text) > 8 else "")
