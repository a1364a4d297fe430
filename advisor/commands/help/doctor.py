"""``paro-advise doctor``: what is installed and what it allows, ready to paste in an issue."""

from __future__ import annotations

import click


@click.command("doctor", short_help="Check the installation.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def command(*, as_json: bool) -> None:
    """Say what is installed, in which version, and what is missing for which feature.

    \b
    Example:
      paro-advise doctor
    """
    from paro_advise.advisor.commands.help.installation import check_installation

    checks = check_installation()
    if as_json:
        from paro_advise.core.documents import to_json

        click.echo(to_json({"format": "paro-advise/doctor", "format_version": "1.0", "checks": checks}), nl=False)
        return
    for check in checks:
        mark = click.style("[OK]  ", fg="green") if check.ok else click.style("[WARN]", fg="yellow")
        click.echo(f"{mark} {check.name:<24} {check.found:<28} {check.use if check.ok else check.help}".rstrip())
