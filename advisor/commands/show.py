"""``paro-advise show``: reads an analysis or a comparison back from a report or a JSON file."""

from __future__ import annotations

from pathlib import Path

import click
from paro_advise.errors import InputError


@click.command("show", short_help="Print what a report or JSON file of ours holds.")
@click.argument("path", metavar="REPORT")
@click.option("--json", "json_target", metavar="FILE", help="Write it as JSON; - for stdout.")
@click.option("--force", is_flag=True, help="Replace an output file that exists.")
def command(*, path: str, json_target: str | None, force: bool) -> None:
    """Print the analysis or comparison in REPORT, an HTML report or a JSON of ours.

    \b
    Example:
      paro-advise show run.html --json -
    """
    from paro_advise.advisor.analysis import from_json, to_json
    from paro_advise.advisor.comparison import FORMAT, comparison_from_json
    from paro_advise.advisor.comparison_text import comparison_text
    from paro_advise.advisor.output import write_output
    from paro_advise.advisor.page import embedded_data
    from paro_advise.advisor.terminal import analysis_text

    try:
        data = Path(path).read_bytes()
    except OSError as error:
        raise InputError(f"an input must be a readable file: {error.strerror or error}", where=path) from error
    if data.lstrip()[:1] == b"<":
        data = embedded_data(data, path)
    if f'"{FORMAT}"'.encode() in data[: 1 << 20] and b'"predicted_vs_measured"' in data:
        comparison = comparison_from_json(data, path)
        if json_target:
            write_output(json_target, to_json(comparison), force=force)
        if json_target != "-":
            click.echo(comparison_text(comparison))
        return
    analysis = from_json(data, path)
    if json_target:
        write_output(json_target, to_json(analysis), force=force)
    if json_target != "-":
        click.echo(analysis_text(analysis))
