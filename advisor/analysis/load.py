"""The run that a user named: an analysis JSON as it is, or everything that is read for one."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from paro_advise.core.documents import document_bytes
from paro_advise.errors import InputError, UsageError
from paro_advise.trace_parsers.bytes.blocks import SourceRef
from paro_advise.trace_parsers.bytes.local_copy import local_copy
from paro_advise.trace_parsers.constants import OWN_TITLE
from paro_advise.trace_parsers.remote.objects import RemoteObject, is_remote, shown_address
from paro_advise.trace_parsers.remote.store import read_head

if TYPE_CHECKING:
    from collections.abc import Sequence

    from paro_advise.advisor.analysis.model import Analysis, Options
    from paro_advise.advisor.facts.inputs import Commentary
    from paro_advise.advisor.facts.reading.all_inputs import ReadInputs
    from paro_advise.advisor.facts.reading.choice import EngineChoice

_HEAD_BYTES = 1 << 16  # the format's name or a key of its own stands in the first 64 KiB, a page's title as well


def load_analysis(
    paths: Sequence[str], options: Options, progress: Commentary, *, engine: EngineChoice | None = None
) -> tuple[Analysis, ReadInputs | None]:
    """Return the analysis that a JSON file or a report holds, or that of a run's inputs.

    Args:
        paths: one document, or inputs.
        options: of the analysis.
        progress: told what goes on.
        engine: where inputs are read; None for all cores of this machine.

    Returns:
        The analysis, and the facts behind it where inputs were read.

    Raises:
        InputError: nothing can be used.
    """
    from paro_advise.advisor.analysis.build import build_analysis
    from paro_advise.advisor.analysis.model import analysis_from_json
    from paro_advise.advisor.facts.inputs import read_inputs

    if len(paths) == 1 and is_analysis(paths[0]):
        if options.gpus_per_node or options.skip_steps:
            raise UsageError(
                "--gpus-per-node and --skip-steps must come with traces, an analysis was made without them",
                where=paths[0],
                hint="pass the traces, or give both to `analyze` and take its JSON",
            )
        return analysis_from_json(document_of(paths[0]), paths[0]), None
    inputs = read_inputs(paths, progress, engine=engine)
    read = inputs.read
    return build_analysis(read.facts, read.notices, options, inputs.step_logs), read


def is_analysis(path: str) -> bool:
    """Tell whether an input holds an analysis, and is none that is read for one.

    Raises:
        InputError: it cannot be read.
    """
    from paro_advise.advisor.analysis.model import FORMAT

    if is_remote(path):
        head = read_head(path, _HEAD_BYTES) if _is_document_name(path) else b""
    else:
        try:
            if not Path(path).is_file():
                return False
            with Path(path).open("rb") as file:
                head = file.read(_HEAD_BYTES)
        except OSError as error:
            raise InputError(f"an input must be a readable file: {error.strerror or error}", where=path) from error
    if OWN_TITLE in head:  # of a page, whose data stand behind its styles and tables
        head = document_of(path)[:_HEAD_BYTES]
    return FORMAT.name.encode() in head or b'"breakdown_us"' in head


def _is_document_name(address: str) -> bool:
    return shown_address(address).lower().endswith((".json", ".html"))


def document_of(path: str) -> bytes:
    """Return the JSON that a file or an object holds, or that a report page there embeds.

    Raises:
        InputError: it cannot be read.
        ForeignDataError: it is a page that embeds none.
    """
    if not is_remote(path):
        return document_bytes(path)
    item = SourceRef(
        path=Path(shown_address(path).rpartition("/")[2]), remote=RemoteObject(url=path, size_bytes=None, etag="")
    )
    with local_copy(item) as copy:
        return document_bytes(str(copy.path))
