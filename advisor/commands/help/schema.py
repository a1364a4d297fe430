"""``paro-advise schema``: the JSON schema of a format."""

from __future__ import annotations

import click

from paro_advise.errors import UsageError

_FORMATS = ("analysis", "plan", "comparison", "hang")


@click.command("schema", short_help="Print the JSON schema of a format.")
@click.argument("name", type=str)
def command(name: str) -> None:
    """Print the JSON schema of format NAME (analysis, plan, comparison, hang).

    \b
    Example:
      paro-advise schema analysis > analysis.schema.json
    """
    if name not in _FORMATS:
        raise UsageError(f"a format must be one of {', '.join(_FORMATS)}, got {name!r}")
    import msgspec

    from paro_advise.advisor.analysis.model import Analysis
    from paro_advise.advisor.comparison.model import Comparison
    from paro_advise.advisor.hangs.model import Hang
    from paro_advise.core.documents import to_json
    from paro_advise.policies.plan import Plan

    types = {"analysis": Analysis, "plan": Plan, "comparison": Comparison, "hang": Hang}
    click.echo(to_json(msgspec.json.schema(types[name])), nl=False)
