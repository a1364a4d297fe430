"""Reads everything that a user named for one run: traces, logs, and what a capture adds."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from paro_advise.errors import InputError, NoInputError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from paro_advise.advisor.analysis import Analysis
    from paro_advise.advisor.build import Options
    from paro_advise.advisor.captured import Captured
    from paro_advise.advisor.gather import Gathered
    from paro_advise.advisor.progress import Progress
    from paro_advise.trace_parsers.blocks import SourceRef


@dataclass(frozen=True, slots=True, kw_only=True)
class RunInputs:
    """What was read.

    Attributes:
        refs: the files that are not a capture's own step logs.
        gathered: their facts.
        captured: from step logs, None without any.
    """

    refs: tuple[SourceRef, ...]
    gathered: Gathered
    captured: Captured | None


def read_inputs(
    paths: Sequence[str], progress: Progress, *, jobs: int | None = None, use_cache: bool = True
) -> RunInputs:
    """Read the inputs of one run.

    Args:
        paths: files, folders, archives, globs.
        progress: told what goes on.
        jobs: processes; None for all cores.
        use_cache: keep and take facts of files read before.

    Raises:
        InputError: nothing can be used.
    """
    from paro_advise.advisor.captured import captured_of
    from paro_advise.advisor.gather import default_cache, gather
    from paro_advise.advisor.ranks import ranks_text
    from paro_advise.trace_parsers.discover import find_inputs
    from paro_advise.trace_parsers.notice import Notice, Severity
    from paro_advise.trace_parsers.peek import peek
    from paro_advise.trace_parsers.step_log import is_ours, read_step_logs

    found, is_collection = find_inputs(paths)
    ours = [ref for ref in found if is_ours(ref)]
    refs = [ref for ref in found if ref not in ours]
    logs, problems = read_step_logs(ours)
    progress.say(f"found {len(refs)} file{'s' if len(refs) != 1 else ''}")
    if not refs:
        raise NoInputError(
            "a run must have traces, only a capture's step logs were found",
            where=", ".join(paths),
            hint="the job may have ended before the steps to record; capture again with earlier --steps",
        )
    if len(refs) > 1:
        progress.say(ranks_text(peek(refs)))
    gathered = gather(
        refs,
        is_collection=is_collection or len(refs) > 1,
        cache=default_cache() if use_cache else None,
        jobs=jobs or os.cpu_count() or 1,
        progress=progress.step,
    )
    progress.say(f"read {sum(item.num_events for item in gathered.facts):,} events")
    notices = [Notice(code="Q301", severity=Severity.WARNING, message=problem) for problem in problems]
    gathered = replace(gathered, notices=(*gathered.notices, *notices))
    return RunInputs(refs=tuple(refs), gathered=gathered, captured=captured_of(logs))


def analysis_of(paths: Sequence[str], options: Options, progress: Progress) -> tuple[Analysis, Gathered | None]:
    """Return the analysis that a JSON of ours holds, or that of a run's inputs.

    Returns:
        The analysis, and the facts behind it where they were read.

    Raises:
        InputError: nothing can be used.
    """
    from paro_advise.advisor.analysis import FORMAT, from_json
    from paro_advise.advisor.build import build_analysis

    if len(paths) == 1:
        try:
            is_file = Path(paths[0]).is_file()
            head = b""
            if is_file:
                with Path(paths[0]).open("rb") as file:
                    head = file.read(1 << 16)
            if FORMAT.encode() in head or b'"breakdown_us"' in head:
                return from_json(Path(paths[0]).read_bytes(), paths[0]), None
        except OSError as error:
            raise InputError(f"an input must be a readable file: {error.strerror or error}", where=paths[0]) from error
    inputs = read_inputs(paths, progress)
    analysis = build_analysis(inputs.gathered.facts, inputs.gathered.notices, options, inputs.captured)
    return analysis, inputs.gathered
