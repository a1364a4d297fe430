"""``paro-advise explain``: the meaning of a finding, a note or an error."""

from __future__ import annotations

import click

from paro_advise.errors import UsageError


def _codes_from(_context: click.Context, _parameter: click.Parameter, typed: str) -> list[str]:
    """Return the codes that begin with what was typed, for a shell to complete."""
    from paro_advise.advisor.wording.codes import known_codes

    return [code for code in known_codes() if code.startswith(typed.upper())]


@click.command("explain", short_help="Say what a finding, note or error code means.")
@click.argument("code", required=False, shell_complete=_codes_from)
def command(code: str | None) -> None:
    """Say what CODE means, what it is based on and what to do; without CODE, list all.

    \b
    Example:
      paro-advise explain PARO020
    """
    from paro_advise.advisor.wording.codes import close_codes, known_codes

    known = known_codes()
    if code is None:
        for name, entry in known.items():
            click.echo(f"{name:<8} {entry.title}")
        return
    found = known.get(code.upper())
    if found is None:
        close = close_codes(code.upper())
        raise UsageError(
            f"a code must be one that paro-advise prints, got {code!r}",
            hint=f"did you mean {' or '.join(close)}?" if close else "`paro-advise explain` lists all codes",
        )
    click.echo(f"{found.code}: {found.title}\n\n{found.text}")
