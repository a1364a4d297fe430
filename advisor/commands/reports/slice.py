"""``paro-advise slice``: cuts the worst window of a trace for Perfetto."""

from __future__ import annotations

from pathlib import Path

import click

from paro_advise.errors import InputError, UsageError


@click.command("slice", short_help="Cut one step of a trace for Perfetto, with our findings as tracks.")
@click.argument("path", metavar="TRACE|DIR")
@click.option("-o", "--output", required=True, metavar="FILE", help="Where to write (.json or .json.gz).")
@click.option("--rank", type=click.IntRange(0), help="Of a folder.  [default: a straggler, else the slowest rank]")
@click.option("--step", type=click.IntRange(0), help="Index of the step.  [default: the slowest]")
@click.option(
    "--max-mb",
    type=click.FloatRange(0.1, 200),
    default=10.0,
    show_default=True,
    help="Upper bound of the file.",
)
@click.option("--force", is_flag=True, help="Replace the output file if it exists.")
def command(*, path: str, output: str, rank: int | None, step: int | None, max_mb: float, force: bool) -> None:
    """Cut one step out of TRACE and add tracks that name each collective's model state.

    Of a folder with the traces of several ranks, one is taken. Open the result by dragging it into ui.perfetto.dev;
    nothing is uploaded.

    \b
    Example:
      paro-advise slice traces/rank17.json.gz -o worst.json.gz
      paro-advise slice traces/ --rank 17 -o rank17.json.gz
    """
    from paro_advise.advisor.commands.output import refuse_overwrite, write_output
    from paro_advise.advisor.facts.perfetto_slice import cut_slice

    refuse_overwrite(output, force=force, inputs=(path,))
    if Path(path).is_dir():
        path = _trace_of(path, rank)
    elif rank is not None:
        raise UsageError("--rank must come with a folder of traces, got one file", where=path)
    result = cut_slice(path, step=step, max_bytes=int(max_mb * (1 << 20)), compress=output.endswith(".gz"))
    write_output(output, result.data, force=force)
    click.echo(
        f"{result.label}: {result.num_events} events, {len(result.data) / (1 << 20):.2f} MiB"
        + (f"; {result.num_left_out} events beyond --max-mb were left out" if result.num_left_out else ""),
        err=True,
    )
    click.echo("next: drag the file into ui.perfetto.dev (it stays in your browser)", err=True)


def _trace_of(folder: str, wanted: int | None) -> str:
    """Return the trace of a rank in a folder: the one asked for, else a straggler's, else that of the slowest step.

    Raises:
        InputError: the folder has no such trace.
    """
    from paro_advise.advisor.analysis.build import build_analysis
    from paro_advise.advisor.analysis.model import Options
    from paro_advise.advisor.commands.progress import Progress
    from paro_advise.advisor.facts.inputs import read_inputs

    read = read_inputs([folder], Progress(quiet=False)).read
    timed = {facts.header.rank: facts for facts in read.facts if facts.steps and facts.header.rank is not None}
    if not timed:
        raise InputError("a folder must hold the trace of a rank with steps, got none", where=folder)
    rank, why = wanted, "as asked for"
    if rank is None:
        late = build_analysis(read.facts, read.notices, Options()).stragglers
        slowest = max(timed, key=lambda number: max(step.wall_us for step in timed[number].steps))
        rank, why = (late[0].rank, "a straggler") if late else (slowest, "which has the slowest step")
    if rank not in timed:
        known = ", ".join(map(str, sorted(timed)[:8])) + ", ..." * (len(timed) > 8)
        raise InputError(f"a folder must hold the trace of the rank, got {rank}; it has {known}", where=folder)
    names = {path.name: path for path in sorted(Path(folder).rglob("*")) if path.is_file()}
    found = names.get(Path(timed[rank].source.path).name)
    if found is None:
        raise InputError(
            f"a slice must be cut from a file, the trace of rank {rank} lies in an archive",
            where=timed[rank].source.path,
            hint="unpack the archive",
        )
    click.echo(f"rank {rank}, {why}: {found}", err=True)
    return str(found)
