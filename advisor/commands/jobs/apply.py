"""``paro-advise apply``: changes a user's own file so that it runs a plan."""

from __future__ import annotations

import difflib
import os
from pathlib import Path
from typing import TYPE_CHECKING

import click

from paro_advise.errors import InputError, UsageError

if TYPE_CHECKING:
    from collections.abc import Callable

_BACKUP = ".before-paro"


@click.command("apply", short_help="Change a config or a training script so that it runs a plan.")
@click.argument("plan_file", metavar="PLAN")
@click.argument("target", metavar="TARGET")
@click.option(
    "--diff", "action", flag_value="diff", default="diff", help="Show the change and write nothing.  [default]"
)
@click.option("--write", "action", flag_value="write", help="Change the file; a copy stays beside it.")
@click.option("--undo", "action", flag_value="undo", help="Put the copy back.")
@click.option("--force", is_flag=True, help="Write although nothing is gained; undo although the file was changed.")
@click.option("-q", "--quiet", is_flag=True, help="Print only the diff.")
def command(*, plan_file: str, target: str, action: str, force: bool, quiet: bool) -> None:
    """Express PLAN in TARGET: a DeepSpeed JSON, accelerate YAML, torchtitan TOML, Megatron launch script or a
    Python training script. Comments and formatting stay; what cannot be expressed is refused.

    \b
    Examples:
      paro-advise apply plan.json ds_config.json
      paro-advise apply plan.json train.py --write
    """
    from paro_advise.advisor.commands.output import write_output
    from paro_advise.advisor.edits.edit import edit_file
    from paro_advise.advisor.wording.escaping import plain
    from paro_advise.policies.plan import Verdict, kept_text, read_plan

    path = Path(os.path.realpath(target))  # a link stays one; what it leads to is changed
    if not path.is_file():
        raise InputError("a target must be a file", where=target)
    mode = path.stat().st_mode & 0o7777
    backup = path.with_name(path.name + _BACKUP)
    plan = read_plan(plan_file)
    plan_name = os.path.relpath(plan_file, path.parent)
    if action == "undo":
        _undo(
            path,
            backup,
            force=force,
            is_ours=lambda before, now: (
                edit_file(plan, path.name, before, plan_name, whatever_it_brings=True).text == now
            ),
        )
        click.echo(f"{target} is as it was")
        return
    before = _text(path)
    made = edit_file(plan, path.name, before, plan_name, whatever_it_brings=force)
    if made.text == before:
        is_kept = plan.verdict == Verdict.KEEP
        told = kept_text(plan) if is_kept else f"{target} runs this plan already"
        click.echo(f"{told}; nothing to change", err=True)
        for caveat in () if quiet or is_kept else made.caveats:
            click.echo(plain(f"{made.framework}: {caveat}"), err=True)
        return
    lines = difflib.unified_diff(
        before.splitlines(), made.text.splitlines(), f"a/{path.name}", f"b/{path.name}", lineterm=""
    )
    click.echo("\n".join(plain(line) for line in lines))
    if not quiet:
        for caveat in made.caveats:
            click.echo(plain(f"{made.framework}: {caveat}"), err=True)
        click.echo(plain(plan.text), err=True)
    if action == "write":
        if backup.exists():
            raise UsageError(
                f"a backup from an earlier apply exists: {backup.name}",
                hint="run `apply --undo`, or remove the backup",
            )
        write_output(str(backup), before.encode(), force=False, mode=mode)
        write_output(str(path), made.text.encode(), force=True, mode=mode)
        click.echo(f"wrote {target}; the backup is {backup.name}, `apply --undo` restores it", err=True)
    elif not quiet:
        click.echo(f"next: paro-advise apply {plan_file} {target} --write", err=True)


def _text(path: Path) -> str:
    try:
        with path.open(encoding="utf-8", newline="") as file:
            return file.read()
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"a target must be a readable text file: {error}", where=str(path)) from error


def _undo(path: Path, backup: Path, *, force: bool, is_ours: Callable[[str, str], bool]) -> None:
    """Restore the backup.

    Raises:
        InputError: there is none.
        UsageError: the file was changed since.
    """
    from paro_advise.advisor.commands.output import write_output

    if not backup.is_file():
        raise InputError("nothing to undo: no backup found", where=str(backup))
    before = _text(backup)
    if not force and not is_ours(before, _text(path)):
        raise UsageError(
            f"{path.name} was changed since `apply`, or by another plan",
            hint="pass --force to lose those changes",
        )
    write_output(str(path), before.encode(), force=True, mode=backup.stat().st_mode & 0o7777)
    backup.unlink()
