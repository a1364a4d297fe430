"""``paro-advise show``: reads an analysis, a plan, a comparison or a hang back from a report or a JSON file."""

from __future__ import annotations

import click

from paro_advise.core.required_name import refuse_empty
from paro_advise.errors import ForeignDataError


@click.command("show", short_help="Print what a report or a paro-advise JSON file holds.")
@click.argument("path", metavar="REPORT")
@click.option("--json", "json_target", metavar="FILE", help="Write it as JSON; - for stdout.")
@click.option("--force", is_flag=True, help="Replace an output file that exists.")
def command(*, path: str, json_target: str | None, force: bool) -> None:
    """Print the analysis, plan, comparison or hang in REPORT, an HTML report or a paro-advise JSON file.

    \b
    Example:
      paro-advise show run.html --json -
    """
    from paro_advise.advisor.analysis.load import document_of
    from paro_advise.advisor.commands.output import Targets, write_output
    from paro_advise.core.documents import to_json

    refuse_empty(path, "an input")
    Targets.checked(json_target, force=force, inputs=[path])
    value, text = _read(document_of(path), path)
    if json_target:
        write_output(json_target, to_json(value), force=force)
    if json_target != "-":
        click.echo(text)


def _read(data: bytes, path: str) -> tuple[object, str]:
    """Return what a document holds, and as text for people; of no known format it is read as an analysis."""
    import msgspec

    from paro_advise.advisor.analysis.model import analysis_from_json
    from paro_advise.advisor.comparison.model import FORMAT as COMPARISON
    from paro_advise.advisor.comparison.model import comparison_from_json
    from paro_advise.advisor.hangs.model import FORMAT as HANG
    from paro_advise.advisor.hangs.model import Hang
    from paro_advise.advisor.rendering.texts.analysis_text import analysis_text
    from paro_advise.advisor.rendering.texts.comparison_text import comparison_text
    from paro_advise.advisor.rendering.texts.hang_text import hang_text
    from paro_advise.advisor.rendering.texts.plan_text import plan_text
    from paro_advise.core.documents import format_name, from_json
    from paro_advise.policies.plan import FORMAT as PLAN
    from paro_advise.policies.plan import plan_from_json

    name = format_name(data)
    if not name and not data.lstrip().startswith(b"{"):
        raise ForeignDataError(
            "the file must be an analysis, a plan, a comparison or a hang that paro-advise wrote, it is none",
            where=path,
        )
    match name:
        case COMPARISON.name:
            comparison = comparison_from_json(data, path)
            return comparison, comparison_text(comparison)
        case PLAN.name:
            # As it was written, numbers to the letter: its id is made of them.
            return msgspec.json.decode(data), plan_text(plan_from_json(data, path))
        case HANG.name:
            hang = from_json(data, HANG, Hang, path)
            return hang, hang_text(hang)
    analysis = analysis_from_json(data, path)
    return analysis, analysis_text(analysis)
