"""``paro-advise hang``: from what a job left to who holds it up."""

from __future__ import annotations

import click


@click.command("hang", short_help="Tell from dumps, stacks, logs or RAS which rank a job that hangs waits for.")
@click.argument("paths", nargs=-1, required=True, metavar="DUMP...")
@click.option("-o", "--output", metavar="FILE", help="Write the HTML page.")
@click.option("--json", "data", metavar="FILE", help="Write the JSON document; - for stdout.")
@click.option("--force", is_flag=True, help="Replace an output file that exists.")
@click.option("-q", "--quiet", is_flag=True, help="Suppress progress and notes; warnings stay.")
def command(*, paths: tuple[str, ...], output: str | None, data: str | None, force: bool, quiet: bool) -> None:
    """Read what a job that hangs has left, and tell which ranks hold it up, and in what.

    DUMP is a file or a folder: dumps of PyTorch's flight recorder, one for each rank; logs with lines of the NCCL
    watchdog; reports of NCCL's RAS (ncclras -f json), two of them to see whether the job moves; stacks by py-spy or
    faulthandler, one file for each rank and named after it. Start the job with TORCH_NCCL_TRACE_BUFFER_SIZE=2000 and
    TORCH_NCCL_DUMP_ON_TIMEOUT=1, and it leaves dumps at TORCH_NCCL_DEBUG_INFO_TEMP_FILE.

    \b
    Examples:
      paro-advise hang /tmp/nccl_trace_rank_*
      paro-advise hang dumps/ -o hang.html
      paro-advise hang job.log stack_rank_3.txt
      paro-advise hang ras1.json ras2.json
    """
    from paro_advise.advisor.commands.output import Targets, write_output
    from paro_advise.advisor.hangs.reading import read_hang
    from paro_advise.advisor.rendering.texts.hang_text import hang_text
    from paro_advise.advisor.wording.escaping import plain
    from paro_advise.core.documents import to_json
    from paro_advise.trace_parsers.discover import find_inputs

    targets = Targets.checked(output, data, force=force, inputs=paths)
    refs, is_collection = find_inputs(paths)
    hang, left_out = read_hang(refs, is_collection=is_collection)
    for problem in left_out:
        click.echo(plain(f"left out {problem}"), err=True)
    if targets.are_files:
        click.echo("\n".join(plain(line) for line in hang_text(hang).splitlines()))
    if data:
        write_output(data, to_json(hang), force=force)
    if output:
        from paro_advise.advisor.rendering.hang_page import render_hang
        from paro_advise.advisor.rendering.provenance import provenance

        write_output(output, render_hang(hang, provenance()).encode(), force=force)
    for line in () if quiet else targets.written():
        click.echo(line, err=True)
