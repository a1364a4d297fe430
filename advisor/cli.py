"""The command line: options, one library call a verb, errors as text and exit codes."""

from __future__ import annotations

import os
import signal
import sys
import traceback
from contextlib import suppress
from itertools import pairwise
from typing import Any

import click

from paro_advise.advisor.wording.standard_streams import outlive_readers
from paro_advise.errors import InputError, ParoAdviseError

# Verbs in order of the workflow, and the folder of commands/ that holds each.
VERBS = {
    "capture": "jobs",
    "attach": "jobs",
    "analyze": "reports",
    "recommend": "reports",
    "apply": "jobs",
    "run": "jobs",
    "switch": "jobs",
    "watch": "jobs",
    "compare": "reports",
    "demo": "jobs",
    "index": "reports",
    "hang": "reports",
    "export": "reports",
    "doctor": "help",
    "explain": "help",
    "schema": "help",
    "show": "reports",
    "slice": "reports",
}


class VerbGroup(click.Group):
    """Imports a verb's module when it is used; a path in place of a verb means ``analyze``."""

    def list_commands(self, ctx: click.Context) -> list[str]:  # noqa: ARG002 - click's signature
        """Return the verbs in order of the workflow."""
        return list(VERBS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:  # noqa: ARG002
        """Return the verb's command, None for an unknown one."""
        if cmd_name not in VERBS:
            return None
        from importlib import import_module

        module = import_module(f"paro_advise.advisor.commands.{VERBS[cmd_name]}.{cmd_name}")
        command: click.Command = module.command
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Take ``paro-advise DIR`` for ``paro-advise analyze DIR``; suggest close verbs."""
        name = args[0]
        if name not in VERBS and not name.startswith("-"):
            if os.path.exists(name) or any(char in name for char in "*?[") or os.sep in name:  # noqa: PTH110
                args = ["analyze", *args]
            else:
                from difflib import get_close_matches

                close = get_close_matches(name, VERBS, n=1)
                tip = f" Did you mean {close[0]!r}?" if close else " Pass a trace or one of: " + ", ".join(VERBS)
                raise click.UsageError(f"No such command or file: {name!r}.{tip}", ctx)
        return super().resolve_command(ctx, args)


def _colour(mode: str) -> bool | None:
    """Return whether to colour: option, then NO_COLOR, then FORCE_COLOR, then the terminal and its TERM."""
    if mode != "auto":
        return mode == "always"
    if os.environ.get("NO_COLOR"):
        return False
    if os.environ.get("TERM") == "dumb" and not os.environ.get("FORCE_COLOR"):
        return False
    return True if os.environ.get("FORCE_COLOR") else None


@click.group(
    cls=VerbGroup,
    invoke_without_command=True,
    context_settings={
        "help_option_names": ["-h", "--help"],
        "auto_envvar_prefix": "PARO_ADVISE",
        "max_content_width": 100,
    },
)
@click.version_option(package_name="paro-advise", message="paro-advise %(version)s")
@click.option(
    "--color",
    type=click.Choice(["auto", "always", "never"]),
    default="auto",
    show_default=True,
    help="Colour the output.",
)
@click.pass_context
def cli(ctx: click.Context, color: str) -> None:
    """Tell what limits a ZeRO/FSDP training run, state by state.

    \b
    Examples:
      paro-advise traces/                       what limits this run
      paro-advise analyze traces/ -o run.html   the same, with a report
      paro-advise explain PARO020               what a finding means
    """
    ctx.color = _colour(color)
    if ctx.invoked_subcommand is None:
        click.echo(ctx.get_help())


def main(argv: list[str] | None = None) -> None:
    """Run the command line and exit with its code."""
    # Ended from outside (timeout, scancel): leave through the clean-up of every open block.
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    outlive_readers()
    sys.exit(run(sys.argv[1:] if argv is None else argv))


def run(argv: list[str]) -> int:
    """Run the command line.

    Returns:
        0 done, 1 failure, 2 usage, 3 input unusable, 4 plan stale, 5 regression, 130 stopped (formats).
    """
    try:
        result: Any = cli.main(_colour_first(argv), prog_name="paro-advise", standalone_mode=False)
    except click.exceptions.Abort:
        click.echo("stopped", err=True)
        return 128 + signal.SIGINT
    except click.ClickException as error:
        _usage(error)
        return error.exit_code
    except ParoAdviseError as error:
        _report(error, as_json=_wants_json(argv))
        return error.exit_code
    except OSError as error:
        if error.filename is not None:  # outputs are told of where they are written
            named = InputError(f"a file or folder must be usable: {error.strerror}", where=os.fsdecode(error.filename))
            _report(named, as_json=_wants_json(argv))
            return named.exit_code
        with suppress(OSError):
            click.echo(f"error[E400]: an output cannot be written: {error.strerror or error}", err=True)
        return 1
    except MemoryError:
        click.echo("error[E101]: not enough memory; pass fewer files or --jobs 1", err=True)
        return 1
    except Exception as error:  # noqa: BLE001 - the last line of defence against tracebacks
        if os.environ.get("PARO_ADVISE_DEBUG"):
            traceback.print_exc()
        click.echo(f"error[E100]: a defect of paro-advise: {type(error).__name__}: {str(error)[:300]}", err=True)
        click.echo(
            "  help: report it with the output of `paro-advise doctor`; PARO_ADVISE_DEBUG=1 shows more",
            err=True,
        )
        return 1
    return result if isinstance(result, int) else 0


def _wants_json(argv: list[str]) -> bool:
    """Tell whether the standard output takes JSON, so that an error is told there as JSON too."""
    own = argv[: argv.index("--")] if "--" in argv else argv
    return "--json=-" in own or ("--json", "-") in pairwise(own)


def _colour_first(argv: list[str]) -> list[str]:
    """Return the arguments with ``--color`` in front of the verb, wherever a user wrote it before ``--``."""
    end = argv.index("--") if "--" in argv else len(argv)
    for place, argument in enumerate(argv[:end]):
        if argument == "--color" or argument.startswith("--color="):
            stop = place + (1 if "=" in argument else 2)
            return argv[place:stop] + argv[:place] + argv[stop:]
    return argv


def _usage(error: click.ClickException) -> None:
    context = getattr(error, "ctx", None)
    if context is not None:
        click.echo(context.get_usage(), err=True)
    click.echo(f"error[E200]: {error.format_message()}", err=True)


def _report(error: ParoAdviseError, *, as_json: bool) -> None:
    from paro_advise.advisor.wording.escaping import plain
    from paro_advise.core.secrets import masked_text

    if as_json:
        from paro_advise.core.documents import to_json

        told = {"message": error.what, "where": error.where, "hint": error.hint}
        body = {"code": error.code} | {key: masked_text(text) if text else text for key, text in told.items()}
        with suppress(OSError):  # of a full disk; the lines below say what went wrong before
            click.echo(to_json({"error": body}).decode(), nl=False)
    for line in error.lines():
        click.echo(plain(masked_text(line)), err=True)
