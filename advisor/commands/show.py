"""``paro-advise show``: reads an analysis back from a report or a JSON file."""

from __future__ import annotations

from pathlib import Path

import click
from paro_advise.errors import ForeignDataError, InputError


@click.command("show", short_help="Print the analysis that a report or JSON file holds.")
@click.argument("path", metavar="REPORT")
@click.option("--json", "json_target", metavar="FILE", help="Write the analysis as JSON; - for stdout.")
@click.option("--force", is_flag=True, help="Replace an output file that exists.")
def command(*, path: str, json_target: str | None, force: bool) -> None:
    """Print the analysis in REPORT, an HTML report or an analysis JSON of ours.

    \b
    Example:
      paro-advise show run.html --json -
    """
    from paro_advise.advisor.analysis import from_json, to_json
    from paro_advise.advisor.output import write_output
    from paro_advise.advisor.terminal import analysis_text

    try:
        data = Path(path).read_bytes()
    except OSError as error:
        raise InputError(f"an input must be a readable file: {error.strerror or error}", where=path) from error
    if data.lstrip()[:1] == b"<":
        mark = b'<script type="application/json" id="paro-data">'
        begin = data.find(mark)
        if begin < 0:
            raise ForeignDataError("a report must hold its data as JSON, this page holds none", where=path)
        data = data[begin + len(mark) : data.find(b"</script>", begin)]
    analysis = from_json(data, path)
    if json_target:
        write_output(json_target, to_json(analysis), force=force)
    if json_target != "-":
        click.echo(analysis_text(analysis))
