"""Reads all inputs of a run into facts, where an engine puts it; what is lost with a process is read once more."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from paro_advise.advisor.facts.reading.cache import entry_name, load, prune, usable_cache
from paro_advise.advisor.facts.reading.choice import EngineName
from paro_advise.advisor.facts.reading.packing import anywhere
from paro_advise.advisor.facts.reading.pooled import DaskEngine, LocalEngine
from paro_advise.advisor.facts.reading.ray_cluster import RayEngine
from paro_advise.advisor.facts.reading.slurm_array import SlurmEngine
from paro_advise.core.plural import plural
from paro_advise.errors import BrokenInputError, InputError, UnknownFormatError
from paro_advise.trace_parsers.notice import Notice, Severity
from paro_advise.trace_parsers.remote.objects import is_remote

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from paro_advise.advisor.facts.model import RankFacts
    from paro_advise.advisor.facts.reading.choice import EngineChoice
    from paro_advise.advisor.facts.reading.engine import InputReader, Result
    from paro_advise.trace_parsers.bytes.blocks import SourceRef


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadInputs:
    """The facts of all inputs that could be used, in order of path, and what happened to the rest.

    Attributes:
        failure: why those that could not be used could not, None where all could.
    """

    facts: tuple[RankFacts, ...]
    notices: tuple[Notice, ...]
    failure: InputError | None = None

    def require_facts(self) -> None:
        """Raise where nothing could be used.

        Raises:
            InputError: the reason.
        """
        if not self.facts and self.failure is not None:
            raise self.failure


def read_all(
    refs: Sequence[SourceRef],
    *,
    is_collection: bool,
    cache: str | None,
    choice: EngineChoice,
    progress: Callable[[int, int, str], None] | None = None,
) -> ReadInputs:
    """Read inputs.

    Args:
        refs: the inputs.
        is_collection: a folder or glob was given, so unknown kinds are skipped with a notice.
        cache: folder or address of cached facts, None to read every file anew.
        choice: where they are read.
        progress: called with (done, total, label) after each input.

    Raises:
        UsageError: the engine cannot be used here.
    """
    results: dict[int, Result] = {}
    cache, said = usable_cache(cache)
    if choice.name != EngineName.LOCAL:
        refs = [anywhere(ref) for ref in refs]

    def done(place: int, result: Result) -> None:
        results[place] = result
        if progress:
            progress(len(results), len(refs), refs[place].label)

    for place, ref in enumerate(refs):
        # A store is asked by the processes that read, many at once.
        if choice.name != EngineName.LOCAL and cache and not is_remote(cache) and (known := _ask_cache(ref, cache)):
            done(place, known)
    for engine, places in _part_by_engine([place for place in range(len(refs)) if place not in results], refs, choice):
        lost = _read_by(engine, places, refs, cache, done, alone=False)
        for place, reason in _read_by(engine, list(lost), refs, cache, done, alone=True).items():
            what = f"the process that read this input ended twice: {reason}"
            done(place, BrokenInputError(what, where=refs[place].label))
    if cache:
        prune(cache)
    read = _usable([results[index] for index in range(len(refs))], refs, is_collection=is_collection)
    return replace(read, notices=(said, *read.notices)) if said else read


def _part_by_engine(
    places: Sequence[int], refs: Sequence[SourceRef], choice: EngineChoice
) -> Iterator[tuple[InputReader, list[int]]]:
    """Give each engine and what it reads: members of compressed archives lie unpacked on this machine only."""
    if choice.name == EngineName.LOCAL:
        here, there = list(places), []
    else:
        here = [place for place in places if _is_unpacked_here(refs[place])]
        there = [place for place in places if not _is_unpacked_here(refs[place])]
    if here:
        yield LocalEngine(choice.jobs or os.cpu_count() or 1), here
    if there:
        yield _engine_of(choice), there


def _is_unpacked_here(ref: SourceRef) -> bool:
    return ref.member is not None and ref.member.data != ref.path


def _engine_of(choice: EngineChoice) -> InputReader:
    jobs = choice.jobs or os.cpu_count() or 1
    if choice.name == EngineName.RAY:
        return RayEngine(jobs)
    if choice.name == EngineName.DASK:
        return DaskEngine(jobs)
    return SlurmEngine(choice.max_array)


def _read_by(
    engine: InputReader,
    places: Sequence[int],
    refs: Sequence[SourceRef],
    cache: str | None,
    done: Callable[[int, Result], None],
    *,
    alone: bool,
) -> dict[int, str]:
    if not places:
        return {}
    lost = engine.read(
        [refs[place] for place in places], cache, lambda number, result: done(places[number], result), alone=alone
    )
    return {places[number]: reason for number, reason in lost.items()}


def _ask_cache(ref: SourceRef, cache: str) -> RankFacts | None:
    """Return cached facts: what an interrupted analysis has read elsewhere is not read again."""
    try:
        name = entry_name(ref)
    except OSError:
        return None
    return load(cache, name) if name else None


def _usable(results: Sequence[RankFacts | InputError], refs: Sequence[SourceRef], *, is_collection: bool) -> ReadInputs:
    facts: list[RankFacts] = []
    said: list[tuple[str, Notice]] = []
    notices: list[Notice] = []
    failures: list[InputError] = []
    unknown: list[str] = []
    for result, ref in zip(results, refs, strict=True):
        if not isinstance(result, InputError):
            facts.append(result)
            said.extend((ref.file_name, notice) for notice in result.notices)
        elif isinstance(result, UnknownFormatError) and is_collection:
            unknown.append(ref.file_name)
            failures.append(result)
        else:
            failures.append(result)
            message = f"{ref.file_name} could not be used: {result.what}"
            notices.append(Notice(code="Q301", severity=Severity.ERROR, message=message, help=result.hint or ""))
    if unknown:
        shown = ", ".join(sorted(unknown)[:5]) + (", ..." if len(unknown) > 5 else "")
        notices.append(
            Notice(
                code="Q302",
                severity=Severity.INFO,
                message=f"left out {plural(len(unknown), 'file')} without a recording: {shown}",
            )
        )
    return ReadInputs(facts=tuple(facts), notices=(*_name_files(said), *notices), failure=_reason(failures, refs))


def _reason(failures: Sequence[InputError], refs: Sequence[SourceRef]) -> InputError | None:
    """Return the reason that tells most: of a broken trace before that of a file that is none; of none that none is."""
    broken = next((failure for failure in failures if not isinstance(failure, UnknownFormatError)), None)
    if broken is not None or len(failures) < max(2, len(refs)):
        return broken or next(iter(failures), None)
    return UnknownFormatError(
        f"a run must have traces, logs or dumps, none of {plural(len(refs), 'file')} is one: {_some(refs)}",
        hint="record a few steps with the PyTorch profiler on every rank, or name the folder that holds them",
    )


def _some(refs: Sequence[SourceRef]) -> str:
    names = sorted(ref.file_name for ref in refs)
    return ", ".join(names[:5]) + (", ..." if len(names) > 5 else "")


def _name_files(said: Sequence[tuple[str, Notice]]) -> list[Notice]:
    """Return notices that name their files; what several files say alike is said once."""
    files: dict[Notice, list[str]] = {}
    for name, notice in said:
        files.setdefault(replace(notice, message=notice.message.removeprefix(f"{name}: ")), []).append(name)
    out = []
    for notice, names in files.items():
        names = list(dict.fromkeys(names))
        if len(names) == 1 and names[0] in notice.message:
            out.append(notice)
            continue
        which = (
            names[0] if len(names) == 1 else f"{len(names)} files ({', '.join(names[:2])}{', ...' * (len(names) > 2)})"
        )
        out.append(replace(notice, message=f"{which}: {notice.message}"))
    return out
