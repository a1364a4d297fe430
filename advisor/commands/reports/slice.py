"""``paro-advise slice``: cuts a step of one rank or of all ranks for Perfetto."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, TypedDict

import click

from paro_advise.advisor.commands.options import Number
from paro_advise.advisor.slices.constants import SLICE_MAX_MB
from paro_advise.core.plural import plural
from paro_advise.errors import InputError, UsageError
from paro_advise.trace_parsers.remote.objects import refuse_remote

if TYPE_CHECKING:
    from paro_advise.advisor.slices.trace_events import Slice


class _Bounds(TypedDict):
    """What is cut, as both kinds of slice take it."""

    step: int | None
    max_bytes: int
    compress: bool


@click.command("slice", short_help="Cut one step of a rank, or of all ranks on one clock, for Perfetto.")
@click.argument("path", metavar="TRACE|DIR")
@click.option("-o", "--output", required=True, metavar="FILE", help="Where to write (.json or .json.gz).")
@click.option("--rank", type=click.IntRange(0), help="Of a folder, this rank alone.  [default: all ranks]")
@click.option("--step", type=click.IntRange(0), help="Index of the step.  [default: the slowest]")
@click.option(
    "--max-mb",
    type=Number(0.1, 200),
    default=SLICE_MAX_MB,
    show_default=True,
    help="Upper bound before compression; the tracks of states are always written.",
)
@click.option("--force", is_flag=True, help="Replace the output file if it exists.")
def command(*, path: str, output: str, rank: int | None, step: int | None, max_mb: float, force: bool) -> None:
    """Cut one step out of TRACE and add tracks that name each collective's model state.

    Of a folder, the same step of all ranks is written into one file, on one clock, with arrows from the first rank
    that arrives at a collective to the last. Open the result by dragging it into ui.perfetto.dev; nothing is uploaded.

    \b
    Example:
      paro-advise slice traces/ -o step.json.gz
      paro-advise slice traces/ --rank 16 -o rank16.json.gz
      paro-advise slice traces/rank16.json.gz --step 1 -o rank16.json.gz
    """
    from paro_advise.advisor.commands.output import refuse_overwrite, write_output
    from paro_advise.advisor.wording.quantities import bytes_text

    refuse_remote([path], "slice")
    refuse_overwrite(output, force=force, inputs=(path,))
    bounds = _Bounds(step=step, max_bytes=int(max_mb * (1 << 20)), compress=output.endswith(".gz"))
    if Path(path).is_dir():
        result = _of_folder(path, rank, bounds)
    elif rank is not None:
        raise UsageError("--rank must come with a folder of traces, got one file", where=path)
    else:
        from paro_advise.advisor.slices.one_rank import cut_slice
        from paro_advise.trace_parsers.bytes.blocks import SourceRef

        result = cut_slice(SourceRef(path=Path(path)), **bounds)
    write_output(output, result.data, force=force)
    for note in result.notes:
        click.echo(f"note: {note}", err=True)
    click.echo(
        f"{result.label}: {plural(result.num_events, 'event')}, {bytes_text(len(result.data))}"
        + (f"; {result.num_left_out} events beyond --max-mb were left out" if result.num_left_out else ""),
        err=True,
    )
    click.echo("next: drag the file into ui.perfetto.dev (it stays in your browser)", err=True)


def _of_folder(folder: str, rank: int | None, bounds: _Bounds) -> Slice:
    """Cut the step of all ranks in a folder, or of the one asked for.

    Raises:
        InputError: the folder has no such trace.
    """
    from paro_advise.advisor.commands.progress import Progress
    from paro_advise.advisor.facts.inputs import read_inputs
    from paro_advise.advisor.slices.all_ranks import merge_ranks
    from paro_advise.advisor.slices.one_rank import cut_slice

    inputs = read_inputs([folder], Progress(quiet=False))
    refs = {ref.label: ref for ref in inputs.refs}
    timed = {facts.header.rank: facts for facts in inputs.read.facts if facts.steps and facts.header.rank is not None}
    if rank is None and len(timed) != 1:
        return merge_ranks(inputs.read.facts, refs, **bounds, step_logs=inputs.step_logs)
    if rank is None:
        rank = next(iter(timed))
    if rank not in timed:
        known = ", ".join(map(str, sorted(timed)[:8])) + ", ..." * (len(timed) > 8)
        raise InputError(f"a folder must hold the trace of the rank, got {rank}; it has {known}", where=folder)
    return cut_slice(refs[timed[rank].source.path], **bounds)
