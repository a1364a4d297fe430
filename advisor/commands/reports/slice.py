"""``paro-advise slice``: cuts the worst window of a trace for Perfetto."""

from __future__ import annotations

import click


@click.command("slice", short_help="Cut one step of a trace for Perfetto, with our findings as tracks.")
@click.argument("path", metavar="TRACE")
@click.option("-o", "--output", required=True, metavar="FILE", help="Where to write (.json or .json.gz).")
@click.option("--step", type=click.IntRange(0), help="Index of the step.  [default: the slowest]")
@click.option(
    "--max-mb",
    type=click.FloatRange(0.1, 200),
    default=10.0,
    show_default=True,
    help="Upper bound of the file.",
)
@click.option("--force", is_flag=True, help="Replace the output file if it exists.")
def command(*, path: str, output: str, step: int | None, max_mb: float, force: bool) -> None:
    """Cut one step out of TRACE and add tracks that name each collective's model state.

    Open the result by dragging it into ui.perfetto.dev; nothing is uploaded.

    \b
    Example:
      paro-advise slice traces/rank17.json.gz -o worst.json.gz
    """
    from paro_advise.advisor.commands.output import refuse_overwrite, write_output
    from paro_advise.advisor.facts.perfetto_slice import cut_slice

    refuse_overwrite(output, force=force, inputs=(path,))
    result = cut_slice(path, step=step, max_bytes=int(max_mb * (1 << 20)), compress=output.endswith(".gz"))
    write_output(output, result.data, force=force)
    click.echo(
        f"{result.label}: {result.num_events} events, {len(result.data) / (1 << 20):.2f} MiB"
        + (f"; {result.num_left_out} events beyond --max-mb were left out" if result.num_left_out else ""),
        err=True,
    )
    click.echo("next: drag the file into ui.perfetto.dev (it stays in your browser)", err=True)
