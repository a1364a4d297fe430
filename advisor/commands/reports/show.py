"""``paro-advise show``: reads an analysis or a comparison back from a report or a JSON file."""

from __future__ import annotations

import click


@click.command("show", short_help="Print what a report or a paro-advise JSON file holds.")
@click.argument("path", metavar="REPORT")
@click.option("--json", "json_target", metavar="FILE", help="Write it as JSON; - for stdout.")
@click.option("--force", is_flag=True, help="Replace an output file that exists.")
def command(*, path: str, json_target: str | None, force: bool) -> None:
    """Print the analysis or comparison in REPORT, an HTML report or a paro-advise JSON file.

    \b
    Example:
      paro-advise show run.html --json -
    """
    from paro_advise.advisor.analysis.load import document_of
    from paro_advise.advisor.analysis.model import analysis_from_json
    from paro_advise.advisor.commands.output import Targets, write_output
    from paro_advise.advisor.comparison.model import FORMAT, comparison_from_json
    from paro_advise.advisor.rendering.texts.analysis_text import analysis_text
    from paro_advise.advisor.rendering.texts.comparison_text import comparison_text
    from paro_advise.core.documents import to_json

    Targets.checked(json_target, force=force, inputs=[path])
    data = document_of(path)
    if f'"{FORMAT.name}"'.encode() in data[: 1 << 20] and b'"predicted_vs_measured"' in data:
        comparison = comparison_from_json(data, path)
        if json_target:
            write_output(json_target, to_json(comparison), force=force)
        if json_target != "-":
            click.echo(comparison_text(comparison))
        return
    analysis = analysis_from_json(data, path)
    if json_target:
        write_output(json_target, to_json(analysis), force=force)
    if json_target != "-":
        click.echo(analysis_text(analysis))
