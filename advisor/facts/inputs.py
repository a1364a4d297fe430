"""Reads everything that a user named for one run: traces, logs, and what a capture adds."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Protocol

from paro_advise.advisor.wording.quantities import number_ranges
from paro_advise.core.plural import plural
from paro_advise.errors import NoInputError, UsageError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from paro_advise.advisor.facts.capture_log import StepLogs
    from paro_advise.advisor.facts.reading.all_inputs import ReadInputs
    from paro_advise.advisor.facts.reading.choice import EngineChoice
    from paro_advise.trace_parsers.bytes.blocks import SourceRef
    from paro_advise.trace_parsers.peek import Peek


class Commentary(Protocol):
    """Whoever is told what goes on while inputs are read."""

    def say(self, text: str) -> None:
        """Take one line."""

    def step(self, done: int, total: int, label: str) -> None:
        """Take how many of all inputs are read, and the name of the last one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunInputs:
    """What was read.

    Attributes:
        refs: the files that are not a capture's own step logs.
        read: their facts.
        step_logs: of a capture, or of several.
    """

    refs: tuple[SourceRef, ...]
    read: ReadInputs
    step_logs: StepLogs


def read_inputs(
    paths: Sequence[str],
    progress: Commentary,
    *,
    engine: EngineChoice | None = None,
    use_cache: bool = True,
    is_sample: bool = False,
    skip_steps: int = 0,
) -> RunInputs:
    """Read the inputs of one run.

    Args:
        paths: files, folders, archives, globs, addresses of stores.
        progress: told what goes on.
        engine: where they are read; None for all cores of this machine.
        use_cache: keep and take facts of files read before.
        is_sample: read only as many traces as it takes to state the exposed communication of all.
        skip_steps: warm-up steps that a sample is judged without.

    Raises:
        InputError: nothing can be used.
    """
    from paro_advise.advisor.facts.capture_log import StepLogs
    from paro_advise.advisor.facts.reading.all_inputs import read_all
    from paro_advise.advisor.facts.reading.cache import default_cache
    from paro_advise.advisor.facts.reading.choice import EngineChoice
    from paro_advise.trace_parsers.bytes.local_copy import local_copy
    from paro_advise.trace_parsers.discover import find_inputs
    from paro_advise.trace_parsers.logs.step_log import is_capture_file, read_step_logs
    from paro_advise.trace_parsers.notice import Notice, Severity
    from paro_advise.trace_parsers.peek import peek

    found, is_collection = find_inputs(paths)
    capture_files = [ref for ref in found if is_capture_file(ref)]
    refs = [ref for ref in found if ref not in capture_files]
    with ExitStack() as copies:
        logs, problems = read_step_logs([copies.enter_context(local_copy(ref)) for ref in capture_files])
    progress.say(f"found {len(refs)} file{'s' if len(refs) != 1 else ''}")
    if not refs:
        raise NoInputError(
            "a run must have traces, only a capture's step logs were found",
            where=", ".join(paths),
            hint="the job may have ended before the steps to record; capture again with earlier --steps",
        )
    peeked = peek(refs) if is_sample or len(refs) > 1 else None
    if peeked and sum(ref.remote is None for ref in refs) > 1:
        progress.say(_ranks_text(peeked))

    def read_some(some: Sequence[SourceRef]) -> ReadInputs:
        return read_all(
            some,
            is_collection=is_collection or len(refs) > 1,
            cache=default_cache() if use_cache else None,
            choice=engine or EngineChoice(),
            progress=progress.step,
        )

    read = _read_sample(refs, peeked, read_some, skip_steps) if is_sample and peeked else read_some(refs)
    read.require_facts()
    progress.say(f"read {sum(item.num_events for item in read.facts):,} events")
    notices = [Notice(code="Q301", severity=Severity.WARNING, message=problem) for problem in problems]
    read = replace(read, notices=(*read.notices, *notices))
    return RunInputs(refs=tuple(refs), read=read, step_logs=StepLogs(logs))


def _read_sample(
    refs: Sequence[SourceRef], peeked: Peek, read_some: Callable[[Sequence[SourceRef]], ReadInputs], skip_steps: int
) -> ReadInputs:
    """Read as many traces as it takes, and all that is no trace.

    Raises:
        UsageError: most ranks have several traces, which are of several recordings: a sample would mix them.
    """
    from paro_advise.advisor.facts.reading.all_inputs import ReadInputs
    from paro_advise.advisor.facts.sampling import read_sample, sample_notice

    if 2 * len(peeked.doubles) > len(peeked.ranks):
        raise UsageError(
            "--sample must get the traces of one job, most ranks have several here",
            hint="pass the folder or files of one; `analyze` without --sample lists them",
        )
    sampled = {id(ref) for ref in peeked.traces}
    rest = [ref for ref in refs if id(ref) not in sampled]
    parts, sample = read_sample(peeked.traces, read_some, skip_steps) if peeked.traces else ([], None)
    if rest:
        parts.append(read_some(rest))
    said = (sample_notice(sample),) if sample and sample.num_read < sample.num_all else ()
    facts = sorted((item for part in parts for item in part.facts), key=lambda item: item.source.path)
    return ReadInputs(
        facts=tuple(facts),
        notices=(*said, *(note for part in parts for note in part.notices)),
        failure=next((part.failure for part in parts if part.failure), None),
    )


def _ranks_text(peeked: Peek) -> str:
    """Say which ranks are there, missing and double, from a first look at the inputs."""
    if not peeked.ranks:
        return "no trace says its rank" if peeked.num_unnamed else "no traces among them"
    world = peeked.world_size
    text = f"ranks {number_ranges(sorted(peeked.ranks))}" + (f" of {world}" if world else "")
    if world and world <= 1 << 20 and peeked.missing:
        text += f"; missing {number_ranges(peeked.missing)}"
    if peeked.doubles:
        text += f"; several traces of {number_ranges(peeked.doubles)}"
    if peeked.num_unnamed:
        text += f"; {plural(peeked.num_unnamed, 'trace')} without a rank"
    return text
