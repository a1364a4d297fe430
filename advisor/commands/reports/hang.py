"""``paro-advise hang``: from the flight recorder's dumps to who holds a job up."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from paro_advise.errors import InputError, NoInputError

if TYPE_CHECKING:
    from paro_advise.trace_parsers.bytes.blocks import SourceRef
    from paro_advise.trace_parsers.dumps.rank_dump import RankDump


@click.command("hang", short_help="Tell from flight-recorder dumps which rank a job that hangs waits for.")
@click.argument("paths", nargs=-1, required=True, metavar="DUMP...")
@click.option("-o", "--output", metavar="FILE", help="Write the HTML page.")
@click.option("--json", "data", metavar="FILE", help="Write the JSON document; - for stdout.")
@click.option("--force", is_flag=True, help="Replace an output file that exists.")
@click.option("-q", "--quiet", is_flag=True, help="Suppress progress messages.")
def command(*, paths: tuple[str, ...], output: str | None, data: str | None, force: bool, quiet: bool) -> None:
    """Read the flight-recorder dumps of a job that hangs, and tell which ranks hold it up, and in what.

    DUMP is a file or a folder, one dump for each rank. Start the job with TORCH_NCCL_TRACE_BUFFER_SIZE=2000 and
    TORCH_NCCL_DUMP_ON_TIMEOUT=1, and it leaves them at TORCH_NCCL_DEBUG_INFO_TEMP_FILE.

    \b
    Examples:
      paro-advise hang /tmp/nccl_trace_rank_*
      paro-advise hang dumps/ -o hang.html
    """
    from paro_advise.advisor.commands.output import refuse_overwrite, refuse_same, write_output, wrote_text
    from paro_advise.advisor.hangs.diagnosis import diagnose
    from paro_advise.advisor.rendering.texts.hang_text import hang_text
    from paro_advise.advisor.wording.escaping import plain
    from paro_advise.core.documents import to_json
    from paro_advise.trace_parsers.discover import find_inputs

    for file in (output, data):
        refuse_overwrite(file, force=force, inputs=paths)
    refuse_same([output, data])
    refs, is_collection = find_inputs(paths)
    dumps: dict[int, RankDump] = {}
    for ref in refs:
        problem = _add(dumps, ref, is_alone=not is_collection and len(refs) == 1)
        if problem:
            click.echo(plain(f"left out {ref.label}: {problem}"), err=True)
    if not dumps:
        raise NoInputError(
            "a hang must be read from dumps of PyTorch's flight recorder, there are none",
            where=paths[0],
            hint="start the job with TORCH_NCCL_TRACE_BUFFER_SIZE=2000 and TORCH_NCCL_DUMP_ON_TIMEOUT=1",
        )
    hang = diagnose(dumps)
    if data != "-":
        click.echo("\n".join(plain(line) for line in hang_text(hang).splitlines()))
    if data:
        write_output(data, to_json(hang), force=force)
    if output:
        from paro_advise.advisor.rendering.hang_page import render_hang
        from paro_advise.advisor.rendering.provenance import provenance

        write_output(output, render_hang(hang, provenance()).encode(), force=force)
    for file in (output, data):
        if file and file != "-" and not quiet:
            click.echo(wrote_text(file), err=True)


def _add(dumps: dict[int, RankDump], ref: SourceRef, *, is_alone: bool) -> str:
    """Add the dump in a file; return why it is left out, "" if it is not.

    Raises:
        InputError: it cannot be read, and there is no other one.
    """
    from paro_advise.trace_parsers.dumps.flight_recorder import looks_like
    from paro_advise.trace_parsers.dumps.rank_dump import read_dump
    from paro_advise.trace_parsers.read import read_head

    try:
        if not looks_like(read_head(ref)):
            return "not a dump of the flight recorder"
        dump = read_dump(ref)
    except InputError as error:
        if is_alone:
            raise
        return str(error)
    if dump.rank is None:
        return "neither the dump nor its name tells the rank"
    if dump.rank in dumps:
        return f"rank {dump.rank} is in {dumps[dump.rank].path} already"
    dumps[dump.rank] = dump
    return ""
